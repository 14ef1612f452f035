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

use alloc::string::{String, ToString};
use alloc::vec::Vec;

use quintet_collectives::chunk::chunk;
use quintet_collectives::{Axis, DeviceMesh, Init, ParamSpec, Placement};
use quintet_kernels::{Collectives, Embedding, EmbeddingSpec, Scalar, Tag};

use crate::region::{Region, apply, apply_to};
use crate::saved::{Saved, views, views_mut};
use crate::spec::{INIT_STD, dense};
use crate::{Ctx, Error, MicroBatch};

const NAME: &str = "embedding";

/// The table's name, which the head uses too where they are tied.
pub const TABLE: &str = "model.embed_tokens.weight";

/// Looks tokens up.
#[derive(Debug, Clone)]
pub struct VocabParallelEmbedding {
    mesh: DeviceMesh,
    vocab: usize,
    hidden: usize,
    tie: Option<String>,
    region: Region,
}

/// What the embedding keeps: nothing, then the gradient of its output, whole.
pub type EmbeddingSaved<Buf> = Saved<(), Buf>;

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
        })
    }

    /// The table.
    #[must_use]
    pub fn params(&self) -> Vec<ParamSpec> {
        let on_tp = [(self.mesh.factor(Axis::Tp), Placement::shard(0))];
        let (shape, init) = ([self.vocab, self.hidden], Init::Normal { std: INIT_STD });
        let mut table = dense(&self.mesh, TABLE, &shape, &on_tp, init);
        table.tie.clone_from(&self.tie);
        Vec::from([table])
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

    /// `x[t]` = the table's row of `ids[t]`.
    ///
    /// # Errors
    /// What a kernel or a collective refuses or fails with.
    pub fn forward<B: Embedding, C: Collectives<B>, E: Scalar>(
        &self,
        ctx: &Ctx<'_, B, C>,
        batch: &MicroBatch<B, E>,
        params: &[B::Ref<'_, E>],
    ) -> Result<(B::Buf<E>, EmbeddingSaved<B::Buf<E>>), Error> {
        let &[table] = views(NAME, params)?;
        let t = batch.tokens();
        let spec = self.spec(t, ctx.tp.world(), ctx.tp.rank());
        let mut x = ctx.device.alloc(Tag::Activation, t * self.hidden)?;
        let ids = B::whole(&batch.ids_t);
        ctx.device
            .embedding::<E>(&spec, ids, table, B::whole_mut(&mut x))?;
        let x = apply(ctx, self.region.leave(), x, t, self.hidden)?;
        Ok((x, Saved::Forward(())))
    }

    /// Takes the gradient of the output; there is no input to hand one to.
    ///
    /// # Errors
    /// As [`VocabParallelEmbedding::forward`].
    pub fn backward_input<B: Embedding, C: Collectives<B>, E: Scalar>(
        &self,
        ctx: &Ctx<'_, B, C>,
        batch: &MicroBatch<B, E>,
        saved: &mut EmbeddingSaved<B::Buf<E>>,
        dx_td: B::Buf<E>,
    ) -> Result<(), Error> {
        saved.take_forward(NAME)?;
        let back = self.region.leave().backward()?;
        let whole = apply_to(ctx, back, B::whole(&dx_td), batch.tokens(), self.hidden)?;
        *saved = Saved::Weight(whole.unwrap_or(dx_td));
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
        let [dtable]: &mut [_; 1] = views_mut(NAME, grads)?;
        let dx = saved.into_weight(NAME)?;
        let spec = self.spec(batch.tokens(), ctx.tp.world(), ctx.tp.rank());
        let (ids, dtable) = (B::whole(&batch.ids_t), B::reborrow(dtable));
        Ok(ctx
            .device
            .embedding_backward::<E>(&spec, ids, B::whole(&dx), dtable)?)
    }
}
