//! Formulas as papers and other programs give them, for comparison: what this crate says of its own
//! trainer is elsewhere, and does not use them.

/// Bytes of parameters (2), gradients (2) and Adam in mixed precision (12) of `parameters` on each
/// of `ranks`, under a ZeRO stage (Rajbhandari et al., arXiv:1910.02054, figure 1).
///
/// ```
/// use quintet_planner::literature::zero;
/// assert_eq!(zero(70e9, 0, 1), 1120e9);
/// ```
#[must_use]
pub fn zero(parameters: f64, stage: u8, ranks: usize) -> f64 {
    let n = ranks as f64;
    let part = |from: u8| if stage >= from { n } else { 1.0 };
    parameters * (2.0 / part(3) + 2.0 / part(2) + 12.0 / part(1))
}

/// What DeepSpeed keeps in the memory of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Offload {
    /// Nothing.
    None,
    /// The optimizer.
    Optimizer,
    /// Optimizer and parameters.
    All,
}

/// Bytes on each GPU by `estimate_zero2_model_states_mem_needs` of DeepSpeed as it is today. Its
/// documentation still shows figures of an older formula, `4 P + 16 P / n`.
#[must_use]
pub fn deepspeed_zero2(parameters: f64, ranks: usize, offload: Offload) -> f64 {
    match offload {
        Offload::None => 2.0 * parameters + 18.0 * parameters / ranks as f64,
        Offload::Optimizer | Offload::All => 2.0 * parameters,
    }
}

/// Bytes on each GPU by `estimate_zero3_model_states_mem_needs`; `largest` are the parameters of the
/// largest layer.
#[must_use]
pub fn deepspeed_zero3(parameters: f64, largest: f64, ranks: usize, offload: Offload) -> f64 {
    let n = ranks as f64;
    4.0 * largest
        + match offload {
            Offload::None => 18.0 * parameters / n,
            Offload::Optimizer => 2.0 * parameters / n,
            Offload::All => 0.0,
        }
}

/// A GPT as Korthikanti et al. count it (arXiv:2205.05198): MLP of 4 h, as many KV heads as heads,
/// dropout everywhere, 16 bits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Gpt {
    /// Width.
    pub hidden: f64,
    /// Layers.
    pub layers: f64,
    /// Heads.
    pub heads: f64,
    /// Tokens of a sequence.
    pub seq: f64,
    /// Entries of the vocabulary.
    pub vocab: f64,
}

/// How its activations are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keeping {
    /// Tensor parallel.
    Tensor,
    /// And what lies between the regions cut by token.
    Sequence,
    /// Tensor parallel; attention's scores are computed again.
    Selective,
    /// Both.
    SequenceSelective,
    /// The input of each layer alone.
    Full,
}

impl Gpt {
    /// Parameters of the layers, 12 h^2 each.
    #[must_use]
    pub fn layer_parameters(&self) -> f64 {
        12.0 * self.layers * self.hidden * self.hidden
    }

    /// All parameters: `12 l h^2 (1 + 13 / 12 h + (V + s) / 12 l h)` (Narayanan et al.,
    /// arXiv:2104.04473).
    #[must_use]
    pub fn parameters(&self) -> f64 {
        let Self {
            hidden: h,
            layers: l,
            seq: s,
            vocab: v,
            ..
        } = *self;
        self.layer_parameters() * (1.0 + 13.0 / (12.0 * h) + (v + s) / (12.0 * l * h))
    }

    /// Operations of a step of `batch` sequences, without recompute: `72 B s l h^2 (1 + s / 6 h + V
    /// / 12 h l)`.
    #[must_use]
    pub fn flops(&self, batch: f64) -> f64 {
        let Self {
            hidden: h,
            layers: l,
            seq: s,
            vocab: v,
            ..
        } = *self;
        72.0 * batch * s * l * h * h * (1.0 + s / (6.0 * h) + v / (12.0 * h * l))
    }

    /// With full recompute: `96 B s l h^2 (1 + s / 6 h + V / 16 l h)`.
    #[must_use]
    pub fn flops_recomputed(&self, batch: f64) -> f64 {
        let Self {
            hidden: h,
            layers: l,
            seq: s,
            vocab: v,
            ..
        } = *self;
        96.0 * batch * s * l * h * h * (1.0 + s / (6.0 * h) + v / (16.0 * l * h))
    }

    /// Bytes of activations that one layer keeps of a microbatch of `micro` sequences over `tp`
    /// ranks.
    #[must_use]
    pub fn activations(&self, micro: f64, tp: f64, keeping: Keeping) -> f64 {
        let Self {
            hidden: h,
            heads: a,
            seq: s,
            ..
        } = *self;
        let sbh = s * micro * h;
        let scores = 5.0 * a * s / h;
        sbh * match keeping {
            Keeping::Tensor => 10.0 + (24.0 + scores) / tp,
            Keeping::Sequence => (34.0 + scores) / tp,
            Keeping::Selective => 10.0 + 24.0 / tp,
            Keeping::SequenceSelective => 34.0 / tp,
            Keeping::Full => 2.0,
        }
    }

    /// The same on the first stage of `pp`, of all microbatches it holds: `L` layers' worth, and
    /// `1 + (p - 1) / (p v)` times that where stages hold `v` chunks.
    #[must_use]
    pub fn first_stage(&self, layer: f64, pp: f64, chunks: f64) -> f64 {
        let more = if chunks > 1.0 {
            1.0 + (pp - 1.0) / (pp * chunks)
        } else {
            1.0
        };
        self.layers * layer * more
    }
}
