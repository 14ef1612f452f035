//! All-gather context parallelism (Llama 3): every rank sees all keys and values, in the order of
//! the sequence. KV blocks then begin where they begin on one device, and forward has its bits.

use alloc::vec;

use quintet_collectives::ReduceOp;
use quintet_kernels::{Attention, AttentionSpec, Backend, Collectives, Scalar, Tag, Wire};

use super::attend::{Qkv, Sight};
use super::{ContextPlaces, Cut, alloc};
use crate::Error;

/// What forward gives and leaves.
pub(super) struct Gathered<B: Backend, E: Scalar> {
    pub(super) o: B::Buf<E>,
    pub(super) lse: B::Buf<E::Acc>,
    /// Of whole sequences.
    pub(super) k: B::Buf<E>,
    pub(super) v: B::Buf<E>,
}

/// `o, lse` of my queries over all keys, and those keys.
pub(super) fn forward<B: Attention, C: Collectives<B>, E: Scalar>(
    device: &B,
    group: &C,
    spec: &AttentionSpec,
    qkv: Qkv<'_, B, E>,
    places: &ContextPlaces<B>,
) -> Result<Gathered<B, E>, Error> {
    let k = whole(device, group, spec, qkv.k)?;
    let v = whole(device, group, spec, qkv.v)?;
    let spec = over_all(spec, group.world());
    let mut o = alloc::<B, E>(device, Tag::Activation, B::len(qkv.q))?;
    let stats = spec.batch * spec.heads * spec.queries;
    let mut lse = alloc::<B, E::Acc>(device, Tag::Activation, stats)?;
    device.attention::<E>(
        &spec,
        (qkv.q, B::whole(&k), B::whole(&v)),
        Sight::of_all(places, group.rank())?.places(),
        B::whole_mut(&mut o),
        B::whole_mut(&mut lse),
    )?;
    Ok(Gathered { o, lse, k, v })
}

/// `dq` of my queries and `[dk, dv]` of my keys, in Acc; `qkv` holds the keys of whole sequences.
pub(super) fn backward<B: Attention, C: Collectives<B>, E: Scalar>(
    device: &B,
    group: &C,
    spec: &AttentionSpec,
    qkv: Qkv<'_, B, E>,
    places: &ContextPlaces<B>,
    d_o: B::Ref<'_, E>,
    lse_delta: (B::Ref<'_, E::Acc>, B::Ref<'_, E::Acc>),
) -> Result<(B::Buf<E::Acc>, B::Buf<E::Acc>), Error> {
    let all = over_all(spec, group.world());
    let (len, mine) = (B::len(qkv.k), B::len(qkv.k) / group.world());
    let mut dq = device.zeros::<E::Acc>(Tag::Activation, B::len(qkv.q))?;
    let mut dk = device.zeros::<E::Acc>(Tag::Comm, len)?;
    let mut dv = device.zeros::<E::Acc>(Tag::Comm, len)?;
    device.attention_backward_step::<E>(
        &all,
        (qkv.q, qkv.k, qkv.v),
        Sight::of_all(places, group.rank())?.places(),
        d_o,
        lse_delta,
        (
            B::whole_mut(&mut dq),
            B::whole_mut(&mut dk),
            B::whole_mut(&mut dv),
        ),
    )?;
    let mut dkv = alloc::<B, E::Acc>(device, Tag::Comm, 2 * mine)?;
    let (to_k, to_v) = B::split_mut(B::whole_mut(&mut dkv), mine);
    let counts = vec![mine; group.world()];
    for (d_all, to) in [(dk, to_k), (dv, to_v)] {
        let mut by_rank = alloc::<B, E::Acc>(device, Tag::Comm, len)?;
        let cut = Cut::new(spec.batch, group.world(), mine);
        cut.by_rank(device, B::whole(&d_all), B::whole_mut(&mut by_rank))?;
        group.reduce_scatter(B::whole(&by_rank), &counts, to, ReduceOp::Sum)?;
    }
    Ok((dq, dkv))
}

/// `x` of whole sequences, in order.
fn whole<B: Backend, C: Collectives<B>, T: Wire>(
    device: &B,
    group: &C,
    spec: &AttentionSpec,
    x: B::Ref<'_, T>,
) -> Result<B::Buf<T>, Error> {
    let (part, world) = (B::len(x), group.world());
    let mut parts = alloc::<B, T>(device, Tag::Comm, world * part)?;
    group.all_gather(x, &vec![part; world], B::whole_mut(&mut parts))?;
    let mut all = alloc::<B, T>(device, Tag::Activation, world * part)?;
    let cut = Cut::new(spec.batch, world, part);
    cut.into_order(device, B::whole(&parts), B::whole_mut(&mut all))?;
    Ok(all)
}

fn over_all(spec: &AttentionSpec, world: usize) -> AttentionSpec {
    AttentionSpec {
        keys: spec.keys * world,
        ..*spec
    }
}
