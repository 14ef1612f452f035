//! The flags of `quintet plan`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use quintet_collectives::DType;
use quintet_planner::cluster::{Cluster, PRESETS};
use quintet_planner::flops::Causal;
use quintet_planner::search::{Job, Pins, Request};
use quintet_planner::time::{Efficiency, Practice};
use quintet_planner::traffic::WireTypes;

use super::words::{CpWord, DtypeWord, Optimizer, RecomputeWord, Schedule};
use crate::failure::Failure;
use crate::plan::{Form, Plan, read_cluster, read_shape, read_times};

#[derive(Debug, Clone, Args)]
pub(super) struct PlanArgs {
    /// A published model by name (llama3-405b, deepseek-v3, ...), one of train's, or a config.json or
    /// its folder
    #[arg(long, value_name = "NAME|PATH")]
    model: String,
    /// GPUs in all [default: as the cluster's file says, else 8]
    #[arg(long, value_name = "N")]
    gpus: Option<usize>,
    /// Kind of GPU: a100, h100, h200, b200 [default: h100]
    #[arg(long, value_name = "NAME", conflicts_with = "cluster")]
    preset: Option<String>,
    /// A cluster of your own; the keys are in docs/plan.md
    #[arg(long, value_name = "FILE.toml")]
    cluster: Option<PathBuf>,
    /// What kernels and links were measured to take, in place of the stated efficiencies; the keys are in
    /// docs/plan.md
    #[arg(long, value_name = "FILE.toml")]
    times: Option<PathBuf>,
    /// Tokens of a sequence [default: 8192, or what the model is made for if that is less]
    #[arg(long, visible_alias = "seq-len", value_name = "N")]
    seq_length: Option<usize>,
    /// Sequences of a step [default: as many as make 16,777,216 tokens]
    #[arg(long, visible_alias = "gbs", value_name = "N")]
    global_batch_size: Option<usize>,
    /// Type of parameters and activations; gradients and moments are f32, or f64 with f64
    /// [default: bf16]
    #[arg(long, value_enum)]
    dtype: Option<DtypeWord>,
    /// The rule, for what it keeps of each parameter [default: adamw]
    #[arg(long, value_enum)]
    optimizer: Option<Optimizer>,
    /// How MFU counts attention under a causal mask [default: full, as Megatron does]
    #[arg(long, value_enum)]
    mfu_attention: Option<CausalWord>,
    /// Tensor parallel ranks [default: searched, as is every degree and way below]
    #[arg(long = "tp", visible_aliases = ["tensor-parallel-size", "tensor-model-parallel-size"], value_name = "N", help_heading = "Already decided")]
    tp: Option<usize>,
    /// Pipeline stages
    #[arg(long = "pp", visible_aliases = ["pipeline-parallel-size", "pipeline-model-parallel-size"], value_name = "N", help_heading = "Already decided")]
    pp: Option<usize>,
    /// Context parallel ranks
    #[arg(
        long = "cp",
        visible_alias = "context-parallel-size",
        value_name = "N",
        help_heading = "Already decided"
    )]
    cp: Option<usize>,
    /// Data parallel ranks
    #[arg(
        long = "dp",
        visible_alias = "data-parallel-size",
        value_name = "N",
        help_heading = "Already decided"
    )]
    dp: Option<usize>,
    /// Expert parallel ranks
    #[arg(long = "ep", visible_aliases = ["expert-parallel-size", "expert-model-parallel-size"], value_name = "N", help_heading = "Already decided")]
    ep: Option<usize>,
    /// Ranks that share an expert
    #[arg(
        long = "etp",
        visible_alias = "expert-tensor-parallel-size",
        value_name = "N",
        help_heading = "Already decided"
    )]
    etp: Option<usize>,
    /// Activations between blocks cut over tp, or not
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL", help_heading = "Already decided")]
    sequence_parallel: Option<bool>,
    /// ZeRO stage
    #[arg(long, value_parser = clap::value_parser!(u8).range(0..=3), value_name = "0..3", help_heading = "Already decided")]
    zero_stage: Option<u8>,
    /// Order of work of the pipeline
    #[arg(long, value_enum, help_heading = "Already decided")]
    schedule: Option<Schedule>,
    /// Chunks of a stage
    #[arg(long, value_name = "N", help_heading = "Already decided")]
    virtual_stages: Option<usize>,
    /// How a cut sequence attends
    #[arg(
        long,
        visible_alias = "cp-comm-type",
        value_enum,
        help_heading = "Already decided"
    )]
    cp_comm: Option<CpWord>,
    /// Sequences of a microbatch
    #[arg(
        long,
        visible_alias = "mbs",
        value_name = "N",
        help_heading = "Already decided"
    )]
    micro_batch_size: Option<usize>,
    /// What backward computes again
    #[arg(
        long,
        visible_alias = "recompute-granularity",
        value_enum,
        help_heading = "Already decided"
    )]
    recompute: Option<RecomputeWord>,
    /// Meshes to show [default: 10]
    #[arg(long, value_name = "N", help_heading = "Answer")]
    top: Option<std::num::NonZeroUsize>,
    /// One JSON object; its keys are in docs/plan.md
    #[arg(long, conflicts_with = "csv", help_heading = "Answer")]
    json: bool,
    /// A line for each layout
    #[arg(long, help_heading = "Answer")]
    csv: bool,
    /// A page with the layouts, where ranks sit on nodes, memory and seconds; one file, which loads
    /// nothing
    #[arg(
        long,
        value_name = "FILE.html",
        conflicts_with = "steps",
        help_heading = "Answer"
    )]
    html: Option<PathBuf>,
    /// The first layout in figures, what the rules of the craft say of each, and why others do not go
    #[arg(long, conflicts_with_all = ["json", "csv"], help_heading = "Answer")]
    explain: bool,
    /// Decide step by step: memory, tp, pp, ZeRO, cp, ep
    #[arg(long, conflicts_with_all = ["json", "csv", "explain", "run"], help_heading = "Answer")]
    steps: bool,
    /// Run the best layout's shape at toy scale on the CPU: predicted beside counted
    #[arg(long, conflicts_with_all = ["json", "csv"], help_heading = "Answer")]
    run: bool,
}

/// How attention is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum CausalWord {
    /// As if there were no mask
    Full,
    /// What a causal kernel computes
    Half,
}

/// Tokens of a step where nothing says so.
const TOKENS: usize = 1 << 24;

impl PlanArgs {
    /// The question that is asked.
    ///
    /// # Errors
    /// Exit 2 in one sentence.
    pub(super) fn plan(&self) -> Result<Plan, Failure> {
        let shape = read_shape(&self.model)?;
        let seq = self.seq_length.unwrap_or(shape.max_positions.min(8192));
        let global_batch = self
            .global_batch_size
            .unwrap_or((TOKENS / seq.max(1)).max(1));
        let job = Job {
            types: self.types(),
            moments: match self.optimizer {
                Some(Optimizer::Sgd) => 0,
                _ => 2,
            },
            causal: match self.mfu_attention {
                Some(CausalWord::Half) => Causal::Half,
                _ => Causal::Full,
            },
            ..Job::bf16(seq, global_batch)
        };
        let mut request = Request {
            shape,
            cluster: self.cluster()?,
            job,
            pins: self.pins(),
            efficiency: Efficiency::default(),
            practice: Practice::default(),
            keep: self.top.map_or(10, std::num::NonZeroUsize::get),
        };
        if let Some(path) = &self.times {
            read_times(path, &mut request)?;
        }
        let form = match (self.json, self.csv) {
            (true, _) => Form::Json,
            (_, true) => Form::Csv,
            _ => Form::Table,
        };
        Ok(Plan {
            request,
            form,
            html: self.html.clone(),
            explain: self.explain,
            steps: self.steps,
            run: self.run,
        })
    }

    fn types(&self) -> WireTypes {
        let (storage, accumulation) = match self.dtype {
            Some(DtypeWord::F64) => (DType::F64, DType::F64),
            Some(DtypeWord::F32) => (DType::F32, DType::F32),
            _ => (DType::Bf16, DType::F32),
        };
        WireTypes {
            storage,
            accumulation,
        }
    }

    fn cluster(&self) -> Result<Cluster, Failure> {
        let mut cluster = match &self.cluster {
            Some(path) => read_cluster(path)?,
            None => {
                let name = self.preset.as_deref().unwrap_or("h100");
                Cluster::preset(name, 8).ok_or_else(|| {
                    Failure::usage(format!(
                        "preset {name}: no such kind of GPU; there are {}, and --cluster FILE.toml",
                        PRESETS.join(", ")
                    ))
                })?
            }
        };
        if let Some(gpus) = self.gpus {
            cluster.gpus = gpus;
        }
        cluster.validate()?;
        Ok(cluster)
    }

    fn pins(&self) -> Pins {
        Pins {
            tp: self.tp,
            pp: self.pp,
            cp: self.cp,
            dp: self.dp,
            ep: self.ep,
            etp: self.etp,
            sequence_parallel: self.sequence_parallel,
            zero_stage: self.zero_stage,
            schedule: self.schedule.map(Into::into),
            virtual_stages: self.virtual_stages,
            cp_comm: self.cp_comm.map(Into::into),
            micro_batch: self.micro_batch_size,
            recompute: self.recompute.map(Into::into),
        }
    }
}
