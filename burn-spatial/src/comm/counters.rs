//! Calls, bytes and seconds per kind of operation.
