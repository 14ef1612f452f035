//! Every flag, as given: nothing is filled in here, so that a saved job shows through.
//!
//! `[default: x]` in a help text is checked by a test against what a run really does.

use std::path::PathBuf;

use clap::Args;

use super::words::{
    CpWord, DecayStyle, Device, DtypeWord, Launch, Log, Optimizer, RecomputeWord, ReductionOrder,
    Schedule, ScoreFunction, Transport,
};

#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Layout")]
pub(super) struct LayoutArgs {
    /// Replicas that each learn from a part of the batch [default: 1]
    #[arg(long = "dp", visible_alias = "data-parallel-size", value_name = "N")]
    pub dp: Option<usize>,
    /// Parts that each layer is cut into; divides the heads [default: 1]
    #[arg(long = "tp", visible_aliases = ["tensor-parallel-size", "tensor-model-parallel-size"], value_name = "N")]
    pub tp: Option<usize>,
    /// Stages that the layers are dealt to [default: 1]
    #[arg(long = "pp", visible_aliases = ["pipeline-parallel-size", "pipeline-model-parallel-size"], value_name = "N")]
    pub pp: Option<usize>,
    /// Ranks that a sequence is cut over, two pieces each; 2 x N divides its length [default: 1]
    #[arg(long = "cp", visible_alias = "context-parallel-size", value_name = "N")]
    pub cp: Option<usize>,
    /// Ranks of dp x cp x tp that share the experts; divides them [default: 1]
    #[arg(long = "ep", visible_aliases = ["expert-parallel-size", "expert-model-parallel-size"], value_name = "N")]
    pub ep: Option<usize>,
    /// Parts that each expert is cut into [default: 1]
    #[arg(
        long = "etp",
        visible_alias = "expert-tensor-parallel-size",
        value_name = "N"
    )]
    pub etp: Option<usize>,
    /// Cut activations between blocks over tp too, by token [default: false]
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    pub sequence_parallel: Option<bool>,
    /// 0: replicas keep all; 1: each keeps its part of the optimizer's state; 2: of the gradients
    /// too, summed after each microbatch; 3: of the parameters too, gathered where they are used
    /// [default: 0]
    #[arg(long, value_parser = clap::value_parser!(u8).range(0..=3), value_name = "0..3")]
    pub zero_stage: Option<u8>,
    /// Megatron's word for --zero-stage 1
    #[arg(long, conflicts_with = "zero_stage")]
    pub use_distributed_optimizer: bool,
    /// Order of work of the pipeline [default: 1f1b]
    #[arg(long, value_enum)]
    pub schedule: Option<Schedule>,
    /// Chunks of the model that a stage holds; 2 or more under the interleaved schedule, which a
    /// number given here alone asks for [default: 1; with --schedule interleaved 2]
    #[arg(
        long,
        visible_alias = "num-virtual-stages-per-pipeline-rank",
        value_name = "N"
    )]
    pub virtual_stages: Option<usize>,
    /// Layers on each stage, as in 1,3; with several chunks a stage, of each chunk in the order of
    /// the model [default: even, earlier ones take the remainder]
    #[arg(
        long,
        visible_alias = "pipeline-model-parallel-layout",
        value_delimiter = ',',
        value_name = "N,N,..."
    )]
    pub pipeline_layout: Option<Vec<usize>>,
    /// How a cut sequence attends [default: ring]
    #[arg(long, visible_alias = "cp-comm-type", value_enum)]
    pub cp_comm: Option<CpWord>,
    /// Factor of cp that exchanges tokens for heads, the rest being a ring or gathering
    /// [default: all of cp under --cp-comm ulysses, else 1]
    #[arg(long, value_name = "N")]
    pub ulysses_degree: Option<usize>,
    /// What backward computes again instead of keeping it [default: none]
    #[arg(long, visible_alias = "recompute-granularity", value_enum)]
    pub recompute: Option<RecomputeWord>,
    /// Neighbouring replicas that shard among themselves, the others holding copies; divides dp x
    /// cp, needs --zero-stage 1, 2 or 3 [default: all of them]
    #[arg(long, value_name = "N")]
    pub hybrid_shard_size: Option<usize>,
    /// Gradients are summed, and under --zero-stage 3 parameters gathered, in buckets of whole
    /// layers that are closed once they take this many bytes; 1 makes each layer its own
    /// [default: 1048576; zero-stage 2, 3 or recompute full: 1]
    #[arg(long, value_name = "BYTES")]
    pub bucket_bytes: Option<usize>,
    /// Order in which contributions are added [default: rank]
    #[arg(long, value_enum)]
    pub reduction_order: Option<ReductionOrder>,
}

#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Model")]
pub(super) struct ModelArgs {
    /// tiny, tiny-moe, bench-s, bench-m, or a config.json with Hugging Face's keys, or its folder
    /// [default: tiny; verify: tiny-moe; the demo too]
    #[arg(long, value_name = "NAME|PATH")]
    pub model: Option<String>,
    /// Give the head a table of its own [default: as the model says]
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    pub untie_embeddings_and_output_weights: Option<bool>,
    /// Share let go in training: of the embedding's output, of attention's probabilities, and of what
    /// attention and MLP give; the same elements under any layout [default: 0]
    #[arg(long, value_name = "P")]
    pub dropout: Option<f64>,
    /// Tokens that a token sees, itself the last of them; 0 is all before it [default: as the
    /// model says]
    #[arg(long, value_name = "N")]
    pub window_size: Option<usize>,
    /// Blank lines part documents that do not see each other; positions begin anew in each, and
    /// no prediction across a border counts [default: false]
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    pub pack_documents: Option<bool>,
    /// Experts a layer, in place of its MLP; 0 is none [default: as the model says]
    #[arg(long, value_name = "N")]
    pub num_experts: Option<usize>,
    /// Experts a token goes to [default: as the model says, else 2]
    #[arg(long, value_name = "N")]
    pub moe_router_topk: Option<usize>,
    /// How a router scores: softmax over the experts, or sigmoid of each [default: as the model says,
    /// else softmax]
    #[arg(long, value_enum)]
    pub moe_router_score_function: Option<ScoreFunction>,
    /// Weight of the loss of balance [default: as the model says, else 0]
    #[arg(long, visible_alias = "moe-aux-loss-coefficient", value_name = "X")]
    pub moe_aux_loss_coeff: Option<f64>,
    /// Weight of the router's z-loss [default: as the model says, else 0]
    #[arg(long, value_name = "X")]
    pub moe_z_loss_coeff: Option<f64>,
    /// Room of an expert over its fair share of a microbatch; what comes after is dropped [default:
    /// as the model says, else nothing is dropped]
    #[arg(long, visible_alias = "moe-expert-capacity-factor", value_name = "X")]
    pub moe_capacity_factor: Option<f64>,
    /// Width of an expert [default: as the model says, else its ffn]
    #[arg(long, value_name = "N")]
    pub moe_ffn_hidden_size: Option<usize>,
    /// Weights of a token's experts are its scores as they are, not divided by their sum [default: as
    /// the model says, else false]
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    pub moe_router_pre_softmax: Option<bool>,
    /// Multiplies the weights of a token's experts [default: as the model says, else 1]
    #[arg(long, value_name = "X")]
    pub moe_router_topk_scaling_factor: Option<f64>,
    /// A bias on the choice of experts that evens their load without a loss [default: as the model
    /// says, else false]
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    pub moe_router_enable_expert_bias: Option<bool>,
    /// How far that bias moves in a step [default: as the model says, else 0.001]
    #[arg(long, value_name = "X")]
    pub moe_router_bias_update_rate: Option<f64>,
    /// Width of an MLP that every token uses beside its experts; 0 is none [default: as the model
    /// says, else 0]
    #[arg(long, value_name = "N")]
    pub moe_shared_expert_intermediate_size: Option<usize>,
    /// Each token weighs that MLP by a gate [default: as the model says, else false]
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    pub moe_shared_expert_gate: Option<bool>,
}

#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Optimiser")]
pub(super) struct OptimiserArgs {
    /// The rule [default: adamw; verify: sgd]
    #[arg(long, value_enum)]
    pub optimizer: Option<Optimizer>,
    /// Highest learning rate [default: 0.002; verify: 0.1]
    #[arg(long, value_name = "X")]
    pub lr: Option<f64>,
    /// Learning rate of the last step [default: a tenth of --lr]
    #[arg(long, value_name = "X")]
    pub min_lr: Option<f64>,
    /// How it falls after the warm-up [default: cosine; verify: constant]
    #[arg(long, value_enum)]
    pub lr_decay_style: Option<DecayStyle>,
    /// Steps on which it rises from 0 [default: a tenth of the steps, at most 30; verify: 0]
    #[arg(long, value_name = "N")]
    pub lr_warmup_iters: Option<u64>,
    /// Decoupled; norms take none [default: 0.1; verify: 0]
    #[arg(long, value_name = "X")]
    pub weight_decay: Option<f64>,
    /// Largest norm of the gradient; 0 is no limit [default: 1; verify: 0]
    #[arg(long, value_name = "X")]
    pub clip_grad: Option<f64>,
    /// Decay of the first moment [default: 0.9]
    #[arg(long, value_name = "X")]
    pub adam_beta1: Option<f64>,
    /// Decay of the second moment [default: 0.95]
    #[arg(long, value_name = "X")]
    pub adam_beta2: Option<f64>,
    /// Added to the root of the second moment [default: 1e-8]
    #[arg(long, value_name = "X")]
    pub adam_eps: Option<f64>,
}

#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Run")]
pub(super) struct BatchArgs {
    /// Text to learn from, read byte by byte, or `embedded` [default: embedded]
    #[arg(long, visible_alias = "data-path", value_name = "FILE")]
    pub data: Option<PathBuf>,
    /// Tokens predicted per sample [default: the model's; verify: at most 32]
    #[arg(long, visible_alias = "seq-len", value_name = "N")]
    pub seq_length: Option<usize>,
    /// Samples in a microbatch [default: 2 for tiny, else 1; verify, eval: 1]
    #[arg(long, visible_alias = "mbs", value_name = "N")]
    pub micro_batch_size: Option<usize>,
    /// Samples in a step, over all replicas [default: the model's; verify, eval: 8]
    #[arg(long, visible_alias = "gbs", value_name = "N")]
    pub global_batch_size: Option<usize>,
}

#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Run")]
pub(super) struct StepArgs {
    /// Steps in all, a loaded checkpoint's included [default: 300; verify: 3]
    #[arg(long, visible_alias = "train-iters", value_name = "N")]
    pub steps: Option<u64>,
    /// Seed of weights and of the order of the data [default: 1]
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Share of predictions that do not count, drawn by seed [default: 0]
    #[arg(long, value_name = "P")]
    pub mask_fraction: Option<f64>,
    /// Share of samples, drawn by seed, none of whose predictions counts; then --mask-fraction is
    /// of single predictions [default: half of --mask-fraction, the other half on single ones]
    #[arg(long, value_name = "P")]
    pub mask_samples: Option<f64>,
    /// Start from the config.json of an earlier run; flags beside it win
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
}

#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Run")]
pub(super) struct DeviceArgs {
    /// Type of parameters and activations [default: f32; verify: f64]
    #[arg(long, value_enum)]
    pub dtype: Option<DtypeWord>,
    /// What computes [default: cpu]
    #[arg(long, value_enum)]
    pub device: Option<Device>,
    /// What a rank is [default: threads; a process under a launcher, or where --transport is for
    /// processes]
    #[arg(long, value_enum)]
    pub launch: Option<Launch>,
    /// What carries messages between ranks [default: auto]
    #[arg(long, value_enum)]
    pub transport: Option<Transport>,
    /// Ranks that are threads send each other messages, as between hosts, rather than share memory
    #[arg(long)]
    pub by_messages: bool,
    /// Constants of this transport that plans are chosen by, as bench --calibrate --constants FILE saves
    /// them [default: those of threads]
    #[arg(long, value_name = "FILE")]
    pub constants: Option<PathBuf>,
    /// Threads each rank computes with [default: 1]
    #[arg(long, value_name = "N")]
    pub threads_per_rank: Option<usize>,
}

#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Output")]
pub(super) struct OutputArgs {
    /// Take the loss on held-out text every N steps; 0 is never [default: 50]
    #[arg(long, value_name = "N")]
    pub eval_interval: Option<u64>,
    /// Write a checkpoint at the end
    #[arg(long, value_name = "DIR")]
    pub save: Option<PathBuf>,
    /// Write one every N steps too; 0 is only at the end [default: 0]
    #[arg(long, value_name = "N")]
    pub save_interval: Option<u64>,
    /// Go on from a checkpoint, saved under any layout; its model, data, seed and mask stay, and what else
    /// it was trained with is the default here
    #[arg(long, value_name = "DIR")]
    pub load: Option<PathBuf>,
    /// Folder of this run [default: the next free runs/0001, runs/0002, ...]
    #[arg(long, value_name = "DIR")]
    pub run_dir: Option<PathBuf>,
    /// Metrics file, one object a step [default: metrics.jsonl in the run's folder]
    #[arg(long, value_name = "FILE.jsonl")]
    pub metrics: Option<PathBuf>,
    /// Record the last calls of each rank here, for `trace --recorder` once a run stands still
    #[arg(long, value_name = "DIR")]
    pub recorder: Option<PathBuf>,
    /// Timeline of every rank over a few steps, for ui.perfetto.dev or chrome://tracing
    #[arg(long, value_name = "FILE.json")]
    pub trace: Option<PathBuf>,
    /// The timeline begins after this step [default: the steps already done]
    #[arg(long, value_name = "N")]
    pub profile_step_start: Option<u64>,
    /// and ends after this one [default: three steps later]
    #[arg(long, value_name = "N")]
    pub profile_step_end: Option<u64>,
    /// The page that shows the run, one file [default: report.html in the run's folder]
    #[arg(long, value_name = "FILE.html")]
    pub report: Option<PathBuf>,
    /// Folder for event files that TensorBoard reads; none are written without it
    #[arg(long, value_name = "DIR")]
    pub tensorboard_dir: Option<PathBuf>,
    /// How steps are printed [default: plain]
    #[arg(long, value_enum)]
    pub log_format: Option<Log>,
    /// A line every N steps; 0 makes at most 30 lines [default: 0]
    #[arg(long, value_name = "N")]
    pub log_interval: Option<u64>,
    /// Run one device beside the layout and print where they differ [default: on in the demo only]
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    pub prove: Option<bool>,
    /// Print no banner and no steps [default: false]
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    pub quiet: Option<bool>,
}

/// What describes a job.
#[derive(Debug, Clone, Default, Args)]
pub(super) struct JobArgs {
    #[command(flatten)]
    pub layout: LayoutArgs,
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub optimiser: OptimiserArgs,
    #[command(flatten)]
    pub step: StepArgs,
    #[command(flatten)]
    pub batch: BatchArgs,
    #[command(flatten)]
    pub device: DeviceArgs,
    #[command(flatten)]
    pub output: OutputArgs,
}
