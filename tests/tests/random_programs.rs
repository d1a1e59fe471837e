//! A thousand random programs have the values and gradients of plain Burn, on grids of 1 to 8 ranks. `cargo xtask verify`
//! runs more.

use std::collections::BTreeSet;
use std::process::Command;

use burn_spatial_tests::programs::Node;
use burn_spatial_tests::programs::generate::generate;

/// The operations of which programs are made.
const OPERATIONS: &str = "Full FullInt Arange Random TimesRandom Unary Scalar Binary Logic Not Compare CompareScalar MaskWhere MaskFill ToInt ToFloat \
    Reduce ReduceAll SumDims ArgMax ArgMin MaxWithIndices Reshape Permute Slice SliceAssign SliceFill Cat Repeat Expand Flip Roll Unfold \
    Pad Tril Triu Select SelectAssign Gather Scatter Embedding Matmul Linear Attention Scan Sort ArgSort TopK Soft Conv Transposed \
    PaddedConv MaxPool AvgPool Adaptive Interpolate Upsample BatchNorm LayerNorm WholeVolume";

#[test]
fn a_thousand_programs_equal_one_rank() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_random_programs"));
    let output = command.args(["--programs", "1000", "--seed", "1"]).output().expect("the program starts");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("0 failed"), "{text}");
}

#[test]
fn programs_have_all_operations_and_are_the_same_again() {
    std::panic::set_hook(Box::new(|_| {}));
    let mut seen = BTreeSet::new();
    for seed in 1..=1000 {
        let program = generate(seed);
        for node in &program.nodes {
            if let Node::Step(op, _) = node {
                let text = format!("{op:?}");
                seen.insert(text.split('(').next().expect("a name").to_owned());
            }
        }
        assert!((4..=24).contains(&program.steps()), "{program}");
        if seed % 100 == 0 {
            assert_eq!(program, generate(seed));
        }
    }
    let missing: Vec<&str> = OPERATIONS.split_whitespace().filter(|name| !seen.contains(*name)).collect();
    assert!(missing.is_empty(), "{missing:?} are in none of 1000 programs");
}
