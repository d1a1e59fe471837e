//! Losses of segmentation, over logits `[N, C, D, H, W]` and the class of each voxel, `[N, D, H, W]` or
//! `[N, 1, D, H, W]`.
//!
//! Logits of half precision are taken in single, and so are the losses.
//!
//! All sums run over the whole batch and volume: on a split volume the values are those of the whole, on every rank.
//! They are made of element-wise operations and sums alone, so that nothing is gathered: what each voxel's class is
//! comes from comparing with each class, not from indexing.
//!
//! Targets have to be classes from 0 to C - 1, or the ignored one. A voxel of no class adds nothing to the
//! cross-entropy but what label smoothing spreads over all classes, and its probabilities add to the Dice loss's denominators.

use burn::config::Config;
use burn::tensor::activation::log_softmax;
use burn::tensor::backend::Backend;
use burn::tensor::{Bool, DType, Int, Tensor, TensorData};

use crate::metric::count;

/// How cross-entropies of voxels become one number.
#[derive(Config, Copy, Debug, PartialEq, Eq)]
pub enum Reduction {
    /// The sum, divided by the sum of the voxels' class weights: without weights the mean. 0 where that is 0: where all
    /// voxels are ignored, or of classes of weight 0.
    Mean,
    /// The sum.
    Sum,
}

/// Cross-entropy of the softmax over classes: -w(t) log p(t) of each voxel of class t. With label smoothing s (Szegedy et
/// al., arXiv 1512.00567), as PyTorch defines it: -(1 - s) w(t) log p(t) - s / C sum over all classes c of w(c) log p(c).
#[derive(Config, Debug, PartialEq)]
pub struct VoxelCrossEntropy {
    /// Weight of each class; all 1 if not given.
    pub class_weights: Option<Vec<f64>>,
    /// Voxels of this class do not count.
    pub ignore_index: Option<i64>,
    /// What is made of all voxels.
    #[config(default = "Reduction::Mean")]
    pub reduction: Reduction,
    /// Share of a voxel's target, 0 to 1, that is spread evenly over all classes.
    #[config(default = 0.0)]
    pub label_smoothing: f64,
}

/// Dice loss (Milletari et al., arXiv 1606.04797): with p the softmax over classes and t one-hot,
/// 1 - (2 sum(p t) + epsilon) / (sum(p) + sum(t) + epsilon) of each class, and the mean of these.
#[derive(Config, Debug, PartialEq)]
pub struct DiceLoss {
    /// Added above and below, that a class which is nowhere costs nothing.
    #[config(default = 1.0)]
    pub epsilon: f64,
    /// Whether the denominator has sum(p^2) for sum(p).
    #[config(default = false)]
    pub squared: bool,
    /// Whether sums run over each sample alone instead of the batch; the mean then is over samples too.
    #[config(default = false)]
    pub per_sample: bool,
    /// Whether class 0 is left out of the mean.
    #[config(default = false)]
    pub skip_background: bool,
    /// Voxels of this class do not count.
    pub ignore_index: Option<i64>,
}

/// Weighted sum of cross-entropy and Dice loss. Class weights act on the cross-entropy.
#[derive(Config, Debug, PartialEq)]
pub struct DiceCrossEntropy {
    /// Weight of each class in the cross-entropy; all 1 if not given.
    pub class_weights: Option<Vec<f64>>,
    /// Voxels of this class do not count.
    pub ignore_index: Option<i64>,
    /// Weight of the (mean) cross-entropy.
    #[config(default = 1.0)]
    pub cross_entropy: f64,
    /// Weight of the Dice loss.
    #[config(default = 1.0)]
    pub dice: f64,
    /// Epsilon of the Dice loss.
    #[config(default = 1.0)]
    pub epsilon: f64,
}

impl VoxelCrossEntropy {
    /// One number `[1]`. Collective where a tensor is split.
    ///
    /// # Panics
    /// If the shapes do not fit each other or the number of class weights, or if the label smoothing is not from 0 to 1.
    pub fn forward<B: Backend, const T: usize>(&self, logits: Tensor<B, 5>, targets: Tensor<B, T, Int>) -> Tensor<B, 1> {
        let voxels = Voxels::new(logits, targets, self.ignore_index);
        self.of(&voxels)
    }

    /// What each voxel adds to the sum, `[N, D, H, W]`: zero where it does not count. Split as the logits' volume is.
    ///
    /// # Panics
    /// As [`forward`](Self::forward).
    pub fn forward_no_reduction<B: Backend, const T: usize>(&self, logits: Tensor<B, 5>, targets: Tensor<B, T, Int>) -> Tensor<B, 4> {
        let voxels = Voxels::new(logits, targets, self.ignore_index);
        let shares = self.shares(&voxels);
        let weighted = match &self.class_weights {
            Some(weights) => shares * voxels.per_class(weights),
            None => shares,
        };
        -weighted.sum_dim(1).squeeze_dim::<4>(1)
    }

    /// `[N, C, D, H, W]`: each class's log probability times its share of the voxel's target.
    fn shares<B: Backend>(&self, voxels: &Voxels<B>) -> Tensor<B, 5> {
        let smoothing = self.label_smoothing;
        assert!((0.0..=1.0).contains(&smoothing), "the label smoothing must be from 0 to 1, but is {smoothing}");
        let log_probabilities = &voxels.log_probabilities;
        let own = voxels.at_targets(log_probabilities.clone());
        if smoothing == 0.0 {
            return own;
        }
        let classes = log_probabilities.dims()[1] as f64;
        own * (1.0 - smoothing) + voxels.valid(log_probabilities.clone()) * (smoothing / classes)
    }

    fn of<B: Backend>(&self, voxels: &Voxels<B>) -> Tensor<B, 1> {
        let chosen = class_sums(self.shares(voxels));
        let weights = self.class_weights.as_ref().map(|weights| voxels.per_class(weights));
        let weighted = |sums: Tensor<B, 5>| match &weights {
            Some(weights) => sums * weights.clone(),
            None => sums,
        };
        let sum = -weighted(chosen).sum();
        match self.reduction {
            Reduction::Mean => {
                let all = weighted(class_sums(voxels.counts())).sum();
                // Where nothing counts the sum is 0, and so is the mean.
                sum / all.clone().mask_fill(all.equal_elem(0.0), 1.0)
            }
            Reduction::Sum => sum,
        }
    }
}

impl DiceLoss {
    /// One number `[1]`. Collective where a tensor is split.
    ///
    /// # Panics
    /// If the shapes do not fit each other.
    pub fn forward<B: Backend, const T: usize>(&self, logits: Tensor<B, 5>, targets: Tensor<B, T, Int>) -> Tensor<B, 1> {
        let voxels = Voxels::new(logits, targets, self.ignore_index);
        self.of(&voxels)
    }

    fn of<B: Backend>(&self, voxels: &Voxels<B>) -> Tensor<B, 1> {
        let sums = |x: Tensor<B, 5>| if self.per_sample { volume_sums(x) } else { class_sums(x) };
        let p = voxels.log_probabilities.clone().exp();
        let both = sums(voxels.at_targets(p.clone()));
        let p = if self.squared { p.square() } else { p };
        let either = sums(voxels.valid(p)) + sums(voxels.counts());
        let (above, below) = (both * 2.0 + self.epsilon, either + self.epsilon);
        let score = match self.epsilon == 0.0 {
            // A class which is nowhere costs nothing all the same.
            true => {
                let nowhere = below.clone().equal_elem(0.0);
                (above / below.mask_fill(nowhere.clone(), 1.0)).mask_fill(nowhere, 1.0)
            }
            false => above / below,
        };
        let [rows, classes, ..] = score.dims();
        let first = usize::from(self.skip_background && classes > 1);
        1.0 - score.slice([0..rows, first..classes]).mean()
    }
}

impl DiceCrossEntropy {
    /// One number `[1]`. Collective where a tensor is split.
    ///
    /// # Panics
    /// If the shapes do not fit each other or the number of class weights.
    pub fn forward<B: Backend, const T: usize>(&self, logits: Tensor<B, 5>, targets: Tensor<B, T, Int>) -> Tensor<B, 1> {
        let voxels = Voxels::new(logits, targets, self.ignore_index);
        let cross_entropy = VoxelCrossEntropy::new().with_class_weights(self.class_weights.clone());
        let dice = DiceLoss::new().with_epsilon(self.epsilon);
        cross_entropy.of(&voxels) * self.cross_entropy + dice.of(&voxels) * self.dice
    }
}

/// Whether every voxel is of class `ignore_index`: a batch of such has a loss of 0 and no gradient. Collective where
/// `targets` are split.
pub fn all_ignored<B: Backend, const T: usize>(targets: Tensor<B, T, Int>, ignore_index: i64) -> bool {
    count(targets.not_equal_elem(ignore_index)) == 0
}

/// `targets` as `[N, 1, D, H, W]`, of the batch and volume of `shape`.
///
/// # Panics
/// If they are of another.
pub(crate) fn with_channel<B: Backend, const T: usize>(targets: Tensor<B, T, Int>, shape: [usize; 5]) -> Tensor<B, 5, Int> {
    let [n, _, d, h, w] = shape;
    let own = targets.dims();
    let fits = own[..] == [n, d, h, w] || own[..] == [n, 1, d, h, w];
    assert!(fits, "targets of shape {own:?} do not fit logits of shape {shape:?}: expected {:?}", [n, d, h, w]);
    targets.reshape([n, 1, d, h, w])
}

/// What both losses are made of.
struct Voxels<B: Backend> {
    /// `[N, C, D, H, W]`.
    log_probabilities: Tensor<B, 5>,
    /// `[N, C, D, H, W]`: whether a voxel is of another class, or does not count.
    elsewhere: Tensor<B, 5, Bool>,
    /// `[N, C, D, H, W]`: whether a voxel does not count.
    ignored: Option<Tensor<B, 5, Bool>>,
}

impl<B: Backend> Voxels<B> {
    fn new<const T: usize>(logits: Tensor<B, 5>, targets: Tensor<B, T, Int>, ignore_index: Option<i64>) -> Self {
        let shape = logits.dims();
        let targets = with_channel(targets, shape);
        let classes = TensorData::new((0..shape[1] as i64).collect::<Vec<_>>(), [1, shape[1], 1, 1, 1]);
        let classes = Tensor::from_data(classes, (&targets.device(), targets.dtype()));
        let ignored = ignore_index.map(|index| targets.clone().equal_elem(index).expand(shape));
        let elsewhere = targets.not_equal(classes);
        let elsewhere = match &ignored {
            Some(ignored) => elsewhere.bool_or(ignored.clone()),
            None => elsewhere,
        };
        // Sums over volumes exceed the range of half precision.
        let logits = if matches!(logits.dtype(), DType::F16 | DType::BF16) { logits.cast(DType::F32) } else { logits };
        Voxels { log_probabilities: log_softmax(logits, 1), elsewhere, ignored }
    }

    /// `x`, zero but for each voxel's own class.
    fn at_targets(&self, x: Tensor<B, 5>) -> Tensor<B, 5> {
        x.mask_fill(self.elsewhere.clone(), 0.0)
    }

    /// `x`, zero where a voxel does not count.
    fn valid(&self, x: Tensor<B, 5>) -> Tensor<B, 5> {
        match &self.ignored {
            Some(ignored) => x.mask_fill(ignored.clone(), 0.0),
            None => x,
        }
    }

    /// One where a voxel is of the class, zero elsewhere.
    fn counts(&self) -> Tensor<B, 5> {
        let x = &self.log_probabilities;
        self.at_targets(Tensor::ones(x.dims(), (&x.device(), x.dtype())))
    }

    /// `[1, C, 1, 1, 1]`.
    fn per_class(&self, weights: &[f64]) -> Tensor<B, 5> {
        let x = &self.log_probabilities;
        let classes = x.dims()[1];
        assert_eq!(weights.len(), classes, "there are {} class weights for {classes} classes", weights.len());
        Tensor::from_data(TensorData::new(weights.to_vec(), [1, classes, 1, 1, 1]), (&x.device(), x.dtype()))
    }
}

/// Sums over the volume: `[N, C, 1, 1, 1]`.
fn volume_sums<B: Backend>(x: Tensor<B, 5>) -> Tensor<B, 5> {
    x.sum_dim(4).sum_dim(3).sum_dim(2)
}

/// Sums over batch and volume: `[1, C, 1, 1, 1]`.
fn class_sums<B: Backend>(x: Tensor<B, 5>) -> Tensor<B, 5> {
    volume_sums(x).sum_dim(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::backend::Flex;

    fn logits() -> Tensor<Flex, 5> {
        let values: Vec<f32> = (0..2 * 3 * 8).map(|i| ((i * 37 + 11) % 23) as f32 / 10.0).collect();
        Tensor::from_data(TensorData::new(values, [2, 3, 2, 2, 2]), &Default::default())
    }

    fn targets(values: [i64; 16]) -> Tensor<Flex, 4, Int> {
        Tensor::from_data(TensorData::new(values.to_vec(), [2, 2, 2, 2]), &Default::default())
    }

    const TARGETS: [i64; 16] = [0, 1, 2, 0, 1, 2, 0, 1, 2, 2, 2, 1, 0, 0, 1, 2];

    fn number(loss: Tensor<Flex, 1>) -> f32 {
        loss.into_scalar()
    }

    #[test]
    fn the_sum_of_losses_is_theirs() {
        let weights = Some(vec![0.5, 1.0, 2.0]);
        let both = DiceCrossEntropy::new().with_class_weights(weights.clone()).with_dice(0.3).with_cross_entropy(2.0);
        let cross_entropy = VoxelCrossEntropy::new().with_class_weights(weights);
        let want = 2.0 * number(cross_entropy.forward(logits(), targets(TARGETS)))
            + 0.3 * number(DiceLoss::new().forward(logits(), targets(TARGETS)));
        let with_channel: Tensor<Flex, 5, Int> = targets(TARGETS).reshape([2, 1, 2, 2, 2]);
        assert!((number(both.forward(logits(), with_channel)) - want).abs() < 1e-6);
    }

    #[test]
    fn ignored_voxels_are_as_if_absent() {
        // The second sample is ignored: what remains is the first alone.
        let mut some = TARGETS;
        some[8..].fill(255);
        let first = Tensor::from_data(TensorData::new(TARGETS[..8].to_vec(), [1, 2, 2, 2]), &Default::default());
        let alone = logits().slice_dim(0, 0..1);
        let loss = DiceCrossEntropy::new();
        let ignoring = loss.clone().with_ignore_index(Some(255)).forward(logits(), targets(some));
        assert!((number(ignoring) - number(loss.forward::<_, 4>(alone, first))).abs() < 1e-6);
    }

    #[test]
    fn where_nothing_counts_loss_and_gradient_are_zero() {
        type A = burn::backend::Autodiff<Flex>;
        let check = |loss: DiceCrossEntropy, values: [i64; 16]| {
            let logits = Tensor::<A, 5>::from_inner(logits()).require_grad();
            let targets = Tensor::<A, 4, Int>::from_inner(targets(values));
            let value = loss.forward(logits.clone(), targets);
            let gradient = logits.grad(&value.backward()).unwrap();
            assert_eq!(value.into_scalar(), 0.0, "{loss:?}");
            assert!(gradient.into_data().iter::<f32>().all(|x| x == 0.0), "{loss:?}");
        };
        let loss = DiceCrossEntropy::new().with_ignore_index(Some(255));
        check(loss.clone(), [255; 16]);
        check(loss.clone().with_epsilon(0.0), [255; 16]);
        check(loss.with_class_weights(Some(vec![0.0, 0.0, 3.0])), [255; 16]);
        // Classes of weight 0 alone: the Dice loss counts them, the cross-entropy does not.
        check(DiceCrossEntropy::new().with_class_weights(Some(vec![0.0, 1.0, 1.0])).with_dice(0.0), [0; 16]);
        assert!(all_ignored(targets([255; 16]), 255));
        assert!(!all_ignored(targets(TARGETS), 255) && !all_ignored(targets(TARGETS), 2));
    }

    #[test]
    fn a_perfect_prediction_costs_nothing() {
        let one_hot = targets(TARGETS).reshape([2, 1, 2, 2, 2]).equal(Tensor::arange(0..3, &Default::default()).reshape([1, 3, 1, 1, 1]));
        let sure = one_hot.float() * 100.0;
        assert!(number(DiceCrossEntropy::new().forward(sure.clone(), targets(TARGETS))).abs() < 1e-6);
        // Without the background the mean is over the other classes.
        assert!(number(DiceLoss::new().with_skip_background(true).forward(sure, targets(TARGETS))).abs() < 1e-6);
    }

    #[test]
    fn losses_of_voxels_add_up_to_the_sum() {
        let loss = VoxelCrossEntropy::new()
            .with_class_weights(Some(vec![0.5, 1.0, 2.0]))
            .with_ignore_index(Some(1))
            .with_label_smoothing(0.1)
            .with_reduction(Reduction::Sum);
        let each = loss.forward_no_reduction(logits(), targets(TARGETS));
        assert_eq!(each.dims(), [2, 2, 2, 2]);
        let each: Vec<f32> = each.into_data().to_vec().unwrap();
        assert!(each.iter().zip(TARGETS).all(|(loss, class)| (*loss == 0.0) == (class == 1)), "{each:?}");
        let sum = number(loss.forward(logits(), targets(TARGETS)));
        assert!((each.iter().sum::<f32>() - sum).abs() < 1e-5 * sum);
    }

    #[test]
    #[should_panic(expected = "label smoothing must be from 0 to 1")]
    fn a_smoothing_above_one_is_refused() {
        VoxelCrossEntropy::new().with_label_smoothing(1.5).forward(logits(), targets(TARGETS));
    }

    #[test]
    #[should_panic(expected = "do not fit logits")]
    fn targets_of_another_volume_are_refused() {
        DiceLoss::new().forward(logits(), targets(TARGETS).slice_dim(0, 0..1));
    }
}
