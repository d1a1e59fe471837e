//! One thread a rank within a process.
//!
//! What a rank contributes is *deposited*: a send or a part of a collective goes into shared memory, and the call
//! returns at once. Whoever reads it needs no further call by the depositor; a reduction is made by each reader
//! itself, in rank order, so that all get the same bits. What all ranks have read is freed.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use burn_std::DType;

use super::{
    Comm, CommCounters, CommError, Communicator, Kind, ReduceOp, Request, Signature, lock, reduce, timeout_from_env, without_rank,
};

/// The communicators of `n` thread ranks, in rank order. Hand one to each thread.
///
/// Waits end after `BURN_SPATIAL_TIMEOUT` seconds (300 unless set, 0 for never).
pub fn world(n: usize) -> Vec<Comm> {
    build(n, timeout_from_env()).1
}

/// A world and its communicators, with waits of at most `timeout`.
pub(crate) fn build(n: usize, timeout: Option<Duration>) -> (Arc<World>, Vec<Comm>) {
    let world = Arc::new(World { timeout, poison: OnceLock::new(), groups: Mutex::default() });
    let group = Group::new(&world, (0..n).collect());
    let comm = |rank| -> Comm { Arc::new(ThreadComm { group: group.clone(), rank, seq: AtomicU64::new(0), counters: Arc::default() }) };
    let comms = (0..n).map(comm).collect();
    (world, comms)
}

/// What all groups split from one world share.
pub(crate) struct World {
    timeout: Option<Duration>,
    poison: OnceLock<(usize, String)>,
    groups: Mutex<Vec<Weak<Group>>>,
}

impl World {
    /// Fails every wait of the world, now and later, with the cause given first.
    pub(crate) fn abort(&self, rank: usize, cause: &str) {
        let _ = self.poison.set((rank, without_rank(rank, cause).to_owned()));
        let groups: Vec<_> = lock(&self.groups).iter().filter_map(Weak::upgrade).collect();
        for group in groups {
            // Under the lock, so that no waiter is between its look at the poison and its sleep.
            let _state = lock(&group.state);
            group.wake.iter().for_each(Condvar::notify_all);
        }
    }

    /// The rank that failed first and its cause.
    pub(crate) fn poison(&self) -> Option<(usize, String)> {
        self.poison.get().cloned()
    }
}

struct Group {
    world: Arc<World>,
    /// The world rank of each member.
    members: Vec<usize>,
    /// One for each member.
    wake: Vec<Condvar>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// By sender, receiver and tag.
    channels: HashMap<(usize, usize, u16), Channel>,
    /// Collectives under way, by their number in program order.
    slots: HashMap<u64, Slot>,
    /// Groups made by the split of this number, by colour, until every member has fetched its own.
    splits: HashMap<(u64, usize), (Arc<Group>, usize)>,
}

/// The messages of one pair and tag: the i-th receive takes the i-th message.
#[derive(Default)]
struct Channel {
    sent: u64,
    posted: u64,
    messages: HashMap<u64, Arc<Vec<u8>>>,
    /// Receives given up before their message came.
    cancelled: HashSet<u64>,
}

struct Slot {
    parts: Vec<Option<(Signature, Arc<Vec<u8>>)>>,
    readers: usize,
}

impl Group {
    fn new(world: &Arc<World>, members: Vec<usize>) -> Arc<Group> {
        let wake = members.iter().map(|_| Condvar::new()).collect();
        let group = Arc::new(Group { world: world.clone(), members, wake, state: Mutex::default() });
        let mut groups = lock(&world.groups);
        groups.retain(|group| group.strong_count() > 0);
        groups.push(Arc::downgrade(&group));
        group
    }

    fn poisoned(&self) -> Result<(), CommError> {
        match self.world.poison() {
            Some((rank, cause)) => Err(CommError::Poisoned { rank, cause }),
            None => Ok(()),
        }
    }

    /// Sleeps until `ready` finds something, the world is poisoned, or the watchdog's time is over.
    fn wait<T>(
        &self,
        me: usize,
        op: &'static str,
        mut ready: impl FnMut(&mut State) -> Option<T>,
        missing: impl Fn(&State) -> Vec<usize>,
    ) -> Result<T, CommError> {
        let start = Instant::now();
        let mut state = lock(&self.state);
        loop {
            if let Some(found) = ready(&mut state) {
                return Ok(found);
            }
            self.poisoned()?;
            let Some(timeout) = self.world.timeout else {
                state = self.wake[me].wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let Some(left) = timeout.checked_sub(start.elapsed()).filter(|left| !left.is_zero()) else {
                let missing = missing(&state).into_iter().map(|rank| self.members[rank]).collect();
                return Err(CommError::Timeout { rank: self.members[me], op, seconds: timeout.as_secs(), missing });
            };
            state = self.wake[me].wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Marks the collective `seq` as read by one more rank.
    fn read(&self, seq: u64) {
        let mut state = lock(&self.state);
        if let Some(slot) = state.slots.get_mut(&seq) {
            slot.readers -= 1;
            if slot.readers == 0 {
                state.slots.remove(&seq);
            }
        }
    }
}

struct ThreadComm {
    group: Arc<Group>,
    rank: usize,
    /// The number of the next collective.
    seq: AtomicU64,
    counters: Arc<CommCounters>,
}

impl fmt::Debug for ThreadComm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ThreadComm({} of {})", self.rank, self.group.members.len())
    }
}

/// The parts of a collective: `None` for a rank whose part is not needed.
type Parts = Vec<Option<Arc<Vec<u8>>>>;

/// One rank's share in a collective under way. Dropping it counts as having read.
struct Collective {
    group: Arc<Group>,
    me: usize,
    seq: u64,
    signature: Signature,
    counters: Arc<CommCounters>,
}

impl Collective {
    fn arrived(state: &State, seq: u64, needed: impl Fn(usize) -> bool) -> bool {
        let slot = &state.slots[&seq];
        slot.parts.iter().enumerate().all(|(rank, part)| part.is_some() || !needed(rank))
    }

    /// Waits for the parts of the ranks `needed`.
    fn wait(&self, needed: impl Fn(usize) -> bool) -> Result<Parts, CommError> {
        let start = Instant::now();
        let result = self.group.wait(
            self.me,
            self.signature.kind.name(),
            |state| Self::arrived(state, self.seq, &needed).then(|| state.slots[&self.seq].parts.clone()),
            |state| {
                let parts = &state.slots[&self.seq].parts;
                (0..parts.len()).filter(|rank| needed(*rank) && parts[*rank].is_none()).collect()
            },
        );
        self.counters.waited(self.signature.kind, start.elapsed());
        let rank_of = |rank: usize| self.group.members[rank];
        let mut found = Vec::new();
        for (rank, part) in result?.into_iter().enumerate() {
            let Some((signature, data)) = part.filter(|_| needed(rank)) else {
                found.push(None);
                continue;
            };
            self.signature.check(rank_of(self.me), signature, rank_of(rank))?;
            found.push(Some(data));
        }
        Ok(found)
    }
}

impl Drop for Collective {
    fn drop(&mut self) {
        self.group.read(self.seq);
    }
}

impl ThreadComm {
    fn check_peer(&self, peer: usize) -> Result<(), CommError> {
        let size = self.size();
        if peer < size {
            return Ok(());
        }
        Err(CommError::Peer { rank: self.group.members[self.rank], peer, size })
    }

    /// Deposits `data` for the next collective and wakes those that wait for it.
    fn deposit(&self, signature: Signature, data: Vec<u8>) -> Result<Collective, CommError> {
        self.group.poisoned()?;
        let seq = self.seq.fetch_add(1, Ordering::Relaxed);
        let size = self.size();
        let mut state = lock(&self.group.state);
        let slot = state.slots.entry(seq).or_insert_with(|| Slot { parts: vec![None; size], readers: size });
        slot.parts[self.rank] = Some((signature, Arc::new(data)));
        drop(state);
        self.group.wake.iter().for_each(Condvar::notify_all);
        let counters = self.counters.clone();
        Ok(Collective { group: self.group.clone(), me: self.rank, seq, signature, counters })
    }

    fn count(&self, kind: Kind, sent: usize, received: usize) {
        self.counters.call(kind);
        if self.size() > 1 {
            self.counters.bytes(kind, sent, received);
        }
    }

    /// Every rank's part of a collective without a reduction.
    fn exchange(&self, kind: Kind, data: &[u8]) -> Result<Parts, CommError> {
        self.deposit(Signature::of(kind), data.to_vec())?.wait(|_| true)
    }

    /// The parts as vectors, and how many bytes those of the others have.
    fn unpack(&self, parts: Parts) -> (Vec<Vec<u8>>, usize) {
        let parts: Vec<Vec<u8>> = parts.into_iter().flatten().map(Arc::unwrap_or_clone).collect();
        let others = parts.iter().enumerate().filter(|(rank, _)| *rank != self.rank).map(|(_, part)| part.len()).sum();
        (parts, others)
    }
}

impl Communicator for ThreadComm {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.group.members.len()
    }

    fn timeout(&self) -> Option<Duration> {
        self.group.world.timeout
    }

    fn start_send(&self, to: usize, tag: u16, data: Vec<u8>) -> Result<Box<dyn Request>, CommError> {
        self.check_peer(to)?;
        self.group.poisoned()?;
        self.counters.call(Kind::PointToPoint);
        self.counters.bytes(Kind::PointToPoint, data.len(), 0);
        let data = Arc::new(data);
        let mut state = lock(&self.group.state);
        let channel = state.channels.entry((self.rank, to, tag)).or_default();
        let number = channel.sent;
        channel.sent += 1;
        if !channel.cancelled.remove(&number) {
            channel.messages.insert(number, data.clone());
        }
        drop(state);
        self.group.wake[to].notify_all();
        Ok(Box::new(Sent(data)))
    }

    fn start_recv(&self, from: usize, tag: u16, len: usize) -> Result<Box<dyn Request>, CommError> {
        self.check_peer(from)?;
        self.group.poisoned()?;
        self.counters.bytes(Kind::PointToPoint, 0, len);
        let key = (from, self.rank, tag);
        let mut state = lock(&self.group.state);
        let channel = state.channels.entry(key).or_default();
        let number = channel.posted;
        channel.posted += 1;
        drop(state);
        let counters = self.counters.clone();
        Ok(Box::new(Receive { group: self.group.clone(), key, number, len, counters, taken: false }))
    }

    fn start_all_reduce(&self, data: Vec<u8>, dtype: DType, op: ReduceOp) -> Result<Box<dyn Request>, CommError> {
        reduce::check(data.len(), dtype, op)?;
        self.count(Kind::AllReduce, data.len(), 0);
        let signature = Signature::all_reduce(data.len(), dtype, op);
        Ok(Box::new(AllReduce { part: self.deposit(signature, data)?, dtype, op }))
    }

    fn all_gather(&self, data: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        let (parts, received) = self.unpack(self.exchange(Kind::AllGather, data)?);
        self.count(Kind::AllGather, data.len(), received);
        Ok(parts)
    }

    fn gather(&self, root: usize, data: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        self.check_peer(root)?;
        let part = self.deposit(Signature::of(Kind::Gather), data.to_vec())?;
        if self.rank != root {
            self.count(Kind::Gather, data.len(), 0);
            return Ok(Vec::new());
        }
        let (parts, received) = self.unpack(part.wait(|_| true)?);
        self.count(Kind::Gather, 0, received);
        Ok(parts)
    }

    fn broadcast(&self, root: usize, data: Vec<u8>) -> Result<Vec<u8>, CommError> {
        self.check_peer(root)?;
        let signature = Signature::of(Kind::Broadcast);
        if self.rank == root {
            self.count(Kind::Broadcast, data.len(), 0);
            self.deposit(signature, data.clone())?;
            return Ok(data);
        }
        let part = self.deposit(signature, Vec::new())?;
        let (mut parts, received) = self.unpack(part.wait(|rank| rank == root)?);
        self.count(Kind::Broadcast, 0, received);
        Ok(parts.swap_remove(0))
    }

    fn barrier(&self) -> Result<(), CommError> {
        self.count(Kind::Barrier, 0, 0);
        self.exchange(Kind::Barrier, &[]).map(drop)
    }

    fn split(&self, color: usize, key: usize) -> Result<Comm, CommError> {
        let wish = [color as u64, key as u64].map(u64::to_ne_bytes).concat();
        let part = self.deposit(Signature::of(Kind::AllGather), wish)?;
        let mut peers: Vec<(u64, usize)> = Vec::new();
        for (rank, wish) in part.wait(|_| true)?.into_iter().flatten().enumerate() {
            let number = |i: usize| wish.as_chunks::<8>().0.get(i).map(|bytes| u64::from_ne_bytes(*bytes));
            if number(0) == Some(color as u64) {
                peers.push((number(1).unwrap_or_default(), rank));
            }
        }
        peers.sort_unstable();
        let rank = peers.iter().take_while(|(_, rank)| *rank != self.rank).count();
        let mut state = lock(&self.group.state);
        let entry = state.splits.entry((part.seq, color)).or_insert_with(|| {
            let members = peers.iter().map(|(_, rank)| self.group.members[*rank]).collect();
            (Group::new(&self.group.world, members), peers.len())
        });
        entry.1 -= 1;
        let group = entry.0.clone();
        if entry.1 == 0 {
            state.splits.remove(&(part.seq, color));
        }
        drop(state);
        Ok(Arc::new(ThreadComm { group, rank, seq: AtomicU64::new(0), counters: self.counters.clone() }))
    }

    fn abort(&self, cause: &str) {
        self.group.world.abort(self.group.members[self.rank], cause);
    }

    fn counters(&self) -> &Arc<CommCounters> {
        &self.counters
    }
}

/// A message on its way: done when made. Sender and receiver share it; the last one takes it without a copy.
struct Sent(Arc<Vec<u8>>);

impl Request for Sent {
    fn test(&mut self) -> Result<bool, CommError> {
        Ok(true)
    }

    fn wait(self: Box<Self>) -> Result<Vec<u8>, CommError> {
        Ok(Arc::unwrap_or_clone(self.0))
    }
}

struct Receive {
    group: Arc<Group>,
    key: (usize, usize, u16),
    number: u64,
    len: usize,
    counters: Arc<CommCounters>,
    taken: bool,
}

impl Request for Receive {
    fn test(&mut self) -> Result<bool, CommError> {
        let arrived = lock(&self.group.state).channels[&self.key].messages.contains_key(&self.number);
        if !arrived {
            self.group.poisoned()?;
        }
        Ok(arrived)
    }

    fn wait(mut self: Box<Self>) -> Result<Vec<u8>, CommError> {
        let start = Instant::now();
        let (from, me, _) = self.key;
        let result = self.group.wait(
            me,
            Kind::PointToPoint.name(),
            |state| state.channels.get_mut(&self.key)?.messages.remove(&self.number),
            |_| vec![from],
        );
        self.counters.waited(Kind::PointToPoint, start.elapsed());
        let data = result?;
        self.taken = true;
        if data.len() != self.len {
            let (rank, from) = (self.group.members[me], self.group.members[from]);
            return Err(CommError::Length { rank, from, expected: self.len, got: data.len() });
        }
        Ok(Arc::unwrap_or_clone(data))
    }
}

impl Drop for Receive {
    /// The message it stood for is thrown away, so that the next receive gets the next one.
    fn drop(&mut self) {
        if self.taken {
            return;
        }
        if let Some(channel) = lock(&self.group.state).channels.get_mut(&self.key)
            && channel.messages.remove(&self.number).is_none()
        {
            channel.cancelled.insert(self.number);
        }
    }
}

struct AllReduce {
    part: Collective,
    dtype: DType,
    op: ReduceOp,
}

impl Request for AllReduce {
    fn test(&mut self) -> Result<bool, CommError> {
        let arrived = Collective::arrived(&lock(&self.part.group.state), self.part.seq, |_| true);
        if !arrived {
            self.part.group.poisoned()?;
        }
        Ok(arrived)
    }

    fn wait(self: Box<Self>) -> Result<Vec<u8>, CommError> {
        let parts = self.part.wait(|_| true)?;
        let mut parts: Vec<Arc<Vec<u8>>> = parts.into_iter().flatten().collect();
        let own = self.part.me;
        let mut out = Arc::unwrap_or_clone(parts.remove(own));
        let others: Vec<&[u8]> = parts.iter().map(|part| &part[..]).collect();
        reduce::reduce(&mut out, own, &others, self.dtype, self.op);
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Alive, broadcast_of};
    use super::*;
    use std::thread;

    fn f32s(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|x| x.to_ne_bytes()).collect()
    }

    /// All ranks of one thread: what is deposited can be read without a further call of the depositor.
    #[test]
    fn deposits_need_no_further_call() {
        let comms = world(3);
        let sums: Vec<_> = comms
            .iter()
            .map(|comm| {
                let part = f32s(&[comm.rank() as f32, 1.0]);
                comm.start_all_reduce(part, DType::F32, ReduceOp::Sum).unwrap()
            })
            .collect();
        for to in 0..3 {
            comms[0].start_send(to, 1, vec![to as u8; 4]).unwrap();
        }
        comms[0].broadcast(0, vec![5]).unwrap();
        assert!(comms[0].gather(2, &[8, 8]).unwrap().is_empty());
        for (rank, comm) in comms.iter().enumerate().skip(1) {
            let mut receive = comm.start_recv(0, 1, 4).unwrap();
            assert!(receive.test().unwrap());
            assert_eq!(receive.wait().unwrap(), [rank as u8; 4]);
            assert_eq!(comm.broadcast(0, vec![]).unwrap(), [5]);
        }
        comms[1].gather(2, &[9]).unwrap();
        assert_eq!(comms[2].gather(2, &[]).unwrap(), [vec![8, 8], vec![9], vec![]]);
        for mut sum in sums.into_iter().rev() {
            assert!(sum.test().unwrap());
            assert_eq!(sum.wait().unwrap(), f32s(&[3.0, 3.0]));
        }
    }

    #[test]
    fn what_all_have_read_is_freed() {
        let (world, _) = build(2, None);
        let group = Group::new(&world, vec![0, 1]);
        let comm = |rank| ThreadComm { group: group.clone(), rank, seq: AtomicU64::new(0), counters: Arc::default() };
        let (a, b) = (comm(0), comm(1));
        let first = a.start_all_reduce(vec![1], DType::U8, ReduceOp::Sum).unwrap();
        let second = b.start_all_reduce(vec![2], DType::U8, ReduceOp::Sum).unwrap();
        assert_eq!(lock(&group.state).slots.len(), 1);
        assert_eq!(first.wait().unwrap(), [3]);
        drop(second);
        assert!(lock(&group.state).slots.is_empty());
        drop(b.start_recv(0, 4, 1).unwrap());
        a.start_send(1, 4, vec![1]).unwrap();
        let channel = &lock(&group.state).channels[&(0, 1, 4)];
        assert!(channel.messages.is_empty() && channel.cancelled.is_empty());
    }

    #[test]
    fn poison_ends_every_wait() {
        let comms = world(3);
        let split = std::sync::Barrier::new(3);
        thread::scope(|scope| {
            let waiters: Vec<_> = comms[1..]
                .iter()
                .map(|comm| {
                    let split = &split;
                    scope.spawn(move || {
                        // A group that rank 0 is not in, and a message that never comes.
                        let group = comm.split(comm.rank().min(1), 0).unwrap();
                        let receive = group.start_recv(0, 0, 1).unwrap();
                        split.wait();
                        receive.wait().unwrap_err()
                    })
                })
                .collect();
            comms[0].split(0, 0).unwrap();
            split.wait();
            comms[0].abort("the disk is full");
            comms[0].abort("a later cause");
            for waiter in waiters {
                assert_eq!(waiter.join().unwrap().to_string(), "rank 0 failed: the disk is full");
            }
        });
        let poisoned = |result: Result<(), CommError>| assert!(matches!(result, Err(CommError::Poisoned { rank: 0, .. })));
        poisoned(comms[2].barrier());
        poisoned(comms[2].start_send(0, 0, vec![]).map(drop));
        poisoned(comms[2].start_all_reduce(vec![], DType::F32, ReduceOp::Sum).map(drop));
    }

    #[test]
    fn the_watchdog_names_who_is_missing() {
        let (_, comms) = build(4, Some(Duration::from_millis(1)));
        let reduce = |rank: usize| comms[rank].start_all_reduce(vec![0; 4], DType::F32, ReduceOp::Sum).unwrap();
        let (_one, three) = (reduce(1), reduce(3));
        match three.wait().unwrap_err() {
            CommError::Timeout { rank: 3, op: "all_reduce", missing, .. } => assert_eq!(missing, [0, 2]),
            other => panic!("{other}"),
        }
        match comms[0].start_recv(2, 0, 1).unwrap().wait().unwrap_err() {
            CommError::Timeout { rank: 0, op: "point_to_point", missing, .. } => assert_eq!(missing, [2]),
            other => panic!("{other}"),
        }
        let text = comms[0].gather(0, &[]).unwrap_err().to_string();
        assert_eq!(text, "rank 0: gather waited 0 s; ranks that did not arrive: [2]");
    }

    /// Rank 1 of three works for ten times the watchdog's time in steps of `step`; what all have of it.
    fn long_work(step: Duration) -> Vec<Result<Vec<u8>, CommError>> {
        const TIMEOUT: Duration = Duration::from_millis(200);
        let (_, comms) = build(3, Some(TIMEOUT));
        let work = |alive: &mut Alive<'_>| {
            let start = Instant::now();
            while start.elapsed() < TIMEOUT * 10 {
                thread::sleep(step);
                if alive.beat().is_err() {
                    break;
                }
            }
            vec![7, 8]
        };
        thread::scope(|scope| {
            let handles: Vec<_> = comms.iter().map(|comm| scope.spawn(move || broadcast_of(&**comm, 1, work))).collect();
            handles.into_iter().map(|handle| handle.join().unwrap()).collect()
        })
    }

    #[test]
    fn long_work_is_waited_for_as_long_as_it_gives_signs_of_life() {
        for bytes in long_work(Duration::from_millis(10)) {
            assert_eq!(bytes.unwrap(), [7, 8]);
        }
        // Work that hangs is found out, by all who wait.
        let results = long_work(Duration::from_secs(2));
        for rank in [0, 2] {
            match results[rank].as_ref().unwrap_err() {
                CommError::Timeout { rank: waiting, op: "broadcast", missing, .. } => {
                    assert_eq!((*waiting, &missing[..]), (rank, &[1][..]))
                }
                other => panic!("{other}"),
            }
        }
    }

    #[test]
    fn a_rank_that_dies_in_its_work_ends_all() {
        let result = crate::launch::threads(3, |comm| {
            broadcast_of(&*comm, 2, |alive| {
                alive.beat().unwrap();
                panic!("the file system is gone")
            })
        });
        assert_eq!(result.unwrap_err().to_string(), "rank 2: the file system is gone");
    }

    #[test]
    fn missing_ranks_are_numbered_as_in_the_world() {
        let (_, comms) = build(4, Some(Duration::from_millis(200)));
        let error = thread::scope(|scope| {
            let handles: Vec<_> = comms
                .iter()
                .map(|comm| {
                    scope.spawn(move || {
                        let group = comm.split(comm.rank() % 2, 0).unwrap();
                        (comm.rank() == 3).then(|| group.barrier().unwrap_err())
                    })
                })
                .collect();
            handles.into_iter().filter_map(|handle| handle.join().unwrap()).next().unwrap()
        });
        match error {
            CommError::Timeout { rank: 3, op: "barrier", missing, .. } => assert_eq!(missing, [1]),
            other => panic!("{other}"),
        }
    }
}
