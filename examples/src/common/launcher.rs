//! What `mpirun` and `srun` tell each process before MPI has started.

/// The first of these variables that is a number.
fn number(names: &[&str]) -> Option<usize> {
    names.iter().find_map(|name| std::env::var(name).ok()?.trim().parse().ok())
}

/// This process's number; `None` without a launcher.
pub fn rank() -> Option<usize> {
    number(&["OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID"])
}

/// The processes started together. A shell within a Slurm job has that job's count, and is none of them: not asked.
pub fn size() -> Option<usize> {
    number(&["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
}
