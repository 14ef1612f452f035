//! Every layout of a model on a cluster, judged: what does not go, and why; of the rest the
//! fastest.
//!
//! ```text
//! mesh      tp x pp x cp x dp, and ep x etp folded in      validate, or a reason
//!   sp      parts of each layer, model states under ZeRO 0 to 3
//!     cp, microbatch, recompute    bytes, flows and seconds of each kind of layer
//!       schedule x chunks          what stages hold at once; idle time
//!         ZeRO                     memory of the fullest rank, or a reason; seconds of a step
//! ```
//!
//! Each mesh is represented by its fastest way; the meshes are ranked by tokens a second. What cannot
//! come among those kept, for its layers alone take longer, is counted without being looked into: a
//! test compares with a search that keeps everything.

use alloc::string::String;
use alloc::vec::Vec;

use quintet_collectives::DType;
use quintet_parallel_layers::pipeline::ScheduleKind;

use crate::closed::held::Held;
use crate::cluster::Cluster;
use crate::flops::{Causal, Flops, per_token};
use crate::shape::Shape;
use crate::time::{Efficiency, Practice, StepTime};
use crate::traffic::WireTypes;
use crate::{Batch, Invalid, Layout};

mod cost;
mod limits;
mod pins;
mod reject;
mod space;
mod walk;

pub use pins::Pins;
pub use reject::{Rejected, Tightest};

/// What is to be trained, beside the model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Job {
    /// Tokens of a sequence.
    pub seq: usize,
    /// Sequences of a step.
    pub global_batch: usize,
    /// Of activations and parameters; of gradients.
    pub types: WireTypes,
    /// Numbers that the optimizer keeps of each parameter: two for AdamW.
    pub moments: usize,
    /// How attention is counted in MFU.
    pub causal: Causal,
}

impl Job {
    /// bf16 with f32 gradients, master weights and AdamW: 18 bytes a parameter.
    #[must_use]
    pub fn bf16(seq: usize, global_batch: usize) -> Self {
        Self {
            seq,
            global_batch,
            types: WireTypes {
                storage: DType::Bf16,
                accumulation: DType::F32,
            },
            moments: 2,
            causal: Causal::Full,
        }
    }

    /// Operations a second that a GPU of the cluster could do at most in this job's type.
    #[must_use]
    pub fn peak(&self, cluster: &Cluster) -> f64 {
        match self.types.storage {
            DType::F64 => cluster.peak.f64,
            DType::F32 => cluster.peak.f32,
            _ => cluster.peak.bf16,
        }
    }
}

/// A question to the planner.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// The model.
    pub shape: Shape,
    /// The machine.
    pub cluster: Cluster,
    /// The job.
    pub job: Job,
    /// What is already decided.
    pub pins: Pins,
    /// The constants of the model of time.
    pub efficiency: Efficiency,
    /// Whose trainer is timed; bytes and memory are this project's.
    pub practice: Practice,
    /// Meshes to keep.
    pub keep: usize,
}

/// A layout that fits.
#[derive(Debug, Clone, PartialEq)]
pub struct Candidate {
    /// How it is cut.
    pub layout: Layout,
    /// How much it learns from at once.
    pub batch: Batch,
    /// What its fullest rank holds.
    pub held: Held,
    /// Which stage that is.
    pub stage: usize,
    /// Where the seconds of a step go.
    pub time: StepTime,
}

impl Candidate {
    /// Microbatches of each replica in a step.
    #[must_use]
    pub fn microbatches(&self) -> usize {
        self.batch.microbatches() / self.layout.dp.max(1)
    }

    /// Tokens a second, of all GPUs.
    #[must_use]
    pub fn tokens_per_second(&self) -> f64 {
        (self.batch.seq * self.batch.global_batch) as f64 / self.time.total()
    }

    /// Share of the peak that the model's operations make up; recompute is no such operation.
    #[must_use]
    pub fn mfu(&self, request: &Request, flops: &Flops) -> f64 {
        let peak = request.job.peak(&request.cluster) * self.layout.world() as f64;
        self.tokens_per_second() * flops.per_token() / peak
    }

    /// Share of the step in which the pipeline fills and drains.
    #[must_use]
    pub fn bubble(&self) -> f64 {
        self.time.bubble / self.time.total()
    }
}

/// What a search found.
#[derive(Debug, Clone, PartialEq)]
pub struct Found {
    /// The fastest way of each of the best meshes, fastest first.
    pub best: Vec<Candidate>,
    /// Layouts looked at, those included that were seen to be slower together.
    pub considered: u64,
    /// Those that can be, fit and were timed.
    pub fitting: u64,
    /// Meshes of which some way did.
    pub meshes: u64,
    /// Why the others do not go, most frequent first.
    pub rejected: Vec<Rejected>,
    /// The layout that comes nearest to fitting, where some do not.
    pub tightest: Option<Tightest>,
    /// How operations are counted.
    pub flops: Flops,
}

/// Judges every layout.
///
/// # Errors
/// Where cluster or job cannot be at all.
pub fn search(request: &Request) -> Result<Found, Invalid> {
    judge(request)?;
    Ok(walk::Walk::new(request, &swift(request)).run(usize::MAX))
}

/// Whether any layout fits: stops at the first mesh of which one does.
///
/// # Errors
/// As [`search`].
pub fn fits(request: &Request) -> Result<bool, Invalid> {
    judge(request)?;
    Ok(walk::Walk::new(request, &swift(request)).run(1).meshes > 0)
}

/// The fewest GPUs of this kind on which some layout fits, tried in whole nodes at 1, 2, 3, 4, 6, 8,
/// 12, 16 and so on (and parts of a first node at 1, 2, 4); none below 2^14 nodes. Asked is the way
/// that needs least: microbatches of one sequence, one forward and one backward in turn.
#[must_use]
pub fn smallest(request: &Request) -> Option<usize> {
    let node = request.cluster.gpus_per_node.max(1);
    let parts = [1, 2, 4].into_iter().filter(|&few| few < node);
    let nodes = (0..14).flat_map(|k| [1 << k, 3 << k]);
    let mut counts: Vec<usize> = parts.chain(nodes.map(|n| n * node)).collect();
    counts.sort_unstable();
    counts.dedup();
    counts.into_iter().find(|&gpus| {
        let mut request = request.clone();
        request.cluster.gpus = gpus;
        request.pins = Pins {
            micro_batch: Some(1),
            schedule: Some(ScheduleKind::OneFOneB),
            ..Pins::default()
        };
        fits(&request).unwrap_or(false)
    })
}

/// The cluster without latencies.
fn swift(request: &Request) -> Cluster {
    let mut swift = request.cluster.clone();
    (swift.inside.latency, swift.between.latency) = (0.0, 0.0);
    swift
}

fn judge(request: &Request) -> Result<(), Invalid> {
    request.cluster.validate()?;
    request.practice.validate(&request.cluster)?;
    limits::limits(request)?;
    let job = &request.job;
    let no = |text: &str| Err(Invalid(String::from(text)));
    if job.seq == 0 || job.global_batch == 0 {
        return no("a step needs at least one sequence of one token");
    }
    if job.peak(&request.cluster) <= 0.0 {
        return no("the cluster's peak in this type is 0; name one in its file");
    }
    Ok(())
}

/// Operations of a token in this request.
#[must_use]
pub fn flops(request: &Request) -> Flops {
    per_token(&request.shape, request.job.seq, request.job.causal)
}
