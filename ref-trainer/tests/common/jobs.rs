//! The jobs that tests of one matter begin from.

use quintet_planner::config::{Batch, Layout, ModelConfig};
use quintet_ref_trainer::compare::compare;
use quintet_ref_trainer::data::Samples;
use quintet_ref_trainer::job::Job;
use quintet_ref_trainer::record::Step;

use super::Draw;

/// The job most small tests begin from: a small untied model, three steps of descent.
pub fn small_job() -> Job {
    let model = ModelConfig {
        vocab: 37,
        hidden: 12,
        layers: 4,
        heads: 4,
        kv_heads: 2,
        head_dim: 4,
        ffn: 10,
        tied: false,
        ..Job::default().model
    };
    let batch = Batch {
        seq: 6,
        micro_batch: 1,
        global_batch: 12,
    };
    Job {
        model,
        batch,
        layout: Layout::single(),
        seed: 11,
        ..Job::verify()
    }
}

/// The same cut over dp x tp x pp ranks.
pub fn cut(job: &Job, (dp, tp, pp): (usize, usize, usize)) -> Job {
    with(job, |layout| {
        (layout.dp, layout.tp, layout.pp) = (dp, tp, pp)
    })
}

/// The same with another layout.
pub fn with(job: &Job, change: impl FnOnce(&mut Layout)) -> Job {
    let mut job = job.clone();
    change(&mut job.layout);
    job
}

/// Samples of seeded bytes that fit the job.
pub fn samples_of(job: &Job) -> Samples {
    Draw { job: job.clone() }.samples()
}

/// The first quantity in which two runs have not the same bits. Norms are left out where
/// `but_norm`: how they are summed may depend on what is compared.
pub fn first_difference(a: &[Step], b: &[Step], but_norm: bool) -> Option<String> {
    if a.len() != b.len() {
        return Some(format!("{} steps and {}", a.len(), b.len()));
    }
    a.iter().zip(b).enumerate().find_map(|(step, (x, y))| {
        let same = |x: f64, y: f64| x.to_bits() == y.to_bits();
        let checks = [
            ("loss", same(x.loss, y.loss)),
            ("gradients", compare(&x.grads, &y.grads).bit_equal),
            ("norm", but_norm || same(x.norm, y.norm)),
            ("parameters", compare(&x.params, &y.params).bit_equal),
        ];
        let differs = checks.into_iter().find(|(_, same)| !same);
        differs.map(|(what, _)| format!("{what} of step {}", step + 1))
    })
}
