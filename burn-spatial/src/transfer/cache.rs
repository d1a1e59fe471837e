//! The plans of a rank, built once and kept as long as they are used.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use super::Plan;
use crate::layout::{Axis, AxisNeed};
use crate::mesh::Mesh;
use crate::stats::PlanCounts;

/// How many plans are kept; a network has a few for each of its layers. Beyond that the one goes that was used longest ago.
const KEPT: usize = 1024;

/// How the axes of a tensor are stored, and what every rank needs of them: the same on all ranks.
type Key = (Vec<Axis>, Vec<AxisNeed>);

/// A plan and what it was made for.
pub(crate) struct KeyedPlan {
    key: Key,
    plan: Plan,
}

impl std::ops::Deref for KeyedPlan {
    type Target = Plan;

    fn deref(&self) -> &Plan {
        &self.plan
    }
}

impl KeyedPlan {
    /// Whether both were made for the same. All ranks find the same, also where one of them had to build its plan again; plans
    /// alone may be equal on some ranks and differ on others.
    pub(crate) fn is(&self, other: &KeyedPlan) -> bool {
        std::ptr::eq(self, other) || self.key == other.key
    }
}

/// The cache.
#[derive(Default)]
pub(crate) struct Plans {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    plans: HashMap<Key, Entry>,
    /// Counts uses.
    clock: u64,
    counts: PlanCounts,
}

struct Entry {
    plan: Arc<KeyedPlan>,
    used: u64,
}

impl Plans {
    /// The plan from how `axes` are stored to what all ranks need of them.
    pub(crate) fn get(&self, mesh: &Mesh, axes: &[Axis], needs: &[AxisNeed]) -> Arc<KeyedPlan> {
        let key = (axes.to_vec(), needs.to_vec());
        let mut state = self.state.lock().expect("no panic while a plan is built");
        let State { plans, clock, counts } = &mut *state;
        *clock += 1;
        if let Some(entry) = plans.get_mut(&key) {
            counts.hits += 1;
            entry.used = *clock;
            return entry.plan.clone();
        }
        counts.built += 1;
        let plan = Arc::new(KeyedPlan { plan: Plan::new(mesh, axes, needs), key: key.clone() });
        if plans.len() >= KEPT
            && let Some(oldest) = plans.iter().min_by_key(|(_, entry)| entry.used).map(|(key, _)| key.clone())
        {
            plans.remove(&oldest);
            counts.evicted += 1;
        }
        plans.insert(key, Entry { plan: plan.clone(), used: *clock });
        plan
    }

    pub(crate) fn counts(&self) -> PlanCounts {
        self.state.lock().expect("no panic while a plan is built").counts
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launch;
    use crate::mesh::{Grid, MeshAxis};

    #[test]
    fn the_plan_used_longest_ago_goes() {
        let counts = launch::threads(2, |comm| {
            let mesh = Mesh::new(comm, Grid([1, 2, 1, 1]))?;
            let plans = Plans::default();
            let get = |n: usize| {
                let axis = Axis::split(MeshAxis::Depth, vec![0, 1, n + 2]);
                plans.get(&mesh, &[axis], &[AxisNeed::whole(n + 2)])
            };
            let first = get(0);
            assert!(Arc::ptr_eq(&first, &get(0)));
            (1..KEPT).for_each(|n| drop(get(n)));
            assert_eq!(plans.counts(), PlanCounts { built: KEPT as u64, hits: 1, evicted: 0 });
            // Used again, it stays; the second goes.
            assert!(Arc::ptr_eq(&first, &get(0)));
            let second = get(1);
            drop(get(KEPT));
            assert_eq!(plans.counts(), PlanCounts { built: KEPT as u64 + 1, hits: 3, evicted: 1 });
            (KEPT + 1..2 * KEPT + 1).for_each(|n| drop(get(n)));
            assert!(plans.state.lock().unwrap().plans.len() == KEPT);
            let again = get(1);
            assert!(!Arc::ptr_eq(&second, &again), "built again");
            assert!(second.is(&again) && !first.is(&again), "and known again");
            Ok::<_, crate::mesh::MeshError>(plans.counts())
        });
        assert_eq!(counts.unwrap(), [PlanCounts { built: 2 * KEPT as u64 + 2, hits: 3, evicted: KEPT as u64 + 2 }; 2]);
    }
}
