//! What the first message of a payload tells.

use burn_std::{BoolStore, DType};

use crate::comm::{Kind, ReduceOp, Signature};

/// Bytes of the header: kind, type, operation, whether the signature has a length; from byte 4 the tag of the rest,
/// from 8 that length, from 16 the payload's, from 24 one more than the payload's place in the node's memory.
pub(super) const HEADER: usize = 32;

/// The types a header can name, by their place.
const TYPES: [DType; 16] = [
    DType::F64,
    DType::F32,
    DType::Flex32,
    DType::F16,
    DType::BF16,
    DType::I64,
    DType::I32,
    DType::I16,
    DType::I8,
    DType::U64,
    DType::U32,
    DType::U16,
    DType::U8,
    DType::Bool(BoolStore::Native),
    DType::Bool(BoolStore::U8),
    DType::Bool(BoolStore::U32),
];

const OPS: [ReduceOp; 6] = [ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Max, ReduceOp::Min, ReduceOp::And, ReduceOp::Or];

/// What the first message of a payload tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) signature: Signature,
    /// The tag of what does not fit the first message.
    pub(super) rest: u16,
    /// Bytes of the payload.
    pub(super) len: usize,
    /// Where it lies in the sender's part of the node's memory, if it does.
    pub(super) block: Option<usize>,
}

/// The header as sent. Code 0 stands for none.
pub(super) fn encode(Header { signature, rest, len, block }: Header) -> [u8; HEADER] {
    let code = |place: Option<usize>| place.map_or(0, |place| place as u8 + 1);
    let mut bytes = [0; HEADER];
    bytes[0] = signature.kind as u8;
    if let Some((dtype, op)) = signature.reduce {
        bytes[1] = code(TYPES.iter().position(|found| *found == dtype));
        bytes[2] = code(OPS.iter().position(|found| *found == op));
    }
    bytes[3] = u8::from(signature.len.is_some());
    bytes[4..6].copy_from_slice(&rest.to_le_bytes());
    bytes[8..16].copy_from_slice(&(signature.len.unwrap_or(0) as u64).to_le_bytes());
    bytes[16..24].copy_from_slice(&(len as u64).to_le_bytes());
    bytes[24..].copy_from_slice(&block.map_or(0, |block| block as u64 + 1).to_le_bytes());
    bytes
}

/// What [`encode`] made; `None` for anything else.
pub(super) fn decode(bytes: &[u8]) -> Option<Header> {
    let bytes = bytes.first_chunk::<HEADER>()?;
    let number = |at: usize| Some(u64::from_le_bytes(*bytes[at..].first_chunk()?) as usize);
    let dtype = usize::from(bytes[1]).checked_sub(1).and_then(|place| TYPES.get(place));
    let op = usize::from(bytes[2]).checked_sub(1).and_then(|place| OPS.get(place));
    let signature = Signature {
        kind: *Kind::ALL.get(usize::from(bytes[0]))?,
        reduce: dtype.copied().zip(op.copied()),
        len: if bytes[3] == 1 { Some(number(8)?) } else { None },
    };
    let rest = u16::from_le_bytes([bytes[4], bytes[5]]);
    Some(Header { signature, rest, len: number(16)?, block: number(24)?.checked_sub(1) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_round_trip() {
        for dtype in TYPES {
            for op in OPS {
                let signature = Signature::all_reduce(5 << 32, dtype, op);
                let header = Header { signature, rest: 999, len: 77, block: Some(6 << 30) };
                assert_eq!(decode(&encode(header)), Some(header));
            }
        }
        let barrier = Header { signature: Signature::of(Kind::Barrier), rest: 0, len: 0, block: None };
        assert_eq!(decode(&encode(barrier)), Some(barrier));
        assert_eq!(decode(&[0; HEADER - 1]), None);
    }
}
