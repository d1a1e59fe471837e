//! Checks of a communicator, for any number of ranks. Every rank calls them in the same order; a failed one panics.

use burn_spatial::comm::{Comm, CommError, Kind, ReduceOp, Request, broadcast_of};
use burn_std::{BoolStore, DType, bf16, f16};

type Check = (&'static str, fn(&Comm));

/// All checks, with their names.
pub const CHECKS: [Check; 14] = [
    ("ring", ring),
    ("order of messages", order_of_messages),
    ("reductions of every type", reductions),
    ("same bits as in rank order", same_bits),
    ("reductions under way together", overlapping),
    ("progress of what is not waited for", progress),
    ("dropped requests", dropped),
    ("all-gather, gather, broadcast", gathers),
    ("splits", splits),
    ("wrong lengths", wrong_lengths),
    ("different programs", different_programs),
    ("refused arguments", refused),
    ("counters", counters),
    ("adjoint pairs", adjoints),
];

/// Runs every check on `comm`; rank 0 calls `report` with the name of each that passed on all ranks. Collective.
pub fn run(comm: &Comm, report: impl Fn(&str)) {
    for (name, check) in CHECKS {
        check(comm);
        comm.barrier().unwrap();
        if comm.rank() == 0 {
            report(name);
        }
    }
}

/// Lengths around the first message's payload, a small cap, and the two ways of an all-reduce.
const LENGTHS: [usize; 11] = [0, 1, 39, 40, 63, 64, 65, 128, 8191, 20_000, 100_001];

/// Bytes that differ by rank and position.
fn bytes(rank: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 31 + rank * 7 + i / 251) as u8).collect()
}

fn wait(request: Result<Box<dyn Request>, CommError>) -> Vec<u8> {
    request.unwrap().wait().unwrap()
}

fn f64s(values: &[f64]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_ne_bytes()).collect()
}

fn to_f64s(bytes: &[u8]) -> Vec<f64> {
    bytes.as_chunks::<8>().0.iter().map(|x| f64::from_ne_bytes(*x)).collect()
}

/// A group of this rank and its neighbour; `None` for the last of an odd number.
fn pair(comm: &Comm) -> Option<Comm> {
    let group = comm.split(comm.rank() / 2, 0).unwrap();
    (group.size() == 2).then_some(group)
}

fn ring(comm: &Comm) {
    let (rank, size) = (comm.rank(), comm.size());
    let (next, last) = ((rank + 1) % size, (rank + size - 1) % size);
    for len in LENGTHS {
        let receive = comm.start_recv(last, 3, len).unwrap();
        let send = comm.start_send(next, 3, bytes(rank, len)).unwrap();
        assert_eq!(receive.wait().unwrap(), bytes(last, len));
        assert_eq!(send.wait().unwrap(), bytes(rank, len), "a send gives its buffer back");
    }
}

fn order_of_messages(comm: &Comm) {
    let (rank, size) = (comm.rank(), comm.size());
    let (next, last) = ((rank + 1) % size, (rank + size - 1) % size);
    for tag in [9, 65_535] {
        for i in 0..5u8 {
            comm.start_send(next, tag, vec![i; 100]).unwrap();
        }
    }
    // Receives get messages in the order of their start, whatever the order of the waits.
    for tag in [65_535, 9] {
        let mut receives: Vec<_> = (0..5).map(|_| comm.start_recv(last, tag, 100).unwrap()).collect();
        for i in (0..5u8).rev() {
            let mut receive = receives.pop().unwrap();
            while !receive.test().unwrap() {
                std::thread::yield_now();
            }
            assert_eq!(receive.wait().unwrap(), vec![i; 100]);
        }
    }
}

fn reductions(comm: &Comm) {
    let (rank, size) = (comm.rank(), comm.size());
    macro_rules! number {
        ($($dtype:expr, $ty:ty, $of:expr);* $(;)?) => {$(
            for count in [0, 1, 1000, 20_000] {
                // Small whole numbers, exact in every type.
                let values = |rank: usize| (0..count).map(move |i| ((i + rank * 3) % 5 + 1) as u8);
                let part: Vec<u8> = values(rank).flat_map(|x| <$ty>::to_ne_bytes($of(x))).collect();
                let each = |f: fn(u64, u64) -> u64| -> Vec<u8> {
                    let mut all: Vec<u64> = values(0).map(u64::from).collect();
                    for rank in 1..size {
                        all.iter_mut().zip(values(rank)).for_each(|(a, x)| *a = f(*a, x.into()));
                    }
                    all.iter().flat_map(|x| <$ty>::to_ne_bytes($of(*x as u8))).collect()
                };
                for (op, f) in [
                    (ReduceOp::Sum, (|a, b| a + b) as fn(u64, u64) -> u64),
                    (ReduceOp::Max, |a, b| a.max(b)),
                    (ReduceOp::Min, |a, b| a.min(b)),
                ] {
                    let result = comm.all_reduce(part.clone(), $dtype, op).unwrap();
                    assert!(result == each(f), "{:?} {op:?} of {count}", $dtype);
                }
            }
            let two: Vec<u8> = <$ty>::to_ne_bytes($of(if rank < 6 { 2u8 } else { 1 })).to_vec();
            let product = comm.all_reduce(two, $dtype, ReduceOp::Prod).unwrap();
            assert_eq!(product, <$ty>::to_ne_bytes($of(1u8 << size.min(6))), "{:?}", $dtype);
        )*};
    }
    number! {
        DType::F64, f64, f64::from;
        DType::F32, f32, f32::from;
        DType::Flex32, f32, f32::from;
        DType::F16, f16, |x: u8| f16::from_f32(x.into());
        DType::BF16, bf16, |x: u8| bf16::from_f32(x.into());
        DType::I64, i64, i64::from;
        DType::I32, i32, i32::from;
        DType::I16, i16, i16::from;
        DType::I8, i8, |x: u8| x as i8;
        DType::U64, u64, u64::from;
        DType::U32, u32, u32::from;
        DType::U16, u16, u16::from;
        DType::U8, u8, |x: u8| x;
    }
    for store in [BoolStore::Native, BoolStore::U8] {
        let mine: Vec<u8> = (0..size).map(|i| u8::from(i == rank)).chain([1, 0]).collect();
        let expected = |own: u8| -> Vec<u8> { (0..size).map(|_| own).chain([1, 0]).collect() };
        let and = comm.all_reduce(mine.clone(), DType::Bool(store), ReduceOp::And).unwrap();
        assert_eq!(and, expected(u8::from(size == 1)));
        assert_eq!(comm.all_reduce(mine, DType::Bool(store), ReduceOp::Or).unwrap(), expected(1));
    }
}

fn same_bits(comm: &Comm) {
    let (rank, size) = (comm.rank(), comm.size());
    // Values of many magnitudes: every order of addition gives other bits.
    let values = |rank: usize, count: usize| -> Vec<f32> {
        let mut state = rank as u64 * 977 + 1;
        let next = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            ((state >> 40) as f32 - 8e6) * ((state >> 33) as f32 % 20.0).exp2()
        };
        std::iter::repeat_with(next).take(count).collect()
    };
    for count in [7, 4096, 30_001] {
        let mut sum = values(0, count);
        for rank in 1..size {
            sum.iter_mut().zip(values(rank, count)).for_each(|(a, x)| *a += x);
        }
        let part = values(rank, count).iter().flat_map(|x| x.to_ne_bytes()).collect();
        let result = comm.all_reduce(part, DType::F32, ReduceOp::Sum).unwrap();
        assert!(result == sum.iter().flat_map(|x| x.to_ne_bytes()).collect::<Vec<u8>>(), "{count} values");
        let all = comm.all_gather(&result).unwrap();
        assert!(all.iter().all(|other| *other == result), "{count} values");
    }
}

fn overlapping(comm: &Comm) {
    let size = comm.size();
    let count = |i: usize| [3, 5000, 1, 9000][i % 4];
    let mut requests: Vec<_> =
        (0..12).map(|i| Some(comm.start_all_reduce(f64s(&vec![i as f64; count(i)]), DType::F64, ReduceOp::Sum).unwrap())).collect();
    // Each rank waits in an order of its own.
    for step in 0..12 {
        let i = (step * 5 + comm.rank()) % 12;
        let result = requests[i].take().unwrap().wait().unwrap();
        assert_eq!(to_f64s(&result), vec![(i * size) as f64; count(i)]);
    }
}

fn progress(comm: &Comm) {
    let Some(pair) = pair(comm) else { return };
    let reduction = pair.start_all_reduce(f64s(&vec![1.0; 50_000]), DType::F64, ReduceOp::Sum).unwrap();
    // One rank waits for the reduction before it sends what the other waits for before the reduction.
    if pair.rank() == 0 {
        assert_eq!(wait(pair.start_recv(1, 0, 5)), [7; 5]);
        assert_eq!(to_f64s(&reduction.wait().unwrap()), vec![2.0; 50_000]);
    } else {
        assert_eq!(to_f64s(&reduction.wait().unwrap()), vec![2.0; 50_000]);
        wait(pair.start_send(0, 0, vec![7; 5]));
    }
}

fn dropped(comm: &Comm) {
    let (rank, size) = (comm.rank(), comm.size());
    for count in [4, 10_000] {
        let request = comm.start_all_reduce(f64s(&vec![2.0; count]), DType::F64, ReduceOp::Sum).unwrap();
        if rank == 0 {
            drop(request);
        } else {
            assert_eq!(to_f64s(&request.wait().unwrap()), vec![2.0 * size as f64; count]);
        }
        comm.barrier().unwrap();
    }
    // A dropped receive takes its message, and a dropped send arrives.
    let (next, last) = ((rank + 1) % size, (rank + size - 1) % size);
    for len in [10, 90_000] {
        drop(comm.start_recv(last, 1, len).unwrap());
        drop(comm.start_send(next, 1, vec![1; len]).unwrap());
        drop(comm.start_send(next, 1, vec![2; len]).unwrap());
        assert_eq!(wait(comm.start_recv(last, 1, len)), vec![2; len]);
    }
}

fn gathers(comm: &Comm) {
    let (rank, size) = (comm.rank(), comm.size());
    for len in LENGTHS {
        // Lengths differ, and some ranks have nothing.
        let part = |rank: usize| if rank % 3 == 2 { Vec::new() } else { bytes(rank, len + rank) };
        let expected: Vec<Vec<u8>> = (0..size).map(part).collect();
        assert!(comm.all_gather(&part(rank)).unwrap() == expected, "{len}");
        for root in [0, size / 2, size - 1] {
            let all = comm.gather(root, &part(rank)).unwrap();
            assert!(all == if rank == root { expected.clone() } else { Vec::new() }, "{len} {root}");
            let ignored = if rank == root { bytes(root, len) } else { vec![9; 3] };
            assert!(comm.broadcast(root, ignored).unwrap() == bytes(root, len), "{len} {root}");
            let made = broadcast_of(&**comm, root, |alive| alive.beat().map(|()| bytes(rank, len)).unwrap());
            assert!(made.unwrap() == bytes(root, len), "{len} {root}");
        }
    }
}

fn splits(comm: &Comm) {
    let (rank, size) = (comm.rank(), comm.size());
    // Larger keys first: the order is turned round.
    let group = comm.split(rank % 2, size - rank).unwrap();
    let members: Vec<usize> = (0..size).rev().filter(|r| r % 2 == rank % 2).collect();
    assert_eq!(group.size(), members.len());
    assert_eq!(members[group.rank()], rank);
    let seen: Vec<usize> = group.all_gather(&[rank as u8]).unwrap().iter().map(|r| r[0] as usize).collect();
    assert_eq!(seen, members);
    // Equal keys keep the order; a group of a group.
    let inner = group.split(group.rank() / 2, 5).unwrap();
    assert_eq!(inner.rank(), group.rank() % 2);
    // Traffic of groups under way together, with the same tags, does not mix.
    let sum = |comm: &Comm, x: usize| {
        let request = comm.start_all_reduce(f64s(&[x as f64]), DType::F64, ReduceOp::Sum).unwrap();
        move || to_f64s(&request.wait().unwrap())[0] as usize
    };
    let (a, b, c) = (sum(comm, rank), sum(&group, rank), sum(&inner, 1));
    assert_eq!(c(), inner.size());
    assert_eq!(b(), members.iter().sum::<usize>());
    assert_eq!(a(), size * (size - 1) / 2);
    // Everyone alone.
    let alone = comm.split(rank, 0).unwrap();
    assert_eq!((alone.rank(), alone.size()), (0, 1));
    assert_eq!(alone.broadcast(0, vec![3]).unwrap(), [3]);
    assert_eq!(to_f64s(&alone.all_reduce(f64s(&[4.0]), DType::F64, ReduceOp::Sum).unwrap()), [4.0]);
}

fn wrong_lengths(comm: &Comm) {
    let first = comm.rank() / 2 * 2;
    for (sent, expected) in [(10, 8), (8, 10), (128, 64), (64, 128), (0, 1), (1, 0), (50_000, 64)] {
        let Some(pair) = pair(comm) else { continue };
        if pair.rank() == 0 {
            drop(pair.start_send(1, 0, vec![0; sent]).unwrap());
            continue;
        }
        match pair.start_recv(0, 0, expected).unwrap().wait() {
            Err(CommError::Length { rank, from, expected: e, got }) => {
                assert_eq!((rank, from, e, got), (first + 1, first, expected, sent));
            }
            other => panic!("{sent} bytes where {expected} were expected: {other:?}"),
        }
    }
}

fn different_programs(comm: &Comm) {
    let (first, second) = (comm.rank() / 2 * 2, comm.rank() / 2 * 2 + 1);
    if let Some(pair) = pair(comm) {
        let len = if pair.rank() == 0 { 8 } else { 40_000 };
        let error = pair.all_reduce(vec![0; len], DType::F32, ReduceOp::Sum).unwrap_err();
        let text = error.to_string();
        let expected = if pair.rank() == 0 {
            format!("rank {first} is in all_reduce Sum of F32, 8 bytes, but rank {second} in all_reduce Sum of F32, 40000 bytes; ")
        } else {
            format!("rank {second} is in all_reduce Sum of F32, 40000 bytes, but rank {first} in all_reduce Sum of F32, 8 bytes; ")
        };
        assert!(text.starts_with(&expected), "{text}");
    }
    if let Some(pair) = pair(comm) {
        let error = match pair.rank() {
            0 => pair.barrier().unwrap_err(),
            _ => pair.all_gather(&[1, 2]).unwrap_err(),
        };
        assert!(matches!(error, CommError::Mismatch { .. }), "{error}");
    }
}

fn refused(comm: &Comm) {
    let size = comm.size();
    let peer = |result: Result<(), CommError>| {
        let message = format!("rank {}: there is no rank {size} in a group of {size}", comm.rank());
        assert_eq!(result.unwrap_err().to_string(), message);
    };
    peer(comm.start_send(size, 0, vec![]).map(drop));
    peer(comm.start_recv(size, 0, 0).map(drop));
    peer(comm.gather(size, &[]).map(drop));
    peer(comm.broadcast(size, vec![]).map(drop));
    let reduce = |len, dtype, op| comm.start_all_reduce(vec![0; len], dtype, op).map(drop).unwrap_err();
    assert!(matches!(reduce(4, DType::F32, ReduceOp::Or), CommError::Type(DType::F32)));
    assert!(matches!(reduce(5, DType::I32, ReduceOp::Sum), CommError::Elements { bytes: 5, dtype: DType::I32 }));
}

fn counters(comm: &Comm) {
    let (rank, size) = (comm.rank(), comm.size());
    let group = comm.split(0, size - rank).unwrap();
    let before = comm.counters().snapshot();
    let send = comm.start_send((rank + 1) % size, 0, vec![0; 10]).unwrap();
    wait(comm.start_recv((rank + size - 1) % size, 0, 10));
    send.wait().unwrap();
    group.all_reduce(vec![0; 4000], DType::F32, ReduceOp::Sum).unwrap();
    comm.all_gather(&vec![0; 100 + rank]).unwrap();
    comm.gather(0, &[0; 30]).unwrap();
    comm.broadcast(0, if rank == 0 { vec![0; 50] } else { vec![] }).unwrap();
    comm.barrier().unwrap();
    let now = comm.counters().snapshot().since(&before);
    let others = size - 1;
    let alone = size == 1;
    let is = |kind: Kind, sent: usize, received: usize| {
        let found = now.get(kind);
        assert_eq!((found.calls, found.sent, found.received), (1, sent as u64, received as u64), "{kind}");
    };
    is(Kind::PointToPoint, 10, 10);
    let in_group = |bytes: usize| if alone { 0 } else { bytes };
    is(Kind::AllReduce, in_group(4000), 0);
    is(Kind::AllGather, in_group(100 + rank), (0..size).filter(|r| *r != rank).map(|r| 100 + r).sum());
    match rank {
        0 => is(Kind::Gather, 0, 30 * others),
        _ => is(Kind::Gather, 30, 0),
    }
    match rank {
        0 => is(Kind::Broadcast, in_group(50), 0),
        _ => is(Kind::Broadcast, 0, 50),
    }
    is(Kind::Barrier, 0, 0);
}

/// `<F x, y> = <x, F* y>` over all ranks, in whole numbers, so exactly.
fn adjoints(comm: &Comm) {
    let (rank, size) = (comm.rank(), comm.size());
    const N: usize = 50;
    let vector =
        |seed: usize, len: usize| -> Vec<f64> { (0..len).map(|i| ((i * 17 + seed * 29 + rank * 13) % 23) as f64 - 11.0).collect() };
    let sum = |x: &[f64]| to_f64s(&comm.all_reduce(f64s(x), DType::F64, ReduceOp::Sum).unwrap());
    let dot = |a: &[f64], b: &[f64]| sum(&[a.iter().zip(b).map(|(a, b)| a * b).sum()])[0];

    // Broadcast from a root, and the sum to it.
    for root in 0..size {
        let at_root = |v: Vec<f64>| if rank == root { v } else { vec![0.0; N] };
        let (x, y) = (at_root(vector(1, N)), vector(2, N));
        let fx = to_f64s(&comm.broadcast(root, f64s(&x)).unwrap());
        assert_eq!(dot(&fx, &y), dot(&x, &at_root(sum(&y))), "broadcast from {root}");
    }

    // All-gather, and the sum of which each rank keeps its own piece.
    let (x, y) = (vector(3, N), vector(4, N * size));
    let fx: Vec<f64> = comm.all_gather(&f64s(&x)).unwrap().iter().flat_map(|part| to_f64s(part)).collect();
    assert_eq!(dot(&fx, &y), dot(&x, &sum(&y)[rank * N..(rank + 1) * N]), "all-gather");

    // The sum over all ranks is its own adjoint.
    let (x, y) = (vector(5, N), vector(6, N));
    assert_eq!(dot(&sum(&x), &y), dot(&x, &sum(&y)), "all-reduce");

    // A shift to the next rank, and one to the last.
    let shift = |v: &[f64], by: usize| {
        let send = comm.start_send((rank + by) % size, 2, f64s(v)).unwrap();
        let got = to_f64s(&wait(comm.start_recv((rank + size - by) % size, 2, N * 8)));
        send.wait().unwrap();
        got
    };
    assert_eq!(dot(&shift(&x, 1), &y), dot(&x, &shift(&y, size - 1)), "shift");
}
