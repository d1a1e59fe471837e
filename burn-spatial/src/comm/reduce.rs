//! Element-wise reductions of byte buffers in rank order: the one arithmetic of every communicator, so that threads
//! and MPI ranks give the same bits.

use burn_std::{BoolStore, DType, bf16, f16};

use super::{CommError, ReduceOp};

/// Elements reduced at a time: small enough for the accumulators to stay in the first-level cache.
const BLOCK: usize = 1024;

/// An element as stored (`N` bytes, native order) and the type it is accumulated in.
trait Element<const N: usize> {
    type Acc: Copy + Default;
    fn load(bytes: [u8; N]) -> Self::Acc;
    fn store(acc: Self::Acc) -> [u8; N];
    fn sum(a: Self::Acc, b: Self::Acc) -> Self::Acc;
    fn prod(a: Self::Acc, b: Self::Acc) -> Self::Acc;
    fn max(a: Self::Acc, b: Self::Acc) -> Self::Acc;
    fn min(a: Self::Acc, b: Self::Acc) -> Self::Acc;
}

macro_rules! float {
    ($stored:ty, $acc:ty, $size:literal, $load:expr, $store:expr) => {
        impl Element<$size> for $stored {
            type Acc = $acc;
            fn load(bytes: [u8; $size]) -> $acc {
                $load(<$stored>::from_ne_bytes(bytes))
            }
            fn store(acc: $acc) -> [u8; $size] {
                <$stored>::to_ne_bytes($store(acc))
            }
            fn sum(a: $acc, b: $acc) -> $acc {
                a + b
            }
            fn prod(a: $acc, b: $acc) -> $acc {
                a * b
            }
            fn max(a: $acc, b: $acc) -> $acc {
                if a > b || a.is_nan() { a } else { b }
            }
            fn min(a: $acc, b: $acc) -> $acc {
                if a < b || a.is_nan() { a } else { b }
            }
        }
    };
}
float!(f64, f64, 8, |x| x, |x| x);
float!(f32, f32, 4, |x| x, |x| x);
float!(f16, f32, 2, f16::to_f32, f16::from_f32);
float!(bf16, f32, 2, bf16::to_f32, bf16::from_f32);

macro_rules! int {
    ($($int:ty, $size:literal);*) => {$(
        impl Element<$size> for $int {
            type Acc = $int;
            fn load(bytes: [u8; $size]) -> $int {
                <$int>::from_ne_bytes(bytes)
            }
            fn store(acc: $int) -> [u8; $size] {
                acc.to_ne_bytes()
            }
            fn sum(a: $int, b: $int) -> $int {
                a.wrapping_add(b)
            }
            fn prod(a: $int, b: $int) -> $int {
                a.wrapping_mul(b)
            }
            fn max(a: $int, b: $int) -> $int {
                a.max(b)
            }
            fn min(a: $int, b: $int) -> $int {
                a.min(b)
            }
        }
    )*};
}
int!(i64, 8; i32, 4; i16, 2; i8, 1; u64, 8; u32, 4; u16, 2; u8, 1);

/// Reduces `out`, the elements of rank `own`, with `others`: those of the other ranks, in rank order. Floats are
/// added in rank order; integers wrap; f16 and bf16 are accumulated in f32 and rounded once. Booleans stay booleans
/// (0 or 1): a sum or maximum of them is "or", a product or minimum "and".
///
/// All buffers are of one length, a whole number of elements, which [`check`] has confirmed.
pub(super) fn reduce(out: &mut [u8], own: usize, others: &[&[u8]], dtype: DType, op: ReduceOp) {
    match dtype {
        DType::F64 => fold::<f64, 8>(out, own, others, op),
        DType::F32 | DType::Flex32 => fold::<f32, 4>(out, own, others, op),
        DType::F16 => fold::<f16, 2>(out, own, others, op),
        DType::BF16 => fold::<bf16, 2>(out, own, others, op),
        DType::I64 => fold::<i64, 8>(out, own, others, op),
        DType::I32 => fold::<i32, 4>(out, own, others, op),
        DType::I16 => fold::<i16, 2>(out, own, others, op),
        DType::I8 => fold::<i8, 1>(out, own, others, op),
        DType::U64 => fold::<u64, 8>(out, own, others, op),
        DType::U32 => fold::<u32, 4>(out, own, others, op),
        DType::U16 => fold::<u16, 2>(out, own, others, op),
        DType::U8 if !logical(op) => fold::<u8, 1>(out, own, others, op),
        DType::U8 | DType::Bool(BoolStore::Native | BoolStore::U8) => bools::<u8, 1>(out, others, op, u8::from),
        DType::Bool(BoolStore::U32) => bools::<u32, 4>(out, others, op, u32::from),
        DType::QFloat(_) => unreachable!("refused by check"),
    }
}

/// Whether `len` bytes of `dtype` can be reduced by `op`: a boolean operation needs booleans or bytes.
pub(super) fn check(len: usize, dtype: DType, op: ReduceOp) -> Result<(), CommError> {
    let boolean = matches!(dtype, DType::U8 | DType::Bool(_));
    if matches!(dtype, DType::QFloat(_)) || logical(op) && !boolean {
        return Err(CommError::Type(dtype));
    }
    if !len.is_multiple_of(dtype.size()) {
        return Err(CommError::Elements { bytes: len, dtype });
    }
    Ok(())
}

fn logical(op: ReduceOp) -> bool {
    matches!(op, ReduceOp::And | ReduceOp::Or)
}

fn fold<T: Element<N>, const N: usize>(out: &mut [u8], own: usize, others: &[&[u8]], op: ReduceOp) {
    match op {
        ReduceOp::Sum => fold_with::<T, N>(out, own, others, T::sum),
        ReduceOp::Prod => fold_with::<T, N>(out, own, others, T::prod),
        ReduceOp::Max => fold_with::<T, N>(out, own, others, T::max),
        ReduceOp::Min => fold_with::<T, N>(out, own, others, T::min),
        ReduceOp::And | ReduceOp::Or => unreachable!("refused by check"),
    }
}

#[inline(always)]
fn fold_with<T: Element<N>, const N: usize>(out: &mut [u8], own: usize, others: &[&[u8]], f: impl Fn(T::Acc, T::Acc) -> T::Acc) {
    if others.is_empty() {
        return;
    }
    let mut acc = [T::Acc::default(); BLOCK];
    for (i, block) in out.as_chunks_mut::<N>().0.chunks_mut(BLOCK).enumerate() {
        let acc = &mut acc[..block.len()];
        for rank in 0..=others.len() {
            let part = match rank.cmp(&own) {
                std::cmp::Ordering::Equal => &*block,
                order => {
                    let other = others[rank - usize::from(order.is_gt())].as_chunks::<N>().0;
                    &other[i * BLOCK..i * BLOCK + block.len()]
                }
            };
            if rank == 0 {
                acc.iter_mut().zip(part).for_each(|(a, x)| *a = T::load(*x));
            } else {
                acc.iter_mut().zip(part).for_each(|(a, x)| *a = f(*a, T::load(*x)));
            }
        }
        block.iter_mut().zip(acc).for_each(|(x, a)| *x = T::store(*a));
    }
}

fn bools<T, const N: usize>(out: &mut [u8], others: &[&[u8]], op: ReduceOp, of: impl Fn(bool) -> T)
where
    T: Element<N, Acc = T> + Copy + Default + PartialEq,
{
    let all = matches!(op, ReduceOp::And | ReduceOp::Prod | ReduceOp::Min);
    let truth = |x: &[u8; N]| T::load(*x) != T::default();
    for (i, x) in out.as_chunks_mut::<N>().0.iter_mut().enumerate() {
        let mut others = others.iter().map(|other| truth(&other.as_chunks::<N>().0[i]));
        let value = if all { truth(x) && others.all(|b| b) } else { truth(x) || others.any(|b| b) };
        *x = T::store(of(value));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(parts: &[&[u8]], dtype: DType, op: ReduceOp) -> Vec<u8> {
        let results: Vec<Vec<u8>> = (0..parts.len())
            .map(|own| {
                let mut out = parts[own].to_vec();
                let others: Vec<&[u8]> = (0..parts.len()).filter(|r| *r != own).map(|r| parts[r]).collect();
                check(out.len(), dtype, op).unwrap();
                reduce(&mut out, own, &others, dtype, op);
                out
            })
            .collect();
        assert!(results.windows(2).all(|pair| pair[0] == pair[1]), "same bits on every rank");
        results[0].clone()
    }

    fn f32s(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|x| x.to_ne_bytes()).collect()
    }

    #[test]
    fn floats_are_added_in_rank_order() {
        // ((1e8 + 1) - 1e8) is 0 in f32; any other order gives 1.
        let parts = [1e8f32, 1.0, -1e8].map(|x| f32s(&vec![x; 3000]));
        let parts: Vec<&[u8]> = parts.iter().map(|p| &p[..]).collect();
        assert_eq!(run(&parts, DType::F32, ReduceOp::Sum), f32s(&vec![0.0; 3000]));
    }

    #[test]
    fn halves_are_rounded_once() {
        let part = |x: f32| f16::from_f32(x).to_ne_bytes();
        // 2048 + 1 rounds to 2048 in f16, so adding in f16 would give 2048.
        let sum = run(&[&part(2048.0), &part(1.0), &part(1.0)], DType::F16, ReduceOp::Sum);
        assert_eq!(sum, part(2050.0));
        let part = |x: f32| bf16::from_f32(x).to_ne_bytes();
        let sum = run(&[&part(256.0), &part(1.0), &part(1.0)], DType::BF16, ReduceOp::Sum);
        assert_eq!(sum, part(258.0));
    }

    #[test]
    fn nan_wins() {
        for order in [[f32::NAN, 1.0, 2.0], [1.0, f32::NAN, 2.0], [1.0, 2.0, f32::NAN]] {
            let parts = order.map(|x| x.to_ne_bytes());
            let parts: Vec<&[u8]> = parts.iter().map(|p| &p[..]).collect();
            for op in [ReduceOp::Max, ReduceOp::Min] {
                let out = run(&parts, DType::F32, op);
                assert!(f32::from_ne_bytes(out.try_into().unwrap()).is_nan(), "{order:?} {op:?}");
            }
        }
    }

    #[test]
    fn booleans_stay_booleans() {
        let parts: [&[u8]; 2] = [&[0, 0, 1, 7], &[0, 1, 0, 1]];
        let dtype = DType::Bool(BoolStore::Native);
        for op in [ReduceOp::Or, ReduceOp::Sum, ReduceOp::Max] {
            assert_eq!(run(&parts, dtype, op), [0, 1, 1, 1], "{op:?}");
        }
        for op in [ReduceOp::And, ReduceOp::Prod, ReduceOp::Min] {
            assert_eq!(run(&parts, dtype, op), [0, 0, 0, 1], "{op:?}");
        }
        let words = [2u32, 0].map(u32::to_ne_bytes).concat();
        let or = run(&[&words, &words], DType::Bool(BoolStore::U32), ReduceOp::Or);
        assert_eq!(or, [1u32, 0].map(u32::to_ne_bytes).concat());
    }

    #[test]
    fn impossible_reductions_are_refused() {
        assert!(matches!(check(8, DType::F32, ReduceOp::And), Err(CommError::Type(DType::F32))));
        assert!(matches!(check(6, DType::F32, ReduceOp::Sum), Err(CommError::Elements { bytes: 6, .. })));
        let quantized = DType::QFloat(Default::default());
        assert!(matches!(check(8, quantized, ReduceOp::Sum), Err(CommError::Type(_))));
    }
}
