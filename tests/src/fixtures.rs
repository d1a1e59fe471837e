//! Cases with right values, and runners that compute them on any backend: `place` decides how a tensor lies there.

use std::collections::BTreeMap;
use std::path::PathBuf;

use burn::tensor::backend::AutodiffBackend;
use burn::tensor::module::conv_transpose3d;
use burn::tensor::ops::ConvTransposeOptions;
use burn::tensor::{DType, Int, Tensor, TensorData};
use burn_spatial::nn::{
    ConvSpec, PaddingMode, PoolSpec, Upsample3dConfig, UpsampleMode, WindowBackend, avg_pool3d, max_pool3d, padded_conv3d,
};
use serde_json::Value;

use crate::npz::{self, Array};

/// One case: its parameters and arrays.
#[derive(Clone, Debug)]
pub struct Case {
    /// The operation: `conv3d`, `avg_pool3d`, `max_pool3d`, ...
    pub op: String,
    /// Its name.
    pub name: String,
    /// Parameters as PyTorch names them.
    pub params: Value,
    /// Arrays by name: `x`, `w`, `y`, `gy`, ...
    pub arrays: BTreeMap<String, Array>,
}

/// What a runner computed, as float64 in C order.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// The output and the gradients, under the names of the case's arrays.
    pub values: BTreeMap<&'static str, Vec<f64>>,
}

/// Where the fixtures lie.
pub fn directory() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures"))
}

/// All cases of `op`.
///
/// # Panics
/// If the fixtures are missing or damaged.
pub fn cases(op: &str) -> Vec<Case> {
    ["A", "B"].into_iter().flat_map(|set| cases_of(op, set)).collect()
}

/// The cases of `op` in one set, which may have none.
fn cases_of(op: &str, set: &str) -> Vec<Case> {
    let manifest = std::fs::read(directory().join(format!("manifest_{set}.json"))).expect("the manifest");
    let manifest: Value = serde_json::from_slice(&manifest).expect("a json manifest");
    let all: Vec<&Value> = manifest["cases"].as_array().expect("a list of cases").iter().filter(|case| case["op"] == op).collect();
    if all.is_empty() {
        return Vec::new();
    }
    let arrays = npz::read(&directory().join(format!("{op}_{set}.npz"))).expect("the arrays");
    let text = |v: &Value| v.as_str().expect("a string").to_owned();
    all.into_iter()
        .map(|case| {
            let name = text(&case["case"]);
            let prefix = format!("{name}/");
            let own = arrays.iter().filter_map(|(k, a)| Some((k.strip_prefix(&prefix)?.to_owned(), a.clone())));
            Case { op: op.to_owned(), params: case["params"].clone(), arrays: own.collect(), name }
        })
        .collect()
}

impl Case {
    /// Whether the parameter `name` is true.
    pub fn flag(&self, name: &str) -> bool {
        self.params[name] == true
    }

    /// The parameter `name` as a number.
    ///
    /// # Panics
    /// If it is none.
    pub fn number(&self, name: &str) -> f64 {
        self.params[name].as_f64().expect("a number")
    }

    /// The parameter `name` along depth, height and width.
    ///
    /// # Panics
    /// If it is not three numbers.
    pub fn triple(&self, name: &str) -> [usize; 3] {
        [0, 1, 2].map(|i| self.params[name][i].as_u64().expect("three numbers") as usize)
    }

    /// The array `name` as a tensor.
    ///
    /// # Panics
    /// If the case has none.
    pub fn tensor<B: burn::tensor::backend::Backend, const D: usize>(&self, name: &str, dtype: DType, device: &B::Device) -> Tensor<B, D> {
        let array = &self.arrays[name];
        let data = TensorData::new(array.values.clone(), array.shape.clone()).convert_dtype(dtype);
        Tensor::from_data(data, (device, dtype))
    }

    /// Asserts that each value of `outcome` is within `tolerance` of the right one, relative to the largest entry,
    /// and that no result and no gradient is missing.
    ///
    /// # Panics
    /// If it is not.
    pub fn check(&self, outcome: &Outcome, tolerance: f64) {
        let result = |name: &str| matches!(name, "y" | "idx" | "params") || name.ends_with("_out");
        let gradient = |name: &str| name.starts_with('g') && !matches!(name, "gy" | "grads");
        for (name, want) in self.arrays.iter().filter(|(name, _)| result(name) || gradient(name)) {
            let got = outcome.values.get(name.as_str()).unwrap_or_else(|| panic!("{}/{}: no {name}", self.op, self.name));
            let scale = want.values.iter().fold(0.0f64, |m, v| m.max(v.abs()));
            assert_eq!(got.len(), want.values.len(), "{}/{}: {name}", self.op, self.name);
            let worst = got.iter().zip(&want.values).map(|(g, w)| (g - w).abs());
            let worst = worst.fold(0.0, |m: f64, d| if d.is_nan() { f64::INFINITY } else { m.max(d) });
            assert!(worst <= tolerance * scale, "{}/{}: {name} is off by {worst} of {scale}", self.op, self.name);
        }
    }
}

/// The elements of a tensor.
///
/// # Panics
/// If they cannot be read.
pub fn values<B: burn::tensor::backend::Backend, const D: usize>(tensor: Tensor<B, D>) -> Vec<f64> {
    tensor.into_data().convert::<f64>().to_vec().expect("float64 data")
}

/// Runs a convolution and its backward pass in `dtype`. `place` is applied to x and to the incoming gradient.
///
/// # Panics
/// If a gradient is missing.
pub fn run_conv3d<B: WindowBackend + AutodiffBackend>(
    case: &Case,
    dtype: DType,
    device: &B::Device,
    place: impl Fn(Tensor<B, 5>) -> Tensor<B, 5>,
) -> Outcome {
    let spec = ConvSpec {
        stride: case.triple("stride"),
        padding: case.triple("padding").map(|p| (p, p)),
        mode: match case.params["padding_mode"].as_str() {
            Some("circular") => PaddingMode::Periodic,
            Some("reflect") => PaddingMode::Reflect,
            Some("replicate") => PaddingMode::Replicate,
            _ => PaddingMode::Zeros,
        },
        dilation: case.triple("dilation"),
        groups: case.params["groups"].as_u64().expect("a number") as usize,
    };
    let x = place(case.tensor("x", dtype, device)).require_grad();
    let w = case.tensor::<B, 5>("w", dtype, device).require_grad();
    let b = case.flag("bias").then(|| case.tensor::<B, 1>("b", dtype, device).require_grad());
    let y = padded_conv3d(x.clone(), w.clone(), b.clone(), &spec);
    let mut outcome = Outcome::default();
    outcome.values.insert("y", values(y.clone()));
    let grads = (y * place(case.tensor("gy", dtype, device))).sum().backward();
    outcome.values.insert("gx", values(x.grad(&grads).expect("a gradient of x")));
    outcome.values.insert("gw", values(w.grad(&grads).expect("a gradient of w")));
    if let Some(b) = b {
        outcome.values.insert("gb", values(b.grad(&grads).expect("a gradient of b")));
    }
    outcome
}

/// Runs a pool (`max_pool3d` or `avg_pool3d`) and its backward pass in `dtype`.
///
/// # Panics
/// If a gradient is missing.
pub fn run_pool3d<B: WindowBackend + AutodiffBackend>(
    case: &Case,
    dtype: DType,
    device: &B::Device,
    place: impl Fn(Tensor<B, 5>) -> Tensor<B, 5>,
) -> Outcome {
    let spec = PoolSpec {
        kernel: case.triple("kernel"),
        stride: case.triple("stride"),
        padding: case.triple("padding"),
        dilation: case.params.get("dilation").map_or([1; 3], |_| case.triple("dilation")),
        count_include_pad: case.flag("count_include_pad"),
        divisor: case.params.get("divisor_override").and_then(Value::as_u64).map(|divisor| divisor as usize),
        ceil: case.flag("ceil_mode"),
    };
    let mut outcome = Outcome::default();
    let x = place(case.tensor("x", dtype, device)).require_grad();
    let y = match case.op.as_str() {
        "max_pool3d" => {
            let (y, indices): (Tensor<B, 5>, Tensor<B, 5, Int>) = max_pool3d(x.clone(), &spec);
            outcome.values.insert("idx", indices.into_data().convert::<f64>().to_vec().expect("float64 data"));
            y
        }
        _ => avg_pool3d(x.clone(), &spec),
    };
    outcome.values.insert("y", values(y.clone()));
    let grads = (y * place(case.tensor("gy", dtype, device))).sum().backward();
    outcome.values.insert("gx", values(x.grad(&grads).expect("a gradient of x")));
    outcome
}

/// Runs Burn's transposed convolution and its backward pass in `dtype`.
///
/// # Panics
/// If a gradient is missing.
pub fn run_conv_transpose3d<B: AutodiffBackend>(
    case: &Case,
    dtype: DType,
    device: &B::Device,
    place: impl Fn(Tensor<B, 5>) -> Tensor<B, 5>,
) -> Outcome {
    let groups = case.params["groups"].as_u64().expect("a number") as usize;
    let [stride, padding, out, dilation] = ["stride", "padding", "output_padding", "dilation"].map(|name| case.triple(name));
    let x = place(case.tensor("x", dtype, device)).require_grad();
    let w = case.tensor::<B, 5>("w", dtype, device).require_grad();
    let b = case.flag("bias").then(|| case.tensor::<B, 1>("b", dtype, device).require_grad());
    let options = ConvTransposeOptions::new(stride, padding, out, dilation, groups);
    let y = conv_transpose3d(x.clone(), w.clone(), b.clone(), options);
    let mut outcome = Outcome::default();
    outcome.values.insert("y", values(y.clone()));
    let grads = (y * place(case.tensor("gy", dtype, device))).sum().backward();
    outcome.values.insert("gx", values(x.grad(&grads).expect("a gradient of x")));
    outcome.values.insert("gw", values(w.grad(&grads).expect("a gradient of w")));
    if let Some(b) = b {
        outcome.values.insert("gb", values(b.grad(&grads).expect("a gradient of b")));
    }
    outcome
}

/// Runs an interpolation and its backward pass in `dtype`.
///
/// # Panics
/// If a gradient is missing.
pub fn run_upsample<B: WindowBackend + AutodiffBackend>(
    case: &Case,
    dtype: DType,
    device: &B::Device,
    place: impl Fn(Tensor<B, 5>) -> Tensor<B, 5>,
) -> Outcome {
    let mode = if case.params["mode"] == "trilinear" { UpsampleMode::Trilinear } else { UpsampleMode::Nearest };
    let scale = case.params["scale"].as_f64().expect("a factor");
    let config = Upsample3dConfig::new().with_scale_factor(Some([scale; 3])).with_mode(mode);
    let module = config.with_align_corners(case.flag("align_corners")).init();
    let x = place(case.tensor("x", dtype, device)).require_grad();
    let y = module.forward(x.clone());
    let mut outcome = Outcome::default();
    outcome.values.insert("y", values(y.clone()));
    let grads = (y * place(case.tensor("gy", dtype, device))).sum().backward();
    outcome.values.insert("gx", values(x.grad(&grads).expect("a gradient of x")));
    outcome
}
