//! What the tests of several crates share: fixtures with right values, and the programs that are compared with them.
#![warn(missing_docs)]

pub mod fixtures;
pub mod npz;
