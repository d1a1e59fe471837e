//! Starts the ranks of a job and ends them together.
