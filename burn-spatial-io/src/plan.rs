//! Which samples a rank reads at which step.

use burn_spatial::comm::CommError;
use burn_spatial::mesh::{AxisSet, Mesh};

use crate::random;
use crate::rank::GridRank;

/// One group's part of a global batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchPart {
    /// The samples of this group, in order.
    pub ids: Vec<usize>,
    /// How many samples the global batch has.
    pub global: usize,
    /// Whether the groups hold different samples; else every group holds the whole batch.
    pub split: bool,
}

/// The order of samples of one epoch, the same on all ranks and platforms: it depends on the arguments alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EpochPlan {
    order: Vec<usize>,
    batch: usize,
}

impl EpochPlan {
    /// Plans epoch number `epoch` over `samples` samples in global batches of `batch` (0 counts as 1).
    ///
    /// With a seed the order is a Fisher-Yates shuffle by ChaCha8, keyed by the seed, the epoch being its stream;
    /// without, it is the stored order. The global batch of step s is samples `s * batch ..` of that order; the last
    /// one of an epoch is smaller where the batch does not divide the set.
    pub fn new(samples: usize, batch: usize, seed: Option<u64>, epoch: u64) -> EpochPlan {
        let order = match seed {
            Some(seed) => random::permutation(samples, &mut random::stream(seed, b"epoch\0\0\0", epoch)),
            None => (0..samples).collect(),
        };
        EpochPlan { order, batch: batch.max(1) }
    }

    /// All samples in the order of the epoch.
    pub fn order(&self) -> &[usize] {
        &self.order
    }

    /// Steps of the epoch.
    pub fn steps(&self) -> usize {
        self.order.len().div_ceil(self.batch)
    }

    /// The global batch of `step`, empty past the end.
    pub fn batch(&self, step: usize) -> &[usize] {
        self.order.chunks(self.batch).nth(step).unwrap_or(&[])
    }

    /// The samples of the batch of `step` that `rank` holds blocks of.
    pub fn part(&self, step: usize, rank: GridRank) -> BatchPart {
        let batch = self.batch(step);
        let own = &batch[rank.samples(batch.len())];
        BatchPart { ids: own.to_vec(), global: batch.len(), split: own.len() < batch.len() }
    }
}

/// Why ranks cannot step together.
#[derive(Debug, thiserror::Error)]
pub enum IdsError {
    /// Ranks of one spatial group hold different samples: their blocks do not belong together.
    #[error(
        "ranks of one spatial group hold different samples: rank {rank} has {ids:?}, rank {other} has {other_ids:?}; give all ranks the same files, seed, epoch and batch size"
    )]
    Mismatch {
        /// The first rank of the group, in the world communicator.
        rank: usize,
        /// Its samples.
        ids: Vec<usize>,
        /// The first rank that disagrees.
        other: usize,
        /// Its samples.
        other_ids: Vec<usize>,
    },
    /// The communication failed.
    #[error(transparent)]
    Comm(#[from] CommError),
}

/// Checks that all ranks of this spatial group hold the samples `ids`. Collective over the spatial group; every rank
/// of it returns the same error.
pub fn check_ids(ids: &[usize], mesh: &Mesh) -> Result<(), IdsError> {
    let Some(group) = mesh.group(AxisSet::SPATIAL) else { return Ok(()) };
    let numbers = std::iter::once(mesh.rank()).chain(ids.iter().copied());
    let bytes: Vec<u8> = numbers.flat_map(|n| (n as u64).to_le_bytes()).collect();
    let all: Vec<Vec<usize>> = group
        .all_gather(&bytes)?
        .iter()
        .map(|bytes| bytes.as_chunks().0.iter().map(|n| u64::from_le_bytes(*n) as usize).collect())
        .collect();
    // Each list starts with the sender's rank.
    match all.iter().find(|other| other[1..] != all[0][1..]) {
        None => Ok(()),
        Some(other) => {
            Err(IdsError::Mismatch { rank: all[0][0], ids: all[0][1..].to_vec(), other: other[0], other_ids: other[1..].to_vec() })
        }
    }
}

#[cfg(test)]
mod tests {
    use burn_spatial::mesh::Grid;

    use super::*;

    #[test]
    fn every_sample_once_an_epoch_and_spatial_groups_agree() {
        let grid = Grid([4, 2, 1, 2]);
        let mut orders = Vec::new();
        for epoch in 0..3 {
            let plan = EpochPlan::new(16, 8, Some(1), epoch);
            let mut seen: Vec<usize> = Vec::new();
            for step in 0..plan.steps() {
                let parts: Vec<BatchPart> = (0..grid.ranks()).map(|rank| plan.part(step, GridRank { grid, rank })).collect();
                for spatial_group in parts.chunks(4) {
                    assert!(spatial_group.iter().all(|part| *part == spatial_group[0]));
                    assert_eq!((spatial_group[0].ids.len(), spatial_group[0].global), (2, 8));
                    seen.extend(&spatial_group[0].ids);
                }
            }
            orders.push(seen.clone());
            seen.sort_unstable();
            assert_eq!(seen, (0..16).collect::<Vec<_>>());
        }
        assert!(orders[0] != orders[1] && orders[1] != orders[2]);
        assert_eq!(EpochPlan::new(16, 8, Some(1), 2), EpochPlan::new(16, 8, Some(1), 2));
        assert_ne!(EpochPlan::new(16, 8, Some(1), 2), EpochPlan::new(16, 8, Some(2), 2));
    }

    #[test]
    fn the_order_is_pinned() {
        // From an independent ChaCha8 in Python. Another order would break resumed trainings.
        let expected = [11, 1, 4, 2, 9, 6, 13, 0, 7, 14, 10, 5, 12, 8, 15, 3];
        assert_eq!(EpochPlan::new(16, 4, Some(7), 0).order(), expected);
    }

    #[test]
    fn a_small_last_batch_is_neither_lost_nor_counted_twice() {
        let group = |rank| GridRank { grid: Grid([4, 1, 1, 1]), rank };
        // 13 = 5 + 5 + 3: the last batch has fewer samples than there are groups.
        let plan = EpochPlan::new(13, 5, None, 0);
        assert_eq!(plan.steps(), 3);
        let ids = |step| (0..4).map(|index| plan.part(step, group(index)).ids).collect::<Vec<_>>();
        assert_eq!(ids(0), [vec![0, 1], vec![2], vec![3], vec![4]]);
        assert_eq!(ids(2), vec![vec![10, 11, 12]; 4]);
        let last = plan.part(2, group(3));
        assert_eq!((last.global, last.split), (3, false));
        assert_eq!(plan.part(3, group(0)), BatchPart { ids: vec![], global: 0, split: false });
        assert_eq!(EpochPlan::new(0, 5, Some(3), 0).steps(), 0);
        assert_eq!(EpochPlan::new(3, 0, None, 0).steps(), 3);
    }
}
