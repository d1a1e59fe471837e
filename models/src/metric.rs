//! How good a segmentation is, class by class, over any number of batches.

use burn::tensor::backend::Backend;
use burn::tensor::{Bool, DType, Int, Tensor};

use crate::loss::with_channel;

/// Voxels of each class, counted over whole batches and volumes: the same on every grid, and exact.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct ClassCounts {
    /// Voxels predicted and truly of the class.
    pub both: Vec<u64>,
    /// Voxels predicted to be of the class.
    pub predicted: Vec<u64>,
    /// Voxels truly of the class.
    pub truth: Vec<u64>,
}

impl ClassCounts {
    /// Nothing counted yet, of `classes` classes.
    pub fn new(classes: usize) -> ClassCounts {
        ClassCounts { both: vec![0; classes], predicted: vec![0; classes], truth: vec![0; classes] }
    }

    /// Counts a batch: `logits` `[N, C, D, H, W]`, of which the largest wins, and the class of each voxel,
    /// `[N, D, H, W]` or `[N, 1, D, H, W]`. Voxels of class `ignore_index` do not count. Collective where a tensor is
    /// split; every rank counts the same.
    ///
    /// # Panics
    /// If the shapes do not fit each other or the number of classes.
    pub fn add<B: Backend, const T: usize>(&mut self, logits: Tensor<B, 5>, targets: Tensor<B, T, Int>, ignore_index: Option<i64>) {
        let shape = logits.dims();
        assert_eq!(shape[1], self.both.len(), "logits of shape {shape:?} for {} classes", self.both.len());
        let truth = with_channel(targets, shape);
        let predicted = logits.argmax(1);
        let counted = ignore_index.map(|index| truth.clone().not_equal_elem(index));
        let valid = |mask: Tensor<B, 5, Bool>| match &counted {
            Some(counted) => mask.bool_and(counted.clone()),
            None => mask,
        };
        for class in 0..shape[1] {
            let true_here = valid(truth.clone().equal_elem(class as i64));
            let predicted_here = valid(predicted.clone().equal_elem(class as i64));
            self.both[class] += count(true_here.clone().bool_and(predicted_here.clone()));
            self.predicted[class] += count(predicted_here);
            self.truth[class] += count(true_here);
        }
    }

    /// Intersection over union of each class; `None` for one that is neither predicted nor true anywhere.
    pub fn iou(&self) -> Vec<Option<f64>> {
        self.ratios(|both, sum| (both, sum - both))
    }

    /// Dice coefficient of each class, twice the intersection over the sum of both; `None` for one that is neither
    /// predicted nor true anywhere.
    pub fn dice(&self) -> Vec<Option<f64>> {
        self.ratios(|both, sum| (2 * both, sum))
    }

    fn ratios(&self, parts: impl Fn(u64, u64) -> (u64, u64)) -> Vec<Option<f64>> {
        let ratio = |class: usize| {
            let (above, below) = parts(self.both[class], self.predicted[class] + self.truth[class]);
            (below > 0).then(|| above as f64 / below as f64)
        };
        (0..self.both.len()).map(ratio).collect()
    }
}

/// How many are true. Rows are summed in the backend's own integers, the rest in 64 bits.
pub(crate) fn count<B: Backend, const D: usize>(mask: Tensor<B, D, Bool>) -> u64 {
    let sum = mask.int().sum_dim(D - 1).cast(DType::I64).sum();
    sum.into_data().iter::<i64>().next().and_then(|n| n.try_into().ok()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::backend::Flex;
    use burn::tensor::TensorData;

    fn classes(values: [i64; 8]) -> Tensor<Flex, 5, Int> {
        Tensor::from_data(TensorData::new(values.to_vec(), [1, 1, 2, 2, 2]), &Default::default())
    }

    fn logits(values: [i64; 8]) -> Tensor<Flex, 5> {
        classes(values).equal(Tensor::arange(0..4, &Default::default()).reshape([1, 4, 1, 1, 1])).float()
    }

    #[test]
    fn voxels_are_counted_class_by_class() {
        let mut counts = ClassCounts::new(4);
        counts.add(logits([0, 0, 1, 1, 1, 2, 2, 2]), classes([0, 1, 1, 1, 0, 2, 2, 0]), None);
        assert_eq!(counts, ClassCounts { both: vec![1, 2, 2, 0], predicted: vec![2, 3, 3, 0], truth: vec![3, 3, 2, 0] });
        assert_eq!(counts.dice(), [Some(0.4), Some(4.0 / 6.0), Some(0.8), None]);
        assert_eq!(counts.iou(), [Some(0.25), Some(0.5), Some(2.0 / 3.0), None]);
        // A second batch adds to the first.
        counts.add(logits([3; 8]), classes([3; 8]), None);
        assert_eq!(counts.dice()[3], Some(1.0));
    }

    #[test]
    fn ignored_voxels_do_not_count() {
        let mut counts = ClassCounts::new(4);
        counts.add(logits([0, 0, 1, 1, 1, 2, 2, 2]), classes([0, 9, 1, 1, 9, 2, 2, 9]), Some(9));
        assert_eq!(counts, ClassCounts { both: vec![1, 2, 2, 0], predicted: vec![1, 2, 2, 0], truth: vec![1, 2, 2, 0] });
    }
}
