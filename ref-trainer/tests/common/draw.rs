//! A job with its data.

use std::fmt;

use quintet_parallel_layers::philox::Stream;
use quintet_ref_trainer::data::{Corpus, Samples};
use quintet_ref_trainer::job::Job;

/// A job with its data, which is of a text of seeded bytes.
#[derive(Debug, Clone)]
pub struct Draw {
    /// The job.
    pub job: Job,
}

impl Draw {
    /// The samples: of a text of seeded bytes below the vocabulary.
    pub fn samples(&self) -> Samples {
        let corpus = Corpus::from_bytes("(drawn)", &self.text()).expect("a text");
        let samples = Samples::new(corpus, self.job.seed, self.job.batch.seq);
        let samples = samples
            .expect("a text long enough")
            .with_mask(self.job.mask());
        samples.with_documents(self.job.pack_documents)
    }

    pub(super) fn text(&self) -> Vec<u8> {
        let mut bytes = text(self.job.model.vocab, 400, self.job.seed);
        if self.job.pack_documents {
            blank_lines(&mut bytes, self.job.seed);
        }
        bytes
    }

    /// Valid tokens of each replica in each step.
    pub fn valid(&self) -> Vec<Vec<usize>> {
        let (batch, dp) = (self.job.batch, self.job.layout.dp);
        let (samples, each) = (self.samples(), batch.global_batch / dp);
        let replica = |step, r: usize| {
            let mine = (r * each..(r + 1) * each).map(|i| samples.sample(step, i as u64).valid());
            mine.sum()
        };
        let steps = 1..=self.job.steps;
        steps
            .map(|step| (0..dp).map(|r| replica(step, r)).collect())
            .collect()
    }
}

/// Puts a blank line at every sixth place or so.
pub fn blank_lines(bytes: &mut [u8], seed: u64) {
    let stream = Stream::new(seed, "blank lines for tests");
    for at in 0..bytes.len() - 1 {
        if stream.below(at as u64, 6) == 0 {
            bytes[at..at + 2].fill(b'\n');
        }
    }
}

/// Seeded bytes below `vocab`.
pub fn text(vocab: usize, len: usize, seed: u64) -> Vec<u8> {
    let stream = Stream::new(seed, "a text for tests");
    let most = vocab.min(256) as u64;
    (0..len as u64)
        .map(|i| stream.below(i, most) as u8)
        .collect()
}

impl fmt::Display for Draw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (m, l, b, o) = (
            &self.job.model,
            &self.job.layout,
            &self.job.batch,
            &self.job.optimizer,
        );
        writeln!(
            f,
            "dp {} tp {} pp {} cp {} {} ulysses {} documents {} window {:?}",
            l.dp,
            l.tp,
            l.pp,
            l.cp,
            l.cp_comm.name(),
            l.ulysses(),
            self.job.pack_documents,
            m.window,
        )?;
        writeln!(
            f,
            "sequence-parallel {} zero {} within {:?} {} of {} chunks {:?} bucket {} any order {} threads {} by messages {} recompute {:?}",
            l.sequence_parallel,
            l.zero_stage,
            l.hybrid_shard_size,
            l.schedule.name(),
            l.chunks(),
            l.stage_layers,
            l.bucket_bytes,
            l.any_order,
            self.job.threads_per_rank,
            self.job.by_messages,
            l.recompute,
        )?;
        writeln!(
            f,
            "dropout {} ep {} etp {} {:?}",
            m.dropout, l.ep, l.etp, m.moe
        )?;
        writeln!(
            f,
            "vocab {} hidden {} layers {} heads {} kv {} head_dim {} ffn {} tied {}",
            m.vocab, m.hidden, m.layers, m.heads, m.kv_heads, m.head_dim, m.ffn, m.tied,
        )?;
        writeln!(f, "{:?}", m.architecture)?;
        writeln!(
            f,
            "seq {} micro {} global {} mask {:?} valid {:?}",
            b.seq,
            b.micro_batch,
            b.global_batch,
            self.job.mask(),
            self.valid(),
        )?;
        write!(
            f,
            "{:?} {:?} lr {} clip {} decay {} seed {}",
            self.job.dtype, o.kind, o.lr, o.clip_grad, o.weight_decay, self.job.seed,
        )
    }
}
