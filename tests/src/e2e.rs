//! End-to-end fixtures: ten Adam steps of a network in PyTorch, and the formula its weights and batches come from.

use std::collections::BTreeMap;

use burn::tensor::{DType, TensorData};
use serde_json::Value;

/// The numbers of one fixture.
#[derive(Clone, Debug)]
pub struct Fixture {
    /// Its name, which the formula needs.
    pub case: String,
    /// The whole file.
    pub json: Value,
}

impl Fixture {
    /// The fixture `e2e_{case}.json`.
    ///
    /// # Panics
    /// If it is missing or damaged.
    pub fn read(case: &str) -> Fixture {
        let text = std::fs::read(crate::fixtures::directory().join(format!("e2e_{case}.json"))).expect("the fixture");
        Fixture { case: case.to_owned(), json: serde_json::from_slice(&text).expect("a json fixture") }
    }

    /// The list of numbers `key`.
    ///
    /// # Panics
    /// If it is missing.
    pub fn list(&self, key: &str) -> Vec<f64> {
        self.json[key].as_array().expect("a list").iter().map(number).collect()
    }

    /// The number `key`.
    ///
    /// # Panics
    /// If it is missing.
    pub fn number(&self, key: &str) -> f64 {
        number(&self.json[key])
    }

    /// The names and values of the table `key`.
    ///
    /// # Panics
    /// If it is missing.
    pub fn table(&self, key: &str) -> impl Iterator<Item = (&str, &Value)> {
        self.json[key].as_object().expect("a table").iter().map(|(name, value)| (name.as_str(), value))
    }

    /// A tensor of `shape` by the formula, rounded to float32: `values` maps u in [0, 1) to an element.
    pub fn tensor(&self, name: &str, shape: &[usize], dtype: DType, value: impl Fn(f64) -> f64) -> TensorData {
        let hash = fnv1a(&format!("{}/{name}", self.case));
        let count: usize = shape.iter().product();
        let values: Vec<f32> = (0..count as u64).map(|i| value(unit(hash, i)) as f32).collect();
        TensorData::new(values, shape.to_vec()).convert_dtype(dtype)
    }

    /// The weight `name` of `shape` by the formula.
    pub fn weight(&self, name: &str, shape: &[usize], dtype: DType) -> TensorData {
        let norm = shape.len() == 1;
        let fan_in: usize = if name.starts_with("up.") { shape[0] } else { shape[1..].iter().product() };
        let bound = (6.0 / fan_in as f64).sqrt();
        self.tensor(name, shape, dtype, |u| {
            let centered = 2.0 * u - 1.0;
            match name.rsplit('.').next() {
                Some("running_mean") => 0.0,
                Some("running_var") => 1.0,
                Some("bias") => 0.1 * centered,
                _ if norm => 1.0 + 0.2 * centered,
                _ => centered * bound,
            }
        })
    }
}

/// How far, relative, ten steps in float32 may leave float64 ones where maxima and kinks lie so close that rounding moves
/// voxels across them.
pub const STEPPED: f64 = 5e-3;

/// What ten steps left, in float64.
#[derive(Debug, PartialEq)]
pub struct Outcome {
    /// The loss of each step.
    pub losses: Vec<f64>,
    /// The norm of each gradient of the first step.
    pub gradient_norms: BTreeMap<String, f64>,
    /// Sum and absolute sum of each tensor at the end; running variances as PyTorch keeps them, unbiased.
    pub sums: BTreeMap<String, [f64; 2]>,
}

impl Outcome {
    /// Asserts that the losses stay within [`STEPPED`] of those of `fixture`.
    ///
    /// # Panics
    /// If they do not.
    pub fn follows(&self, fixture: &Fixture, grid: &str) {
        let losses = fixture.list("loss_f32");
        assert_eq!(self.losses.len(), losses.len());
        for (step, (got, want)) in self.losses.iter().zip(losses).enumerate() {
            assert!((got - want).abs() <= STEPPED * want, "{} on {grid}: the loss of step {step} is {got}, not {want}", fixture.case);
        }
    }

    /// Asserts that this is the float64 outcome of `fixture`, for what ran on `grid`: losses and norms within
    /// `tolerance`, final sums within `final_tolerance`, all relative.
    ///
    /// # Panics
    /// If it is not.
    pub fn check(&self, fixture: &Fixture, [tolerance, final_tolerance]: [f64; 2], grid: &str) {
        let mut wrong = Vec::new();
        let mut near = |what: String, tolerance: f64, got: f64, want: f64, scale: f64| {
            let off = (got - want).abs() / scale.abs();
            if off.is_nan() || off > tolerance {
                wrong.push(format!("{what} is {got}, not {want}: off by {off:e}"));
            }
        };
        let losses = fixture.list("loss_f64");
        assert_eq!(self.losses.len(), losses.len());
        for (step, (got, want)) in self.losses.iter().zip(losses).enumerate() {
            near(format!("the loss of step {step}"), tolerance, *got, want, want);
        }
        let norms: Vec<_> = fixture.table("grad_norm_step0_f64").collect();
        assert_eq!(self.gradient_norms.len(), norms.len());
        for (name, want) in norms {
            near(format!("the gradient norm of {name}"), tolerance, self.gradient_norms[name], number(want), number(want));
        }
        let sums: Vec<_> = fixture.table("final_sum_abssum_f64").collect();
        assert_eq!(self.sums.len(), sums.len());
        for (name, want) in sums {
            let [sum, absolute] = [number(&want[0]), number(&want[1])];
            near(format!("the sum of {name}"), final_tolerance, self.sums[name][0], sum, absolute);
            near(format!("the absolute sum of {name}"), final_tolerance, self.sums[name][1], absolute, absolute);
        }
        assert!(wrong.is_empty(), "{} on {grid}:\n{}", fixture.case, wrong.join("\n"));
    }
}

/// The elements of `data`.
///
/// # Panics
/// If they are no numbers.
pub fn floats(data: &TensorData) -> Vec<f64> {
    data.clone().convert::<f64>().to_vec().expect("float64 data")
}

/// Euclidean norm of `data`.
pub fn norm(data: &TensorData) -> f64 {
    floats(data).iter().map(|v| v * v).sum::<f64>().sqrt()
}

/// Sum and absolute sum of `data`. A running variance after `steps` steps over `voxels` values a channel, which Burn
/// keeps biased, is made PyTorch's: each step's is (n - 1) / n of the unbiased one.
pub fn sums(name: &str, data: &TensorData, steps: usize, voxels: usize) -> [f64; 2] {
    let mut values = floats(data);
    if name.ends_with("running_var") {
        let n = voxels as f64;
        let start = 0.9f64.powi(steps as i32);
        values.iter_mut().for_each(|v| *v = start + (*v - start) * n / (n - 1.0));
    }
    [values.iter().sum(), values.iter().map(|v| v.abs()).sum()]
}

/// A number of a fixture.
///
/// # Panics
/// If it is none.
pub fn number(value: &Value) -> f64 {
    value.as_f64().expect("a number")
}

fn fnv1a(text: &str) -> u64 {
    text.bytes().fold(0xCBF2_9CE4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3))
}

/// Element `index` of the stream `hash`, in [0, 1), by the finaliser of splitmix64.
fn unit(hash: u64, index: u64) -> f64 {
    let z = hash.wrapping_add(0x9E37_79B9_7F4A_7C15u64.wrapping_mul(index + 1));
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
}
