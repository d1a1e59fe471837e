//! What is measured.

use burn::backend::Flex;
use burn::tensor::{Distribution, Tensor, TensorPrimitive};
use burn_backend::tensor::FloatTensor;
use burn_spatial::kernels::{self, Count, Window, WindowAxis};

/// One layer on one sample, float32.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// Its name in tables.
    pub name: &'static str,
    /// What it is.
    pub layer: Layer,
    /// Channels of the input.
    pub inputs: usize,
    /// Channels of the output.
    pub outputs: usize,
    /// Voxels along each edge of the input.
    pub width: usize,
    /// Taps along each axis.
    pub kernel: usize,
    /// Voxels between outputs.
    pub stride: usize,
}

/// A kind of layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layer {
    /// A convolution with "same" padding.
    Conv,
    /// A transposed convolution without padding.
    Transposed,
    /// A maximum over windows, without padding.
    Max,
    /// A mean over windows, padded by half of them.
    Mean,
}

/// What of a layer is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// The output.
    Forward,
    /// The gradient of the input.
    Data,
    /// The gradient of the weight.
    Weight,
}

impl Pass {
    /// Its name in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Pass::Forward => "forward",
            Pass::Data => "data",
            Pass::Weight => "weight",
        }
    }
}

const fn conv(name: &'static str, [inputs, outputs]: [usize; 2], width: usize, kernel: usize, stride: usize) -> Case {
    Case { name, layer: Layer::Conv, inputs, outputs, width, kernel, stride }
}

/// The layers of CosmoFlow and the U-Net that take the most time, and one of each other kind.
pub const CASES: [Case; 13] = [
    conv("3^3 16->32 64^3", [16, 32], 64, 3, 1),
    conv("3^3 32->64 32^3", [32, 64], 32, 3, 1),
    conv("3^3 32->64 64^3", [32, 64], 64, 3, 1),
    conv("3^3 4->16 64^3", [4, 16], 64, 3, 1),
    conv("3^3 4->16 128^3", [4, 16], 128, 3, 1),
    conv("3^3 128->256 8^3", [128, 256], 8, 3, 1),
    conv("3^3 s2 64->128 16^3", [64, 128], 16, 3, 2),
    conv("1^3 32->3 64^3", [32, 3], 64, 1, 1),
    conv("2^3 s2 32->64 32^3", [32, 64], 32, 2, 2),
    conv("5^3 16->16 32^3", [16, 16], 32, 5, 1),
    Case { name: "transposed 2^3 s2 64->64 32^3", layer: Layer::Transposed, inputs: 64, outputs: 64, width: 32, kernel: 2, stride: 2 },
    Case { name: "max 2^3 s2 64 64^3", layer: Layer::Max, inputs: 64, outputs: 64, width: 64, kernel: 2, stride: 2 },
    Case { name: "mean 3^3 s2 32 64^3", layer: Layer::Mean, inputs: 32, outputs: 32, width: 64, kernel: 3, stride: 2 },
];

/// A case with its tensors.
pub struct Ready {
    case: Case,
    window: Window,
    x: FloatTensor<Flex>,
    weight: FloatTensor<Flex>,
    grad: FloatTensor<Flex>,
}

fn random(shape: [usize; 5]) -> FloatTensor<Flex> {
    match Tensor::<Flex, 5>::random(shape, Distribution::Uniform(-1.0, 1.0), &Default::default()).into_primitive() {
        TensorPrimitive::Float(tensor) => tensor,
        TensorPrimitive::QFloat(_) => unreachable!("random values are floats"),
    }
}

impl Case {
    /// What it has.
    pub fn passes(&self) -> &'static [Pass] {
        match self.layer {
            Layer::Conv | Layer::Transposed => &[Pass::Forward, Pass::Data, Pass::Weight],
            Layer::Max | Layer::Mean => &[Pass::Forward, Pass::Data],
        }
    }

    fn padding(&self) -> usize {
        match self.layer {
            // Even kernels are those of strided layers, which read each voxel once.
            Layer::Conv | Layer::Mean if self.kernel % 2 == 1 => self.kernel / 2,
            _ => 0,
        }
    }

    /// Voxels along each edge of the output.
    fn output(&self) -> usize {
        match self.layer {
            Layer::Transposed => (self.width - 1) * self.stride + self.kernel,
            _ => (self.width + 2 * self.padding() - self.kernel) / self.stride + 1,
        }
    }

    /// Billions of multiplications and additions of each pass: two for every tap of every output and pair of channels.
    pub fn gflop(&self) -> f64 {
        let positions = match self.layer {
            Layer::Transposed => self.width.pow(3),
            _ => self.output().pow(3),
        };
        let pairs = match self.layer {
            Layer::Conv | Layer::Transposed => self.inputs * self.outputs,
            Layer::Max | Layer::Mean => self.inputs,
        };
        2e-9 * (positions * pairs * self.kernel.pow(3)) as f64
    }

    /// Makes the tensors.
    pub fn ready(self) -> Ready {
        let (near, far) = (self.width, self.output());
        // A transposed convolution is the gradient of one from its output to its input.
        let (input, output) = if self.layer == Layer::Transposed { (far, near) } else { (near, far) };
        let axis = WindowAxis { input, output, kernel: self.kernel, stride: self.stride, dilation: 1, offset: self.padding() as isize };
        let weight = match self.layer {
            Layer::Transposed => [self.inputs, self.outputs],
            _ => [self.outputs, self.inputs],
        };
        Ready {
            case: self,
            window: [axis; 3],
            x: random([1, self.inputs, near, near, near]),
            weight: random([weight[0], weight[1], self.kernel, self.kernel, self.kernel]),
            grad: random([1, self.outputs, far, far, far]),
        }
    }
}

impl Ready {
    /// A pass of which only the computation is run, again and again.
    pub fn pass(&self, pass: Pass) -> Box<dyn Fn() + Send + Sync + '_> {
        let Ready { case, window, x, weight, grad } = self;
        let shape = || burn_backend::TensorMetadata::shape(weight).dims();
        match (case.layer, pass) {
            (Layer::Conv, Pass::Forward) => Box::new(move || drop(kernels::conv3d::<Flex>(x.clone(), weight.clone(), None, window, 1))),
            (Layer::Conv, Pass::Data) => Box::new(move || drop(kernels::conv3d_data_grad::<Flex>(grad.clone(), weight.clone(), window, 1))),
            (Layer::Conv, Pass::Weight) => {
                Box::new(move || drop(kernels::conv3d_weight_grad::<Flex>(x.clone(), grad.clone(), shape(), window, 1)))
            }
            (Layer::Transposed, Pass::Forward) => {
                Box::new(move || drop(kernels::conv3d_data_grad::<Flex>(x.clone(), weight.clone(), window, 1)))
            }
            (Layer::Transposed, Pass::Data) => {
                Box::new(move || drop(kernels::conv3d::<Flex>(grad.clone(), weight.clone(), None, window, 1)))
            }
            (Layer::Transposed, Pass::Weight) => {
                Box::new(move || drop(kernels::conv3d_weight_grad::<Flex>(grad.clone(), x.clone(), shape(), window, 1)))
            }
            (Layer::Max, Pass::Forward) => Box::new(move || drop(kernels::max_pool3d::<Flex>(x.clone(), window, [0; 3], [case.width; 3]))),
            (Layer::Max, _) => {
                let (_, at) = kernels::max_pool3d::<Flex>(x.clone(), window, [0; 3], [case.width; 3]);
                Box::new(move || drop(kernels::max_pool3d_grad::<Flex>(grad.clone(), at.clone(), window, [0; 3], [case.width; 3])))
            }
            (Layer::Mean, Pass::Forward) => Box::new(move || drop(kernels::avg_pool3d::<Flex>(x.clone(), window, Count::Inside))),
            (Layer::Mean, _) => Box::new(move || drop(kernels::avg_pool3d_grad::<Flex>(grad.clone(), window, Count::Inside))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pass_of_every_case_runs_small() {
        for case in CASES {
            let case = Case { width: 8, ..case };
            let ready = case.ready();
            case.passes().iter().for_each(|pass| ready.pass(*pass)());
            assert!(case.gflop() > 0.0);
        }
        let conv = CASES[0];
        assert_eq!(conv.gflop(), 2e-9 * (64usize.pow(3) * 16 * 32 * 27) as f64);
    }
}
