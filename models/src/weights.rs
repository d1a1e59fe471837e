//! Named weights: PyTorch's names and shapes for the modules here.
//!
//! A tensor is named by the path of its fields, as in `conv.0.weight`. Batch norm's `gamma` and `beta` are called
//! `weight` and `bias`, the weight of a dense layer is `[out, in]` where Burn's is `[in, out]`, a U-Net's blocks are
//! sequences (`seq.0` to `seq.5`) and its head is called `final`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use burn::module::{AutodiffModule, Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{BoolStore, Bytes, DType, Tensor, TensorData};
use safetensors::SafeTensors;

/// Tensors by name.
pub type Named = BTreeMap<String, TensorData>;

/// Why weights cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    /// The file cannot be read.
    #[error("{}: {cause}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's words.
        cause: std::io::Error,
    },
    /// The file is no safetensors file.
    #[error("{}: not a safetensors file: {cause}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        cause: safetensors::SafeTensorError,
    },
    /// A tensor of numbers that there are no tensors of here.
    #[error("{}: {name} holds {dtype}, which cannot be read or written", path.display())]
    Type {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// What it holds.
        dtype: String,
    },
    /// The file cannot be written.
    #[error("{}: cannot be written: {cause}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        cause: safetensors::SafeTensorError,
    },
    /// The module's tensor is of floats, those given are not.
    #[error("{name} is of floats, but weights of type {dtype:?} were given")]
    NotFloats {
        /// The tensor.
        name: String,
        /// What was given.
        dtype: DType,
    },
    /// The module has a tensor that was not given.
    #[error("no weights for {name}; is it another network?")]
    Missing {
        /// The tensor.
        name: String,
    },
    /// The module's tensor has another shape.
    #[error("{name} has shape {expected:?}, but weights of shape {got:?} were given")]
    Shape {
        /// The tensor.
        name: String,
        /// Its shape.
        expected: Vec<usize>,
        /// The shape given.
        got: Vec<usize>,
    },
}

/// What numbers are called in a file and here.
const TYPES: [(safetensors::Dtype, DType); 13] = [
    (safetensors::Dtype::F16, DType::F16),
    (safetensors::Dtype::BF16, DType::BF16),
    (safetensors::Dtype::F32, DType::F32),
    (safetensors::Dtype::F64, DType::F64),
    (safetensors::Dtype::I8, DType::I8),
    (safetensors::Dtype::I16, DType::I16),
    (safetensors::Dtype::I32, DType::I32),
    (safetensors::Dtype::I64, DType::I64),
    (safetensors::Dtype::U8, DType::U8),
    (safetensors::Dtype::U16, DType::U16),
    (safetensors::Dtype::U32, DType::U32),
    (safetensors::Dtype::U64, DType::U64),
    (safetensors::Dtype::BOOL, DType::Bool(BoolStore::Native)),
];

/// All tensors of the safetensors file at `path` whose names start with `prefix`, which is taken off. Counters and masks,
/// as PyTorch's `num_batches_tracked`, are among them.
///
/// # Errors
/// [`WeightsError`] when the file cannot be read or is damaged, or such a tensor is of floats or integers that there are no
/// tensors of here.
pub fn read_safetensors(path: &Path, prefix: &str) -> Result<Named, WeightsError> {
    let bytes = std::fs::read(path).map_err(|cause| WeightsError::Read { path: path.to_owned(), cause })?;
    let format = |cause| WeightsError::Format { path: path.to_owned(), cause };
    let file = SafeTensors::deserialize(&bytes).map_err(format)?;
    let mut tensors = Named::new();
    for (name, view) in file.tensors() {
        let Some(name) = name.strip_prefix(prefix) else { continue };
        let Some((_, dtype)) = TYPES.into_iter().find(|(stored, _)| *stored == view.dtype()) else {
            return Err(WeightsError::Type { path: path.to_owned(), name: name.to_owned(), dtype: format!("{:?}", view.dtype()) });
        };
        let bytes = Bytes::from_bytes_vec(view.data().to_vec());
        tensors.insert(name.to_owned(), TensorData::from_bytes(bytes, view.shape().to_vec(), dtype));
    }
    Ok(tensors)
}

/// Writes `tensors` to the safetensors file `path`.
///
/// # Errors
/// [`WeightsError`] when the file cannot be written or has no name for the type of a tensor.
pub fn write_safetensors(path: &Path, tensors: &Named) -> Result<(), WeightsError> {
    let write = |cause| WeightsError::Write { path: path.to_owned(), cause };
    let view = |(name, data): (&String, &TensorData)| {
        let Some((dtype, _)) = TYPES.into_iter().find(|(_, held)| *held == data.dtype) else {
            return Err(WeightsError::Type { path: path.to_owned(), name: name.clone(), dtype: format!("{:?}", data.dtype) });
        };
        let bytes = data.as_bytes().to_vec();
        Ok((name.clone(), (dtype, data.shape.to_vec(), bytes)))
    };
    let owned = tensors.iter().map(|(n, d)| view((n, d))).collect::<Result<BTreeMap<_, _>, _>>()?;
    let views = owned
        .iter()
        .map(|(name, (dtype, shape, bytes))| Ok((name.as_str(), safetensors::tensor::TensorView::new(*dtype, shape.clone(), bytes)?)));
    let views = views.collect::<Result<Vec<_>, _>>().map_err(write)?;
    safetensors::serialize_to_file(views, None, path).map_err(write)
}

/// `module` with the weights `tensors`, in the float type of each. Running statistics may be missing and then stay;
/// names that the module lacks are ignored. Local: every rank gives the same.
///
/// # Errors
/// [`WeightsError`] when a trained tensor is missing, or one has another shape or is not of floats.
pub fn load<B: Backend, M: Module<B>>(module: M, tensors: &Named) -> Result<M, WeightsError> {
    let mut loader = Loader { tensors, place: Place::default(), error: None };
    let module = module.map(&mut loader);
    loader.error.map_or(Ok(module), Err)
}

/// Every tensor of `module`, running statistics included. Of a module in training take `module.valid()`: its own
/// running statistics lag by one step. Collective where a tensor is split.
pub fn collect<B: Backend, M: Module<B>>(module: &M) -> Named {
    let mut collector = Collector { named: Named::new(), place: Place::default() };
    module.visit(&mut collector);
    collector.named
}

/// The name of a tensor of `module`, running statistics included, that holds NaN or an infinity, if there is one. Of a
/// module in training take `module.valid()`. Collective where a tensor is split.
pub fn not_finite<B: Backend, M: Module<B>>(module: &M) -> Option<String> {
    let mut search = Search { place: Place::default(), found: None };
    module.visit(&mut search);
    search.found
}

/// The gradient of every trained tensor of `module`. Collective where sums are pending or tensors split.
pub fn gradients<B: AutodiffBackend, M: AutodiffModule<B>>(module: &M, gradients: &B::Gradients) -> Named {
    let mut collector = Gradients::<B> { named: Named::new(), place: Place::default(), gradients };
    module.visit(&mut collector);
    collector.named
}

/// Where in a module a visitor is: field names, and what they are fields of.
#[derive(Default)]
struct Place(Vec<(String, String)>);

impl Place {
    fn enter(&mut self, name: &str, container: &str) {
        self.0.push((name.to_owned(), container.to_owned()));
    }

    fn exit(&mut self) {
        self.0.pop();
    }

    fn name(&self) -> String {
        let name = |(name, container): &(String, String)| match (container.as_str(), name.as_str()) {
            ("Struct:BatchNorm", "gamma") => "weight".to_owned(),
            ("Struct:BatchNorm", "beta") => "bias".to_owned(),
            ("Struct:ConvBlock", "conv1") => "seq.0".to_owned(),
            ("Struct:ConvBlock", "norm1") => "seq.1".to_owned(),
            ("Struct:ConvBlock", "conv2") => "seq.3".to_owned(),
            ("Struct:ConvBlock", "norm2") => "seq.4".to_owned(),
            ("Struct:UNet3d", "head") => "final".to_owned(),
            _ => name.clone(),
        };
        self.0.iter().map(name).collect::<Vec<_>>().join(".")
    }

    /// Whether PyTorch keeps this tensor transposed.
    fn transposed(&self) -> bool {
        self.0.last().is_some_and(|(name, container)| container == "Struct:Linear" && name == "weight")
    }

    fn running(&self) -> bool {
        self.0.last().is_some_and(|(name, _)| name.starts_with("running_"))
    }

    fn data<B: Backend, const D: usize>(&self, tensor: Tensor<B, D>) -> TensorData {
        if self.transposed() { tensor.transpose().into_data() } else { tensor.into_data() }
    }
}

struct Loader<'a> {
    tensors: &'a Named,
    place: Place,
    error: Option<WeightsError>,
}

impl<B: Backend> ModuleMapper<B> for Loader<'_> {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.place.enter(name, container);
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.place.exit();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let name = self.place.name();
        let Some(data) = self.tensors.get(&name) else {
            if !self.place.running() {
                self.error.get_or_insert(WeightsError::Missing { name });
            }
            return param;
        };
        let mut expected = param.lazy_shape().to_vec();
        let transposed = self.place.transposed();
        if transposed {
            expected.reverse();
        }
        if !data.dtype.is_float() {
            self.error.get_or_insert(WeightsError::NotFloats { name, dtype: data.dtype });
            return param;
        }
        if data.shape.to_vec() != expected {
            self.error.get_or_insert(WeightsError::Shape { name, expected, got: data.shape.to_vec() });
            return param;
        }
        param.map(|old| {
            let new = Tensor::from_data(data.clone(), (&old.device(), data.dtype));
            let new = if transposed { new.transpose() } else { new };
            new.set_require_grad(old.is_require_grad())
        })
    }
}

struct Collector {
    named: Named,
    place: Place,
}

impl<B: Backend> ModuleVisitor<B> for Collector {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.place.enter(name, container);
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.place.exit();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        self.named.insert(self.place.name(), self.place.data(param.val()));
    }
}

struct Search {
    place: Place,
    found: Option<String>,
}

impl<B: Backend> ModuleVisitor<B> for Search {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.place.enter(name, container);
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.place.exit();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if self.found.is_none() && !is_finite(param.val()) {
            self.found = Some(self.place.name());
        }
    }
}

/// Whether `tensor` holds neither NaN nor an infinity. Collective where it is split.
pub fn is_finite<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> bool {
    let data = tensor.into_data();
    match data.as_slice::<f32>() {
        Ok(values) => values.iter().all(|value| value.is_finite()),
        Err(_) => data.iter::<f64>().all(f64::is_finite),
    }
}

struct Gradients<'a, B: AutodiffBackend> {
    named: Named,
    place: Place,
    gradients: &'a B::Gradients,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Gradients<'_, B> {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.place.enter(name, container);
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.place.exit();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if let Some(gradient) = param.val().grad(self.gradients) {
            self.named.insert(self.place.name(), self.place.data(gradient));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::CosmoFlowConfig;
    use burn::backend::{Autodiff, Flex};

    #[test]
    fn names_and_shapes_are_pytorchs() {
        let model = CosmoFlowConfig::new(32).with_scale(8).init::<Flex>(&Default::default()).unwrap();
        let named = collect(&model);
        assert_eq!(named.len(), 7 + 7 * 4 + 3 * 2);
        assert_eq!(named["conv.0.weight"].shape.to_vec(), [2, 4, 3, 3, 3]);
        assert_eq!(named["fc.1.weight"].shape.to_vec(), [32, 256]);
        for name in ["bn.6.weight", "bn.0.bias", "bn.3.running_mean", "bn.3.running_var", "fc.2.bias"] {
            assert!(named.contains_key(name), "{name}");
        }
    }

    #[test]
    fn weights_come_back_in_their_type() {
        type B = Autodiff<Flex>;
        let config = CosmoFlowConfig::new(32).with_scale(8);
        let one = collect(&config.init::<Flex>(&Default::default()).unwrap());
        let double: Named = one.iter().map(|(name, data)| (name.clone(), data.clone().convert_dtype(DType::F64))).collect();
        let other = load(config.init::<B>(&Default::default()).unwrap(), &double).unwrap();
        assert!(other.fc[0].weight.val().is_require_grad());
        assert_eq!(collect(&other), double);
    }

    #[test]
    fn a_state_dict_of_pytorch_loads_untouched() {
        let config = CosmoFlowConfig::new(32).with_scale(16);
        let want = collect(&config.init::<Flex>(&Default::default()).unwrap());
        // As `safetensors.torch.save_file(model.state_dict(), ...)` of a wrapped module writes it: batch norms count.
        type Entry = (String, safetensors::Dtype, Vec<usize>, Vec<u8>);
        let float = |(name, data): (&String, &TensorData)| -> Entry {
            (format!("module.{name}"), safetensors::Dtype::F32, data.shape.to_vec(), data.as_bytes().to_vec())
        };
        let counter =
            |i: usize| (format!("module.bn.{i}.num_batches_tracked"), safetensors::Dtype::I64, vec![], 7i64.to_le_bytes().to_vec());
        let mask = ("module.mask".to_owned(), safetensors::Dtype::BOOL, vec![3], vec![1, 0, 1]);
        let entries: Vec<Entry> = want.iter().map(float).chain((0..7).map(counter)).chain([mask]).collect();
        let views = entries
            .iter()
            .map(|(name, dtype, shape, bytes)| (name, safetensors::tensor::TensorView::new(*dtype, shape.clone(), bytes).unwrap()));
        let path = std::env::temp_dir().join(format!("burn-spatial-state-dict-{}.safetensors", std::process::id()));
        safetensors::serialize_to_file(views, None, &path).unwrap();
        let named = read_safetensors(&path, "module.");
        let mut named = named.unwrap();
        let loaded = load(config.init::<Flex>(&Default::default()).unwrap(), &named).unwrap();
        assert_eq!(collect(&loaded), want);
        assert_eq!(named["bn.3.num_batches_tracked"].iter::<i64>().collect::<Vec<_>>(), [7]);
        write_safetensors(&path, &named).unwrap();
        assert_eq!(read_safetensors(&path, "").unwrap(), named);
        std::fs::remove_file(&path).unwrap();
        named.insert("conv.0.weight".into(), TensorData::zeros::<i64, _>([1, 4, 3, 3, 3]));
        let message = load(config.init::<Flex>(&Default::default()).unwrap(), &named).unwrap_err().to_string();
        assert_eq!(message, "conv.0.weight is of floats, but weights of type I64 were given");
    }

    #[test]
    fn what_is_not_finite_is_found() {
        let model = CosmoFlowConfig::new(32).with_scale(16).init::<Flex>(&Default::default()).unwrap();
        assert_eq!(not_finite(&model), None);
        for (name, value) in [("conv.2.weight", f32::NAN), ("bn.1.running_var", f32::INFINITY)] {
            let mut named = collect(&model);
            let shape = named[name].shape.to_vec();
            let mut values = vec![0.5; shape.iter().product()];
            *values.last_mut().unwrap() = value;
            named.insert(name.into(), TensorData::new(values, shape));
            assert_eq!(not_finite(&load(model.clone(), &named).unwrap()).as_deref(), Some(name));
        }
    }

    #[test]
    fn other_weights_are_refused() {
        let config = CosmoFlowConfig::new(32).with_scale(16);
        let model = || config.init::<Flex>(&Default::default()).unwrap();
        let mut named = collect(&model());
        named.remove("bn.1.running_mean");
        assert!(load(model(), &named).is_ok(), "running statistics may be missing");
        let conv = named.remove("conv.1.weight").unwrap();
        assert_eq!(load(model(), &named).unwrap_err().to_string(), "no weights for conv.1.weight; is it another network?");
        named.insert("conv.1.weight".into(), TensorData::zeros::<f32, _>([1, 2]));
        let message = load(model(), &named).unwrap_err().to_string();
        assert_eq!(message, "conv.1.weight has shape [2, 1, 3, 3, 3], but weights of shape [1, 2] were given");
        named.insert("conv.1.weight".into(), conv);
        assert!(load(model(), &named).is_ok());
        assert!(read_safetensors(Path::new("missing.safetensors"), "").unwrap_err().to_string().starts_with("missing.safetensors: "));
    }
}
