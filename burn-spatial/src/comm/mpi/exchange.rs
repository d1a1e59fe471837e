//! Payloads to and from several ranks: one step of a collective, or one message of the user.

use std::ops::Deref;
use std::sync::Arc;

use super::engine::{Handle, Operation};
use super::group::Group;
use super::header::{HEADER, Header, decode, encode};
use super::transfer::Transfer;
use crate::comm::node::Shelved;
use crate::comm::{CommError, Kind, Signature};
use crate::copies::copied;

/// Payload that travels in the first message, with the header: both together fit the 4 KiB that Open MPI sends at
/// once between processes of a node.
const INLINE: usize = 4000;

/// A message of the user: an exchange in one direction, and its buffer.
pub(super) struct Message {
    pub(super) exchange: Exchange,
    pub(super) buffer: Vec<u8>,
    pub(super) len: usize,
}

impl Operation for Message {
    fn poll(&mut self) -> Result<bool, CommError> {
        let done = self.exchange.poll()?;
        if done {
            // SAFETY: a sent buffer has this length, a received one is full.
            unsafe { self.buffer.set_len(self.len) };
        }
        Ok(done)
    }

    fn missing(&self) -> Vec<usize> {
        self.exchange.missing()
    }

    fn take(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.buffer)
    }

    fn abandon(&mut self) {
        self.exchange.abandon();
    }
}

/// What one rank sent.
pub(super) enum Payload {
    Own(Vec<u8>),
    Shelved(Shelved),
}

impl Deref for Payload {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Payload::Own(bytes) => bytes,
            Payload::Shelved(bytes) => bytes,
        }
    }
}

impl Payload {
    pub(super) fn into_vec(self) -> Vec<u8> {
        match self {
            Payload::Own(bytes) => bytes,
            Payload::Shelved(bytes) => {
                copied(bytes.len());
                bytes.to_vec()
            }
        }
    }
}

/// Payloads to some ranks and from some ranks: one step of a collective, or one message.
pub(super) struct Exchange {
    pub(super) group: Arc<Group>,
    /// Where first messages go.
    pub(super) first: (Handle, u16),
    /// Where the rest of what this rank sends goes.
    pub(super) rest: (Handle, u16),
    pub(super) signature: Signature,
    pub(super) sends: Vec<Transfer>,
    /// First messages under way, and payloads that belong to the exchange.
    pub(super) kept: Vec<Vec<u8>>,
    pub(super) incoming: Vec<Incoming>,
}

/// A payload from one rank.
pub(super) struct Incoming {
    pub(super) from: usize,
    /// The header and the beginning of the payload.
    pub(super) first: Vec<u8>,
    pub(super) head: Transfer,
    pub(super) body: Option<Transfer>,
    /// Where the payload goes: given by the caller with its length, or `data`.
    pub(super) place: Option<(*mut u8, usize)>,
    pub(super) data: Vec<u8>,
    /// The payload, if it lies in the sender's part of the node's memory.
    pub(super) shelved: Option<Shelved>,
    pub(super) done: bool,
}

// SAFETY: the pointer is used by whoever holds the lock of the operation that owns its buffer.
unsafe impl Send for Incoming {}

impl Exchange {
    /// A step of the collective with this tag.
    pub(super) fn new(group: &Arc<Group>, tag: u16, signature: Signature) -> Self {
        let at = (group.own, tag);
        Self::at(group, at, at, signature)
    }

    /// A message of the user.
    pub(super) fn message(group: &Arc<Group>, tag: u16) -> Self {
        let rest = (group.rest, group.next_rest_tag());
        Self::at(group, (group.user, tag), rest, Signature::of(Kind::PointToPoint))
    }

    pub(super) fn at(group: &Arc<Group>, first: (Handle, u16), rest: (Handle, u16), signature: Signature) -> Self {
        let (sends, kept, incoming) = Default::default();
        Exchange { group: group.clone(), first, rest, signature, sends, kept, incoming }
    }

    /// Payload bytes in the first message, which is shorter than the cap.
    pub(super) fn inline(&self) -> usize {
        INLINE.min(self.group.engine.cap - 1 - HEADER)
    }

    /// Starts to send `len` bytes at `data` to the ranks `to`.
    ///
    /// # Safety
    /// The bytes must stay in place and unchanged until the exchange is done, or be leaked with it.
    pub(super) unsafe fn send(&mut self, to: impl Iterator<Item = usize>, data: *const u8, len: usize) -> Result<(), CommError> {
        let inline = self.inline().min(len);
        let mut far: Vec<usize> = to.collect();
        let header = Header { signature: self.signature, rest: self.rest.1, len, block: None };
        if len > inline
            && let Some(node) = &self.group.engine.node
        {
            let on_node = |to: &usize| node.holds(self.group.members[*to]);
            let near: Vec<usize> = far.iter().copied().filter(on_node).collect();
            // SAFETY: the caller's promise.
            let bytes = unsafe { std::slice::from_raw_parts(data, len) };
            let block = if near.is_empty() { None } else { node.put(bytes, near.len() as u32) };
            if block.is_some() {
                far.retain(|to| !on_node(to));
                let told = encode(Header { block, ..header }).to_vec();
                // SAFETY: nothing follows the first message.
                unsafe { self.send_first(&near, told, data, 0)? };
            }
        }
        if far.is_empty() {
            return Ok(());
        }
        let mut first = encode(header).to_vec();
        // SAFETY: inline <= len; the caller vouches for the rest.
        unsafe {
            first.extend_from_slice(std::slice::from_raw_parts(data, inline));
            self.send_first(&far, first, data.add(inline), len - inline)
        }
    }

    /// Starts to send `first`, and `len` bytes at `rest` after it.
    ///
    /// # Safety
    /// As for [`Exchange::send`].
    pub(super) unsafe fn send_first(&mut self, to: &[usize], first: Vec<u8>, rest: *const u8, len: usize) -> Result<(), CommError> {
        let (start, bytes) = (first.as_ptr(), first.len());
        self.kept.push(first);
        for to in to {
            // SAFETY: `kept` holds the first message; the caller vouches for the rest.
            unsafe {
                self.transfer(self.first, *to, start, bytes)?;
                if len > 0 {
                    self.transfer(self.rest, *to, rest, len)?;
                }
            }
        }
        Ok(())
    }

    /// # Safety
    /// As for [`Exchange::send`].
    pub(super) unsafe fn transfer(&mut self, at: (Handle, u16), to: usize, data: *const u8, len: usize) -> Result<(), CommError> {
        let group = &self.group;
        // SAFETY: the caller's promise. MPI's interface takes a mutable pointer for both ways, and does not write here.
        let send = unsafe { Transfer::start(group, at, to, data.cast_mut(), len, false)? };
        self.sends.push(send);
        Ok(())
    }

    /// Starts to send `data`, which the exchange keeps, to the ranks `to`.
    pub(super) fn send_kept(&mut self, to: impl Iterator<Item = usize>, data: Vec<u8>) -> Result<(), CommError> {
        let (start, len) = (data.as_ptr(), data.len());
        self.kept.push(data);
        // SAFETY: `kept` holds the bytes as long as the exchange lives.
        unsafe { self.send(to, start, len) }
    }

    /// Starts to receive from `from`, to a buffer of the exchange's own.
    pub(super) fn receive(&mut self, from: usize) -> Result<(), CommError> {
        // SAFETY: no place is given.
        unsafe { self.receive_at(from, None) }
    }

    /// Starts to receive from `from`, to `place`: an address and a length.
    ///
    /// # Safety
    /// The place must stay valid, and nobody may touch it, until the exchange is done, or be leaked with it.
    pub(super) unsafe fn receive_at(&mut self, from: usize, place: Option<(*mut u8, usize)>) -> Result<(), CommError> {
        let room = HEADER + self.inline();
        let mut first = Vec::with_capacity(room);
        let group = &self.group;
        // SAFETY: the buffer has the room and moves into `incoming`; one message starts or does not.
        let head = unsafe { Transfer::start(group, self.first, from, first.as_mut_ptr(), room, true)? };
        let (body, data, shelved) = Default::default();
        self.incoming.push(Incoming { from, first, head, body, place, data, shelved, done: false });
        Ok(())
    }

    pub(super) fn poll(&mut self) -> Result<bool, CommError> {
        let mut done = true;
        let inline = self.inline();
        for incoming in &mut self.incoming {
            done &= incoming.poll(&self.group, self.rest.0, self.signature, inline)?;
        }
        for send in &mut self.sends {
            done &= send.poll()?;
        }
        Ok(done)
    }

    /// What came, in the order of the calls to [`Exchange::receive`].
    pub(super) fn payloads(&mut self) -> impl Iterator<Item = Payload> {
        self.incoming.drain(..).map(|incoming| incoming.shelved.map_or(Payload::Own(incoming.data), Payload::Shelved))
    }
}

impl Operation for Exchange {
    fn poll(&mut self) -> Result<bool, CommError> {
        Exchange::poll(self)
    }

    fn missing(&self) -> Vec<usize> {
        let late = self.incoming.iter().filter(|incoming| !incoming.done);
        let mut ranks: Vec<usize> = late.map(|incoming| incoming.head.peer).collect();
        if ranks.is_empty() {
            ranks = self.sends.iter().filter(|send| !send.is_done()).map(|send| send.peer).collect();
            ranks.dedup();
        }
        ranks
    }

    fn take(&mut self) -> Vec<u8> {
        Vec::new()
    }

    fn abandon(&mut self) {
        for incoming in &mut self.incoming {
            incoming.head.abandon();
            incoming.body.iter_mut().for_each(Transfer::abandon);
        }
        self.sends.iter_mut().for_each(Transfer::abandon);
    }
}

impl Incoming {
    pub(super) fn poll(&mut self, group: &Group, rest: Handle, expected: Signature, inline: usize) -> Result<bool, CommError> {
        if self.done {
            return Ok(true);
        }
        if self.body.is_none() {
            if !self.head.poll()? {
                return Ok(false);
            }
            // SAFETY: MPI has written this many bytes.
            unsafe { self.first.set_len(self.head.got) };
            let (rank, from) = (self.head.rank, self.head.peer);
            let Some(Header { signature, rest: tag, len, block }) = decode(&self.first) else {
                return Err(CommError::Length { rank, from, expected: HEADER, got: self.first.len() });
            };
            expected.check(rank, signature, from)?;
            if let Some((_, room)) = self.place.filter(|(_, room)| *room != len) {
                return Err(CommError::Length { rank, from, expected: room, got: len });
            }
            if let Some(block) = block {
                // SAFETY: the sender's header tells where it put the block, once to each reader.
                let shelved = group.engine.node.as_ref().and_then(|node| unsafe { node.get(from, block, len) });
                let Some(shelved) = shelved else { return Err(CommError::Length { rank, from, expected: 0, got: len }) };
                if let Some((start, _)) = self.place {
                    copied(len);
                    // SAFETY: there is room for len bytes.
                    unsafe { start.copy_from_nonoverlapping(shelved.as_ptr(), len) };
                } else {
                    self.shelved = Some(shelved);
                }
                self.done = true;
                return Ok(true);
            }
            let start = match self.place {
                None => {
                    self.data.reserve_exact(len);
                    self.data.as_mut_ptr()
                }
                Some((start, _)) => start,
            };
            let early = &self.first[HEADER..];
            if early.len() != len.min(inline) {
                return Err(CommError::Length { rank, from, expected: len.min(inline), got: early.len() });
            }
            // SAFETY: there is room for len bytes, of which the first message holds the beginning.
            unsafe { start.copy_from_nonoverlapping(early.as_ptr(), early.len()) };
            if len > inline {
                // SAFETY: the same room; `data` or the owner of `place` lives as long as this.
                let body = unsafe { Transfer::start(group, (rest, tag), self.from, start.add(inline), len - inline, true)? };
                self.body = Some(body);
            } else if self.place.is_none() {
                // SAFETY: all len bytes were in the first message.
                unsafe { self.data.set_len(len) };
            }
            self.done = len <= inline;
        }
        if let Some(body) = &mut self.body
            && body.poll()?
        {
            if self.place.is_none() {
                // SAFETY: the first message and the body are all of it.
                unsafe { self.data.set_len(inline + body.got) };
            }
            self.done = true;
        }
        Ok(self.done)
    }
}
