//! The micro-kernels, small products on vectors, and plain loops, for every instruction set.

use std::ops::{Add, AddAssign, Mul, Sub};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering};

use burn_backend::Element;
use bytemuck::Pod;

/// Instruction sets the kernels are compiled for. A set is part of those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Set {
    /// 512-bit vectors, AVX-512 F and VL.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// 256-bit vectors with fused multiply-add.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// What the compiler makes of plain arrays.
    Portable,
}

/// An instruction set that this machine has: only detection makes one, so that whoever has one may run its code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Isa(Set);

impl Isa {
    /// Best first.
    #[cfg(target_arch = "x86_64")]
    const ALL: [Set; 3] = [Set::Avx512, Set::Avx2, Set::Portable];
    /// The only one.
    #[cfg(not(target_arch = "x86_64"))]
    const ALL: [Set; 1] = [Set::Portable];

    /// The set, if this machine has it.
    fn detected(set: Set) -> Option<Isa> {
        let here = match set {
            #[cfg(target_arch = "x86_64")]
            Set::Avx512 => is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512vl"),
            #[cfg(target_arch = "x86_64")]
            Set::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            Set::Portable => true,
        };
        here.then_some(Isa(set))
    }

    /// What this machine has, best first.
    pub(crate) fn available() -> impl Iterator<Item = Isa> {
        Isa::ALL.into_iter().filter_map(Isa::detected)
    }

    /// Which set it is.
    #[inline(always)]
    pub(crate) fn set(self) -> Set {
        self.0
    }

    /// `avx512`, `avx2` or `portable`.
    pub(crate) fn name(self) -> &'static str {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Set::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            Set::Avx2 => "avx2",
            Set::Portable => "portable",
        }
    }

    /// The best of this machine, or what `BURN_SPATIAL_ISA` names.
    fn wanted() -> Isa {
        let best = Isa::available().next().unwrap_or(Isa(Set::Portable));
        let Ok(wanted) = std::env::var("BURN_SPATIAL_ISA") else { return best };
        Isa::available().find(|isa| isa.name() == wanted).unwrap_or_else(|| {
            let names: Vec<&str> = Isa::available().map(Isa::name).collect();
            tracing::warn!("BURN_SPATIAL_ISA={wanted} is not one of this machine's ({}); using {}", names.join(", "), best.name());
            best
        })
    }

    /// What the kernels use: [`Isa::wanted`], unless ranks have agreed on less.
    pub(crate) fn get() -> Isa {
        static WANTED: OnceLock<Isa> = OnceLock::new();
        let agreed = Isa::ALL.get(usize::from(AGREED.load(Ordering::Relaxed))).copied();
        agreed.and_then(Isa::detected).unwrap_or_else(|| *WANTED.get_or_init(Isa::wanted))
    }

    /// Has the kernels of this process use what all ranks have: `others` are their places in [`Isa::ALL`].
    pub(crate) fn agree(others: impl Iterator<Item = u8>) {
        let least = others.fold(Isa::get().place(), u8::max);
        AGREED.store(least, Ordering::Relaxed);
    }

    /// Its place in [`Isa::ALL`].
    pub(crate) fn place(self) -> u8 {
        Isa::ALL.iter().position(|set| *set == self.0).map_or(u8::MAX, |place| place as u8)
    }
}

/// The place of what ranks have agreed on; beyond the end before that.
static AGREED: AtomicU8 = AtomicU8::new(u8::MAX);

/// Defines a function of plain loops that is compiled for every instruction set: its first argument is the [`Isa`].
/// What the loops call must be inlined. The values are the same on all: nothing here fuses a product and a sum.
macro_rules! vectorised {
    ($(#[$meta:meta])* fn $name:ident<T>($($arg:ident: $type:ty),* $(,)?) $(-> $result:ty)? $body:block) => {
        $(#[$meta])*
        fn $name<T: $crate::kernels::cpu::Real>(isa: $crate::kernels::cpu::Isa, $($arg: $type),*) $(-> $result)? {
            #[inline(always)]
            fn body<T: $crate::kernels::cpu::Real>($($arg: $type),*) $(-> $result)? $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512vl")]
            fn avx512<T: $crate::kernels::cpu::Real>($($arg: $type),*) $(-> $result)? {
                body::<T>($($arg),*)
            }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            fn avx2<T: $crate::kernels::cpu::Real>($($arg: $type),*) $(-> $result)? {
                body::<T>($($arg),*)
            }

            match isa.set() {
                // SAFETY: an `Isa` is of instructions that were found on this machine.
                #[cfg(target_arch = "x86_64")]
                $crate::kernels::cpu::Set::Avx512 => unsafe { avx512::<T>($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                $crate::kernels::cpu::Set::Avx2 => unsafe { avx2::<T>($($arg),*) },
                $crate::kernels::cpu::Set::Portable => body::<T>($($arg),*),
            }
        }
    };
}
pub(super) use vectorised;

/// Calls `f` on each of `to` and what lies `step` apart in `from`.
#[inline(always)]
pub(super) fn strided<A, B: Copy>(to: &mut [A], from: &[B], step: usize, f: impl Fn(&mut A, B)) {
    match step {
        1 => to.iter_mut().zip(from).for_each(|(to, from)| f(to, *from)),
        // With a step that is known here vectors are read and sorted.
        2 => {
            let (pairs, rest) = from.as_chunks::<2>();
            to.iter_mut().zip(pairs).for_each(|(to, pair)| f(to, pair[0]));
            if let (Some(to), [last]) = (to.get_mut(pairs.len()), rest) {
                f(to, *last);
            }
        }
        _ => to.iter_mut().zip(from.iter().step_by(step)).for_each(|(to, from)| f(to, *from)),
    }
}

/// Writes elements of `count` rows that lie `pitch` apart in turn: what `f` makes of element `j` of row `r` to
/// `j * count + r`.
#[inline(always)]
pub(super) fn interleave<T: Copy, A>(rows: &[T], pitch: usize, count: usize, to: &mut [A], f: impl Fn(T) -> A) {
    match count {
        1 => to.iter_mut().zip(rows).for_each(|(to, value)| *to = f(*value)),
        // With a number that is known here vectors are sorted and written.
        2 => {
            let (pairs, rest) = to.as_chunks_mut::<2>();
            let (even, odd) = (&rows[..pairs.len()], &rows[pitch..]);
            pairs.iter_mut().zip(even.iter().zip(odd)).for_each(|(pair, (a, b))| *pair = [f(*a), f(*b)]);
            if let [last] = rest {
                *last = f(rows[pairs.len()]);
            }
        }
        _ => {
            for (r, row) in rows.chunks(pitch).enumerate().take(count.min(to.len())) {
                to[r..].iter_mut().step_by(count).zip(row).for_each(|(to, value)| *to = f(*value));
            }
        }
    }
}

/// Vectors of a whole panel at most.
pub(crate) const MAX_VECTORS: usize = 3;

/// A product of a few rows with some columns of vectors: `c[i][j] (+)= sum over r of a[i][r] * b[j][offsets[r]]`, for
/// `rows` x `vectors * lanes` entries of c.
pub(crate) struct Panel<'a, T> {
    /// Rows `lda` apart, the entries of a row `step` apart.
    pub(crate) a: *const T,
    pub(crate) lda: usize,
    pub(crate) step: usize,
    pub(crate) rows: usize,
    /// Where each vector starts; the r-th value of its column lies `offsets[r]` further.
    pub(crate) b: [*const T; MAX_VECTORS],
    pub(crate) offsets: &'a [usize],
    /// At least 1; at most what makes a whole panel, see [`Real::panel`].
    pub(crate) vectors: usize,
    /// Rows `ldc` apart.
    pub(crate) c: *mut T,
    pub(crate) ldc: usize,
    /// Whether to add to what `c` holds.
    pub(crate) add: bool,
}

/// Products of rows with rows: `c[i][j] += sum over p of a[i][p] * b[offsets[j] + p]`, for `rows` x `offsets.len()`
/// entries of c. p runs over a box: `len` values in a row, in `lines`, in `planes`.
pub(crate) struct Dots<'a, T> {
    /// Rows `lda` apart.
    pub(crate) a: *const T,
    pub(crate) lda: usize,
    pub(crate) rows: usize,
    pub(crate) b: *const T,
    pub(crate) offsets: &'a [usize],
    /// Whole vectors.
    pub(crate) len: usize,
    pub(crate) lines: usize,
    pub(crate) planes: usize,
    /// How far lines and planes lie apart in `a` and in `b`.
    pub(crate) a_steps: [usize; 2],
    pub(crate) b_steps: [usize; 2],
    /// Rows `ldc` apart.
    pub(crate) c: *mut T,
    pub(crate) ldc: usize,
}

/// The element types of the CPU kernels.
pub(crate) trait Real:
    Element + Pod + Copy + Default + PartialOrd + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self> + AddAssign
{
    /// The most negative value.
    const NEG_INFINITY: Self;

    /// Elements per vector.
    fn lanes(isa: Isa) -> usize;

    /// Columns of a whole panel.
    fn panel(isa: Isa) -> usize {
        let vectors = match isa.set() {
            #[cfg(target_arch = "x86_64")]
            Set::Avx512 => 3,
            _ => 2,
        };
        vectors * Self::lanes(isa)
    }

    /// Computes `panel`.
    ///
    /// # Safety
    /// The pointers must be valid for the extents given, and nothing else may read or write `c` meanwhile.
    unsafe fn product(isa: Isa, panel: &Panel<'_, Self>);

    /// Computes `dots`.
    ///
    /// # Safety
    /// The pointers must be valid for the extents given, and nothing else may read or write `c` meanwhile.
    unsafe fn dots(isa: Isa, dots: &Dots<'_, Self>);

    /// `1 / n`.
    fn reciprocal(n: usize) -> Self;
}

/// A vector of elements.
///
/// # Safety
/// Its functions are called only in code compiled for the instructions that the vector needs, on a machine that has them, as the
/// functions that run [`panel`] and [`dots`] are. Pointers must be valid for [`Vector::LANES`] elements, those of
/// [`Vector::splat`] for one.
trait Vector: Copy {
    type T: Real;
    const LANES: usize;
    /// Whether there are 32 registers.
    const WIDE: bool;
    unsafe fn zero() -> Self;
    unsafe fn load(p: *const Self::T) -> Self;
    unsafe fn store(self, p: *mut Self::T);
    unsafe fn splat(p: *const Self::T) -> Self;
    /// `self + a * b`
    unsafe fn mul_add(self, a: Self, b: Self) -> Self;
    unsafe fn add(self, a: Self) -> Self;
    /// The sum of all lanes: halves onto halves.
    unsafe fn sum(self) -> Self::T;
}

/// Plain arrays.
#[derive(Clone, Copy)]
struct Array<T, const L: usize>([T; L]);

impl<T: Real, const L: usize> Vector for Array<T, L> {
    type T = T;
    const LANES: usize = L;
    const WIDE: bool = false;
    #[inline(always)]
    unsafe fn zero() -> Self {
        Array([T::default(); L])
    }
    #[inline(always)]
    unsafe fn load(p: *const T) -> Self {
        // SAFETY: the caller's promise: `L` elements.
        Array(unsafe { p.cast::<[T; L]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut T) {
        // SAFETY: the caller's promise: `L` elements.
        unsafe { p.cast::<[T; L]>().write_unaligned(self.0) }
    }
    #[inline(always)]
    unsafe fn splat(p: *const T) -> Self {
        // SAFETY: the caller's promise: one element.
        Array([unsafe { *p }; L])
    }
    #[inline(always)]
    unsafe fn mul_add(self, a: Self, b: Self) -> Self {
        Array(std::array::from_fn(|i| self.0[i] + a.0[i] * b.0[i]))
    }
    #[inline(always)]
    unsafe fn add(self, a: Self) -> Self {
        Array(std::array::from_fn(|i| self.0[i] + a.0[i]))
    }
    #[inline(always)]
    unsafe fn sum(self) -> T {
        let mut lanes = self.0;
        let mut n = L / 2;
        while n > 0 {
            for lane in 0..n {
                lanes[lane] += lanes[lane + n];
            }
            n /= 2;
        }
        lanes[0]
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{Dots, Panel, Vector, dots, panel};

    #[inline(always)]
    unsafe fn sum_f32x8(v: __m256) -> f32 {
        // SAFETY: only registers are read, and the caller's code is compiled for these instructions.
        unsafe {
            let four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        }
    }

    #[inline(always)]
    unsafe fn sum_f32x16(v: __m512) -> f32 {
        // SAFETY: only registers are read, and the caller's code is compiled for these instructions.
        unsafe {
            let high = _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(v)));
            sum_f32x8(_mm256_add_ps(_mm512_castps512_ps256(v), high))
        }
    }

    #[inline(always)]
    unsafe fn sum_f64x4(v: __m256d) -> f64 {
        // SAFETY: only registers are read, and the caller's code is compiled for these instructions.
        unsafe {
            let two = _mm_add_pd(_mm256_castpd256_pd128(v), _mm256_extractf128_pd::<1>(v));
            _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)))
        }
    }

    #[inline(always)]
    unsafe fn sum_f64x8(v: __m512d) -> f64 {
        // SAFETY: only registers are read, and the caller's code is compiled for these instructions.
        unsafe { sum_f64x4(_mm256_add_pd(_mm512_castpd512_pd256(v), _mm512_extractf64x4_pd::<1>(v))) }
    }

    macro_rules! vector {
        ($name:ident, $register:ty, $t:ty, $lanes:literal, $wide:literal, $features:literal, $run:ident, $dots:ident, $zero:ident, $load:ident, $store:ident, $set1:ident, $fmadd:ident, $add:ident, $sum:ident) => {
            #[derive(Clone, Copy)]
            struct $name($register);

            impl Vector for $name {
                type T = $t;
                const LANES: usize = $lanes;
                const WIDE: bool = $wide;
                #[inline(always)]
                unsafe fn zero() -> Self {
                    // SAFETY: the promise of a caller of `Vector`.
                    unsafe { $name($zero()) }
                }
                #[inline(always)]
                unsafe fn load(p: *const $t) -> Self {
                    // SAFETY: the promise of a caller of `Vector`.
                    unsafe { $name($load(p)) }
                }
                #[inline(always)]
                unsafe fn store(self, p: *mut $t) {
                    // SAFETY: the promise of a caller of `Vector`.
                    unsafe { $store(p, self.0) }
                }
                #[inline(always)]
                unsafe fn splat(p: *const $t) -> Self {
                    // SAFETY: the promise of a caller of `Vector`.
                    unsafe { $name($set1(*p)) }
                }
                #[inline(always)]
                unsafe fn mul_add(self, a: Self, b: Self) -> Self {
                    // SAFETY: the promise of a caller of `Vector`.
                    unsafe { $name($fmadd(a.0, b.0, self.0)) }
                }
                #[inline(always)]
                unsafe fn add(self, a: Self) -> Self {
                    // SAFETY: the promise of a caller of `Vector`.
                    unsafe { $name($add(self.0, a.0)) }
                }
                #[inline(always)]
                unsafe fn sum(self) -> $t {
                    // SAFETY: the promise of a caller of `Vector`.
                    unsafe { $sum(self.0) }
                }
            }

            /// # Safety
            /// As [`super::Real::product`], on a machine with these instructions.
            #[target_feature(enable = $features)]
            pub(super) unsafe fn $run(p: &Panel<'_, $t>) {
                // SAFETY: the caller's promise; this function is compiled for what the vector needs.
                unsafe { panel::<$name>(p) }
            }

            /// # Safety
            /// As [`super::Real::dots`], on a machine with these instructions.
            #[target_feature(enable = $features)]
            pub(super) unsafe fn $dots(p: &Dots<'_, $t>) {
                // SAFETY: the caller's promise; this function is compiled for what the vector needs.
                unsafe { dots::<$name>(p) }
            }
        };
    }

    vector!(
        F32x16,
        __m512,
        f32,
        16,
        true,
        "avx512f,avx512vl",
        f32x16,
        dots_f32x16,
        _mm512_setzero_ps,
        _mm512_loadu_ps,
        _mm512_storeu_ps,
        _mm512_set1_ps,
        _mm512_fmadd_ps,
        _mm512_add_ps,
        sum_f32x16
    );
    vector!(
        F32x8,
        __m256,
        f32,
        8,
        false,
        "avx2,fma",
        f32x8,
        dots_f32x8,
        _mm256_setzero_ps,
        _mm256_loadu_ps,
        _mm256_storeu_ps,
        _mm256_set1_ps,
        _mm256_fmadd_ps,
        _mm256_add_ps,
        sum_f32x8
    );
    vector!(
        F64x8,
        __m512d,
        f64,
        8,
        true,
        "avx512f,avx512vl",
        f64x8,
        dots_f64x8,
        _mm512_setzero_pd,
        _mm512_loadu_pd,
        _mm512_storeu_pd,
        _mm512_set1_pd,
        _mm512_fmadd_pd,
        _mm512_add_pd,
        sum_f64x8
    );
    vector!(
        F64x4,
        __m256d,
        f64,
        4,
        false,
        "avx2,fma",
        f64x4,
        dots_f64x4,
        _mm256_setzero_pd,
        _mm256_loadu_pd,
        _mm256_storeu_pd,
        _mm256_set1_pd,
        _mm256_fmadd_pd,
        _mm256_add_pd,
        sum_f64x4
    );
}

macro_rules! real {
    ($t:ty, $wide:ident, $narrow:ident, $wide_dots:ident, $narrow_dots:ident, $l512:literal, $l256:literal, $l128:literal) => {
        impl Real for $t {
            const NEG_INFINITY: Self = <$t>::NEG_INFINITY;

            fn lanes(isa: Isa) -> usize {
                match isa.set() {
                    #[cfg(target_arch = "x86_64")]
                    Set::Avx512 => $l512,
                    #[cfg(target_arch = "x86_64")]
                    Set::Avx2 => $l256,
                    Set::Portable => $l128,
                }
            }

            unsafe fn product(isa: Isa, p: &Panel<'_, Self>) {
                // SAFETY: the caller's promise; an `Isa` is of instructions that were found on this machine.
                unsafe {
                    match isa.set() {
                        #[cfg(target_arch = "x86_64")]
                        Set::Avx512 => x86::$wide(p),
                        #[cfg(target_arch = "x86_64")]
                        Set::Avx2 => x86::$narrow(p),
                        Set::Portable => panel::<Array<$t, $l128>>(p),
                    }
                }
            }

            unsafe fn dots(isa: Isa, p: &Dots<'_, Self>) {
                // SAFETY: the caller's promise; an `Isa` is of instructions that were found on this machine.
                unsafe {
                    match isa.set() {
                        #[cfg(target_arch = "x86_64")]
                        Set::Avx512 => x86::$wide_dots(p),
                        #[cfg(target_arch = "x86_64")]
                        Set::Avx2 => x86::$narrow_dots(p),
                        Set::Portable => dots::<Array<$t, $l128>>(p),
                    }
                }
            }

            fn reciprocal(n: usize) -> Self {
                1.0 / n as $t
            }
        }
    };
}

real!(f32, f32x16, f32x8, dots_f32x16, dots_f32x8, 16, 8, 4);
real!(f64, f64x8, f64x4, dots_f64x8, dots_f64x4, 8, 4, 2);

/// # Safety
/// As [`Real::product`], in code compiled for what the vector needs.
#[inline(always)]
unsafe fn panel<V: Vector>(p: &Panel<'_, V::T>) {
    // SAFETY: the caller's promise.
    unsafe {
        match p.vectors {
            1 => rows::<V, 1>(p),
            2 => rows::<V, 2>(p),
            _ => rows::<V, 3>(p),
        }
    }
}

/// Covers the rows with the tallest blocks that fit the registers.
///
/// # Safety
/// As [`panel`]; the panel has `N` vectors.
#[inline(always)]
unsafe fn rows<V: Vector, const N: usize>(p: &Panel<'_, V::T>) {
    let mut i = 0;
    // SAFETY: `i + M <= p.rows` for each block.
    unsafe {
        if V::WIDE || N == 1 {
            while p.rows - i >= 8 {
                block::<V, 8, N>(p, i);
                i += 8;
            }
        }
        // Twelve sums, two columns and a row fit 16 registers; four by three would spill.
        if !V::WIDE && N == 2 {
            while p.rows - i >= 6 {
                block::<V, 6, N>(p, i);
                i += 6;
            }
        }
        while p.rows - i >= 4 {
            block::<V, 4, N>(p, i);
            i += 4;
        }
        if p.rows - i >= 2 {
            block::<V, 2, N>(p, i);
            i += 2;
        }
        if p.rows - i >= 1 {
            block::<V, 1, N>(p, i);
        }
    }
}

/// Of rows `row..row + M`.
///
/// # Safety
/// As [`rows`]; the rows are the panel's.
#[inline(always)]
unsafe fn block<V: Vector, const M: usize, const N: usize>(p: &Panel<'_, V::T>, row: usize) {
    // SAFETY: `row + M <= p.rows`, and the caller promised the extents.
    unsafe {
        let mut a = p.a.add(row * p.lda);
        let c = p.c.add(row * p.ldc);
        let mut sums = [[V::zero(); N]; M];
        for offset in p.offsets {
            let mut x = [V::zero(); N];
            for (j, x) in x.iter_mut().enumerate() {
                *x = V::load(p.b[j].add(*offset));
            }
            for (i, sums) in sums.iter_mut().enumerate() {
                let w = V::splat(a.add(i * p.lda));
                for j in 0..N {
                    sums[j] = sums[j].mul_add(w, x[j]);
                }
            }
            a = a.add(p.step);
        }
        for (i, sums) in sums.iter().enumerate() {
            for (j, sum) in sums.iter().enumerate() {
                let to = c.add(i * p.ldc + j * V::LANES);
                let sum = if p.add { V::load(to).add(*sum) } else { *sum };
                sum.store(to);
            }
        }
    }
}

/// # Safety
/// As [`Real::dots`], in code compiled for what the vector needs.
#[inline(always)]
unsafe fn dots<V: Vector>(p: &Dots<'_, V::T>) {
    let mut i = 0;
    // SAFETY: `i + M <= p.rows` for each block.
    unsafe {
        while p.rows - i >= 4 {
            dot_columns::<V, 4>(p, i);
            i += 4;
        }
        while p.rows - i >= 1 {
            dot_columns::<V, 1>(p, i);
            i += 1;
        }
    }
}

/// Covers the columns with blocks whose sums are enough to hide a multiplication's latency; four are two and two. With 32
/// registers six columns at a time: of more rows instead the addresses would have to be computed as well.
///
/// # Safety
/// As [`dots`]; rows `row..row + M` are among its.
#[inline(always)]
unsafe fn dot_columns<V: Vector, const M: usize>(p: &Dots<'_, V::T>, row: usize) {
    let mut j = 0;
    // SAFETY: `j + N <= p.offsets.len()` for each block.
    unsafe {
        loop {
            match p.offsets.len() - j {
                0 => return,
                1 => {
                    dot_block::<V, M, 1>(p, row, j);
                    j += 1;
                }
                2 | 4 => {
                    dot_block::<V, M, 2>(p, row, j);
                    j += 2;
                }
                6.. if V::WIDE => {
                    dot_block::<V, M, 6>(p, row, j);
                    j += 6;
                }
                _ => {
                    dot_block::<V, M, 3>(p, row, j);
                    j += 3;
                }
            }
        }
    }
}

/// Of rows `row..row + M` and columns `column..column + N`.
///
/// # Safety
/// As [`dots`]; the rows and columns are among its.
#[inline(always)]
unsafe fn dot_block<V: Vector, const M: usize, const N: usize>(p: &Dots<'_, V::T>, row: usize, column: usize) {
    // SAFETY: the block lies within the rows and columns, and the caller promised the extents.
    unsafe {
        let a = p.a.add(row * p.lda);
        let b: [*const V::T; N] = std::array::from_fn(|j| p.b.add(p.offsets[column + j]));
        let mut sums = [[V::zero(); N]; M];
        for plane in 0..p.planes {
            for line in 0..p.lines {
                let a = a.add(plane * p.a_steps[1] + line * p.a_steps[0]);
                let from = plane * p.b_steps[1] + line * p.b_steps[0];
                for v in (0..p.len).step_by(V::LANES) {
                    let mut x = [V::zero(); N];
                    for (j, x) in x.iter_mut().enumerate() {
                        *x = V::load(b[j].add(from + v));
                    }
                    for (i, sums) in sums.iter_mut().enumerate() {
                        let g = V::load(a.add(i * p.lda + v));
                        for j in 0..N {
                            sums[j] = sums[j].mul_add(g, x[j]);
                        }
                    }
                }
            }
        }
        for (i, sums) in sums.iter().enumerate() {
            for (j, sum) in sums.iter().enumerate() {
                *p.c.add((row + i) * p.ldc + column + j) += sum.sum();
            }
        }
    }
}
