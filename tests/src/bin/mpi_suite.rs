//! Runs the programs of the suite on every grid that has as many ranks as were started: `mpirun -n P mpi_suite
//! [FILTER]`, FILTER a part of the names. Rank 0 prints a line for each; the first that fails ends the job.

use std::io::Write;
use std::process::ExitCode;

use burn_flex::FlexDevice;
use burn_spatial::{Mesh, SpatialDevice, launch};
use burn_spatial_tests::grid::GRIDS;
use burn_spatial_tests::suite;

fn main() -> ExitCode {
    let filter = std::env::args().nth(1).unwrap_or_default();
    let result = launch::mpi(|comm| {
        let first = comm.rank() == 0;
        let mut ran = 0;
        for grid in GRIDS.into_iter().filter(|grid| grid.ranks() == comm.size()) {
            let mesh = Mesh::new(comm.clone(), grid).map_err(|error| error.to_string())?;
            for (name, program) in suite::programs().into_iter().filter(|(name, _)| name.contains(&filter)) {
                if first {
                    print!("test {name} on {grid} ... ");
                    std::io::stdout().flush().map_err(|error| error.to_string())?;
                }
                // A device of its own, so that what it counts starts from nothing.
                let device = SpatialDevice::new(FlexDevice, mesh.clone()).map_err(|error| error.to_string())?;
                (program.run)(&device);
                comm.barrier().map_err(|error| error.to_string())?;
                if first {
                    println!("ok");
                }
                ran += 1;
            }
        }
        if ran == 0 { Err(format!("no grid of {} ranks, or no program named like '{filter}'", comm.size())) } else { Ok(()) }
    });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
