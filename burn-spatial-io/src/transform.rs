//! From elements as they are stored to numbers with the channels first, whatever the file format.

use std::fmt::Display;
use std::sync::LazyLock;

use burn::tensor::DType;
use sealed::Stored;

use crate::error::DataError;
use crate::format::{IndexBox, VolumeReader, VolumeShape};

/// Voxels converted at a time: the tile of all channels stays in the first-level cache.
const TILE: usize = 2048;

/// What is done to every voxel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Transform {
    /// Counts become `ln(1 + x)`, computed in f64; a negative count is an error.
    #[default]
    Log1p,
    /// Values stay as they are.
    Identity,
}

/// Numbers that files hold: integers of 8 to 64 bits, f32 and f64. Every bit pattern is a value.
pub trait Number: Copy + Default + Display + Stored {}

mod sealed {
    use burn::tensor::DType;

    /// What the crate needs of a [`super::Number`]; keeps that trait to numbers.
    pub trait Stored: Copy {
        /// The element type.
        const DTYPE: DType;
        /// The type's name in messages.
        const NAME: &'static str;
        /// The bytes of one number, in the byte order of this machine.
        type Bytes: Copy + IntoIterator<Item = u8>;
        fn split(bytes: &[u8]) -> &[Self::Bytes];
        fn from_bytes(bytes: Self::Bytes) -> Self;
        #[cfg(test)]
        fn to_bytes(self) -> Self::Bytes;
        fn to_f32(self) -> f32;
        fn to_f64(self) -> f64;
        /// The whole number, if it is one that a class may have.
        fn whole(self) -> Option<i64>;
        /// ln(1 + x), right for counts.
        fn log1p(self) -> f32 {
            self.to_f64().ln_1p() as f32
        }
    }
}

/// All [`Number`]s, for messages.
pub(crate) const NUMBERS: &str = "integers, float32 or float64";

/// ln(1 + n) for every count an int16 can hold.
static LOG1P: LazyLock<Vec<f32>> = LazyLock::new(|| (0..=i16::MAX).map(|n| f64::from(n).ln_1p() as f32).collect());

macro_rules! number {
    ($type:ident, $dtype:ident, $name:literal, |$value:ident| $whole:expr $(, $log1p:expr)?) => {
        impl Number for $type {}
        impl Stored for $type {
            const DTYPE: DType = DType::$dtype;
            const NAME: &'static str = $name;
            type Bytes = [u8; size_of::<$type>()];
            fn split(bytes: &[u8]) -> &[Self::Bytes] {
                bytes.as_chunks().0
            }
            fn from_bytes(bytes: Self::Bytes) -> Self {
                Self::from_ne_bytes(bytes)
            }
            #[cfg(test)]
            fn to_bytes(self) -> Self::Bytes {
                self.to_ne_bytes()
            }
            fn to_f32(self) -> f32 {
                self as f32
            }
            fn to_f64(self) -> f64 {
                self as f64
            }
            fn whole(self) -> Option<i64> {
                let $value = self;
                $whole
            }
            $(fn log1p(self) -> f32 {
                let log1p: fn(Self) -> f32 = $log1p;
                log1p(self)
            })?
        }
    };
}

number!(i8, I8, "int8", |v| Some(i64::from(v)));
number!(i16, I16, "int16", |v| Some(i64::from(v)), |count| LOG1P[(count & i16::MAX) as usize]);
number!(i32, I32, "int32", |v| Some(i64::from(v)));
number!(i64, I64, "int64", |v| Some(v));
number!(u8, U8, "uint8", |v| Some(i64::from(v)));
number!(u16, U16, "uint16", |v| Some(i64::from(v)));
number!(u32, U32, "uint32", |v| Some(i64::from(v)));
number!(u64, U64, "uint64", |v| i64::try_from(v).ok());
number!(f32, F32, "float32", |v| f64::from(v).whole());
number!(f64, F64, "float64", |v| (v.fract() == 0.0 && v.abs() < 1e15).then_some(v as i64));

/// Evaluates an expression with the type `$T` of the elements of `$reader`; an error where that is no number.
macro_rules! with_type {
    ($reader:expr, $T:ident => $body:expr) => {
        with_type!(@ $reader, $T, $body, I8 i8, I16 i16, I32 i32, I64 i64, U8 u8, U16 u16, U32 u32, U64 u64, F32 f32, F64 f64)
    };
    (@ $reader:expr, $T:ident, $body:expr, $($dtype:ident $type:ident),*) => {
        match $reader.dtype() {
            $(DType::$dtype => {
                type $T = $type;
                $body
            })*
            other => Err(DataError::Type { at: $reader.at(), expected: NUMBERS, found: other.name().into() }),
        }
    };
}

/// Reading numbers.
impl dyn VolumeReader + '_ {
    /// Reads the voxels `bounds` as f32 into `out`, as `[channels, depth, height, width]` in row-major order. `out` and
    /// `scratch`, which takes them as stored, are resized, and keep their memory from read to read. Not collective.
    ///
    /// # Errors
    /// [`DataError`] when the box is not inside the volume, when it cannot be read, or when it holds negative counts
    /// (with [`Transform::Log1p`]), NaN or infinities.
    pub fn read(&self, bounds: IndexBox, transform: Transform, scratch: &mut Vec<u8>, out: &mut Vec<f32>) -> Result<(), DataError> {
        self.read_stored(bounds, scratch)?;
        with_type!(self, T => self.convert::<T>(bounds, transform, scratch, out))
    }

    /// Reads the voxels `bounds` as they are stored, bit by bit, as `[channels, depth, height, width]`. Not collective.
    ///
    /// # Errors
    /// [`DataError`] as for `read`, and when the volume is stored in another type than `T`.
    pub fn read_raw<T: Number>(&self, bounds: IndexBox) -> Result<Vec<T>, DataError> {
        if self.dtype() != T::DTYPE {
            let found = with_type!(self, S => Ok(S::NAME))?.into();
            return Err(DataError::Type { at: self.at(), expected: T::NAME, found });
        }
        let (mut stored, mut out) = (Vec::new(), Vec::new());
        self.read_stored(bounds, &mut stored)?;
        self.arrange(T::split(&stored), &mut out, |value: T| value);
        Ok(out)
    }

    /// Reads the class of each of the voxels `bounds`, row-major, out of a volume of one channel. `scratch` as for
    /// `read`. Not collective.
    ///
    /// # Errors
    /// [`DataError`] when the box is not inside the volume, when it cannot be read, or when a voxel is neither of a
    /// class from 0 to `classes` - 1 nor `ignored`.
    pub fn read_classes(
        &self,
        bounds: IndexBox,
        classes: usize,
        ignored: Option<i64>,
        scratch: &mut Vec<u8>,
    ) -> Result<Vec<i32>, DataError> {
        self.read_stored(bounds, scratch)?;
        let good = |class: &i64| (0..classes as i64).contains(class) || ignored == Some(*class);
        with_type!(self, T => {
            let stored = T::split(scratch);
            let class = |bytes: &_| T::from_bytes(*bytes).whole().filter(good).and_then(|class| i32::try_from(class).ok());
            let read: Vec<i32> = stored.iter().map_while(class).collect();
            match stored.get(read.len()) {
                None => Ok(read),
                Some(bad) => {
                    let value = T::from_bytes(*bad).to_string();
                    Err(DataError::Class { at: self.at(), classes, ignored, position: bounds.position(read.len()), value })
                }
            }
        })
    }

    /// Reads `bounds` in stored order and type.
    fn read_stored(&self, bounds: IndexBox, out: &mut Vec<u8>) -> Result<(), DataError> {
        let VolumeShape { channels, extent: volume } = self.shape();
        let IndexBox { start, extent } = bounds;
        let inside = |axis: usize| start[axis].checked_add(extent[axis]).is_some_and(|end| end <= volume[axis]);
        if !(0..3).all(inside) || extent.contains(&0) {
            return Err(DataError::Block { at: self.at(), start, extent, volume });
        }
        // Growing fills with zeros; a buffer of the right size is left as it is.
        out.resize(channels * bounds.voxels() * self.dtype().size(), 0);
        self.read_box(bounds, out)
    }

    fn convert<T: Number>(&self, bounds: IndexBox, transform: Transform, stored: &[u8], out: &mut Vec<f32>) -> Result<(), DataError> {
        let stored = T::split(stored);
        let is_count = |value: T| (0.0..f64::INFINITY).contains(&value.to_f64());
        let mut good = true;
        match transform {
            Transform::Log1p => self.arrange(stored, out, |value: T| {
                good &= is_count(value);
                value.log1p()
            }),
            Transform::Identity => self.arrange(stored, out, |value: T| {
                let value = value.to_f32();
                good &= value.is_finite();
                value
            }),
        }
        if good {
            return Ok(());
        }
        let is_bad = |value: T| if transform == Transform::Log1p { !is_count(value) } else { !value.to_f32().is_finite() };
        let index = stored.iter().position(|bytes| is_bad(T::from_bytes(*bytes))).expect("one is bad");
        let (channels, voxels) = (self.shape().channels, bounds.voxels());
        let [channel, voxel] = if self.channels_last() { [index % channels, index / channels] } else { [index / voxels, index % voxels] };
        let [d, h, w] = bounds.position(voxel);
        let (at, position, value) = (self.at(), [channel, d, h, w], T::from_bytes(stored[index]).to_f64());
        Err(match value < 0.0 && value.is_finite() {
            true if transform == Transform::Log1p => DataError::Negative { at, position, value },
            _ => DataError::NonFinite { at, position, value: value.to_string() },
        })
    }

    /// Converts elements from stored order to channels first.
    fn arrange<T: Number, U: Copy + Default>(&self, stored: &[T::Bytes], out: &mut Vec<U>, mut convert: impl FnMut(T) -> U) {
        let channels = self.shape().channels;
        let voxels = stored.len() / channels;
        out.resize(stored.len(), U::default());
        if !self.channels_last() || channels == 1 {
            out.iter_mut().zip(stored).for_each(|(to, from)| *to = convert(T::from_bytes(*from)));
            return;
        }
        for (tile, stored) in stored.chunks(TILE * channels).enumerate() {
            let first = tile * TILE;
            for channel in 0..channels {
                let to = &mut out[channel * voxels + first..][..stored.len() / channels];
                let from = stored[channel..].iter().step_by(channels);
                to.iter_mut().zip(from).for_each(|(to, from)| *to = convert(T::from_bytes(*from)));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Memory;

    #[test]
    fn a_reader_of_any_format_is_converted() {
        // Two channels of 2 x 1 x 3 voxels, channels last.
        let values: Vec<u32> = (0..12).collect();
        let memory = Memory::new([2, 1, 3, 2], true, &values);
        let reader: &dyn VolumeReader = &memory;
        let bounds = IndexBox { start: [0, 0, 1], extent: [2, 1, 2] };
        assert_eq!(reader.read_raw::<u32>(bounds).unwrap(), [2, 4, 8, 10, 3, 5, 9, 11]);
        let (mut scratch, mut out) = (Vec::new(), Vec::new());
        reader.read(bounds, Transform::Log1p, &mut scratch, &mut out).unwrap();
        assert_eq!(out, [2f64, 4.0, 8.0, 10.0, 3.0, 5.0, 9.0, 11.0].map(|v| v.ln_1p() as f32));
        assert!(matches!(reader.read_raw::<i32>(bounds), Err(DataError::Type { expected: "int32", found, .. }) if found == "uint32"));
        let outside = IndexBox { start: [1, 0, 0], extent: [2, 1, 1] };
        assert!(matches!(reader.read_raw::<u32>(outside), Err(DataError::Block { volume: [2, 1, 3], .. })));
    }

    #[test]
    fn what_float32_cannot_hold_is_refused() {
        let check = |value: f64, transform| {
            let memory = Memory::new([1, 1, 1, 2], false, &[0.5, value]);
            let reader: &dyn VolumeReader = &memory;
            let mut out = Vec::new();
            reader.read(reader.shape().whole(), transform, &mut Vec::new(), &mut out).map(|()| out[1])
        };
        assert_eq!(check(-2.5, Transform::Identity), Ok(-2.5));
        assert_eq!(check(1e300, Transform::Log1p), Ok(1e300f64.ln_1p() as f32));
        let position = [0, 0, 0, 1];
        let at = Memory::new([1; 4], false, &[0u8]).at();
        assert_eq!(check(-2.5, Transform::Log1p), Err(DataError::Negative { at: at.clone(), position, value: -2.5 }));
        assert_eq!(check(f64::NAN, Transform::Identity), Err(DataError::NonFinite { at, position, value: "NaN".into() }));
        assert!(matches!(check(-1e300, Transform::Identity), Err(DataError::NonFinite { .. })));
    }

    #[test]
    fn classes_are_whole_numbers_in_range() {
        fn read<T: Number>(values: [T; 4]) -> Result<Vec<i32>, DataError> {
            let memory = Memory::new([1, 1, 2, 2], false, &values);
            let reader: &dyn VolumeReader = &memory;
            reader.read_classes(reader.shape().whole(), 3, Some(-1), &mut Vec::new())
        }
        assert_eq!(read([0i64, 2, -1, 1]).unwrap(), [0, 2, -1, 1]);
        assert_eq!(read([0f32, 2.0, -1.0, 1.0]).unwrap(), [0, 2, -1, 1]);
        for bad in [read([0, 1, u64::MAX, 0]), read([0.0, 1.0, 0.5, 0.0]), read([0, 1, 3i8, 0])] {
            assert!(matches!(bad, Err(DataError::Class { position: [0, 1, 0], .. })), "{bad:?}");
        }
    }
}
