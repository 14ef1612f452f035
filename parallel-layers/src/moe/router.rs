//! The router as a layer: logits, choice, capacity, and the losses of balance.

use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;

use quintet_collectives::chunk::chunk;
use quintet_collectives::{Axis, DeviceMesh, IndexMap, Init, ParamSpec, Placement, ReduceOp};
use quintet_kernels::moe::{Routed, Router, RouterSpec, capacity, drop_beyond};
use quintet_kernels::{Backend, Collectives, Float, Gemm, GemmSpec, Pointwise, Scalar, Tag, Trans};

use super::{MoeSpec, NAME};
use crate::spec::{INIT_STD, dense, join};
use crate::{Ctx, Error, MicroBatch};

/// Where the tokens of one rank went in one layer, and what that rank adds to the losses of
/// balance: summed over all ranks, each is the microbatch's.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Routing {
    /// Pairs (token, k) that chose each expert, before any was dropped.
    pub counts: Vec<u64>,
    /// The experts that each of this rank's tokens chose, in order of choice, those dropped
    /// included.
    pub choices: Vec<i32>,
    /// Pairs that were dropped.
    pub dropped: u64,
    /// The balance loss, unweighted; 0 on all but the first of the ranks that share the microbatch.
    pub aux: f64,
    /// The z-loss, unweighted.
    pub z: f64,
}

/// `logits = x W^T`, and what follows from them.
#[derive(Debug, Clone)]
pub(super) struct RouterLayer {
    mesh: DeviceMesh,
    name: String,
    hidden: usize,
    spec: MoeSpec,
}

#[derive(Debug)]
pub(super) struct RouterForward<Stat> {
    logits_te: Stat,
    choice_tk: Vec<i32>,
    /// The choice without what was dropped.
    pub kept_tk: Vec<i32>,
    pub weight_tk: Stat,
    /// Gradient of the loss with respect to the sums of the kernel.
    dsums_e: Vec<f64>,
    pub routing: Routing,
}

#[derive(Debug)]
pub(super) struct RouterWeight<Stat> {
    dlogits_te: Stat,
}

impl RouterLayer {
    pub(super) fn new(
        mesh: &DeviceMesh,
        name: &str,
        hidden: usize,
        spec: &MoeSpec,
    ) -> Result<Self, Error> {
        if spec.topk == 0 || spec.topk > spec.experts {
            return Err(Error::Layout(alloc::format!(
                "a token goes to {} of {} experts; it must be from 1 to {}",
                spec.topk,
                spec.experts,
                spec.experts
            )));
        }
        Ok(Self {
            mesh: *mesh,
            name: join(name, "gate"),
            hidden,
            spec: *spec,
        })
    }

    pub(super) fn experts(&self) -> usize {
        self.spec.experts
    }

    pub(super) fn topk(&self) -> usize {
        self.spec.topk
    }

    pub(super) fn selection_bias(&self) -> Option<String> {
        let name = || join(&self.name, "e_score_correction_bias");
        self.spec.selection_bias.then(name)
    }

    /// The weight, which each rank uses on tokens of its own; the bias, which all use alike and
    /// no gradient reaches.
    pub(super) fn params(&self) -> Vec<ParamSpec> {
        let (m, experts) = (&self.mesh, self.spec.experts);
        let on_tp = [(m.factor(Axis::Tp), Placement::Replicate)];
        let init = Init::Normal { std: INIT_STD };
        let name = join(&self.name, "weight");
        let mut all = vec![dense(m, &name, &[experts, self.hidden], &on_tp, init)];
        if let Some(name) = self.selection_bias() {
            let on_tp = [(m.factor(Axis::Tp), Placement::Invariant)];
            let mut bias = dense(m, &name, &[experts], &on_tp, Init::Zeros);
            for (_, placement) in &mut bias.at_use {
                *placement = Placement::Invariant;
            }
            all.push(bias);
        }
        all
    }

    fn kernel(&self, tokens: usize) -> RouterSpec {
        RouterSpec {
            tokens,
            experts: self.spec.experts,
            topk: self.spec.topk,
            score: self.spec.score,
            normalize: self.spec.normalize,
            scale: self.spec.scale,
        }
    }

    pub(super) fn forward<B, C, E>(
        &self,
        ctx: &Ctx<'_, B, C>,
        batch: &MicroBatch<B, E>,
        params: &[B::Ref<'_, E>],
        x_td: B::Ref<'_, E>,
    ) -> Result<RouterForward<B::Buf<E::Acc>>, Error>
    where
        B: Gemm + Pointwise + Router,
        C: Collectives<B>,
        E: Scalar,
    {
        let (dev, experts) = (ctx.device, self.spec.experts);
        let tokens = B::len(x_td) / self.hidden;
        let spec = self.kernel(tokens);
        let bias = params
            .get(1)
            .map(|b| widened::<B, E>(dev, *b))
            .transpose()?;
        let weight = params.first().copied().ok_or_else(missing)?;
        let mut logits_te = dev.alloc(Tag::Activation, tokens * experts)?;
        let product = GemmSpec::new(tokens, experts, self.hidden, Trans::N, Trans::T);
        dev.gemm::<E, E::Acc>(
            &product,
            x_td,
            weight,
            None,
            None,
            B::whole_mut(&mut logits_te),
        )?;
        let mut choice = dev.zeros::<i32>(Tag::Scratch, tokens * spec.topk)?;
        let mut weight_tk = dev.alloc(Tag::Activation, tokens * spec.topk)?;
        let mut sums = dev.alloc::<E::Acc>(Tag::Scratch, experts + 1)?;
        let out = Routed {
            choice_tk: B::whole_mut(&mut choice),
            weight_tk: B::whole_mut(&mut weight_tk),
            sums_e: B::whole_mut(&mut sums),
        };
        let bias = bias.as_ref().map(B::whole);
        dev.route::<E::Acc>(&spec, B::whole(&logits_te), bias, out)?;
        let mut choice_tk = vec![0; tokens * spec.topk];
        dev.download(B::whole(&choice), &mut choice_tk)?;
        let mut host = vec![E::Acc::from_f64(0.0); experts + 1];
        dev.download(B::whole(&sums), &mut host)?;
        let sums: Vec<f64> = host.iter().map(|x| x.to_f64()).collect();
        let (routing, dsums_e) = self.balance(ctx, batch, &choice_tk, &sums)?;
        let mut routed = RouterForward {
            logits_te,
            kept_tk: choice_tk.clone(),
            choice_tk,
            weight_tk,
            dsums_e,
            routing,
        };
        self.drop_beyond(ctx, batch, &mut routed)?;
        Ok(routed)
    }

    /// What this rank adds to the losses of balance, and their gradient with respect to its sums.
    /// The balance loss is a product of two sums over ranks, so those come first.
    fn balance<B: Backend, C: Collectives<B>, E: Scalar>(
        &self,
        ctx: &Ctx<'_, B, C>,
        batch: &MicroBatch<B, E>,
        choice_tk: &[i32],
        sums: &[f64],
    ) -> Result<(Routing, Vec<f64>), Error> {
        let MoeSpec {
            experts,
            topk,
            aux_loss,
            z_loss,
            ..
        } = self.spec;
        let mut counts = vec![0; experts];
        for &e in choice_tk {
            counts[e as usize] += 1;
        }
        let tokens = Shared::of(ctx, batch).tokens() as f64;
        let (mut routing, mut dsums) = (Routing::default(), vec![0.0; experts + 1]);
        if aux_loss > 0.0 {
            let mine = counts
                .iter()
                .map(|&n| n as f64)
                .chain(sums[..experts].iter().copied());
            let mut both = ctx
                .device
                .upload(Tag::Scratch, &mine.collect::<Vec<f64>>())?;
            if ctx.replica.world() > 1 {
                ctx.replica
                    .all_reduce(B::whole_mut(&mut both), ReduceOp::Sum)?;
            }
            let mut all = vec![0.0; 2 * experts];
            ctx.device.download(B::whole(&both), &mut all)?;
            let (chosen, scored) = all.split_at(experts);
            // experts * sum of f P = sum over e of per[e] * (sum over tokens of e's share)
            let per = experts as f64 / (tokens * topk as f64 * tokens);
            let aux: f64 = chosen.iter().zip(scored).map(|(n, p)| per * n * p).sum();
            if ctx.replica.rank() == 0 {
                routing.aux = aux;
            }
            for (dsum, n) in dsums.iter_mut().zip(chosen) {
                *dsum = aux_loss * batch.share * per * n;
            }
        }
        if z_loss > 0.0 {
            routing.z = sums[experts] / tokens;
            dsums[experts] = z_loss * batch.share / tokens;
        }
        routing.counts = counts;
        routing.choices = choice_tk.to_vec();
        Ok((routing, dsums))
    }

    /// Drops what an expert has no room for. Who comes first is a matter of the whole microbatch,
    /// so every rank that shares it learns all choices.
    fn drop_beyond<B: Backend, C: Collectives<B>, E: Scalar, S>(
        &self,
        ctx: &Ctx<'_, B, C>,
        batch: &MicroBatch<B, E>,
        routed: &mut RouterForward<S>,
    ) -> Result<(), Error> {
        let MoeSpec { experts, topk, .. } = self.spec;
        let Some(factor) = self.spec.capacity_factor else {
            return Ok(());
        };
        let shared = Shared::of(ctx, batch);
        let tokens = shared.tokens();
        let held: Vec<Vec<usize>> = (0..ctx.replica.world()).map(|r| shared.held(r)).collect();
        let mut all = routed.choice_tk.clone();
        if ctx.replica.world() > 1 {
            let counts: Vec<usize> = held.iter().map(|held| held.len() * topk).collect();
            let mine = ctx.device.upload(Tag::Scratch, &routed.choice_tk)?;
            let mut whole = ctx.device.zeros::<i32>(Tag::Scratch, tokens * topk)?;
            ctx.replica
                .all_gather(B::whole(&mine), &counts, B::whole_mut(&mut whole))?;
            all = vec![0; tokens * topk];
            ctx.device.download(B::whole(&whole), &mut all)?;
        }
        // From the order of ranks to that of tokens, and back.
        let mut whole = vec![-1; tokens * topk];
        for (token, choice) in held.iter().flatten().zip(all.chunks(topk)) {
            whole[token * topk..(token + 1) * topk].copy_from_slice(choice);
        }
        drop_beyond(&mut whole, experts, capacity(tokens, topk, experts, factor));
        let mine = held.get(ctx.replica.rank()).into_iter().flatten();
        routed.kept_tk = mine
            .flat_map(|token| &whole[token * topk..(token + 1) * topk])
            .copied()
            .collect();
        routed.routing.dropped = routed.kept_tk.iter().filter(|e| **e < 0).count() as u64;
        Ok(())
    }

    /// Adds to `dx` what comes through the logits.
    pub(super) fn backward_input<B: Gemm + Pointwise + Router, E: Scalar>(
        &self,
        dev: &B,
        params: &[B::Ref<'_, E>],
        saved: RouterForward<B::Buf<E::Acc>>,
        dweight_tk: &B::Buf<E::Acc>,
        dx_td: &mut B::Buf<E>,
    ) -> Result<RouterWeight<B::Buf<E::Acc>>, Error> {
        let (experts, len) = (self.spec.experts, B::len(B::whole(&saved.logits_te)));
        let spec = self.kernel(len / experts);
        let choice = dev.upload(Tag::Scratch, &saved.choice_tk)?;
        let dsums: Vec<E::Acc> = saved.dsums_e.iter().map(|x| E::Acc::from_f64(*x)).collect();
        let dsums = dev.upload(Tag::Scratch, &dsums)?;
        let mut dlogits_te = dev.alloc(Tag::Activation, len)?;
        dev.route_backward::<E::Acc>(
            &spec,
            B::whole(&saved.logits_te),
            B::whole(&choice),
            (B::whole(dweight_tk), B::whole(&dsums)),
            B::whole_mut(&mut dlogits_te),
        )?;
        let weight = widened::<B, E>(dev, params.first().copied().ok_or_else(missing)?)?;
        let product =
            GemmSpec::new(spec.tokens, self.hidden, experts, Trans::N, Trans::N).accumulate();
        let (dl, dx) = (B::whole(&dlogits_te), B::whole_mut(dx_td));
        dev.gemm::<E::Acc, E>(&product, dl, B::whole(&weight), None, None, dx)?;
        Ok(RouterWeight { dlogits_te })
    }

    pub(super) fn backward_weight<B: Gemm + Pointwise, E: Scalar>(
        &self,
        dev: &B,
        x_td: B::Ref<'_, E>,
        saved: &RouterWeight<B::Buf<E::Acc>>,
        grads: &mut [B::Mut<'_, E::Acc>],
    ) -> Result<(), Error> {
        let tokens = B::len(x_td) / self.hidden;
        let x = widened::<B, E>(dev, x_td)?;
        let shape = (self.spec.experts, self.hidden, tokens);
        let product = GemmSpec::new(shape.0, shape.1, shape.2, Trans::T, Trans::N).accumulate();
        let dl = B::whole(&saved.dlogits_te);
        let Some(dw) = grads.first_mut().map(B::reborrow) else {
            return Err(missing());
        };
        Ok(dev.gemm::<E::Acc, E::Acc>(&product, dl, B::whole(&x), None, None, dw)?)
    }
}

/// How a microbatch lies on the ranks that share it: its sequences are cut over cp in zigzag, what
/// is left over tp in runs.
struct Shared {
    sequences: usize,
    /// Of a sequence, on one place of cp.
    positions: usize,
    cp: usize,
    tp: usize,
}

impl Shared {
    fn of<B: Backend, C: Collectives<B>, E: Scalar>(
        ctx: &Ctx<'_, B, C>,
        batch: &MicroBatch<B, E>,
    ) -> Self {
        let tp = ctx.tp.world();
        Self {
            sequences: batch.sequences,
            positions: batch.positions,
            cp: (ctx.replica.world() / tp).max(1),
            tp,
        }
    }

    /// Tokens of the whole microbatch.
    fn tokens(&self) -> usize {
        self.sequences * self.positions * self.cp
    }

    /// The tokens, by their number in the microbatch, of a rank of the group, in its order.
    fn held(&self, rank: usize) -> Vec<usize> {
        let len = self.positions * self.cp;
        let pieces = IndexMap::Zigzag.ranges(len, self.cp, rank / self.tp);
        let places: Vec<usize> = pieces.into_iter().flatten().flatten().collect();
        let all = (0..self.sequences).flat_map(|s| places.iter().map(move |p| s * len + p));
        let mine = chunk(self.sequences * places.len(), self.tp, rank % self.tp);
        all.skip(mine.start).take(mine.len()).collect()
    }
}

fn missing() -> Error {
    Error::Params {
        layer: NAME,
        expected: 1,
        got: 0,
    }
}

/// The same values in Acc.
pub(super) fn widened<B: Pointwise, E: Scalar>(
    device: &B,
    x: B::Ref<'_, E>,
) -> Result<B::Buf<E::Acc>, Error> {
    let mut y = device.alloc(Tag::Scratch, B::len(x))?;
    device.cast::<E, E::Acc>(x, B::whole_mut(&mut y))?;
    Ok(y)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_token_is_held_once() {
        let shared = Shared {
            sequences: 2,
            positions: 4,
            cp: 2,
            tp: 3,
        };
        assert_eq!(shared.held(0), [0, 1, 6]);
        let mut all: Vec<usize> = (0..6).flat_map(|rank| shared.held(rank)).collect();
        all.sort_unstable();
        assert_eq!(all, (0..16).collect::<Vec<_>>());
        let one = Shared {
            cp: 1,
            tp: 1,
            ..shared
        };
        assert_eq!(one.held(0), (0..8).collect::<Vec<_>>());
    }
}
