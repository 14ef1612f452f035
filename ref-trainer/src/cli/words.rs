//! Words that flags take, those included whose feature is not built yet: they are known, so that
//! what is said of them is not "invalid value".

use clap::ValueEnum;
use quintet_parallel_layers::Recompute;
use quintet_parallel_layers::moe::Score;
use quintet_parallel_layers::pipeline::ScheduleKind;

use quintet_planner::CpComm;

use crate::job::{Decay, DeviceKind, Dtype, LogFormat, OptimizerKind};

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Schedule {
    /// All forwards, then all backwards
    #[value(name = "gpipe")]
    GPipe,
    /// One forward, one backward after the warm-up
    #[value(name = "1f1b")]
    OneFOneB,
    /// 1f1b over several chunks a stage: a smaller bubble, more messages
    Interleaved,
    /// 1f1b whose weight gradients wait until there is time, within the same memory
    #[value(name = "zb-h1")]
    ZbH1,
    /// Two chunks a stage, there and back, with weight gradients that wait at the ends
    #[value(name = "dualpipe-v")]
    DualPipeV,
}

impl From<Schedule> for ScheduleKind {
    fn from(word: Schedule) -> Self {
        match word {
            Schedule::GPipe => Self::GPipe,
            Schedule::OneFOneB => Self::OneFOneB,
            Schedule::Interleaved => Self::Interleaved,
            Schedule::ZbH1 => Self::ZbH1,
            Schedule::DualPipeV => Self::DualPipeV,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum CpWord {
    /// Keys and values go round a ring
    #[value(alias = "p2p")]
    Ring,
    /// Keys and values are gathered
    #[value(aliases = ["all_gather", "allgather"])]
    AllGather,
    /// Tokens are exchanged for heads
    #[value(alias = "a2a")]
    Ulysses,
}

impl From<CpWord> for CpComm {
    fn from(word: CpWord) -> Self {
        match word {
            CpWord::Ring => Self::Ring,
            CpWord::AllGather => Self::AllGather,
            CpWord::Ulysses => Self::Ulysses,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum RecomputeWord {
    /// Nothing: all that forward makes is kept
    None,
    /// What is cheap: outputs of norms and activations
    Selective,
    /// Blocks, each from its input
    Full,
}

impl From<RecomputeWord> for Recompute {
    fn from(word: RecomputeWord) -> Self {
        match word {
            RecomputeWord::None => Self::None,
            RecomputeWord::Selective => Self::Selective,
            RecomputeWord::Full => Self::Full,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum ReductionOrder {
    /// A left fold in rank order: the same bits whatever the transport
    Rank,
    /// Whatever order a plan finds fast: its bits are fixed per plan
    Any,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum ScoreFunction {
    Softmax,
    Sigmoid,
}

impl From<ScoreFunction> for Score {
    fn from(word: ScoreFunction) -> Self {
        match word {
            ScoreFunction::Softmax => Self::Softmax,
            ScoreFunction::Sigmoid => Self::Sigmoid,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Optimizer {
    /// Adam with decoupled weight decay
    #[value(name = "adamw", alias = "adam")]
    AdamW,
    /// Plain gradient descent
    Sgd,
}

impl From<Optimizer> for OptimizerKind {
    fn from(word: Optimizer) -> Self {
        match word {
            Optimizer::AdamW => Self::AdamW,
            Optimizer::Sgd => Self::Sgd,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum DecayStyle {
    /// Stay at --lr
    Constant,
    /// Fall along a line to --min-lr at the last step
    Linear,
    /// Fall along half a cosine to --min-lr at the last step
    Cosine,
}

impl From<DecayStyle> for Decay {
    fn from(word: DecayStyle) -> Self {
        match word {
            DecayStyle::Constant => Self::Constant,
            DecayStyle::Linear => Self::Linear,
            DecayStyle::Cosine => Self::Cosine,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum DtypeWord {
    F64,
    F32,
    /// Parameters and activations; master weights, gradients and sums in f32
    Bf16,
}

impl From<DtypeWord> for Dtype {
    fn from(word: DtypeWord) -> Self {
        match word {
            DtypeWord::F64 => Self::F64,
            DtypeWord::F32 => Self::F32,
            DtypeWord::Bf16 => Self::Bf16,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Device {
    Cpu,
    /// The CUDA kernels, run and checked on the host; verify alone, in a build with feature emulated
    Emulated,
    /// NVIDIA GPUs, which ranks share where there are fewer; train and verify, in a build with feature cuda
    Cuda,
}

impl From<Device> for DeviceKind {
    fn from(word: Device) -> Self {
        match word {
            Device::Cpu => Self::Cpu,
            Device::Emulated => Self::Emulated,
            Device::Cuda => Self::Cuda,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Launch {
    /// Every rank is a thread of this process
    Threads,
    /// Every rank is a process, which this one starts and which ends with it
    Processes,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Transport {
    /// Threads: local; processes: shared memory where two ranks have it, else tcp
    Auto,
    /// Messages between threads of one process
    Local,
    /// Shared memory between processes of one host
    Shm,
    /// Unix sockets between processes of one host
    Unix,
    /// TCP between processes
    Tcp,
    /// NCCL for what is on the device, in a build with feature nccl; all else as under auto. Its folds go in
    /// its own order, so --reduction-order any goes with it
    Nccl,
    /// MPI between the processes that mpirun has started, in a build with feature mpi
    Mpi,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Log {
    /// Lines for a person; a live line on a terminal
    Plain,
    /// The lines of Megatron-LM's training log, times in UTC
    Megatron,
    /// The objects of the metrics file on stdout, and nothing else there
    Json,
}

impl From<Log> for LogFormat {
    fn from(word: Log) -> Self {
        match word {
            Log::Plain => Self::Plain,
            Log::Json => Self::Json,
            Log::Megatron => Self::Megatron,
        }
    }
}
