//! Checks the MPI communicator: `mpirun -n P mpi_comm`. Prints `ok <name>` for each check that passed on all ranks;
//! the first that fails ends the job. `mpi_comm large` sends and reduces a little more than 2 GiB instead.

use std::process::ExitCode;

use burn_spatial::comm::{Comm, CommError, ReduceOp};
use burn_spatial::{comm, launch};
use burn_spatial_tests::comm_checks;
use burn_std::DType;

fn main() -> ExitCode {
    let result = launch::mpi(|comm| {
        assert!(comm::mpi::local_rank().is_some_and(|local| local < comm.size()));
        if std::env::args().nth(1).as_deref() == Some("large") {
            return large(&comm);
        }
        comm_checks::run(&comm, |name| println!("ok {name}"));
        // Left unfinished on purpose: the end of the job must not wait for it.
        drop(comm.start_recv(comm.rank(), 77, 5)?);
        Ok(())
    });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// More bytes than an `i32` counts, in one message and in one reduction.
fn large(comm: &Comm) -> Result<(), CommError> {
    let len = (2usize << 30) + 4096;
    let (rank, size) = (comm.rank(), comm.size());
    let receive = comm.start_recv((rank + size - 1) % size, 0, len)?;
    let send = comm.start_send((rank + 1) % size, 0, vec![rank as u8 + 1; len])?;
    let got = receive.wait()?;
    assert!(got.len() == len && got.iter().all(|x| *x as usize == (rank + size - 1) % size + 1));
    drop(got);
    let data = send.wait()?;
    let sum = comm.all_reduce(data, DType::U8, ReduceOp::Sum)?;
    assert!(sum.len() == len && sum.iter().all(|x| *x as usize == size * (size + 1) / 2));
    if rank == 0 {
        println!("ok {len} bytes");
    }
    Ok(())
}
