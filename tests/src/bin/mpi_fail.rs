//! Rank 1 fails at step 2 while the others wait in a collective: `mpirun -n P mpi_fail panic|error|exit|early|stall`. The
//! job has to end with a non-zero code, and its first line of stderr to name the rank and the cause; with `stall`, the
//! watchdog's error names rank 1 (set `BURN_SPATIAL_TIMEOUT=2`). With `hang` rank 1 hangs in work that the others wait for,
//! and is found out like that; with `work` it works for three times the watchdog's time, and the job goes well.

use std::time::Duration;

use burn_spatial::comm::{ReduceOp, broadcast_of};
use burn_spatial::launch;
use burn_std::DType;

fn main() -> Result<(), launch::LaunchError> {
    let how = std::env::args().nth(1).unwrap_or_default();
    launch::mpi(|comm| {
        for step in 0..4 {
            if (comm.rank(), step) == (1, 2) {
                match &how[..] {
                    "panic" => panic!("the loss is NaN at step {step}"),
                    "error" => return Err(format!("the loss is NaN at step {step}")),
                    "exit" => std::process::exit(3),
                    "early" => return Ok(()),
                    "stall" => std::thread::sleep(Duration::from_secs(3600)),
                    "hang" | "work" => {}
                    _ => return Err("which failure? panic, error, exit, early, stall, hang or work".to_owned()),
                }
            }
            if step == 2 && matches!(&how[..], "hang" | "work") {
                let part = Duration::from_secs(if how == "hang" { 3600 } else { 1 });
                let made = broadcast_of(&*comm, 1, |alive| {
                    let signs = (0..comm.timeout().map_or(1, |timeout| 3 * timeout.as_secs())).map(|_| {
                        std::thread::sleep(part);
                        alive.beat()
                    });
                    signs.filter(Result::is_ok).map(|_| 1).collect()
                });
                let signs = made.map_err(|error| error.to_string())?.len();
                println!("{signs} s of work");
            }
            comm.all_reduce(vec![0; 64], DType::F32, ReduceOp::Sum).map_err(|error| error.to_string())?;
        }
        Ok(())
    })
}
