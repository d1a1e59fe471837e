//! Moves boxes as a [`Plan`] says, forward (send, receive, copy) and in reverse (receive and add).

use burn_backend::{DType, TensorData, TensorMetadata};
use burn_std::{Shape, Slice};

use super::plan::{Message, Plan, Region};
use crate::comm::{CommError, Request};
use crate::copies::copied;
use crate::kernels::LocalKernels;
use crate::kind::{Kind, Numeric};
use crate::mesh::{AxisSet, Mesh};
use crate::trace::timed;

/// Tag of messages that carry boxes forward.
const FORWARD: u16 = 1;
/// Tag of messages that carry them back.
const REVERSE: u16 = 2;

pub(crate) fn slices(region: &Region) -> Vec<Slice> {
    region.start.iter().zip(&region.length).map(|(start, length)| Slice::new(*start as isize, Some((start + length) as isize), 1)).collect()
}

/// The bytes of a message, of whose boxes `part` gives the values.
fn pack<B: LocalKernels, K: Kind<B>>(message: &Message, dtype: DType, mut part: impl FnMut(&Region) -> K::Primitive) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(message.elements() * dtype.size());
    copied(bytes.capacity());
    for region in &message.regions {
        bytes.extend_from_slice(K::into_data(part(region)).as_bytes());
    }
    bytes
}

/// The boxes of a received message.
fn unpack<B: LocalKernels, K: Kind<B>>(bytes: Vec<u8>, message: &Message, dtype: DType, device: &B::Device) -> Vec<(Region, K::Primitive)> {
    let of = |region: &Region, bytes: Vec<u8>| {
        let data = TensorData::from_bytes_vec(bytes, Shape::from(region.length.clone()), dtype);
        (region.clone(), K::from_data(data, device))
    };
    if let [region] = &message.regions[..] {
        return vec![of(region, bytes)];
    }
    let mut rest = &bytes[..];
    let mut parts = Vec::with_capacity(message.regions.len());
    for region in &message.regions {
        let (this, next) = rest.split_at(region.elements() * dtype.size());
        rest = next;
        copied(this.len());
        parts.push(of(region, this.to_vec()));
    }
    parts
}

/// Messages of an exchange on their way.
pub struct Exchange<'a> {
    dtype: DType,
    expected: &'a [Message],
    incoming: Vec<Box<dyn Request>>,
    outgoing: Vec<Box<dyn Request>>,
}

impl<'a> Exchange<'a> {
    /// Sends what others need of this rank's own block. Every rank of the plan's group starts the exchange, and in the
    /// end receives.
    ///
    /// # Errors
    /// As the communicator.
    pub fn start<B: LocalKernels, K: Kind<B>>(mesh: &Mesh, plan: &'a Plan, own: &K::Primitive) -> Result<Exchange<'a>, CommError> {
        let dtype = own.dtype();
        let part = |region: &Region| {
            // Of a view a dense tensor is made first.
            copied(region.elements() * dtype.size());
            K::slice(own.clone(), &slices(region))
        };
        Exchange::with::<B, K>(mesh, plan.group, FORWARD, dtype, [&plan.sends, &plan.receives], part)
    }

    /// Starts an exchange of the messages `[sent, expected]`, of whose boxes `part` gives the values.
    fn with<B: LocalKernels, K: Kind<B>>(
        mesh: &Mesh,
        group: AxisSet,
        tag: u16,
        dtype: DType,
        [sent, expected]: [&'a [Message]; 2],
        mut part: impl FnMut(&Region) -> K::Primitive,
    ) -> Result<Exchange<'a>, CommError> {
        let mut messages = Exchange { dtype, expected, incoming: Vec::new(), outgoing: Vec::new() };
        if let Some(comm) = mesh.group(group) {
            for message in expected {
                messages.incoming.push(comm.start_recv(message.peer, tag, message.elements() * dtype.size())?);
            }
            for message in sent {
                let bytes = pack::<B, K>(message, dtype, &mut part);
                messages.outgoing.push(comm.start_send(message.peer, tag, bytes)?);
            }
        }
        Ok(messages)
    }

    /// Lets messages make progress, between pieces of other work.
    ///
    /// # Errors
    /// As the communicator.
    pub fn progress(&mut self) -> Result<(), CommError> {
        self.incoming.iter_mut().chain(&mut self.outgoing).try_for_each(|request| request.test().map(drop))
    }

    /// Waits for all messages; each box with where it lies in the block.
    ///
    /// # Errors
    /// As the communicator.
    pub fn receive<B: LocalKernels, K: Kind<B>>(self, device: &B::Device) -> Result<Vec<(Region, K::Primitive)>, CommError> {
        let mut parts = Vec::new();
        for (request, message) in self.incoming.into_iter().zip(self.expected) {
            parts.extend(unpack::<B, K>(wait(request)?, message, self.dtype, device));
        }
        self.outgoing.into_iter().try_for_each(|request| wait(request).map(drop))?;
        Ok(parts)
    }
}

/// What an exchange brings.
pub(crate) enum Arrival<'a, T> {
    /// It has arrived.
    Here(T),
    /// It is on its way.
    Coming(Exchange<'a>),
}

impl<'a, T> Arrival<'a, T> {
    /// What has arrived; `receive` waits for the rest.
    pub fn get(self, receive: impl FnOnce(Exchange<'a>) -> T) -> T {
        match self {
            Arrival::Here(received) => received,
            Arrival::Coming(messages) => receive(messages),
        }
    }
}

/// The box `wanted` of the block that `plan` needs, from this rank's own block and the boxes it has `received`.
pub fn assemble<B: LocalKernels, K: Kind<B>>(
    plan: &Plan,
    own: &K::Primitive,
    received: &[(Region, K::Primitive)],
    wanted: &Region,
    device: &B::Device,
) -> K::Primitive {
    let kept = plan.keeps.iter().map(|(from, to)| (from.start.clone(), to, own));
    let sources = kept.chain(received.iter().map(|(to, part)| (vec![0; to.start.len()], to, part)));
    let zeros = || K::zeros(Shape::from(wanted.length.clone()), device, own.dtype());
    let mut block = None;
    for (from, to, source) in sources {
        let Some((there, here)) = wanted.common(to) else { continue };
        // `there` counts from the start of the source's box.
        let start = there.start.iter().zip(from).map(|(a, b)| a + b).collect();
        let part = K::slice(source.clone(), &slices(&Region { start, length: there.length }));
        if here.length == wanted.length {
            return part;
        }
        block = Some(K::slice_assign(block.take().unwrap_or_else(zeros), &slices(&here), part));
    }
    block.unwrap_or_else(zeros)
}

/// From this rank's own block to the block it needs. Collective over the plan's group.
///
/// # Errors
/// As the communicator.
pub fn exchange<B: LocalKernels, K: Kind<B>>(
    mesh: &Mesh,
    plan: &Plan,
    own: K::Primitive,
    device: &B::Device,
) -> Result<K::Primitive, CommError> {
    if plan.is_identity() {
        return Ok(own);
    }
    let messages = Exchange::start::<B, K>(mesh, plan, &own)?;
    let received = messages.receive::<B, K>(device)?;
    Ok(assemble::<B, K>(plan, &own, &received, &plan.needed(), device))
}

/// The adjoint of [`exchange`]: adds every part of the needed block to the shard it came from. `part` gives the values in a
/// box of that block: those of other ranks first, which are on their way while it makes this rank's own (with `overlap`
/// false they have arrived before). Sums are made in the order own, then peers ascending. Collective over the plan's group.
///
/// # Errors
/// As the communicator.
pub fn exchange_add<B: LocalKernels, K: Numeric<B>>(
    mesh: &Mesh,
    plan: &Plan,
    dtype: DType,
    device: &B::Device,
    overlap: bool,
    mut part: impl FnMut(&Region) -> K::Primitive,
) -> Result<K::Primitive, CommError> {
    let messages = Exchange::with::<B, K>(mesh, plan.group, REVERSE, dtype, [&plan.receives, &plan.sends], &mut part)?;
    let receive = |messages: Exchange<'_>| messages.receive::<B, K>(device);
    let received = if overlap { Arrival::Coming(messages) } else { Arrival::Here(receive(messages)) };
    // Of the boxes that this rank has itself one mostly covers the shard.
    let whole = plan.keeps.iter().position(|(to, _)| to.length == plan.own);
    let own = match whole {
        Some(i) => part(&plan.keeps[i].1),
        None => K::zeros(Shape::from(plan.own.clone()), device, dtype),
    };
    let others = plan.keeps.iter().enumerate().filter(|(i, _)| Some(*i) != whole);
    let own = others.fold(own, |own, (_, (to, from))| K::slice_add(own, &slices(to), part(from)));
    let received = received.get(receive)?;
    timed!(HALO, "add");
    Ok(received.into_iter().fold(own, |own, (region, part)| K::slice_add(own, &slices(&region), part)))
}

fn wait(request: Box<dyn Request>) -> Result<Vec<u8>, CommError> {
    timed!(HALO, "wait");
    request.wait()
}
