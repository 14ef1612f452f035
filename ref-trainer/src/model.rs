//! The layers of one stage, run forward and backward: the mirrored list of calls.

use std::ops::Range;

use quintet_kernels::{
    Attention, Backend, Collectives, CrossEntropy, Embedding, Gemm, Norm, Optimizer, Pointwise,
    Rope, Scalar,
};
use quintet_parallel_layers::embedding::EmbeddingSaved;
use quintet_parallel_layers::head::HeadSaved;
use quintet_parallel_layers::{Block, Ctx, Layer, MicroBatch};
use quintet_planner::model::{StageLayer, TABLE};
use quintet_zero::{GradSync, ParamStore};

use crate::failure::Failure;

/// A device that can run the whole model: the one place where all ops are asked for at once.
pub trait Device:
    Backend + Gemm + Attention + Norm + Rope + Pointwise + Embedding + CrossEntropy + Optimizer
{
}
impl<B> Device for B where
    B: Backend + Gemm + Attention + Norm + Rope + Pointwise + Embedding + CrossEntropy + Optimizer
{
}

/// What a layer leaves between its forward and its backward.
pub enum LayerSaved<B: Device, C: Collectives<B>, E: Scalar> {
    /// Of the embedding.
    Embed(EmbeddingSaved<B::Buf<E>>),
    /// Of a block.
    Block(<Block as Layer<B, C, E>>::Saved),
    /// Of the head.
    Head(HeadSaved<B::Buf<E>, B::Buf<E::Acc>>),
}

/// What one microbatch leaves on a stage, layer by layer.
pub struct StageSaved<B: Device, C: Collectives<B>, E: Scalar> {
    batch: MicroBatch<B, E>,
    layers: Vec<Option<LayerSaved<B, C, E>>>,
}

/// A chunk's parameters, with the table that its head may borrow from the stage's first chunk.
pub struct Lent<'a, B: Device, E: Scalar> {
    /// Its own.
    pub own: &'a ParamStore<B, E>,
    /// Where the table is, if not there.
    pub table: Option<&'a ParamStore<B, E>>,
}

impl<B: Device, E: Scalar> Lent<'_, B, E> {
    /// The views of a layer, in the order in which it names its parameters.
    fn views(&self, index: usize, layer: &StageLayer) -> Result<Vec<B::Ref<'_, E>>, Failure> {
        let mut views = self.own.views(index)?;
        if let Some((at, lender)) = place_of_table(layer).zip(self.table) {
            let table = lender.views(0)?.into_iter().nth(TABLE_VIEW);
            views.insert(at, table.ok_or_else(out_of_order)?);
        }
        Ok(views)
    }
}

/// The same of gradients.
pub struct LentGrads<'a, B: Device, C: Collectives<B>, E: Scalar> {
    /// Its own.
    pub own: &'a mut GradSync<B, C, E>,
    /// Where the table's gradient is, if not there.
    pub table: Option<&'a mut GradSync<B, C, E>>,
}

impl<B: Device, C: Collectives<B>, E: Scalar> LentGrads<'_, B, C, E> {
    fn views(
        &mut self,
        index: usize,
        layer: &StageLayer,
    ) -> Result<Vec<B::Mut<'_, E::Acc>>, Failure> {
        let mut views = self.own.views_mut(index)?;
        if let Some((at, lender)) = place_of_table(layer).zip(self.table.as_deref_mut()) {
            let table = lender.views_mut(0)?.into_iter().nth(TABLE_VIEW);
            views.insert(at, table.ok_or_else(out_of_order)?);
        }
        Ok(views)
    }
}

/// Where a head names the table among its parameters.
fn place_of_table(layer: &StageLayer) -> Option<usize> {
    match layer {
        StageLayer::Head(_) => layer.params().iter().position(|p| p.name == TABLE),
        _ => None,
    }
}

/// The table among the views of the embedding, which is the first layer of the model.
const TABLE_VIEW: usize = 0;

/// The layers of a stage's chunk.
pub struct StageModel {
    /// In forward order.
    pub layers: Vec<StageLayer>,
}

/// What forward has come to.
pub struct Forward<B: Device, C: Collectives<B>, E: Scalar> {
    /// The activation for the next stage; none on the last.
    pub output: Option<B::Buf<E>>,
    /// The loss of each token; on the last stage alone.
    pub loss_t: Option<B::Buf<E::Acc>>,
    /// For backward.
    pub saved: StageSaved<B, C, E>,
}

impl<B: Device, C: Collectives<B>, E: Scalar> Forward<B, C, E> {
    /// Before the first layer. `input` is what the stage before sent; none on the first.
    #[must_use]
    pub fn begin(batch: MicroBatch<B, E>, input: Option<B::Buf<E>>) -> Self {
        Self {
            output: input,
            loss_t: None,
            saved: StageSaved {
                batch,
                layers: Vec::new(),
            },
        }
    }
}

impl StageModel {
    /// Runs a microbatch on through the layers `run`, from where `so_far` has come to
    /// ([`Forward::begin`]); those before have been run.
    ///
    /// # Errors
    /// What a kernel or a collective fails with.
    pub fn forward<B: Device, C: Collectives<B>, E: Scalar>(
        &self,
        ctx: &Ctx<'_, B, C>,
        params: &Lent<'_, B, E>,
        run: Range<usize>,
        so_far: Forward<B, C, E>,
    ) -> Result<Forward<B, C, E>, Failure> {
        let Forward {
            output: mut x,
            mut loss_t,
            saved: StageSaved { batch, mut layers },
        } = so_far;
        for index in run {
            let layer = &self.layers[index];
            let views = params.views(index, layer)?;
            layers.push(Some(match layer {
                StageLayer::Embed(embed) => {
                    let (y, saved) = embed.forward(ctx, &batch, &views)?;
                    x = Some(y);
                    LayerSaved::Embed(saved)
                }
                StageLayer::Block(block) => {
                    let (y, saved) = block.forward(ctx, &batch, &views, taken(&mut x)?)?;
                    x = Some(y);
                    LayerSaved::Block(saved)
                }
                StageLayer::Head(head) => {
                    let (loss, saved) = head.forward(ctx, &batch, &views, taken(&mut x)?)?;
                    loss_t = Some(loss);
                    LayerSaved::Head(saved)
                }
            }));
        }
        Ok(Forward {
            output: x,
            loss_t,
            saved: StageSaved { batch, layers },
        })
    }

    /// Gradient of the input of the layers `run`, from the gradient `dx` of their output (none
    /// where the run ends with the head). None comes back from the embedding.
    ///
    /// # Errors
    /// As [`StageModel::forward`].
    pub fn backward_input<B: Device, C: Collectives<B>, E: Scalar>(
        &self,
        ctx: &Ctx<'_, B, C>,
        params: &Lent<'_, B, E>,
        saved: &mut StageSaved<B, C, E>,
        run: Range<usize>,
        mut dx: Option<B::Buf<E>>,
    ) -> Result<Option<B::Buf<E>>, Failure> {
        for index in run.rev() {
            let views = params.views(index, &self.layers[index])?;
            let batch = &saved.batch;
            let left = saved.layers.get_mut(index).and_then(Option::as_mut);
            dx = match (&self.layers[index], left) {
                (StageLayer::Head(head), Some(LayerSaved::Head(left))) => {
                    Some(head.backward_input(ctx, batch, &views, left)?)
                }
                (StageLayer::Block(block), Some(LayerSaved::Block(left))) => {
                    Some(block.backward_input(ctx, batch, &views, left, taken(&mut dx)?)?)
                }
                (StageLayer::Embed(embed), Some(LayerSaved::Embed(left))) => {
                    embed.backward_input(ctx, batch, left, taken(&mut dx)?)?;
                    None
                }
                _ => return Err(out_of_order()),
            };
        }
        Ok(dx)
    }

    /// Adds the gradients of the parameters of the layers `run`.
    ///
    /// # Errors
    /// As [`StageModel::forward`].
    pub fn backward_weight<B: Device, C: Collectives<B>, E: Scalar>(
        &self,
        ctx: &Ctx<'_, B, C>,
        saved: &mut StageSaved<B, C, E>,
        run: Range<usize>,
        grads: &mut LentGrads<'_, B, C, E>,
    ) -> Result<(), Failure> {
        for index in run.rev() {
            let mut views = grads.views(index, &self.layers[index])?;
            let batch = &saved.batch;
            let left = saved.layers.get_mut(index).and_then(Option::take);
            match (&self.layers[index], left) {
                (StageLayer::Head(head), Some(LayerSaved::Head(left))) => {
                    head.backward_weight(ctx, batch, left, &mut views)?;
                }
                (StageLayer::Block(block), Some(LayerSaved::Block(left))) => {
                    block.backward_weight(ctx, batch, left, &mut views)?;
                }
                (StageLayer::Embed(embed), Some(LayerSaved::Embed(left))) => {
                    embed.backward_weight(ctx, batch, left, &mut views)?;
                }
                _ => return Err(out_of_order()),
            }
        }
        Ok(())
    }
}

fn taken<T>(x: &mut Option<T>) -> Result<T, Failure> {
    x.take().ok_or_else(out_of_order)
}

fn out_of_order() -> Failure {
    Failure::aborted("the schedule asked for a layer's work before what it needs was there")
}
