//! How a global tensor lies on the mesh: pure index algebra, no communication.
//!
//! A dimension is an ordered product of [`Axis`]es (usually one, none where the extent is 1), each whole on every
//! rank, split over a mesh axis, or uniform. Local storage is row-major over the local extents, dimension by
//! dimension and axis by axis.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use burn_std::Shape;

use crate::mesh::{AxisSet, Grid, MeshAxis};

mod need;
mod reshape;
mod unify;

pub use need::{AxisNeed, Piece};
pub use reshape::Blocked;
pub(crate) use reshape::refine;
pub use unify::unify;

/// How one axis is stored.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Storage {
    /// Every rank holds all of it.
    Full,
    /// The rank at coordinate `i` of `mesh` holds `offsets[i]..offsets[i + 1]`; no shard is empty.
    Split {
        /// The mesh axis that splits it.
        mesh: MeshAxis,
        /// Shard boundaries: 0 first, the extent last.
        offsets: Arc<[usize]>,
    },
    /// The value does not vary along it and is stored once.
    Uniform,
}

/// A factor of a dimension.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Axis {
    pub(crate) extent: usize,
    pub(crate) storage: Storage,
}

/// Why axes make no layout.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// Shard boundaries that do not rise from 0.
    #[error("shard boundaries {offsets:?} along the {mesh}: they start with 0 and rise, for no shard is empty")]
    Offsets {
        /// The mesh axis that should split.
        mesh: MeshAxis,
        /// What was given.
        offsets: Vec<usize>,
    },
    /// One mesh axis for two axes of a tensor.
    #[error("the {mesh} of the grid splits dimensions {first} and {second}: it can split one")]
    Twice {
        /// The mesh axis.
        mesh: MeshAxis,
        /// The dimension that it splits first.
        first: usize,
        /// The other dimension, or the same.
        second: usize,
    },
    /// A layout for another number of ranks.
    #[error("{layout} has {shards} shards along the {mesh}, but the grid has {ranks} ranks there")]
    Ranks {
        /// The layout, as printed.
        layout: String,
        /// The mesh axis.
        mesh: MeshAxis,
        /// Shards that the layout has.
        shards: usize,
        /// Ranks that the grid has.
        ranks: usize,
    },
}

impl Axis {
    /// A whole axis.
    pub fn full(extent: usize) -> Axis {
        Axis { extent, storage: Storage::Full }
    }

    /// A uniform axis; an empty one is [`Storage::Full`], for it has no value.
    pub fn uniform(extent: usize) -> Axis {
        Axis { extent, storage: if extent == 0 { Storage::Full } else { Storage::Uniform } }
    }

    /// An axis split at `offsets`: 0 first, the extent last, rising.
    pub fn try_split(mesh: MeshAxis, offsets: impl Into<Arc<[usize]>>) -> Result<Axis, LayoutError> {
        let offsets = offsets.into();
        let rising = offsets.len() >= 2 && offsets[0] == 0 && offsets.windows(2).all(|o| o[0] < o[1]);
        if !rising {
            return Err(LayoutError::Offsets { mesh, offsets: offsets.to_vec() });
        }
        Ok(Axis { extent: offsets[offsets.len() - 1], storage: Storage::Split { mesh, offsets } })
    }

    /// [`Axis::try_split`] at offsets that are known to be right.
    ///
    /// # Panics
    /// If they are not.
    pub fn split(mesh: MeshAxis, offsets: impl Into<Arc<[usize]>>) -> Axis {
        Axis::try_split(mesh, offsets).unwrap_or_else(|error| panic!("{error}"))
    }

    /// Global extent.
    pub fn extent(&self) -> usize {
        self.extent
    }

    /// How it is stored.
    pub fn storage(&self) -> &Storage {
        &self.storage
    }

    /// The mesh axis and the offsets, where it is split.
    pub fn as_split(&self) -> Option<(MeshAxis, &Arc<[usize]>)> {
        match &self.storage {
            Storage::Split { mesh, offsets } => Some((*mesh, offsets)),
            _ => None,
        }
    }

    /// What the rank at `coords` holds of it: start and end in global indices. All of it for a full or uniform axis.
    pub fn owned(&self, coords: [usize; 4]) -> (usize, usize) {
        match self.as_split() {
            Some((mesh, offsets)) => {
                let i = coords[mesh.index()];
                (offsets[i], offsets[i + 1])
            }
            None => (0, self.extent),
        }
    }

    /// How many elements the rank at `coords` stores along it.
    pub fn local(&self, coords: [usize; 4]) -> usize {
        match self.storage {
            Storage::Uniform => 1,
            _ => {
                let (start, end) = self.owned(coords);
                end - start
            }
        }
    }
}

/// Shard boundaries of `extent` over `ranks`: shards differ by one at most and the first `extent % ranks` are the
/// longer ones.
pub fn balanced_offsets(extent: usize, ranks: usize) -> Vec<usize> {
    let (each, longer) = (extent / ranks, extent % ranks);
    (0..=ranks).map(|i| i * each + i.min(longer)).collect()
}

/// How a global tensor lies on the mesh.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Layout {
    dims: Vec<Vec<Axis>>,
    /// Mesh axes over which local values still have to be summed.
    pending: AxisSet,
}

impl Layout {
    /// From the axes of each dimension. Extent-1 axes are dropped, neighbours of one kind fused. An error where a mesh axis
    /// splits twice.
    pub fn try_new(dims: Vec<Vec<Axis>>) -> Result<Layout, LayoutError> {
        let dims: Vec<Vec<Axis>> = dims.into_iter().map(normalize).collect();
        let mut splits: [Option<usize>; 4] = [None; 4];
        for (dim, axes) in dims.iter().enumerate() {
            for (mesh, _) in axes.iter().filter_map(Axis::as_split) {
                if let Some(first) = splits[mesh.index()].replace(dim) {
                    return Err(LayoutError::Twice { mesh, first, second: dim });
                }
            }
        }
        Ok(Layout { dims, pending: AxisSet::EMPTY })
    }

    /// [`Layout::try_new`] of axes that are known to be right.
    ///
    /// # Panics
    /// If they are not.
    pub(crate) fn new(dims: Vec<Vec<Axis>>) -> Layout {
        Layout::try_new(dims).unwrap_or_else(|error| panic!("{error}"))
    }

    /// An error unless every split has a shard for each rank of `grid` along its mesh axis.
    pub fn check(&self, grid: Grid) -> Result<(), LayoutError> {
        for (mesh, offsets) in self.axes().filter_map(Axis::as_split) {
            let (shards, ranks) = (offsets.len() - 1, grid.size(mesh));
            if shards != ranks {
                return Err(LayoutError::Ranks { layout: self.to_string(), mesh, shards, ranks });
            }
        }
        Ok(())
    }

    /// Whole on every rank.
    pub fn full(shape: &[usize]) -> Layout {
        Layout::new(shape.iter().map(|n| vec![Axis::full(*n)]).collect())
    }

    /// One value, stored once. A tensor without elements is full.
    pub fn uniform(shape: &[usize]) -> Layout {
        if shape.contains(&0) {
            return Layout::full(shape);
        }
        Layout::new(shape.iter().map(|n| vec![Axis::uniform(*n)]).collect())
    }

    /// `[N, C, ...spatial]` split over `grid` as volumes are by default: the batch over data and the last up to three
    /// dimensions over depth, height and width, in near-equal shards; an axis with fewer elements than ranks is full.
    pub fn volume(shape: &[usize], grid: Grid) -> Layout {
        let spatial = shape.len().saturating_sub(2).min(3);
        let mut layout = Layout::full(shape);
        let mut place = |dim: usize, mesh: MeshAxis| {
            let (extent, ranks) = (shape[dim], grid.size(mesh));
            if ranks > 1 && extent >= ranks {
                layout.dims[dim] = vec![Axis::split(mesh, balanced_offsets(extent, ranks))];
            }
        };
        if !shape.is_empty() {
            place(0, MeshAxis::Data);
        }
        for i in 0..spatial {
            // A plane has height and width, a line has width.
            place(shape.len() - spatial + i, MeshAxis::SPATIAL[3 - spatial + i]);
        }
        layout
    }

    /// The axes of each dimension.
    pub fn dims(&self) -> &[Vec<Axis>] {
        &self.dims
    }

    /// The axes of dimension `dim`; none where its extent is 1.
    pub fn dim(&self, dim: usize) -> &[Axis] {
        &self.dims[dim]
    }

    /// This layout with the axes of dimension `dim` replaced.
    ///
    /// # Panics
    /// If a mesh axis would split twice.
    pub fn with_dim(&self, dim: usize, axes: Vec<Axis>) -> Layout {
        let mut dims = self.dims.clone();
        dims[dim] = axes;
        Layout::new(dims).with_pending(self.pending)
    }

    /// The mesh axes over which local values still have to be summed. Only operations make such layouts.
    pub fn pending(&self) -> AxisSet {
        self.pending
    }

    /// This layout with `pending` mesh axes.
    pub(crate) fn with_pending(mut self, pending: AxisSet) -> Layout {
        self.pending = pending;
        self
    }

    /// This layout once its pending sums are made.
    pub(crate) fn summed(&self) -> Layout {
        self.clone().with_pending(AxisSet::EMPTY)
    }

    /// Number of dimensions.
    pub fn rank(&self) -> usize {
        self.dims.len()
    }

    /// Global extent of dimension `dim`.
    pub fn extent(&self, dim: usize) -> usize {
        extent(&self.dims[dim])
    }

    /// Global shape.
    pub fn shape(&self) -> Shape {
        Shape::from(self.dims.iter().map(|axes| extent(axes)).collect::<Vec<_>>())
    }

    /// What the rank at `coords` holds of dimension `dim`, in global indices; all of it where it is not split. `None` where
    /// that is no range: a factor other than the first of the dimension is split.
    pub fn owned(&self, dim: usize, coords: [usize; 4]) -> Option<Range<usize>> {
        let Some((first, inner)) = self.dims[dim].split_first() else { return Some(0..1) };
        let (start, end) = first.owned(coords);
        let run = extent(inner);
        inner.iter().all(|axis| axis.as_split().is_none()).then(|| start * run..end * run)
    }

    /// Shape of what the rank at `coords` stores.
    pub fn local_shape(&self, coords: [usize; 4]) -> Shape {
        Shape::from(self.dims.iter().map(|axes| axes.iter().map(|a| a.local(coords)).product()).collect::<Vec<usize>>())
    }

    /// All axes, in storage order.
    pub fn axes(&self) -> impl Iterator<Item = &Axis> {
        self.dims.iter().flatten()
    }

    /// The mesh axes that split something.
    pub fn split_over(&self) -> AxisSet {
        self.axes().filter_map(|a| a.as_split().map(|(mesh, _)| mesh)).collect()
    }

    /// Whether every rank holds every element, summed and not stored as uniform.
    pub fn is_full(&self) -> bool {
        self.pending.is_empty() && self.axes().all(|a| a.storage == Storage::Full)
    }

    /// Whether dimension `dim` is stored once (extent 1 included).
    pub fn is_uniform_dim(&self, dim: usize) -> bool {
        self.dims[dim].iter().all(|a| a.storage == Storage::Uniform)
    }

    /// How many elements each stored element stands for: the product of the extents of the uniform axes.
    pub fn multiplicity(axes: &[Axis]) -> usize {
        axes.iter().filter(|a| a.storage == Storage::Uniform).map(|a| a.extent).product()
    }

    /// The same tensor with its dimensions in another order.
    pub fn permute(&self, order: &[usize]) -> Layout {
        Layout { dims: order.iter().map(|d| self.dims[*d].clone()).collect(), pending: self.pending }
    }

    /// This layout with `dim` whole on every rank.
    pub fn full_dim(&self, dim: usize) -> Layout {
        self.with_dim(dim, vec![Axis::full(self.extent(dim))])
    }

    /// This layout with the uniform axes of dimension `dim` stored in full.
    pub fn materialized_dim(&self, dim: usize) -> Layout {
        let axes = self.dims[dim].iter().map(|a| if a.storage == Storage::Uniform { Axis::full(a.extent) } else { a.clone() });
        self.with_dim(dim, axes.collect())
    }

    /// This layout with all uniform axes stored in full.
    pub fn materialized(&self) -> Layout {
        (0..self.rank()).fold(self.clone(), |layout, dim| layout.materialized_dim(dim))
    }
}

/// Global extent of a product of axes.
pub(crate) fn extent(axes: &[Axis]) -> usize {
    axes.iter().map(|a| a.extent).product()
}

/// Drops axes of extent 1 and fuses neighbouring full axes and neighbouring uniform ones.
pub(crate) fn normalize(axes: Vec<Axis>) -> Vec<Axis> {
    let mut out: Vec<Axis> = Vec::with_capacity(axes.len());
    for axis in axes {
        if axis.extent == 1 {
            continue;
        }
        match out.last_mut() {
            Some(last) if last.storage == axis.storage && axis.as_split().is_none() => last.extent *= axis.extent,
            _ => out.push(axis),
        }
    }
    out
}

/// Short form: `[8n, 16, 32d(16|16), 32, 32u]`: `n`, `d`, `h`, `w` name the mesh axis that splits, `u` marks uniform,
/// `*` joins the axes of a dimension, and `+dh` at the end says what is still to be summed.
impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[")?;
        for (i, axes) in self.dims.iter().enumerate() {
            if i > 0 {
                f.write_str(", ")?;
            }
            if axes.is_empty() {
                f.write_str("1")?;
            }
            for (j, axis) in axes.iter().enumerate() {
                if j > 0 {
                    f.write_str("*")?;
                }
                write!(f, "{}", axis.extent)?;
                match &axis.storage {
                    Storage::Full => {}
                    Storage::Uniform => f.write_str("u")?,
                    Storage::Split { mesh, offsets } => {
                        let lengths: Vec<String> = offsets.windows(2).map(|o| (o[1] - o[0]).to_string()).collect();
                        write!(f, "{}({})", mesh.letter(), lengths.join("|"))?;
                    }
                }
            }
        }
        f.write_str("]")?;
        if !self.pending.is_empty() {
            f.write_str("+")?;
            for axis in self.pending.iter() {
                write!(f, "{}", axis.letter())?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn balanced_offsets_are_near_equal() {
        assert_eq!(balanced_offsets(10, 4), [0, 3, 6, 8, 10]);
        assert_eq!(balanced_offsets(8, 2), [0, 4, 8]);
        assert_eq!(balanced_offsets(3, 1), [0, 3]);
    }

    #[test]
    fn partition_of_more_elements_than_32_bits_count() {
        let layout = Layout::volume(&[64, 1, 2048, 2048, 2048], Grid([4, 2, 2, 2]));
        let coords = [3, 1, 1, 1];
        assert_eq!(layout.shape().num_elements(), 64 * 2048 * 2048 * 2048);
        assert_eq!(layout.local_shape(coords).num_elements(), 16 * 1024 * 1024 * 1024);
        let starts: Vec<usize> = layout.axes().map(|a| a.owned(coords).0).collect();
        assert_eq!(starts, [48, 1024, 1024, 1024]);
        let flat = ((starts[0] * 2048 + starts[1]) * 2048 + starts[2]) * 2048 + starts[3];
        assert_eq!(flat, 416_613_925_888);
        assert!(flat > u32::MAX as usize);
    }

    #[test]
    fn the_block_of_a_rank_is_a_box() {
        let grid = Grid([2, 4, 2, 1]);
        let owned = |shape: &[usize], coords| {
            let layout = Layout::volume(shape, grid);
            (0..shape.len()).map(|dim| layout.owned(dim, coords).unwrap()).collect::<Vec<_>>()
        };
        // Fewer planes than ranks, and one sample for two groups: every rank has all of them.
        assert_eq!(owned(&[1, 3, 2, 5, 3], [1, 3, 1, 0]), [0..1, 0..3, 0..2, 3..5, 0..3]);
        assert_eq!(owned(&[5, 1, 10, 2, 1], [0, 2, 1, 0]), [0..3, 0..1, 6..8, 1..2, 0..1]);
        assert_eq!(Layout::volume(&[3], grid).owned(0, [1, 0, 0, 0]), Some(2..3));
        let depth = Axis::split(MeshAxis::Depth, vec![0, 1, 2, 3, 6]);
        let runs = Layout::new(vec![vec![depth.clone(), Axis::full(5)], vec![Axis::full(2)]]);
        assert_eq!(runs.owned(0, [0, 3, 0, 0]), Some(15..30));
        assert_eq!(Layout::new(vec![vec![Axis::full(5), depth]]).owned(0, [0; 4]), None);
    }

    #[test]
    fn axes_that_make_no_layout_are_refused() {
        let depth = |offsets: &[usize]| Axis::try_split(MeshAxis::Depth, offsets).map_err(|error| error.to_string());
        for offsets in [&[][..], &[0], &[1, 2], &[0, 3, 2], &[0, 2, 2]] {
            let message = depth(offsets).unwrap_err();
            assert_eq!(message, format!("shard boundaries {offsets:?} along the depth: they start with 0 and rise, for no shard is empty"));
        }
        let axis = depth(&[0, 2, 4]).unwrap();
        let twice = Layout::try_new(vec![vec![axis.clone()], vec![Axis::full(3)], vec![axis.clone()]]).unwrap_err();
        assert_eq!(twice.to_string(), "the depth of the grid splits dimensions 0 and 2: it can split one");
        let layout = Layout::try_new(vec![vec![axis]]).unwrap();
        assert!(layout.check(Grid([1, 2, 1, 1])).is_ok());
        let other = layout.check(Grid([1, 3, 1, 1])).unwrap_err();
        assert_eq!(other.to_string(), "[4d(2|2)] has 2 shards along the depth, but the grid has 3 ranks there");
    }

    #[test]
    fn prints_short() {
        let layout = Layout::volume(&[2, 4, 10, 8, 8], Grid([2, 4, 1, 1])).with_pending(AxisSet::EMPTY.with(MeshAxis::Depth));
        assert_eq!(layout.to_string(), "[2n(1|1), 4, 10d(3|3|2|2), 8, 8]+d");
    }
}
