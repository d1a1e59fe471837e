//! The process grid: which rank holds which block of the batch, depth, height and width.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::comm::{Comm, CommError};
use crate::seat::Seat;

/// A named axis of the process grid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum MeshAxis {
    /// Splits the batch.
    Data,
    /// Splits the depth of a volume.
    Depth,
    /// Splits the height.
    Height,
    /// Splits the width.
    Width,
}

impl MeshAxis {
    /// All axes, slowest first.
    pub const ALL: [MeshAxis; 4] = [MeshAxis::Data, MeshAxis::Depth, MeshAxis::Height, MeshAxis::Width];
    /// The axes that split a volume.
    pub const SPATIAL: [MeshAxis; 3] = [MeshAxis::Depth, MeshAxis::Height, MeshAxis::Width];

    /// Position in [`MeshAxis::ALL`].
    pub const fn index(self) -> usize {
        self as usize
    }

    /// One letter for printed layouts: `n`, `d`, `h`, `w`.
    pub const fn letter(self) -> char {
        ['n', 'd', 'h', 'w'][self as usize]
    }
}

impl fmt::Display for MeshAxis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(["data", "depth", "height", "width"][self.index()])
    }
}

/// A set of mesh axes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct AxisSet(u8);

impl AxisSet {
    /// No axis.
    pub const EMPTY: AxisSet = AxisSet(0);
    /// Depth, height and width.
    pub const SPATIAL: AxisSet = AxisSet(0b1110);
    /// All four.
    pub const ALL: AxisSet = AxisSet(0b1111);

    /// The set with `axis` added.
    pub const fn with(self, axis: MeshAxis) -> AxisSet {
        AxisSet(self.0 | 1 << axis as u8)
    }

    /// Whether `axis` is a member.
    pub const fn contains(self, axis: MeshAxis) -> bool {
        self.0 >> (axis as u8) & 1 == 1
    }

    /// Members of either.
    pub const fn union(self, other: AxisSet) -> AxisSet {
        AxisSet(self.0 | other.0)
    }

    /// Whether no axis is a member.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The members, slowest first.
    pub fn iter(self) -> impl Iterator<Item = MeshAxis> {
        MeshAxis::ALL.into_iter().filter(move |a| self.contains(*a))
    }
}

impl FromIterator<MeshAxis> for AxisSet {
    fn from_iter<I: IntoIterator<Item = MeshAxis>>(axes: I) -> Self {
        axes.into_iter().fold(AxisSet::EMPTY, AxisSet::with)
    }
}

/// The numbers of ranks along data, depth, height and width: `2x1x2x2`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Grid(pub [usize; 4]);

impl Grid {
    /// One rank.
    pub const ONE: Grid = Grid([1; 4]);

    /// How many ranks the grid has.
    pub fn ranks(&self) -> usize {
        self.0.iter().product()
    }

    /// Ranks along `axis`.
    pub fn size(&self, axis: MeshAxis) -> usize {
        self.0[axis.index()]
    }

    /// The coordinates of `rank`; data is the slowest, width the fastest.
    pub fn coords(&self, rank: usize) -> [usize; 4] {
        let mut rest = rank;
        let mut coords = [0; 4];
        for i in (0..4).rev() {
            coords[i] = rest % self.0[i];
            rest /= self.0[i];
        }
        coords
    }

    /// The rank at `coords`.
    pub fn rank(&self, coords: [usize; 4]) -> usize {
        (0..4).fold(0, |rank, i| rank * self.0[i] + coords[i])
    }
}

impl fmt::Display for Grid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [n, d, h, w] = self.0;
        write!(f, "{n}x{d}x{h}x{w}")
    }
}

impl FromStr for Grid {
    type Err = MeshError;

    fn from_str(text: &str) -> Result<Self, MeshError> {
        let bad = || MeshError::Parse { text: text.to_owned() };
        let sizes: Vec<usize> = text.split('x').map(|part| part.trim().parse().map_err(|_| bad())).collect::<Result<_, _>>()?;
        let sizes: [usize; 4] = sizes.try_into().map_err(|_| bad())?;
        if sizes.contains(&0) || sizes.iter().try_fold(1usize, |n, s| n.checked_mul(*s)).is_none() {
            return Err(bad());
        }
        Ok(Grid(sizes))
    }
}

/// Why a mesh cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum MeshError {
    /// Not a grid.
    #[error("'{text}' is not a grid: write the ranks along data, depth, height and width as four numbers from 1, as in 2x1x2x2")]
    Parse {
        /// What was given.
        text: String,
    },
    /// The grid and the number of ranks disagree.
    #[error("grid {grid} needs {} = {} ranks, but {ranks} were started: start {} or change the grid", .grid.0.map(|n| n.to_string()).join(" x "), .grid.ranks(), .grid.ranks())]
    Ranks {
        /// The grid asked for.
        grid: Grid,
        /// The ranks there are.
        ranks: usize,
    },
    /// Ranks could not talk.
    #[error(transparent)]
    Comm(#[from] CommError),
}

/// One rank's view of the process grid: its coordinates, and a communicator for each set of axes.
#[derive(Debug)]
pub struct Mesh {
    grid: Grid,
    coords: [usize; 4],
    world: Comm,
    /// For each set of axes (by its bits): the ranks that differ from this one along these axes only, ordered by
    /// their coordinates. `None` where that is this rank alone.
    groups: Groups,
    /// The same ranks with groups of their own, for a thread that reads beside the rank's own.
    beside: Option<Beside>,
}

type Groups = [Option<Comm>; 16];

#[derive(Debug)]
struct Beside {
    mesh: Box<Mesh>,
    seat: Arc<Seat>,
}

impl Mesh {
    /// Lays `grid` over the ranks of `world`. Collective.
    ///
    /// Makes two communicators for each set of axes with several ranks, at most 30: one for the rank's own thread, and
    /// one for a second thread that reads tensors. They last as long as the job; make a mesh once.
    pub fn new(world: Comm, grid: Grid) -> Result<Arc<Mesh>, MeshError> {
        if grid.ranks() != world.size() {
            return Err(MeshError::Ranks { grid, ranks: world.size() });
        }
        let coords = grid.coords(world.rank());
        let groups = Mesh::groups(&world, grid)?;
        let beside = Mesh { grid, coords, world: world.clone(), groups: Mesh::groups(&world, grid)?, beside: None };
        let beside = Some(Beside { mesh: Box::new(beside), seat: Arc::default() });
        Ok(Arc::new(Mesh { grid, coords, world, groups, beside }))
    }

    fn groups(world: &Comm, grid: Grid) -> Result<Groups, CommError> {
        let coords = grid.coords(world.rank());
        let mut groups = Groups::default();
        for bits in 1..16u8 {
            let trivial = |axis: MeshAxis| grid.size(axis) == 1;
            // A set with an axis of one rank is the set without it.
            if AxisSet(bits).iter().any(trivial) {
                continue;
            }
            let mut origin = coords;
            AxisSet(bits).iter().for_each(|axis| origin[axis.index()] = 0);
            groups[bits as usize] = Some(world.split(grid.rank(origin), world.rank())?);
        }
        Ok(groups)
    }

    /// The grid.
    pub fn grid(&self) -> Grid {
        self.grid
    }

    /// This rank's number in the world.
    pub fn rank(&self) -> usize {
        self.world.rank()
    }

    /// Ranks along `axis`.
    pub fn size(&self, axis: MeshAxis) -> usize {
        self.grid.size(axis)
    }

    /// This rank's coordinate along `axis`.
    pub fn coord(&self, axis: MeshAxis) -> usize {
        self.coords[axis.index()]
    }

    /// This rank's coordinates.
    pub fn coords(&self) -> [usize; 4] {
        self.coords
    }

    /// The communicator of all ranks.
    pub fn world(&self) -> &Comm {
        &self.world
    }

    /// The mesh on which a thread beside the rank's own communicates, as soon as no other such thread lives; `None`
    /// while one does.
    pub(crate) fn beside(&self) -> Option<&Mesh> {
        let Beside { mesh, seat } = self.beside.as_ref()?;
        seat.take().then_some(mesh)
    }

    /// `axes` without those that have one rank.
    pub fn effective(&self, axes: AxisSet) -> AxisSet {
        axes.iter().filter(|axis| self.size(*axis) > 1).collect()
    }

    /// The ranks that differ from this one along `axes` only; `None` when there is no other.
    pub fn group(&self, axes: AxisSet) -> Option<&Comm> {
        self.groups[self.effective(axes).0 as usize].as_ref()
    }

    /// The rank, within [`Mesh::group`] of `axes`, of the process at `coords`.
    pub fn group_rank(&self, axes: AxisSet, coords: [usize; 4]) -> usize {
        axes.iter().fold(0, |rank, axis| rank * self.size(axis) + coords[axis.index()])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launch;

    #[test]
    fn grids_are_read_and_printed() {
        let grid: Grid = "2x1x3x4".parse().unwrap();
        assert_eq!(grid, Grid([2, 1, 3, 4]));
        assert_eq!(grid.to_string(), "2x1x3x4");
        assert_eq!(grid.ranks(), 24);
        assert_eq!(" 1 x1x1x 2".parse::<Grid>().unwrap(), Grid([1, 1, 1, 2]));
        for bad in ["", "2", "2x2x2", "1x1x1x1x1", "0x1x1x1", "1x-1x1x1", "axbxcxd", "1X1X1X1", "9999999999x9999999999x1x1"] {
            let message = bad.parse::<Grid>().unwrap_err().to_string();
            assert_eq!(
                message,
                format!("'{bad}' is not a grid: write the ranks along data, depth, height and width as four numbers from 1, as in 2x1x2x2")
            );
        }
    }

    #[test]
    fn coordinates_and_ranks_are_inverse() {
        let grid = Grid([2, 3, 1, 4]);
        for rank in 0..grid.ranks() {
            assert_eq!(grid.rank(grid.coords(rank)), rank);
        }
        assert_eq!(grid.coords(1), [0, 0, 0, 1], "width is the fastest");
        assert_eq!(grid.coords(12), [1, 0, 0, 0], "data is the slowest");
    }

    #[test]
    fn a_grid_of_another_size_shows_the_arithmetic() {
        let comm = crate::comm::threads::world(6).remove(0);
        let message = Mesh::new(comm, Grid([2, 1, 2, 2])).unwrap_err().to_string();
        assert_eq!(message, "grid 2x1x2x2 needs 2 x 1 x 2 x 2 = 8 ranks, but 6 were started: start 8 or change the grid");
    }

    #[test]
    fn sets_of_axes() {
        let set = AxisSet::EMPTY.with(MeshAxis::Width).with(MeshAxis::Data);
        assert_eq!(set.iter().collect::<Vec<_>>(), [MeshAxis::Data, MeshAxis::Width]);
        assert_eq!(set.union(AxisSet::SPATIAL), AxisSet::ALL);
        assert!(AxisSet::EMPTY.is_empty() && !set.contains(MeshAxis::Depth));
        assert_eq!(MeshAxis::ALL.map(MeshAxis::letter), ['n', 'd', 'h', 'w']);
    }

    #[test]
    fn groups_hold_the_ranks_that_differ_along_their_axes() {
        launch::threads(12, |world| {
            let grid = Grid([2, 3, 1, 2]);
            let mesh = Mesh::new(world, grid)?;
            assert!(mesh.group(AxisSet::EMPTY).is_none());
            assert!(mesh.group(AxisSet::EMPTY.with(MeshAxis::Height)).is_none(), "one rank along the height");
            for bits in 1..16 {
                let axes = AxisSet(bits);
                let Some(group) = mesh.group(axes) else { continue };
                assert_eq!(group.size(), axes.iter().map(|axis| mesh.size(axis)).product::<usize>());
                assert_eq!(group.rank(), mesh.group_rank(axes, mesh.coords()));
                let ranks = group.all_gather(&[mesh.rank() as u8])?;
                for (place, rank) in ranks.iter().enumerate() {
                    let other = grid.coords(rank[0] as usize);
                    assert_eq!(mesh.group_rank(axes, other), place);
                    let outside = MeshAxis::ALL.into_iter().filter(|axis| !axes.contains(*axis));
                    outside.for_each(|axis| assert_eq!(other[axis.index()], mesh.coord(axis)));
                }
            }
            Ok::<_, MeshError>(())
        })
        .unwrap();
    }
}
