//! What a layer computes on a rank.

use quintet_parallel_layers::MlpKind;

use crate::closed::ByKind;
use crate::shape::Shape;
use crate::{Batch, Layout};

/// Operations and bytes of a layer's forward on this rank, for one microbatch.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Work {
    /// Of products.
    pub products: f64,
    /// Those of them that some trainers take in 8 bits: all but the router's and the head's.
    pub blocks: f64,
    /// Narrowest side of the products that are most of it.
    pub width: f64,
    /// Of attention proper.
    pub attention: f64,
    /// Bytes of memory that go by beside the products.
    pub bytes: f64,
}

/// The forward work of each kind of layer on the first rank.
#[must_use]
pub fn work(shape: &Shape, layout: &Layout, batch: &Batch, element: usize) -> ByKind<Work> {
    let c = &shape.config;
    let tp = layout.tp as f64;
    let t = (batch.micro_batch * batch.seq / layout.cp) as f64;
    let r = if layout.sequence_parallel { t / tp } else { t };
    let (h, f, e) = (c.hidden as f64, c.ffn as f64 / tp, element as f64);
    let q = (c.heads * c.head_dim) as f64 / tp;
    let kv = ((c.kv_heads as f64 / tp).max(1.0)) * c.head_dim as f64;
    let matrices = if c.architecture.mlp == MlpKind::SwiGlu {
        3.0
    } else {
        2.0
    };
    let heads = match shape.latent {
        Some(latent) => {
            latent.whole(c.hidden).0 as f64 + c.heads as f64 / tp * latent.per_head(c.hidden) as f64
        }
        None => 2.0 * (q + kv) * h,
    };
    let seen = c.window.map_or(batch.seq, |window| window.min(batch.seq)) as f64 / 2.0;
    let attention = 4.0 * q * seen * t;
    // Two norms, two residuals and the rotation; the MLP's activation beside them.
    let around = e * (10.0 * r * h + 2.0 * t * (q + kv));
    let products = 2.0 * t * (heads + matrices * f * h);
    let dense = Work {
        products,
        blocks: products,
        width: t.min(h).min(f),
        attention,
        bytes: around + e * matrices * t * f,
    };
    let moe = c.moe.map_or_else(Work::default, |moe| {
        let rows = t / tp * moe.topk as f64 * layout.etp as f64;
        let (wide, shared) = (
            moe.ffn as f64 / layout.etp as f64,
            moe.shared_ffn as f64 / tp,
        );
        let here = (moe.experts / layout.ep.max(1)).max(1) as f64;
        // Rows that come to one expert from all ranks that share it.
        let each = rows * layout.ep as f64 / (here * layout.ep as f64);
        let blocks = 2.0 * t * (heads + 3.0 * shared * h) + 6.0 * rows * wide * h;
        Work {
            products: blocks + 2.0 * t / tp * (moe.experts as f64) * h,
            blocks,
            width: each.min(h).min(wide).max(1.0),
            attention,
            bytes: around + e * (3.0 * t * shared + rows * (3.0 * wide + 4.0 * h)),
        }
    });
    let v = c.vocab as f64 / tp;
    ByKind {
        embed: Work {
            bytes: 2.0 * e * t * h,
            width: h,
            ..Work::default()
        },
        dense,
        moe,
        head: Work {
            products: 2.0 * t * h * v,
            blocks: 0.0,
            width: t.min(h).min(v),
            attention: 0.0,
            bytes: e * (4.0 * r * h + 3.0 * t * v),
        },
    }
}
