//! The embedding with its vocabulary cut over tp.
//!
//! ```text
//! ids --- my rows of the table, zeros for the rest --> Partial -- leave --> x outside
//! dtable <- my rows' tokens -- Replicate <-- dual of leave -- dx outside
//! outside: Invariant, or Shard(t) under sequence parallelism
//! ```
//!
//! Each token is found on exactly one rank, so the sum is exact. The vocabulary need not be a
//! multiple of tp; a rank may hold none of it.
//!
//! Learned positions are a second table, small and whole on every rank, whose rows are added to
//! what lies outside: each rank adds those of its own tokens.

use alloc::string::{String, ToString};
use alloc::vec::Vec;

use quintet_collectives::chunk::chunk;
use quintet_collectives::{Axis, DeviceMesh, Init, ParamSpec, Placement};
use quintet_kernels::{Collectives, Embedding, EmbeddingSpec, Pointwise, Scalar, Tag};

use crate::dropout::{DropoutAt, Site, rows_here};
use crate::region::{Region, apply, apply_to};
use crate::saved::{Saved, runs_mut, views_mut, weight_bias};
use crate::spec::{INIT_STD, dense};
use crate::{Ctx, Error, MicroBatch};

const NAME: &str = "embedding";

/// The table's name, which the head uses too where they are tied.
pub const TABLE: &str = "model.embed_tokens.weight";
/// The name of the table of learned positions.
pub const POSITIONS: &str = "model.embed_positions.weight";

/// Looks tokens up.
#[derive(Debug, Clone)]
pub struct VocabParallelEmbedding {
    mesh: DeviceMesh,
    vocab: usize,
    hidden: usize,
    tie: Option<String>,
    region: Region,
    /// Rows of the table of learned positions, if there is one.
    positions: Option<usize>,
    dropout: DropoutAt,
}

/// What the embedding keeps: nothing, then the gradient of its output.
pub type EmbeddingSaved<Buf> = Saved<(), EmbeddingWeight<Buf>>;

/// What the tables' gradients need.
#[derive(Debug)]
pub struct EmbeddingWeight<Buf> {
    dx: Buf,
    /// The same, whole; `None` where it is whole already.
    dx_whole: Option<Buf>,
}

impl VocabParallelEmbedding {
    /// The embedding; `tied` where the head uses the same table.
    ///
    /// # Errors
    /// None today.
    pub fn new(
        mesh: &DeviceMesh,
        vocab: usize,
        hidden: usize,
        tied: bool,
        sequence_parallel: bool,
    ) -> Result<Self, Error> {
        Ok(Self {
            mesh: *mesh,
            vocab,
            hidden,
            tie: tied.then(|| TABLE.to_string()),
            region: Region::new(sequence_parallel)?,
            positions: None,
            dropout: DropoutAt::new(0.0, Site::Embedding),
        })
    }

    /// Lets go of a share of the output in training.
    #[must_use]
    pub fn dropping(mut self, share: f64) -> Self {
        self.dropout = DropoutAt::new(share, Site::Embedding);
        self
    }

    /// Adds a table of `rows` learned positions.
    #[must_use]
    pub fn with_positions(mut self, rows: usize) -> Self {
        self.positions = Some(rows);
        self
    }

    /// The table, and that of learned positions if there is one.
    #[must_use]
    pub fn params(&self) -> Vec<ParamSpec> {
        let on_tp = [(self.mesh.factor(Axis::Tp), Placement::shard(0))];
        let (shape, init) = ([self.vocab, self.hidden], Init::Normal { std: INIT_STD });
        let mut table = dense(&self.mesh, TABLE, &shape, &on_tp, init);
        table.tie.clone_from(&self.tie);
        let mut all = Vec::from([table]);
        if let Some(rows) = self.positions {
            let on_tp = [(self.mesh.factor(Axis::Tp), self.region.outside_param())];
            let shape = [rows, self.hidden];
            all.push(dense(&self.mesh, POSITIONS, &shape, &on_tp, init));
        }
        all
    }

    /// The table of positions, all of which every rank has.
    fn positions_spec(&self, tokens: usize, rows: usize) -> EmbeddingSpec {
        EmbeddingSpec {
            tokens,
            first: 0,
            rows,
            dim: self.hidden,
        }
    }

    fn spec(&self, tokens: usize, world: usize, rank: usize) -> EmbeddingSpec {
        let here = chunk(self.vocab, world, rank);
        EmbeddingSpec {
            tokens,
            first: here.start,
            rows: here.len(),
            dim: self.hidden,
        }
    }

    /// `x[t]` = the table's row of `ids[t]`, plus the other table's row of `pos[t]`.
    ///
    /// # Errors
    /// What a kernel or a collective refuses or fails with.
    pub fn forward<B: Embedding + Pointwise, C: Collectives<B>, E: Scalar>(
        &self,
        ctx: &Ctx<'_, B, C>,
        batch: &MicroBatch<B, E>,
        params: &[B::Ref<'_, E>],
    ) -> Result<(B::Buf<E>, EmbeddingSaved<B::Buf<E>>), Error> {
        let (table, positions) = weight_bias(NAME, params)?;
        let t = batch.tokens();
        let spec = self.spec(t, ctx.tp.world(), ctx.tp.rank());
        let mut x = ctx.device.alloc(Tag::Activation, t * self.hidden)?;
        let ids = B::whole(&batch.ids_t);
        ctx.device
            .embedding::<E>(&spec, ids, table, B::whole_mut(&mut x))?;
        let mut x = apply(ctx, self.region.leave(), x, t, self.hidden)?;
        if let (Some(table), Some(rows)) = (positions, self.positions) {
            let here = rows_here::<B, C>(ctx.tp, &self.region, t);
            let mut add = ctx.device.alloc(Tag::Scratch, here.len() * self.hidden)?;
            let spec = self.positions_spec(here.len(), rows);
            let pos = B::slice(B::whole(&batch.pos_t), here);
            ctx.device
                .embedding::<E>(&spec, pos, table, B::whole_mut(&mut add))?;
            ctx.device.add::<E>(B::whole_mut(&mut x), B::whole(&add))?;
        }
        self.dropout.apply(ctx, batch, &self.region, &mut x)?;
        Ok((x, Saved::Forward(())))
    }

    /// Takes the gradient of the output; there is no input to hand one to.
    ///
    /// # Errors
    /// As [`VocabParallelEmbedding::forward`].
    pub fn backward_input<B: Embedding + Pointwise, C: Collectives<B>, E: Scalar>(
        &self,
        ctx: &Ctx<'_, B, C>,
        batch: &MicroBatch<B, E>,
        saved: &mut EmbeddingSaved<B::Buf<E>>,
        mut dx_td: B::Buf<E>,
    ) -> Result<(), Error> {
        saved.take_forward(NAME)?;
        self.dropout.apply(ctx, batch, &self.region, &mut dx_td)?;
        let back = self.region.leave().backward()?;
        let dx_whole = apply_to(ctx, back, B::whole(&dx_td), batch.tokens(), self.hidden)?;
        let dx = dx_td;
        *saved = Saved::Weight(EmbeddingWeight { dx, dx_whole });
        Ok(())
    }

    /// Adds to the gradient of the table.
    ///
    /// # Errors
    /// As [`VocabParallelEmbedding::forward`], and [`Error::Order`] before
    /// [`VocabParallelEmbedding::backward_input`].
    pub fn backward_weight<B: Embedding, C: Collectives<B>, E: Scalar>(
        &self,
        ctx: &Ctx<'_, B, C>,
        batch: &MicroBatch<B, E>,
        saved: EmbeddingSaved<B::Buf<E>>,
        grads: &mut [B::Mut<'_, E::Acc>],
    ) -> Result<(), Error> {
        let (counts, t) = ([1, usize::from(self.positions.is_some())], batch.tokens());
        let [dtable, dpositions] = runs_mut(NAME, grads, counts)?;
        let [dtable]: &mut [_; 1] = views_mut(NAME, dtable)?;
        let EmbeddingWeight { dx, dx_whole } = saved.into_weight(NAME)?;
        let spec = self.spec(t, ctx.tp.world(), ctx.tp.rank());
        let (ids, dtable) = (B::whole(&batch.ids_t), B::reborrow(dtable));
        let whole = B::whole(dx_whole.as_ref().unwrap_or(&dx));
        ctx.device
            .embedding_backward::<E>(&spec, ids, whole, dtable)?;
        if let (Some(rows), [dpositions]) = (self.positions, dpositions) {
            let here = rows_here::<B, C>(ctx.tp, &self.region, t);
            let spec = self.positions_spec(here.len(), rows);
            let pos = B::slice(B::whole(&batch.pos_t), here);
            let dpositions = B::reborrow(dpositions);
            ctx.device
                .embedding_backward::<E>(&spec, pos, B::whole(&dx), dpositions)?;
        }
        Ok(())
    }
}
