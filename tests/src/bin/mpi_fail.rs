//! Rank 1 fails at step 2 while the others wait in a collective: `mpirun -n P mpi_fail panic|error|exit|early|stall`. The
//! job has to end with a non-zero code, and its first line of stderr to name the rank and the cause; with `stall`, the
//! watchdog's error names rank 1 (set `BURN_SPATIAL_TIMEOUT=2`).

use burn_spatial::comm::ReduceOp;
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
                    "stall" => std::thread::sleep(std::time::Duration::from_secs(3600)),
                    _ => return Err("which failure? panic, error, exit, early or stall".to_owned()),
                }
            }
            comm.all_reduce(vec![0; 64], DType::F32, ReduceOp::Sum).map_err(|error| error.to_string())?;
        }
        Ok(())
    })
}
