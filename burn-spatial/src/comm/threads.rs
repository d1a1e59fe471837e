//! One thread a rank within a process.
