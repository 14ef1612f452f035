//! Ring attention (Liu et al. 2023): queries stay, keys and values go round.
//!
//! ```text
//! step 0        step 1        step 2        ...           backward
//! k v of me     of me - 1     of me - 2                   dk dv travel with k v, each rank adds,
//!   |    \        |    \        |                         and one hop after the last step they
//! attend  `-> next attend `-> next                        are home
//! ```
//!
//! While a step computes, its keys and values are on their way to the next rank. Forward carries
//! unnormalised sums in Acc, so the number of steps leaves no trace in the error; the fold order
//! of dk and dv begins at their owner and follows the ring.

use quintet_kernels::{
    Attention, AttentionSpec, Backend, Carry, Collectives, Pending, Queue, Scalar, Tag, Wire,
};

use super::attend::{Qkv, Sight};
use super::{TokenPlaces, alloc};
use crate::Error;

/// Keys and values, and their gradients, in separate streams of messages.
const KEYS: u64 = 0;
const GRADIENTS: u64 = 1;

struct Ring<'a, B, C> {
    device: &'a B,
    group: &'a C,
    me: usize,
    world: usize,
}

impl<'a, B: Backend, C: Collectives<B>> Ring<'a, B, C> {
    fn new(device: &'a B, group: &'a C) -> Self {
        Self {
            device,
            group,
            me: group.rank(),
            world: group.world(),
        }
    }

    /// Whose keys are here in a step.
    fn owner(&self, step: usize) -> usize {
        (self.me + self.world - step) % self.world
    }

    /// Starts giving `buf` to the next rank and taking what the one before gives.
    fn pass<T: Wire>(&self, tag: u64, buf: B::Buf<T>) -> Result<Passing<B, C, T>, Error> {
        let len = B::len(B::whole(&buf));
        let after = self.device.record(Queue::Compute);
        let (next, last) = (self.owner(self.world - 1), self.owner(1));
        let sent = self.group.start_send(next, tag, buf, after)?;
        let room = alloc::<B, T>(self.device, Tag::Comm, len)?;
        let taken = self.group.start_recv(last, tag, room)?;
        Ok(Passing { sent, taken })
    }

    /// Waits for both; what is taken comes first.
    fn passed<T: Wire>(&self, passing: Passing<B, C, T>) -> Result<(B::Buf<T>, B::Buf<T>), Error> {
        let taken = passing.taken.wait_on(self.device, Queue::Compute)?;
        Ok((taken, passing.sent.wait_on(self.device, Queue::Compute)?))
    }

    /// k and v side by side, as they travel.
    fn joined<T: Wire>(&self, k: B::Ref<'_, T>, v: B::Ref<'_, T>) -> Result<B::Buf<T>, Error> {
        let mut kv = alloc::<B, T>(self.device, Tag::Comm, 2 * B::len(k))?;
        let (to_k, to_v) = B::split_mut(B::whole_mut(&mut kv), B::len(k));
        self.device.copy(k, to_k)?;
        self.device.copy(v, to_v)?;
        Ok(kv)
    }

    /// Sends a copy on, in `spare` where there is one, so that this rank can go on reading.
    fn lend<T: Wire>(
        &self,
        kv: &B::Buf<T>,
        spare: Option<B::Buf<T>>,
    ) -> Result<Passing<B, C, T>, Error> {
        let mut copy = match spare {
            Some(spare) => spare,
            None => alloc::<B, T>(self.device, Tag::Comm, B::len(B::whole(kv)))?,
        };
        self.device.copy(B::whole(kv), B::whole_mut(&mut copy))?;
        self.pass(KEYS, copy)
    }
}

/// A buffer on its way out and one on its way in.
struct Passing<B: Backend, C: Collectives<B>, T: Wire> {
    sent: C::Pending<T>,
    taken: C::Pending<T>,
}

/// `o, lse` of my queries over all keys.
pub(super) fn forward<B: Attention, C: Collectives<B>, E: Scalar>(
    device: &B,
    group: &C,
    spec: &AttentionSpec,
    qkv: Qkv<'_, B, E>,
    held: &[TokenPlaces<B>],
) -> Result<(B::Buf<E>, B::Buf<E::Acc>), Error> {
    let ring = Ring::new(device, group);
    let (q_len, stats) = (B::len(qkv.q), spec.batch * spec.heads * spec.queries);
    let mut o_acc = alloc::<B, E::Acc>(device, Tag::Scratch, q_len)?;
    let mut max = alloc::<B, E::Acc>(device, Tag::Scratch, stats)?;
    let mut sum = device.zeros::<E::Acc>(Tag::Scratch, stats)?;
    let (mut kv, mut spare) = (ring.joined(qkv.k, qkv.v)?, None);
    for step in 0..ring.world {
        let passing = if step + 1 < ring.world {
            Some(ring.lend(&kv, spare.take())?)
        } else {
            None
        };
        let (k, v) = halves::<B, E>(B::whole(&kv));
        let places = Sight::new(held, ring.me, ring.owner(step))?.places();
        let carry = Carry {
            o_bshd: B::whole_mut(&mut o_acc),
            max_bhs: B::whole_mut(&mut max),
            sum_bhs: B::whole_mut(&mut sum),
        };
        device.attention_step::<E>(spec, (qkv.q, k, v), places, carry)?;
        if let Some(passing) = passing {
            let (taken, sent) = ring.passed(passing)?;
            (kv, spare) = (taken, Some(sent));
        }
    }
    drop((kv, spare));
    let mut o = alloc::<B, E>(device, Tag::Activation, q_len)?;
    let mut lse = alloc::<B, E::Acc>(device, Tag::Activation, stats)?;
    let carry = Carry {
        o_bshd: B::whole(&o_acc),
        max_bhs: B::whole(&max),
        sum_bhs: B::whole(&sum),
    };
    device.attention_finish::<E>(spec, carry, B::whole_mut(&mut o), B::whole_mut(&mut lse))?;
    Ok((o, lse))
}

/// `dq` of my queries and `[dk, dv]` of my keys, in Acc.
pub(super) fn backward<B: Attention, C: Collectives<B>, E: Scalar>(
    device: &B,
    group: &C,
    spec: &AttentionSpec,
    qkv: Qkv<'_, B, E>,
    held: &[TokenPlaces<B>],
    d_o: B::Ref<'_, E>,
    lse_delta: (B::Ref<'_, E::Acc>, B::Ref<'_, E::Acc>),
) -> Result<(B::Buf<E::Acc>, B::Buf<E::Acc>), Error> {
    let ring = Ring::new(device, group);
    let n = B::len(qkv.k);
    let mut dq = device.zeros::<E::Acc>(Tag::Activation, B::len(qkv.q))?;
    let mut dkv = device.zeros::<E::Acc>(Tag::Comm, 2 * n)?;
    let (mut kv, mut spare) = (ring.joined(qkv.k, qkv.v)?, None);
    for step in 0..ring.world {
        let passing = if step + 1 < ring.world {
            Some(ring.lend(&kv, spare.take())?)
        } else {
            None
        };
        let (k, v) = halves::<B, E>(B::whole(&kv));
        let places = Sight::new(held, ring.me, ring.owner(step))?.places();
        let (dk, dv) = B::split_mut(B::whole_mut(&mut dkv), n);
        let into = (B::whole_mut(&mut dq), dk, dv);
        device.attention_backward_step::<E>(spec, (qkv.q, k, v), places, d_o, lse_delta, into)?;
        // After the last step the next rank is the owner.
        (dkv, _) = ring.passed(ring.pass(GRADIENTS, dkv)?)?;
        if let Some(passing) = passing {
            let (taken, sent) = ring.passed(passing)?;
            (kv, spare) = (taken, Some(sent));
        }
    }
    Ok((dq, dkv))
}

fn halves<B: Backend, T: Wire>(kv: B::Ref<'_, T>) -> (B::Ref<'_, T>, B::Ref<'_, T>) {
    let (n, len) = (B::len(kv) / 2, B::len(kv));
    (B::slice(kv, 0..n), B::slice(kv, n..len))
}
