//! Attention of the tokens here, over all keys of their sequences, wherever those lie.

use quintet_kernels::{
    Attention, AttentionSpec, Backend, Collectives, HeadDropout, Places, Pointwise, Scalar, Tag,
};

use super::heads::{Exchange, heads_each};
use super::{ContextPlaces, TokenPlaces, alloc, gather, place, ring, stored};
use crate::{Ctx, Error, MicroBatch};

/// Views of queries, keys and values.
pub(super) struct Qkv<'a, B: Backend, E: Scalar> {
    pub(super) q: B::Ref<'a, E>,
    pub(super) k: B::Ref<'a, E>,
    pub(super) v: B::Ref<'a, E>,
}

/// What forward saves: q, k, v and o as the kernels saw them.
#[derive(Debug)]
pub struct ContextSaved<Buf, Stat> {
    q: Buf,
    k: Buf,
    v: Buf,
    /// Of all tokens and the heads here, where that is not what forward gives back.
    o: Option<Buf>,
    lse: Stat,
}

/// Gradients of the queries, keys and values of the tokens here.
#[derive(Debug)]
pub struct Gradients<Buf> {
    /// Of queries, `[t, heads, e]`.
    pub dq: Buf,
    /// Of keys, `[t, kv_heads, e]`.
    pub dk: Buf,
    /// Of values, shaped as those of keys.
    pub dv: Buf,
}

/// Queries at one place and keys at another.
pub(super) struct Sight<'a, B: Backend> {
    queries: &'a TokenPlaces<B>,
    keys: &'a TokenPlaces<B>,
}

impl<'a, B: Backend> Sight<'a, B> {
    pub(super) fn new(
        held: &'a [TokenPlaces<B>],
        queries: usize,
        keys: usize,
    ) -> Result<Self, Error> {
        match (held.get(queries), held.get(keys)) {
            (Some(queries), Some(keys)) => Ok(Self { queries, keys }),
            _ => Err(unknown()),
        }
    }

    /// My queries and the keys of whole sequences.
    pub(super) fn of_all(places: &'a ContextPlaces<B>, queries: usize) -> Result<Self, Error> {
        Ok(Self {
            queries: places.held.get(queries).ok_or_else(unknown)?,
            keys: &places.in_order,
        })
    }

    pub(super) fn places(&self) -> Places<B::Ref<'a, i32>> {
        let documents = self.queries.doc.as_ref().zip(self.keys.doc.as_ref());
        let at = self.queries.at.as_ref().zip(self.keys.at.as_ref());
        Places {
            q_pos: B::whole(&self.queries.pos),
            k_pos: B::whole(&self.keys.pos),
            documents: documents.map(|(q, k)| (B::whole(q), B::whole(k))),
            at: at.map(|(q, k)| (B::whole(q), B::whole(k))),
        }
    }
}

fn unknown() -> Error {
    Error::Layout(alloc::string::String::from(
        "attention over cp needs the places of whole sequences for as many ranks as its outer factor has",
    ))
}

/// Places of the tokens of the microbatch, where no other rank's keys come in.
fn here<B: Backend, E: Scalar>(batch: &MicroBatch<B, E>) -> Places<B::Ref<'_, i32>> {
    let pos = B::whole(&batch.pos_t);
    Places {
        documents: batch
            .doc_t
            .as_ref()
            .map(|doc| (B::whole(doc), B::whole(doc))),
        at: batch
            .drawn
            .as_ref()
            .map(|drawn| (B::whole(&drawn.at_t), B::whole(&drawn.at_t))),
        ..Places::from((pos, pos))
    }
}

fn context<B: Backend, E: Scalar>(batch: &MicroBatch<B, E>) -> Result<&ContextPlaces<B>, Error> {
    batch.context.as_ref().ok_or_else(unknown)
}

/// The exchange of tokens for `heads` heads, where there is one.
fn exchange<'a, B: Backend, C: Collectives<B>>(
    ctx: &Ctx<'a, B, C>,
    spec: &AttentionSpec,
    heads: usize,
) -> Option<Exchange<'a, C>> {
    ctx.cp.heads.map(|group| Exchange {
        group,
        sequences: spec.batch,
        tokens: spec.batch * spec.queries,
        heads,
        width: spec.head_dim,
    })
}

/// The spec of what kernels see: longer parts of sequences with fewer heads.
fn exchanged<B: Backend, C: Collectives<B>>(
    ctx: &Ctx<'_, B, C>,
    spec: &AttentionSpec,
) -> Result<AttentionSpec, Error> {
    let (rank, ranks) = place::<B, C>(ctx.cp.heads);
    if !spec.heads.is_multiple_of(ranks) {
        return Err(Error::Layout(alloc::format!(
            "a ulysses group of {ranks} does not divide {} heads",
            spec.heads
        )));
    }
    Ok(AttentionSpec {
        queries: spec.queries * ranks,
        keys: spec.keys * ranks,
        heads: spec.heads / ranks,
        kv_heads: heads_each(spec.kv_heads, ranks)?,
        dropout: spec.dropout.map(|of| HeadDropout {
            first_head: of.first_head + rank * (spec.heads / ranks),
            ..of
        }),
        ..*spec
    })
}

/// `o[t, heads, e]` of the tokens here, from q, k and v of them. `spec` tells of tokens and heads
/// here; its keys are its queries.
///
/// # Errors
/// [`Error::Layout`] where a ulysses group cannot share the heads, or the microbatch does not say
/// where the tokens of other ranks stand; what a kernel or a collective refuses or fails with.
pub fn forward<B: Attention + Pointwise, C: Collectives<B>, E: Scalar>(
    ctx: &Ctx<'_, B, C>,
    batch: &MicroBatch<B, E>,
    spec: &AttentionSpec,
    [q, k, v]: [B::Buf<E>; 3],
) -> Result<(B::Buf<E>, ContextSaved<B::Buf<E>, B::Buf<E::Acc>>), Error> {
    let dev = ctx.device;
    let [q_move, kv_move] = [spec.heads, spec.kv_heads].map(|heads| exchange(ctx, spec, heads));
    let seen = exchanged(ctx, spec)?;
    let turned = |x: B::Buf<E>, by: &Option<Exchange<'_, C>>| match by {
        Some(exchange) => exchange.to_heads(dev, B::whole(&x)),
        None => Ok(x),
    };
    let (q, k, v) = (
        turned(q, &q_move)?,
        turned(k, &kv_move)?,
        turned(v, &kv_move)?,
    );
    let views = Qkv {
        q: B::whole(&q),
        k: B::whole(&k),
        v: B::whole(&v),
    };
    let (o, lse, k, v) = match ctx.cp.keys {
        None => {
            let (o, lse) = alone(ctx, batch, &seen, views)?;
            (o, lse, k, v)
        }
        Some(group) if ctx.cp.gather => {
            let done = gather::forward(dev, group, &seen, views, context(batch)?)?;
            (done.o, done.lse, done.k, done.v)
        }
        Some(group) => {
            let (o, lse) = ring::forward(dev, group, &seen, views, &context(batch)?.held)?;
            (o, lse, k, v)
        }
    };
    let (o, kept) = match q_move {
        Some(exchange) => (exchange.to_tokens(dev, B::whole(&o))?, Some(o)),
        None => (o, None),
    };
    let saved = ContextSaved {
        q,
        k,
        v,
        o: kept,
        lse,
    };
    Ok((o, saved))
}

/// One call, whose keys are all here.
fn alone<B: Attention, C: Collectives<B>, E: Scalar>(
    ctx: &Ctx<'_, B, C>,
    batch: &MicroBatch<B, E>,
    spec: &AttentionSpec,
    qkv: Qkv<'_, B, E>,
) -> Result<(B::Buf<E>, B::Buf<E::Acc>), Error> {
    let stats = spec.batch * spec.heads * spec.queries;
    let mut o = alloc::<B, E>(ctx.device, Tag::Activation, B::len(qkv.q))?;
    let mut lse = alloc::<B, E::Acc>(ctx.device, Tag::Activation, stats)?;
    let places = whole_or_here(ctx, batch)?;
    let (o_all, lse_all) = (B::whole_mut(&mut o), B::whole_mut(&mut lse));
    ctx.device
        .attention::<E>(spec, (qkv.q, qkv.k, qkv.v), places, o_all, lse_all)?;
    Ok((o, lse))
}

/// After an exchange for heads the tokens of whole sequences are here.
fn whole_or_here<'a, B: Backend, C: Collectives<B>, E: Scalar>(
    ctx: &Ctx<'_, B, C>,
    batch: &'a MicroBatch<B, E>,
) -> Result<Places<B::Ref<'a, i32>>, Error> {
    match ctx.cp.heads {
        Some(_) => Ok(Sight::new(&context(batch)?.held, 0, 0)?.places()),
        None => Ok(here(batch)),
    }
}

/// Gradients of q, k and v of the tokens here from that of o, which forward gave.
///
/// # Errors
/// As [`forward`].
pub fn backward<B: Attention + Pointwise, C: Collectives<B>, E: Scalar>(
    ctx: &Ctx<'_, B, C>,
    batch: &MicroBatch<B, E>,
    spec: &AttentionSpec,
    saved: ContextSaved<B::Buf<E>, B::Buf<E::Acc>>,
    o: &B::Buf<E>,
    d_o: B::Buf<E>,
) -> Result<Gradients<B::Buf<E>>, Error> {
    let dev = ctx.device;
    let [q_move, kv_move] = [spec.heads, spec.kv_heads].map(|heads| exchange(ctx, spec, heads));
    let seen = exchanged(ctx, spec)?;
    let d_o = match &q_move {
        Some(exchange) => exchange.to_heads(dev, B::whole(&d_o))?,
        None => d_o,
    };
    let ContextSaved {
        q,
        k,
        v,
        o: kept,
        lse,
    } = saved;
    let (d_o_all, o_all) = (B::whole(&d_o), B::whole(kept.as_ref().unwrap_or(o)));
    let mut delta = alloc::<B, E::Acc>(dev, Tag::Scratch, B::len(B::whole(&lse)))?;
    dev.attention_delta::<E>(&seen, d_o_all, o_all, B::whole_mut(&mut delta))?;
    drop(kept);
    let qkv = Qkv {
        q: B::whole(&q),
        k: B::whole(&k),
        v: B::whole(&v),
    };
    let rows = (B::whole(&lse), B::whole(&delta));
    let (dq, dkv) = match ctx.cp.keys {
        None if q_move.is_none() => {
            return alone_backward(ctx, batch, &seen, qkv, d_o_all, rows);
        }
        None => {
            let n = B::len(qkv.k);
            let mut dq = dev.zeros::<E::Acc>(Tag::Activation, B::len(qkv.q))?;
            let mut dkv = dev.zeros::<E::Acc>(Tag::Activation, 2 * n)?;
            let (dk, dv) = B::split_mut(B::whole_mut(&mut dkv), n);
            let into = (B::whole_mut(&mut dq), dk, dv);
            let (qkv, places) = ((qkv.q, qkv.k, qkv.v), whole_or_here(ctx, batch)?);
            dev.attention_backward_step::<E>(&seen, qkv, places, d_o_all, rows, into)?;
            (dq, dkv)
        }
        Some(group) if ctx.cp.gather => {
            let places = context(batch)?;
            gather::backward(dev, group, &seen, qkv, places, d_o_all, rows)?
        }
        Some(group) => {
            let held = &context(batch)?.held;
            ring::backward(dev, group, &seen, qkv, held, d_o_all, rows)?
        }
    };
    drop((q, k, v, d_o));
    home(ctx, [q_move, kv_move], dq, dkv)
}

/// The plain backward of one call.
fn alone_backward<B: Attention, C: Collectives<B>, E: Scalar>(
    ctx: &Ctx<'_, B, C>,
    batch: &MicroBatch<B, E>,
    spec: &AttentionSpec,
    qkv: Qkv<'_, B, E>,
    d_o: B::Ref<'_, E>,
    rows: (B::Ref<'_, E::Acc>, B::Ref<'_, E::Acc>),
) -> Result<Gradients<B::Buf<E>>, Error> {
    let dev = ctx.device;
    let mut dq = alloc::<B, E>(dev, Tag::Activation, B::len(qkv.q))?;
    let mut dk = alloc::<B, E>(dev, Tag::Activation, B::len(qkv.k))?;
    let mut dv = alloc::<B, E>(dev, Tag::Activation, B::len(qkv.v))?;
    let into = (
        B::whole_mut(&mut dq),
        B::whole_mut(&mut dk),
        B::whole_mut(&mut dv),
    );
    let qkv = (qkv.q, qkv.k, qkv.v);
    dev.attention_backward::<E>(spec, qkv, here(batch), d_o, rows, into)?;
    Ok(Gradients { dq, dk, dv })
}

/// Gradients back to the ranks whose tokens they are of, and into storage.
fn home<B: Pointwise, C: Collectives<B>, E: Scalar>(
    ctx: &Ctx<'_, B, C>,
    [q_move, kv_move]: [Option<Exchange<'_, C>>; 2],
    dq: B::Buf<E::Acc>,
    dkv: B::Buf<E::Acc>,
) -> Result<Gradients<B::Buf<E>>, Error> {
    let dev = ctx.device;
    let dq = stored::<B, E>(dev, B::whole(&dq))?;
    let dq = match q_move {
        Some(exchange) => exchange.to_tokens(dev, B::whole(&dq))?,
        None => dq,
    };
    let all = B::whole(&dkv);
    let n = B::len(all) / 2;
    let give = |d: B::Ref<'_, E::Acc>| match &kv_move {
        Some(exchange) => {
            let summed = exchange.to_tokens::<B, E::Acc>(dev, d)?;
            stored::<B, E>(dev, B::whole(&summed))
        }
        None => stored::<B, E>(dev, d),
    };
    let (dk, dv) = (give(B::slice(all, 0..n))?, give(B::slice(all, n..2 * n))?);
    Ok(Gradients { dq, dk, dv })
}
