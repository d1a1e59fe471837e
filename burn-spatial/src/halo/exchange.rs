//! Moves boxes as a [`Plan`] says, forward (send, receive, copy) and in reverse (receive and add).

use burn_backend::{Backend, DType, TensorData, TensorMetadata};
use burn_std::{Shape, Slice};

use super::plan::{Message, Plan, Region};
use crate::comm::{Comm, CommError, Request};
use crate::kind::{Kind, Numeric};
use crate::mesh::Mesh;

/// Tag of messages that carry boxes forward.
const FORWARD: u16 = 1;
/// Tag of messages that carry them back.
const REVERSE: u16 = 2;

pub(crate) fn slices(region: &Region) -> Vec<Slice> {
    region.start.iter().zip(&region.length).map(|(start, length)| Slice::new(*start as isize, Some((start + length) as isize), 1)).collect()
}

fn pack<B: Backend, K: Kind<B>>(block: &K::Primitive, message: &Message) -> Vec<u8> {
    let mut bytes = Vec::new();
    for region in &message.regions {
        bytes.extend_from_slice(K::into_data(K::slice(block.clone(), &slices(region))).as_bytes());
    }
    bytes
}

/// Starts all receives, then all sends.
#[allow(clippy::type_complexity)]
fn post(
    comm: &Comm,
    tag: u16,
    sends: Vec<(usize, Vec<u8>)>,
    receives: Vec<(usize, usize)>,
) -> Result<(Vec<Box<dyn Request>>, Vec<Box<dyn Request>>), CommError> {
    let incoming = receives.into_iter().map(|(peer, bytes)| comm.start_recv(peer, tag, bytes)).collect::<Result<_, _>>()?;
    let outgoing = sends.into_iter().map(|(peer, bytes)| comm.start_send(peer, tag, bytes)).collect::<Result<_, _>>()?;
    Ok((incoming, outgoing))
}

/// Hands each box of a received message to `place`.
fn unpack<B: Backend, K: Kind<B>>(
    bytes: Vec<u8>,
    message: &Message,
    dtype: DType,
    device: &B::Device,
    mut place: impl FnMut(&Region, K::Primitive),
) {
    let mut rest = &bytes[..];
    for region in &message.regions {
        let (this, next) = rest.split_at(region.elements() * dtype.size());
        rest = next;
        let data = TensorData::from_bytes_vec(this.to_vec(), Shape::from(region.length.clone()), dtype);
        place(region, K::from_data(data, device));
    }
}

/// Messages of an exchange on their way.
pub struct Exchange<'a> {
    plan: &'a Plan,
    dtype: DType,
    incoming: Vec<Box<dyn Request>>,
    outgoing: Vec<Box<dyn Request>>,
}

impl<'a> Exchange<'a> {
    /// Sends what others need of this rank's own block. Every rank of the plan's group starts the exchange, and in the
    /// end receives.
    ///
    /// # Errors
    /// As the communicator.
    pub fn start<B: Backend, K: Kind<B>>(mesh: &Mesh, plan: &'a Plan, own: &K::Primitive) -> Result<Exchange<'a>, CommError> {
        let dtype = own.dtype();
        let (mut incoming, mut outgoing) = (Vec::new(), Vec::new());
        if let Some(comm) = mesh.group(plan.group) {
            let sends = plan.sends.iter().map(|m| (m.peer, pack::<B, K>(own, m))).collect();
            let receives = plan.receives.iter().map(|m| (m.peer, m.elements() * dtype.size())).collect();
            (incoming, outgoing) = post(comm, FORWARD, sends, receives)?;
        }
        Ok(Exchange { plan, dtype, incoming, outgoing })
    }

    /// Lets messages make progress, between pieces of other work.
    ///
    /// # Errors
    /// As the communicator.
    pub fn progress(&mut self) -> Result<(), CommError> {
        self.incoming.iter_mut().chain(&mut self.outgoing).try_for_each(|request| request.test().map(drop))
    }

    /// Waits for all messages; hands each box to `place` with where it lies in the needed block.
    ///
    /// # Errors
    /// As the communicator.
    pub fn receive<B: Backend, K: Kind<B>>(
        self,
        device: &B::Device,
        mut place: impl FnMut(&Region, K::Primitive),
    ) -> Result<(), CommError> {
        for (request, message) in self.incoming.into_iter().zip(&self.plan.receives) {
            unpack::<B, K>(request.wait()?, message, self.dtype, device, &mut place);
        }
        self.outgoing.into_iter().try_for_each(|request| request.wait().map(drop))
    }
}

/// From this rank's own block to the block it needs. Collective over the plan's group.
pub fn exchange<B: Backend, K: Kind<B>>(
    mesh: &Mesh,
    plan: &Plan,
    own: K::Primitive,
    device: &B::Device,
) -> Result<K::Primitive, CommError> {
    if plan.is_identity() {
        return Ok(own);
    }
    let dtype = own.dtype();
    let messages = Exchange::start::<B, K>(mesh, plan, &own)?;
    // One kept box and nothing to receive is a view.
    if let ([(from, to)], true) = (&plan.keeps[..], plan.receives.is_empty())
        && to.length == plan.block
    {
        let view = K::slice(own, &slices(from));
        messages.receive::<B, K>(device, |_, _| {})?;
        return Ok(view);
    }
    let mut block = K::zeros(Shape::from(plan.block.clone()), device, dtype);
    for (from, to) in &plan.keeps {
        block = K::slice_assign(block, &slices(to), K::slice(own.clone(), &slices(from)));
    }
    let mut target = Some(block);
    messages.receive::<B, K>(device, |region, part| {
        let block = target.take().expect("put back after every box");
        target = Some(K::slice_assign(block, &slices(region), part));
    })?;
    Ok(target.expect("put back after every box"))
}

/// The adjoint of [`exchange`]: adds every part of the needed block to the shard it came from. Sums are made in the
/// order own, then peers ascending. Collective over the plan's group.
pub fn exchange_add<B: Backend, K: Numeric<B>>(
    mesh: &Mesh,
    plan: &Plan,
    block: K::Primitive,
    device: &B::Device,
) -> Result<K::Primitive, CommError> {
    if plan.is_identity() {
        return Ok(block);
    }
    let dtype = block.dtype();
    let mut requests = None;
    if let Some(comm) = mesh.group(plan.group) {
        let sends = plan.receives.iter().map(|m| (m.peer, pack::<B, K>(&block, m))).collect();
        let receives = plan.sends.iter().map(|m| (m.peer, m.elements() * dtype.size())).collect();
        requests = Some(post(comm, REVERSE, sends, receives)?);
    }
    let mut own = match &plan.keeps[..] {
        // The usual case: one part covers the whole shard.
        [(to, from)] if to.length == plan.own => K::slice(block, &slices(from)),
        keeps => {
            let mut own = K::zeros(Shape::from(plan.own.clone()), device, dtype);
            for (to, from) in keeps {
                own = add_into::<B, K>(own, to, K::slice(block.clone(), &slices(from)));
            }
            own
        }
    };
    if let Some((incoming, outgoing)) = requests {
        for (request, message) in incoming.into_iter().zip(&plan.sends) {
            let mut target = Some(own);
            unpack::<B, K>(request.wait()?, message, dtype, device, |region, part| {
                let own = target.take().expect("put back after every box");
                target = Some(add_into::<B, K>(own, region, part));
            });
            own = target.expect("put back after every box");
        }
        for request in outgoing {
            request.wait()?;
        }
    }
    Ok(own)
}

fn add_into<B: Backend, K: Numeric<B>>(target: K::Primitive, region: &Region, part: K::Primitive) -> K::Primitive {
    let at = slices(region);
    let sum = K::add(K::slice(target.clone(), &at), part);
    K::slice_assign(target, &at, sum)
}
