//! The programs that run on every grid: on thread ranks by `cargo test`, under `mpirun` by the binary `mpi_suite`.

use std::hash::{DefaultHasher, Hasher};

use burn_flex::FlexDevice;
use burn_spatial::SpatialDevice;

use crate::{burn_modules, fixtures_loss, grid, half, layers, modules, ops, planes, second_thread, windows};

/// A rank's device.
pub type Device = SpatialDevice<FlexDevice>;

/// A program that every rank of a grid runs; it panics where something is wrong.
#[derive(Clone, Copy, Debug)]
pub struct Program {
    /// Its name.
    pub name: &'static str,
    /// The program. Collective.
    pub run: fn(&Device),
}

/// All programs, as `module::name`.
pub fn programs() -> Vec<(String, Program)> {
    let modules = [
        ("windows", windows::PROGRAMS),
        ("planes", planes::PROGRAMS),
        ("ops", ops::PROGRAMS),
        ("modules", modules::PROGRAMS),
        ("burn_modules", burn_modules::PROGRAMS),
        ("layers", layers::PROGRAMS),
        ("fixtures_loss", fixtures_loss::PROGRAMS),
        ("half", half::PROGRAMS),
        ("second_thread", second_thread::PROGRAMS),
    ];
    modules.iter().flat_map(|(module, all)| all.iter().map(move |program| (format!("{module}::{}", program.name), *program))).collect()
}

/// Asserts that `bytes` are the same on every rank. Collective.
///
/// # Panics
/// If they are not.
pub fn agree(device: &Device, what: &str, bytes: &[u8]) {
    let mut hasher = DefaultHasher::new();
    hasher.write(bytes);
    let mine = hasher.finish().to_ne_bytes();
    let all = device.mesh().world().all_gather(&mine).expect("ranks talk");
    if let Some(other) = all.iter().position(|hash| *hash != all[0]) {
        panic!("{what}: rank {other} differs from rank 0");
    }
}

/// Runs `program` on thread ranks on every grid of [`grid::GRIDS`].
///
/// # Panics
/// If it fails on one.
pub fn on_every_grid(program: fn(&Device)) {
    for grid in grid::GRIDS {
        grid::on_grid(grid, program);
    }
}

/// A test for each program of a module; one more sees that none was forgotten.
#[macro_export]
macro_rules! on_threads {
    ($module:ident: $($name:ident,)*) => {
        $(
            #[test]
            fn $name() {
                $crate::suite::on_every_grid($crate::$module::$name);
            }
        )*

        #[test]
        fn no_program_is_forgotten() {
            let names: Vec<&str> = $crate::$module::PROGRAMS.iter().map(|program| program.name).collect();
            assert_eq!(names, [$(stringify!($name)),*]);
        }
    };
}
