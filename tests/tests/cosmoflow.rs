//! CosmoFlow on grids of ranks against PyTorch: ten Adam steps from the same weights on the same batches.

use std::collections::BTreeMap;

use burn::backend::{Autodiff, Flex};
use burn::module::{AutodiffModule, Module, ModuleVisitor, Param, ParamId};
use burn::nn::loss::{MseLoss, Reduction};
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::record::AdaptorRecord;
use burn::optim::{GradientsParams, Optimizer};
use burn::record::{BinBytesRecorder, FullPrecisionSettings, Recorder};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{DType, Device, Tensor};
use burn_spatial::nn::WindowBackend;
use burn_spatial::optim::AdamBackend;
use burn_spatial::{Grid, Spatial, place};
use burn_spatial_models::weights::{self, Named};
use burn_spatial_models::{Adam, CosmoFlow, CosmoFlowConfig};
use burn_spatial_tests::e2e::{self, Fixture, Outcome, floats};
use burn_spatial_tests::fixtures::directory;
use burn_spatial_tests::grid::{agreed_on_grid, on_grid};

type Plain = Autodiff<Flex>;
type Split = Autodiff<Spatial<Flex>>;

const SHAPE: [usize; 5] = [2, 4, 32, 32, 32];
/// One, two, four and eight ranks.
const GRIDS: [Grid; 4] = [Grid::ONE, Grid([1, 2, 1, 1]), Grid([2, 2, 1, 1]), Grid([1, 2, 2, 2])];

/// Ten steps of a network.
struct Run {
    fixture: Fixture,
    config: CosmoFlowConfig,
    dtype: DType,
    /// Whether batch norms or convolutions, and activations, are Burn's own modules instead of one fused operation.
    unfused: bool,
}

/// The network of `model` from Burn's own modules and our pool.
fn unfused<B: WindowBackend>(model: &CosmoFlow<B>, volumes: Tensor<B, 5>) -> Tensor<B, 2> {
    let mut x = volumes;
    for (i, conv) in model.conv.iter().enumerate() {
        x = conv.forward(x);
        if let Some(norm) = model.bn.get(i) {
            x = norm.forward(x);
        }
        x = model.activation.forward(x);
        if i < model.pools {
            x = model.pool.forward(x);
        }
    }
    let (last, dense) = model.fc.split_last().expect("dense layers");
    let x = dense.iter().fold(x.flatten(1, 4), |x, dense| model.activation.forward(dense.forward(x)));
    last.forward(x)
}

fn bits(named: Named) -> BTreeMap<String, Vec<u8>> {
    named.into_iter().map(|(name, data)| (name, data.as_bytes().to_vec())).collect()
}

impl Run {
    fn new(case: &str, dtype: DType) -> Run {
        let config = CosmoFlowConfig::new(32)
            .with_dropout(0.0)
            .with_batch_norm(!case.ends_with("nobn"))
            .with_scale(if case.contains("small") { 8 } else { 1 });
        Run { fixture: Fixture::read(case), config, dtype, unfused: false }
    }

    fn model<B: WindowBackend>(&self, device: &B::Device) -> CosmoFlow<B> {
        let model = self.config.init::<B>(device).unwrap();
        let weights = weights::collect(&model);
        let weights = weights.iter().map(|(name, data)| (name.clone(), self.fixture.weight(name, &data.shape, self.dtype)));
        weights::load(model, &weights.collect()).unwrap()
    }

    fn batch<B: AutodiffBackend>(&self, step: usize, device: &B::Device) -> (Tensor<B, 5>, Tensor<B, 2>) {
        let tensor = |name: String, shape: &[usize]| self.fixture.tensor(&name, shape, self.dtype, |u| 2.0 * u - 1.0);
        let x = Tensor::from_data(tensor(format!("x{step}"), &SHAPE), (device, self.dtype));
        (x, Tensor::from_data(tensor(format!("y{step}"), &[2, 4]), (device, self.dtype)))
    }

    fn optimizer<B: WindowBackend + AutodiffBackend>(&self) -> OptimizerAdaptor<Adam, CosmoFlow<B>, B>
    where
        B::InnerBackend: WindowBackend + AdamBackend,
    {
        Adam::default().init()
    }

    /// Loss and gradients of one batch.
    fn backward<B: WindowBackend + AutodiffBackend>(
        &self,
        model: &CosmoFlow<B>,
        (x, y): (Tensor<B, 5>, Tensor<B, 2>),
        split: impl Fn(Tensor<B, 5>) -> Tensor<B, 5>,
    ) -> (f64, B::Gradients) {
        let predicted = if self.unfused { unfused(model, split(x)) } else { model.forward(split(x)) };
        let loss = MseLoss::new().forward(predicted, y, Reduction::Mean);
        let value = floats(&loss.clone().into_data())[0];
        (value, loss.backward())
    }

    /// Trains `steps` steps; `each` sees the gradients of every step.
    fn train<B: WindowBackend + AutodiffBackend>(
        &self,
        steps: usize,
        device: &B::Device,
        split: impl Fn(Tensor<B, 5>) -> Tensor<B, 5>,
        mut each: impl FnMut(usize, f64, &CosmoFlow<B>, &B::Gradients),
    ) -> (CosmoFlow<B>, OptimizerAdaptor<Adam, CosmoFlow<B>, B>)
    where
        B::InnerBackend: WindowBackend + AdamBackend,
    {
        let (mut model, mut optimizer) = (self.model::<B>(device), self.optimizer());
        for step in 0..steps {
            let (loss, gradients) = self.backward(&model, self.batch(step, device), &split);
            each(step, loss, &model, &gradients);
            let gradients = GradientsParams::from_grads(gradients, &model);
            model = optimizer.step(self.fixture.number("lr"), model, gradients);
        }
        (model, optimizer)
    }

    fn outcome<B: WindowBackend + AutodiffBackend>(&self, device: &B::Device, split: impl Fn(Tensor<B, 5>) -> Tensor<B, 5>) -> Outcome
    where
        B::InnerBackend: WindowBackend + AdamBackend,
    {
        let (mut losses, mut gradient_norms) = (Vec::new(), BTreeMap::new());
        let steps = self.fixture.number("steps") as usize;
        let (model, _) = self.train::<B>(steps, device, split, |step, loss, model, gradients| {
            losses.push(loss);
            if step == 0 {
                for (name, data) in weights::gradients(model, gradients) {
                    gradient_norms.insert(name, e2e::norm(&data));
                }
            }
        });
        let named = weights::collect(&model.valid());
        let sums = named.iter().map(|(name, data)| {
            // Running statistics are of the convolution with the same number.
            let layer = name.split('.').nth(1).and_then(|n| n.parse().ok()).filter(|_| name.starts_with("bn.")).unwrap_or(0usize);
            let voxels = SHAPE[0] * [32usize, 16, 8, 2, 2, 2, 2][layer].pow(3);
            (name.clone(), e2e::sums(name, data, steps, voxels))
        });
        Outcome { losses, gradient_norms, sums: sums.collect() }
    }

    /// Asserts that ten steps on every grid are PyTorch's in float64.
    fn check(&self) {
        let tolerance = [if self.dtype == DType::F64 { 1e-8 } else { 1e-4 }; 2];
        if self.fixture.case.contains("small") {
            self.outcome::<Plain>(&Default::default(), |x| x).check(&self.fixture, tolerance, "Flex");
        }
        for grid in GRIDS {
            let outcome = agreed_on_grid(grid, |device| self.outcome::<Split>(device, place::split));
            outcome.check(&self.fixture, tolerance, &grid.to_string());
        }
    }
}

#[test]
fn small_in_float64() {
    Run::new("cosmoflow_small_32", DType::F64).check();
}

#[test]
fn small_in_float32() {
    Run::new("cosmoflow_small_32", DType::F32).check();
}

#[test]
fn small_without_batch_norm_in_float64() {
    Run::new("cosmoflow_small_32_nobn", DType::F64).check();
}

#[test]
fn small_without_batch_norm_in_float32() {
    Run::new("cosmoflow_small_32_nobn", DType::F32).check();
}

#[test]
fn full_in_float64() {
    Run::new("cosmoflow_full_32", DType::F64).check();
}

#[test]
fn full_in_float32() {
    Run::new("cosmoflow_full_32", DType::F32).check();
}

#[test]
fn the_same_from_plain_modules() {
    for case in ["cosmoflow_small_32", "cosmoflow_small_32_nobn"] {
        for dtype in [DType::F64, DType::F32] {
            Run { unfused: true, ..Run::new(case, dtype) }.check();
        }
    }
}

#[test]
fn the_formula_gives_the_stored_weights() {
    let run = Run::new("cosmoflow_small_32", DType::F32);
    let stored = weights::read_safetensors(&directory().join("e2e_cosmoflow_small_32.safetensors"), "").unwrap();
    let mut compared = 0;
    for (name, data) in &stored {
        let made = match name.strip_prefix("w/") {
            Some(weight) => run.fixture.weight(weight, &data.shape, DType::F32),
            None => run.fixture.tensor(name, &data.shape, DType::F32, |u| 2.0 * u - 1.0),
        };
        assert_eq!(made.as_bytes(), data.as_bytes(), "{name}");
        compared += 1;
    }
    assert_eq!(compared, 7 + 2 * 7 + 2 * 3 + 2);
    let parameters: usize = stored.iter().filter(|(name, _)| name.starts_with("w/")).map(|(_, d)| d.num_elements()).sum();
    assert_eq!(parameters, run.fixture.number("params") as usize);
}

/// Layouts and bits of parameters, running statistics and moments.
struct Replicated<'a> {
    record: &'a dyn Fn(ParamId) -> Option<AdaptorRecord<Adam, Split>>,
    bytes: Vec<Vec<u8>>,
    moments: usize,
}

impl ModuleVisitor<Spatial<Flex>> for Replicated<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<Spatial<Flex>, D>>) {
        let mut tensors = vec![param.val()];
        if let Some(record) = (self.record)(param.id) {
            let state = record.into_state::<D>().momentum;
            tensors.extend([state.moment_1, state.moment_2]);
            self.moments += 2;
        }
        for tensor in tensors {
            let layout = place::layout(&tensor);
            assert!(layout.is_full(), "{layout} of shape {:?}", tensor.dims());
            self.bytes.push(place::local(tensor).as_bytes().to_vec());
        }
    }
}

#[test]
fn after_steps_everything_trained_is_whole_and_equal_on_all_ranks() {
    let run = Run::new("cosmoflow_small_32", DType::F32);
    for grid in [Grid([2, 2, 1, 1]), Grid([1, 2, 2, 2])] {
        let bytes = agreed_on_grid(grid, |device| {
            let (model, optimizer) = run.train::<Split>(3, device, place::split, |_, _, _, _| {});
            let records = optimizer.to_record();
            let mut visitor = Replicated { record: &|id| records.get(&id).cloned(), bytes: Vec::new(), moments: 0 };
            model.valid().visit(&mut visitor);
            assert_eq!(visitor.moments, 2 * (7 + 2 * 7 + 2 * 3));
            visitor.bytes
        });
        assert_eq!(bytes.len(), 3 * (7 + 2 * 7 + 2 * 3) + 2 * 7);
    }
}

#[test]
fn a_step_gathers_nothing_for_want_of_a_rule() {
    let run =
        Run { config: Run::new("cosmoflow_small_32", DType::F32).config.with_dropout(0.2), ..Run::new("cosmoflow_small_32", DType::F32) };
    for grid in [Grid([2, 2, 1, 1]), Grid([1, 2, 2, 2])] {
        on_grid(grid, |device| {
            device.set_strict(true);
            run.train::<Split>(1, device, place::split, |_, loss, _, _| assert!(loss.is_finite()));
            assert_eq!(device.stats().gathered(), 0, "{}", device.stats());
        });
    }
}

/// The bytes that the summary says are kept for the backward pass are those of the tensors alive then.
#[test]
fn as_much_is_kept_as_the_summary_says() {
    for batch_norm in [true, false] {
        let config = CosmoFlowConfig::new(32).with_dropout(0.0).with_batch_norm(batch_norm);
        on_grid(Grid::ONE, |device| {
            let model = config.init::<Split>(device).unwrap();
            let x = place::split(Tensor::<Split, 5>::ones([2, 4, 32, 32, 32], device));
            let before = device.stats().live_bytes;
            let y = model.forward(x.clone());
            let got = (device.stats().live_bytes - before) as f64;
            let layers = config.summary(2).unwrap();
            let want = layers.iter().map(|layer| layer.output.iter().product::<usize>() * layer.kept).sum::<usize>() as f64;
            assert!((got - want).abs() <= 0.01 * want, "{got} bytes are kept, not {want}, with batch norm: {batch_norm}");
            drop(y);
        });
    }
}

#[test]
fn records_interchange_with_plain_burn() {
    let run = Run::new("cosmoflow_small_32", DType::F32);
    let recorder = BinBytesRecorder::<FullPrecisionSettings>::default();
    let grid = Grid([1, 2, 2, 1]);
    let loss = |model: &CosmoFlow<Plain>| run.backward(model, run.batch(3, &Default::default()), |x| x).0;
    let split_loss = |model: &CosmoFlow<Split>, device: &Device<Split>| run.backward(model, run.batch(3, device), place::split).0;
    let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-5 * a.abs(), "{a} and {b}");

    let (model, _) = run.train::<Plain>(2, &Default::default(), |x| x, |_, _, _, _| {});
    let saved: Vec<u8> = Recorder::<Plain>::record(&recorder, model.clone().into_record(), ()).unwrap();
    let (there, saved_there) = agreed_on_grid(grid, |device| {
        let record = Recorder::<Split>::load(&recorder, saved.clone(), device).unwrap();
        let loaded = run.model::<Split>(device).load_record(record);
        assert_eq!(bits(weights::collect(&loaded.valid())), bits(weights::collect(&model.valid())));
        let loss = split_loss(&loaded, device);
        let (trained, _) = run.train::<Split>(2, device, place::split, |_, _, _, _| {});
        let record: Vec<u8> = Recorder::<Split>::record(&recorder, trained.clone().into_record(), ()).unwrap();
        let named = bits(weights::collect(&trained.valid()));
        // Parameter ids are drawn anew on every rank, so that rank 0's record stands for all.
        let first = if device.mesh().rank() == 0 { record } else { Vec::new() };
        let first = device.mesh().world().broadcast(0, first).unwrap();
        (loss, (first, named, split_loss(&trained, device)))
    });
    near(there, loss(&model));

    let (record, named, want) = saved_there;
    let record = Recorder::<Plain>::load(&recorder, record, &Default::default()).unwrap();
    let back = run.model::<Plain>(&Default::default()).load_record(record);
    assert_eq!(bits(weights::collect(&back.valid())), named);
    near(loss(&back), want);
}
