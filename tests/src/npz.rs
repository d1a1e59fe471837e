//! Reads `.npz` files whose entries are stored, not compressed, as `numpy.savez` writes them.

use std::collections::BTreeMap;
use std::path::Path;

/// An array of float64; integers are converted.
#[derive(Clone, Debug, PartialEq)]
pub struct Array {
    /// Extents, slowest first.
    pub shape: Vec<usize>,
    /// The elements in C order.
    pub values: Vec<f64>,
}

/// All arrays of the file at `path` by name (without `.npy`).
///
/// # Errors
/// A file that cannot be read or is not of this form, with its path.
pub fn read(path: &Path) -> Result<BTreeMap<String, Array>, String> {
    let bytes = std::fs::read(path).map_err(|e| format!("{}: {e}", path.display()))?;
    parse(&bytes).ok_or_else(|| format!("{}: not an npz file of stored <f8 or <i8 arrays", path.display()))
}

fn number(bytes: &[u8], at: usize, len: usize) -> Option<usize> {
    let bytes = bytes.get(at..at + len)?;
    Some(bytes.iter().rev().fold(0, |n, b| n << 8 | usize::from(*b)))
}

/// Walks the zip file's central directory (APPNOTE 4.3.12).
fn parse(bytes: &[u8]) -> Option<BTreeMap<String, Array>> {
    let end = bytes.windows(4).rposition(|w| w == b"PK\x05\x06")?;
    let (count, mut at) = (number(bytes, end + 10, 2)?, number(bytes, end + 16, 4)?);
    let mut arrays = BTreeMap::new();
    for _ in 0..count {
        if bytes.get(at..at + 4)? != b"PK\x01\x02" || number(bytes, at + 10, 2)? != 0 {
            return None;
        }
        let size = number(bytes, at + 24, 4)?;
        let [name, extra, comment] = [28, 30, 32].map(|i| number(bytes, at + i, 2));
        let local = number(bytes, at + 42, 4)?;
        let key = std::str::from_utf8(bytes.get(at + 46..at + 46 + name?)?).ok()?;
        let start = local + 30 + number(bytes, local + 26, 2)? + number(bytes, local + 28, 2)?;
        arrays.insert(key.trim_end_matches(".npy").to_owned(), npy(bytes.get(start..start + size)?)?);
        at += 46 + name? + extra? + comment?;
    }
    Some(arrays)
}

fn npy(bytes: &[u8]) -> Option<Array> {
    if bytes.get(..6)? != b"\x93NUMPY" {
        return None;
    }
    let wide = bytes[6] > 1;
    let length = number(bytes, 8, if wide { 4 } else { 2 })?;
    let start = if wide { 12 } else { 10 };
    let header = std::str::from_utf8(bytes.get(start..start + length)?).ok()?;
    let extents = header.split("'shape': (").nth(1)?.split(')').next()?;
    let shape: Vec<usize> = extents.split(',').map(str::trim).filter(|e| !e.is_empty()).map(|e| e.parse().ok()).collect::<Option<_>>()?;
    let words = bytes.get(start + length..)?.chunks_exact(8).map(|w| <[u8; 8]>::try_from(w).unwrap_or_default());
    let values: Vec<f64> = if header.contains("<f8") {
        words.map(f64::from_le_bytes).collect()
    } else if header.contains("<i8") {
        words.map(|w| i64::from_le_bytes(w) as f64).collect()
    } else {
        return None;
    };
    (header.contains("'fortran_order': False") && values.len() == shape.iter().product::<usize>()).then_some(Array { shape, values })
}
