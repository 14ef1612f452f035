//! The layers as the tests see them.

use quintet_collectives::{DeviceMesh, ParamSpec, Placement};
use quintet_kernels::{Backend, Cpu, CpuBuf, Tag};
use quintet_parallel_layers::region::Region;
use quintet_parallel_layers::{
    Block, BlockSpec, ColumnParallelLinear, Error, Ffn, Head, Layer, MoeMlp, MoeShape, MoeSpec,
    RowParallelLinear, SelfAttention, VocabParallelEmbedding,
};

use super::{Batch, TestCtx, Tokens, Trio, on_tp, value};

type Done = Result<(CpuBuf<f64>, CpuBuf<f64>), Error>;

fn outside(mesh: &DeviceMesh, sp: bool, name: &str, rows: usize, width: usize) -> ParamSpec {
    let placement = Region::new(sp).unwrap().outside();
    value(name, [rows, width], &on_tp(mesh, placement))
}

/// A column-parallel layer; `kv` cuts it in that many parts.
pub struct Column {
    pub layer: ColumnParallelLinear,
    pub tokens: Tokens,
    pub shape: [usize; 2],
    pub mesh: DeviceMesh,
}

impl Trio for Column {
    fn input(&self) -> Option<ParamSpec> {
        let shape = [self.tokens.len(), self.shape[1]];
        let placement = on_tp(&self.mesh, Placement::Replicate);
        Some(value("x", shape, &placement))
    }

    fn output(&self) -> ParamSpec {
        // As the rows of the weight are cut, so are the columns of y.
        let weight = &self.layer.params()[0];
        let turn = |&(factor, placement): &(_, Placement)| {
            let placement = match placement {
                Placement::Shard { map, .. } => Placement::Shard { dim: 1, map },
                other => other,
            };
            (factor, placement)
        };
        let cut: Vec<_> = weight.at_use.iter().map(turn).collect();
        value("y", [self.tokens.len(), self.shape[0]], &cut)
    }

    fn params(&self) -> Vec<ParamSpec> {
        self.layer.params()
    }

    fn run(
        &self,
        ctx: &TestCtx<'_>,
        _: &Batch,
        params: &[&[f64]],
        x: CpuBuf<f64>,
        dy: CpuBuf<f64>,
        grads: &mut [&mut [f64]],
    ) -> Done {
        let t = self.tokens.len();
        let (x, dy) = (x.as_ref(), dy.as_ref());
        let (bias, layer) = (params.get(1).copied(), &self.layer);
        let y = layer.forward(ctx, t, params[0], bias, x)?;
        let mut dx = ctx.device.zeros(Tag::Activation, x.len())?;
        layer.backward_input(ctx, t, params[0], dy, dx.as_mut(), false)?;
        let (dw, db) = grads.split_at_mut(1);
        let db = db.first_mut().map(|db| &mut **db);
        layer.backward_weight::<Cpu, _, f64>(ctx, t, x, dy, dw[0], db)?;
        Ok((y, dx))
    }
}

/// A row-parallel layer.
pub struct Row {
    pub layer: RowParallelLinear,
    pub tokens: Tokens,
    pub shape: [usize; 2],
    pub sp: bool,
    pub mesh: DeviceMesh,
}

impl Trio for Row {
    fn input(&self) -> Option<ParamSpec> {
        let shape = [self.tokens.len(), self.shape[1]];
        Some(value("x", shape, &on_tp(&self.mesh, Placement::shard(1))))
    }

    fn output(&self) -> ParamSpec {
        outside(&self.mesh, self.sp, "y", self.tokens.len(), self.shape[0])
    }

    fn params(&self) -> Vec<ParamSpec> {
        self.layer.params()
    }

    fn run(
        &self,
        ctx: &TestCtx<'_>,
        _: &Batch,
        params: &[&[f64]],
        x: CpuBuf<f64>,
        dy: CpuBuf<f64>,
        grads: &mut [&mut [f64]],
    ) -> Done {
        let (t, layer) = (self.tokens.len(), &self.layer);
        let y = layer.forward(ctx, t, params[0], params.get(1).copied(), x.as_ref())?;
        let back = layer.backward_input(ctx, t, params[0], &dy)?;
        let whole = back.dy_whole.as_ref().unwrap_or(&dy);
        let (dw, db) = grads.split_at_mut(1);
        let bias = db.first_mut().map(|db| (dy.as_ref(), &mut **db));
        let (x, whole) = (x.as_ref(), whole.as_ref());
        layer.backward_weight::<Cpu, _, f64>(ctx, t, x, whole, dw[0], bias)?;
        drop(dy);
        Ok((y, back.dx))
    }
}

/// What a branch of a block, a block or a head is tested with.
pub struct Model<L> {
    pub layer: L,
    pub tokens: Tokens,
    pub hidden: usize,
    pub sp: bool,
    pub mesh: DeviceMesh,
}

impl<L> Model<L> {
    fn outside(&self, name: &str) -> ParamSpec {
        outside(&self.mesh, self.sp, name, self.tokens.len(), self.hidden)
    }
}

pub fn block(mesh: &DeviceMesh, tokens: Tokens, spec: &BlockSpec) -> Model<Block> {
    model(Block::new(mesh, 1, spec).unwrap(), mesh, tokens, spec)
}

pub fn attention(mesh: &DeviceMesh, tokens: Tokens, spec: &BlockSpec) -> Model<SelfAttention> {
    let layer = SelfAttention::new(mesh, "self_attn", spec).unwrap();
    model(layer, mesh, tokens, spec)
}

pub fn mlp(mesh: &DeviceMesh, tokens: Tokens, spec: &BlockSpec) -> Model<Ffn> {
    let layer = Ffn::new(mesh, "mlp", spec).unwrap();
    model(layer, mesh, tokens, spec)
}

pub fn moe(
    mesh: &DeviceMesh,
    tokens: Tokens,
    shape: &MoeShape,
    spec: &MoeSpec,
) -> Result<Model<MoeMlp>, Error> {
    Ok(Model {
        layer: MoeMlp::new(mesh, "mlp", shape, spec)?,
        tokens,
        hidden: shape.hidden,
        sp: shape.sequence_parallel,
        mesh: *mesh,
    })
}

fn model<L>(layer: L, mesh: &DeviceMesh, tokens: Tokens, spec: &BlockSpec) -> Model<L> {
    Model {
        layer,
        tokens,
        hidden: spec.hidden,
        sp: spec.sequence_parallel,
        mesh: *mesh,
    }
}

/// The three calls of a layer whose input and output lie between layers.
pub trait Pass: Sync {
    /// Whether an activation comes in.
    const INPUT: bool = true;
    /// Whether the loss of each token goes out, instead of an activation.
    const LOSS: bool = false;

    fn ledger(&self) -> Vec<ParamSpec>;
    /// y, dx; adds to the gradients.
    fn pass(
        &self,
        ctx: &TestCtx<'_>,
        batch: &Batch,
        params: &[&[f64]],
        x: CpuBuf<f64>,
        dy: CpuBuf<f64>,
        grads: &mut [&mut [f64]],
    ) -> Done;
}

impl<L: Pass> Trio for Model<L> {
    fn input(&self) -> Option<ParamSpec> {
        L::INPUT.then(|| self.outside("x"))
    }

    fn output(&self) -> ParamSpec {
        if L::LOSS {
            let shape = [self.tokens.len(), 1];
            return value("loss", shape, &on_tp(&self.mesh, Placement::Invariant));
        }
        self.outside("y")
    }

    fn params(&self) -> Vec<ParamSpec> {
        self.layer.ledger()
    }

    fn run(
        &self,
        ctx: &TestCtx<'_>,
        batch: &Batch,
        params: &[&[f64]],
        x: CpuBuf<f64>,
        dy: CpuBuf<f64>,
        grads: &mut [&mut [f64]],
    ) -> Done {
        self.layer.pass(ctx, batch, params, x, dy, grads)
    }
}

impl Pass for Block {
    fn ledger(&self) -> Vec<ParamSpec> {
        self.params()
    }

    fn pass(
        &self,
        ctx: &TestCtx<'_>,
        batch: &Batch,
        params: &[&[f64]],
        x: CpuBuf<f64>,
        dy: CpuBuf<f64>,
        grads: &mut [&mut [f64]],
    ) -> Done {
        let (y, mut saved) = self.forward(ctx, batch, params, x)?;
        let dx = self.backward_input(ctx, batch, params, &mut saved, dy)?;
        self.backward_weight(ctx, batch, saved, grads)?;
        Ok((y, dx))
    }
}

/// The branches of a block lend the gradient that came in.
macro_rules! branch {
    ($branch:ty) => {
        impl Pass for $branch {
            fn ledger(&self) -> Vec<ParamSpec> {
                self.params()
            }

            fn pass(
                &self,
                ctx: &TestCtx<'_>,
                batch: &Batch,
                params: &[&[f64]],
                x: CpuBuf<f64>,
                dy: CpuBuf<f64>,
                grads: &mut [&mut [f64]],
            ) -> Done {
                let (y, saved) = self.forward(ctx, batch, params, x)?;
                let (dx, saved) = self.backward_input(ctx, batch, params, saved, &dy)?;
                self.backward_weight(ctx, batch, saved, &dy, grads)?;
                Ok((y, dx))
            }
        }
    };
}

branch!(SelfAttention);
branch!(Ffn);
branch!(MoeMlp);

impl Pass for VocabParallelEmbedding {
    const INPUT: bool = false;

    fn ledger(&self) -> Vec<ParamSpec> {
        self.params()
    }

    fn pass(
        &self,
        ctx: &TestCtx<'_>,
        batch: &Batch,
        params: &[&[f64]],
        none: CpuBuf<f64>,
        dy: CpuBuf<f64>,
        grads: &mut [&mut [f64]],
    ) -> Done {
        let (y, mut saved) = self.forward(ctx, batch, params)?;
        self.backward_input(ctx, batch, &mut saved, dy)?;
        self.backward_weight(ctx, batch, saved, grads)?;
        Ok((y, none))
    }
}

/// Backward starts from the tokens' weights.
impl Pass for Head {
    const LOSS: bool = true;

    fn ledger(&self) -> Vec<ParamSpec> {
        self.params()
    }

    fn pass(
        &self,
        ctx: &TestCtx<'_>,
        batch: &Batch,
        params: &[&[f64]],
        x: CpuBuf<f64>,
        _: CpuBuf<f64>,
        grads: &mut [&mut [f64]],
    ) -> Done {
        let (loss, mut saved) = self.forward(ctx, batch, params, x)?;
        let dx = self.backward_input(ctx, batch, params, &mut saved)?;
        self.backward_weight(ctx, batch, saved, grads)?;
        Ok((loss, dx))
    }
}
