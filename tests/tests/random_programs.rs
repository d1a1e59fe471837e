//! A thousand random programs have the values and gradients of plain Burn, on grids of 1 to 8 ranks. `cargo xtask verify`
//! runs more.

use std::process::Command;

#[test]
fn a_thousand_programs_equal_one_rank() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_random_programs"));
    let output = command.args(["--programs", "1000", "--seed", "1"]).output().expect("the program starts");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("0 failed"), "{text}");
}
