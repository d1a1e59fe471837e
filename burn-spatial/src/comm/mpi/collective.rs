//! The all-reduce.

use std::ops::Range;
use std::sync::Arc;

use burn_std::DType;

use super::DIRECT;
use super::engine::{Operation, started};
use super::exchange::{Exchange, Payload};
use super::group::Group;
use crate::comm::{CommError, ReduceOp, Signature, reduce};

/// An all-reduce under way; see the module's documentation.
pub(super) struct AllReduce {
    pub(super) group: Arc<Group>,
    pub(super) tag: u16,
    pub(super) data: Vec<u8>,
    pub(super) dtype: DType,
    pub(super) op: ReduceOp,
    pub(super) step: Step,
}

pub(super) enum Step {
    /// Whole buffers to and from all.
    Direct(Exchange),
    /// Pieces to their owners.
    Collect(Exchange),
    /// Reduced pieces to all.
    Share(Exchange),
    Done,
}

impl AllReduce {
    pub(super) fn start(group: &Arc<Group>, data: Vec<u8>, dtype: DType, op: ReduceOp) -> Result<Self, CommError> {
        let tag = group.next_tag();
        let mut exchange = Exchange::new(group, tag, Signature::all_reduce(data.len(), dtype, op));
        let mut reduction = AllReduce { group: group.clone(), tag, data, dtype, op, step: Step::Done };
        let direct = reduction.data.len() <= DIRECT;
        let mut begin = || {
            group.others().try_for_each(|from| exchange.receive(from))?;
            let start = reduction.data.as_ptr();
            // SAFETY: `data` is not touched before the exchange is done, and lives as long.
            unsafe {
                if direct {
                    return exchange.send(group.others(), start, reduction.data.len());
                }
                group.others().try_for_each(|to| {
                    let piece = reduction.piece(to);
                    exchange.send([to].into_iter(), start.add(piece.start), piece.len())
                })
            }
        };
        let result = begin();
        reduction.step = if direct { Step::Direct(exchange) } else { Step::Collect(exchange) };
        started(reduction, result)
    }

    /// The bytes that `rank` reduces: whole elements, near-equal shares.
    pub(super) fn piece(&self, rank: usize) -> Range<usize> {
        let (size, ranks) = (self.dtype.size(), self.group.members.len());
        let elements = self.data.len() / size;
        elements * rank / ranks * size..elements * (rank + 1) / ranks * size
    }

    /// Reduces `range` of the buffer with what came from the others.
    pub(super) fn reduce(&mut self, range: Range<usize>, mut exchange: Exchange) {
        let parts: Vec<Payload> = exchange.payloads().collect();
        let others: Vec<&[u8]> = parts.iter().map(|part| &part[..]).collect();
        reduce::reduce(&mut self.data[range], self.group.rank, &others, self.dtype, self.op);
    }

    pub(super) fn share(&mut self) -> Result<Exchange, CommError> {
        let signature = Signature::all_reduce(self.data.len(), self.dtype, self.op);
        let mut exchange = Exchange::new(&self.group, self.tag + 1, signature);
        let start = self.data.as_mut_ptr();
        let (group, own) = (&self.group, self.piece(self.group.rank));
        let mut begin = || {
            // SAFETY: pieces do not overlap; `data` is not touched before the exchange is done, and lives as long.
            unsafe {
                for from in group.others() {
                    let piece = self.piece(from);
                    exchange.receive_at(from, Some((start.add(piece.start), piece.len())))?;
                }
                exchange.send(group.others(), start.add(own.start), own.len())
            }
        };
        let result = begin();
        started(exchange, result)
    }

    pub(super) fn exchange(&self) -> Option<&Exchange> {
        match &self.step {
            Step::Direct(exchange) | Step::Collect(exchange) | Step::Share(exchange) => Some(exchange),
            Step::Done => None,
        }
    }
}

impl Operation for AllReduce {
    fn poll(&mut self) -> Result<bool, CommError> {
        let (Step::Direct(exchange) | Step::Collect(exchange) | Step::Share(exchange)) = &mut self.step else {
            return Ok(true);
        };
        if !exchange.poll()? {
            return Ok(false);
        }
        match std::mem::replace(&mut self.step, Step::Done) {
            Step::Direct(exchange) => self.reduce(0..self.data.len(), exchange),
            Step::Collect(exchange) => {
                self.reduce(self.piece(self.group.rank), exchange);
                self.step = Step::Share(self.share()?);
                return Ok(false);
            }
            Step::Share(_) | Step::Done => {}
        }
        Ok(true)
    }

    fn missing(&self) -> Vec<usize> {
        self.exchange().map(Operation::missing).unwrap_or_default()
    }

    fn take(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.data)
    }

    fn abandon(&mut self) {
        if let Step::Direct(exchange) | Step::Collect(exchange) | Step::Share(exchange) = &mut self.step {
            exchange.abandon();
        }
    }
}
