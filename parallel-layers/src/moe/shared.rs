//! Experts that every token uses: an ordinary tensor parallel MLP beside the others, weighed for
//! each token by a gate of its own where the model has one.
//!
//! ```text
//! y[t] = sigmoid(<x[t], w>) mlp(x)[t]        a router with one expert, as far as kernels go
//! ```

use alloc::vec::Vec;

use quintet_collectives::{Axis, DeviceMesh, Init, ParamSpec};
use quintet_kernels::moe::{Combine, Permute, Routed, Router, RouterSpec, Score};
use quintet_kernels::{Backend, Collectives, Float, Gemm, GemmSpec, Pointwise, Scalar, Tag, Trans};

use super::router::widened;
use super::{MoeShape, MoeSpec, NAME, copy};
use crate::architecture::Architecture;
use crate::block::BlockSpec;
use crate::mlp::{SwiGluForward, SwiGluMlp, SwiGluWeight};
use crate::recompute::Remade;
use crate::region::Region;
use crate::spec::{INIT_STD, dense, join};
use crate::{Ctx, Error, MicroBatch};

#[derive(Debug, Clone)]
pub(super) struct SharedExperts {
    mlp: SwiGluMlp,
    gate: Option<ParamSpec>,
    hidden: usize,
}

#[derive(Debug)]
pub(super) struct SharedForward<Buf, Stat> {
    mlp: SwiGluForward<Buf>,
    gate: Option<GateForward<Buf, Stat>>,
}

/// What the gate saves: its input and logits, the weights, and what it weighed.
#[derive(Debug)]
struct GateForward<Buf, Stat> {
    x: Remade<Buf>,
    logits_t: Stat,
    weight_t: Stat,
    made: Buf,
}

impl<Buf, Stat> SharedForward<Buf, Stat> {
    /// Lets go what is cheap to make again.
    pub(super) fn let_go(&mut self) {
        self.mlp.let_go();
        if let Some(gate) = &mut self.gate {
            gate.x.let_go();
        }
    }
}

#[derive(Debug)]
pub(super) struct SharedWeight<Buf, Stat> {
    mlp: SwiGluWeight<Buf>,
    gate: Option<GateWeight<Buf, Stat>>,
}

#[derive(Debug)]
struct GateWeight<Buf, Stat> {
    x: Buf,
    dlogits_t: Stat,
    /// Gradient of what the MLP made.
    dmade: Buf,
}

impl SharedExperts {
    /// Named as the models that have them: `shared_experts` (DeepSeek), with a gate
    /// `shared_expert` and `shared_expert_gate` (Qwen2-MoE).
    pub(super) fn new(
        mesh: &DeviceMesh,
        name: &str,
        shape: &MoeShape,
        spec: &MoeSpec,
    ) -> Result<Self, Error> {
        let region = Region::new(shape.sequence_parallel)?;
        let gate = spec.shared_gate.then(|| {
            let on_tp = [(mesh.factor(Axis::Tp), region.outside_param())];
            let (shape, init) = ([1, shape.hidden], Init::Normal { std: INIT_STD });
            dense(
                mesh,
                &join(name, "shared_expert_gate.weight"),
                &shape,
                &on_tp,
                init,
            )
        });
        let part = if spec.shared_gate {
            "shared_expert"
        } else {
            "shared_experts"
        };
        let block = BlockSpec {
            hidden: shape.hidden,
            ffn: spec.shared_ffn,
            layers: shape.layers,
            sequence_parallel: shape.sequence_parallel,
            heads: 1,
            kv_heads: 1,
            head_dim: 2,
            theta: 1.0,
            eps: 1.0,
            moe: None,
            window: None,
            architecture: Architecture::LLAMA,
        };
        Ok(Self {
            mlp: SwiGluMlp::new(mesh, &join(name, part), &block)?,
            gate,
            hidden: shape.hidden,
        })
    }

    pub(super) fn params(&self) -> Vec<ParamSpec> {
        let mut all = self.mlp.params();
        all.extend(self.gate.clone());
        all
    }

    pub(super) fn forward<B, C, E>(
        &self,
        ctx: &Ctx<'_, B, C>,
        batch: &MicroBatch<B, E>,
        params: &[B::Ref<'_, E>],
        x_td: B::Buf<E>,
    ) -> Result<(B::Buf<E>, SharedForward<B::Buf<E>, B::Buf<E::Acc>>), Error>
    where
        B: Gemm + Pointwise + Router + Permute,
        C: Collectives<B>,
        E: Scalar,
    {
        let (weights, gate) = params.split_at(3.min(params.len()));
        let x = match gate {
            [] => None,
            _ => Some(copy::<B, E>(ctx.device, &x_td)?),
        };
        let (made, mlp) = self.mlp.forward(ctx, batch, weights, x_td)?;
        let (Some(x), [w, ..]) = (x, gate) else {
            return Ok((made, SharedForward { mlp, gate: None }));
        };
        let dev = ctx.device;
        let tokens = B::len(B::whole(&x)) / self.hidden;
        let mut logits_t = dev.alloc(Tag::Activation, tokens)?;
        let product = GemmSpec::new(tokens, 1, self.hidden, Trans::N, Trans::T);
        let out = B::whole_mut(&mut logits_t);
        dev.gemm::<E, E::Acc>(&product, B::whole(&x), *w, None, None, out)?;
        let mut choice = dev.zeros::<i32>(Tag::Scratch, tokens)?;
        let mut weight_t = dev.alloc(Tag::Activation, tokens)?;
        let mut sums = dev.alloc(Tag::Scratch, 2)?;
        let out = Routed {
            choice_tk: B::whole_mut(&mut choice),
            weight_tk: B::whole_mut(&mut weight_t),
            sums_e: B::whole_mut(&mut sums),
        };
        dev.route::<E::Acc>(&one(tokens), B::whole(&logits_t), None, out)?;
        let index = each_its_own(dev, tokens)?;
        let by = by::<B>(tokens, self.hidden, &index);
        let mut y = dev.alloc(Tag::Activation, tokens * self.hidden)?;
        let weight = Some(B::whole(&weight_t));
        dev.combine::<E>(by, weight, B::whole(&made), B::whole_mut(&mut y))?;
        let gate = Some(GateForward {
            x: Remade::Here(x),
            logits_t,
            weight_t,
            made,
        });
        Ok((y, SharedForward { mlp, gate }))
    }

    /// Makes again what was let go, from what forward was given.
    pub(super) fn remake<B: Pointwise, E: Scalar>(
        device: &B,
        saved: &mut SharedForward<B::Buf<E>, B::Buf<E::Acc>>,
        x_td: B::Buf<E>,
    ) -> Result<(), Error> {
        if let Some(gate) = &mut saved.gate {
            gate.x.remake(|| copy::<B, E>(device, &x_td))?;
        }
        SwiGluMlp::remake::<B, E>(device, &mut saved.mlp, || Ok(x_td))
    }

    pub(super) fn backward_input<B, C, E>(
        &self,
        ctx: &Ctx<'_, B, C>,
        batch: &MicroBatch<B, E>,
        params: &[B::Ref<'_, E>],
        saved: SharedForward<B::Buf<E>, B::Buf<E::Acc>>,
        dy_td: &B::Buf<E>,
    ) -> Result<(B::Buf<E>, SharedWeight<B::Buf<E>, B::Buf<E::Acc>>), Error>
    where
        B: Gemm + Pointwise + Router + Permute,
        C: Collectives<B>,
        E: Scalar,
    {
        let (weights, gate) = params.split_at(3.min(params.len()));
        let (Some(kept), [w, ..]) = (saved.gate, gate) else {
            let (dx, mlp) = self
                .mlp
                .backward_input(ctx, batch, weights, saved.mlp, dy_td)?;
            return Ok((dx, SharedWeight { mlp, gate: None }));
        };
        let dev = ctx.device;
        let tokens = B::len(B::whole(&kept.logits_t));
        let index = each_its_own(dev, tokens)?;
        let mut dmade = dev.alloc(Tag::Activation, tokens * self.hidden)?;
        let mut dweight = dev.alloc(Tag::Scratch, tokens)?;
        dev.combine_backward::<E>(
            by::<B>(tokens, self.hidden, &index),
            (B::whole(&kept.weight_t), B::whole(&kept.made)),
            B::whole(dy_td),
            B::whole_mut(&mut dmade),
            B::whole_mut(&mut dweight),
        )?;
        let (choice, dsums) = (
            dev.zeros::<i32>(Tag::Scratch, tokens)?,
            dev.upload(Tag::Scratch, &[E::Acc::from_f64(0.0); 2])?,
        );
        let mut dlogits_t = dev.alloc(Tag::Activation, tokens)?;
        dev.route_backward::<E::Acc>(
            &one(tokens),
            B::whole(&kept.logits_t),
            B::whole(&choice),
            (B::whole(&dweight), B::whole(&dsums)),
            B::whole_mut(&mut dlogits_t),
        )?;
        let (mut dx, mlp) = self
            .mlp
            .backward_input(ctx, batch, weights, saved.mlp, &dmade)?;
        let w = widened::<B, E>(dev, *w)?;
        let product = GemmSpec::new(tokens, self.hidden, 1, Trans::N, Trans::N).accumulate();
        let (dl, out) = (B::whole(&dlogits_t), B::whole_mut(&mut dx));
        dev.gemm::<E::Acc, E>(&product, dl, B::whole(&w), None, None, out)?;
        let gate = Some(GateWeight {
            x: kept.x.made(NAME)?,
            dlogits_t,
            dmade,
        });
        Ok((dx, SharedWeight { mlp, gate }))
    }

    pub(super) fn backward_weight<B, C, E>(
        &self,
        ctx: &Ctx<'_, B, C>,
        batch: &MicroBatch<B, E>,
        saved: SharedWeight<B::Buf<E>, B::Buf<E::Acc>>,
        dy_td: &B::Buf<E>,
        grads: &mut [B::Mut<'_, E::Acc>],
    ) -> Result<(), Error>
    where
        B: Gemm + Pointwise,
        C: Collectives<B>,
        E: Scalar,
    {
        let at = 3.min(grads.len());
        let (weights, gate) = grads.split_at_mut(at);
        let dy = saved.gate.as_ref().map_or(dy_td, |gate| &gate.dmade);
        self.mlp
            .backward_weight(ctx, batch, saved.mlp, dy, weights)?;
        if let (Some(kept), [dw, ..]) = (&saved.gate, gate) {
            let x = widened::<B, E>(ctx.device, B::whole(&kept.x))?;
            let tokens = B::len(B::whole(&kept.dlogits_t));
            let product = GemmSpec::new(1, self.hidden, tokens, Trans::T, Trans::N).accumulate();
            let (dl, dw) = (B::whole(&kept.dlogits_t), B::reborrow(dw));
            ctx.device
                .gemm::<E::Acc, E::Acc>(&product, dl, B::whole(&x), None, None, dw)?;
        }
        Ok(())
    }
}

/// A router with one expert.
fn one(tokens: usize) -> RouterSpec {
    RouterSpec {
        tokens,
        experts: 1,
        topk: 1,
        score: Score::Sigmoid,
        normalize: false,
        scale: 1.0,
    }
}

/// Row t for token t.
fn each_its_own<B: Backend>(device: &B, tokens: usize) -> Result<B::Buf<i32>, Error> {
    let index: Vec<i32> = (0..tokens as i32).collect();
    Ok(device.upload(Tag::Scratch, &index)?)
}

fn by<B: Backend>(tokens: usize, width: usize, index: &B::Buf<i32>) -> Combine<'_, B> {
    Combine {
        tokens,
        topk: 1,
        width,
        rows_tk: B::whole(index),
        pairs_r: B::whole(index),
    }
}
