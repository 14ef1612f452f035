//! The flags of `quintet bench`, which are those of nccl-tests where it has them.

use std::path::PathBuf;

use clap::Args;
use quintet_collectives::Order;
use quintet_collectives::bench::{Bench, OPERATIONS};
use quintet_collectives::plan::Operation;

use super::apply::Told;
use super::ranks;
use super::words::{Device, DtypeWord, ReductionOrder, Transport};
use crate::bench::{BenchJob, operation};
use crate::failure::Failure;
use crate::job::{DeviceKind, Dtype, Ranks};

#[derive(Debug, Args)]
pub(super) struct BenchArgs {
    /// all_reduce, reduce_scatter, all_gather, broadcast, reduce, gather, scatter or all_to_all; or
    /// kernels, which prints what quintet plan --times reads
    #[arg(value_name = "OP", required_unless_present = "calibrate")]
    op: Option<String>,
    /// Ranks to start; under a launcher they are its
    #[arg(long, value_name = "N", default_value = "2")]
    ranks: std::num::NonZeroUsize,
    /// Threads over local, processes over the others; nccl on the memory of a device each, by threads or under a launcher
    /// [default: local; auto under a launcher]
    #[arg(long, value_enum)]
    transport: Option<Transport>,
    /// With --transport nccl: whose memory [default: cuda]
    #[arg(long, value_enum)]
    device: Option<Device>,
    /// The least bytes, as in 8, 64k or 4M
    #[arg(short = 'b', long, value_name = "BYTES", default_value = "8", value_parser = bytes)]
    minbytes: usize,
    /// The most bytes
    #[arg(short = 'e', long, value_name = "BYTES", default_value = "64M", value_parser = bytes)]
    maxbytes: usize,
    /// What sizes grow by
    #[arg(short = 'f', long, value_name = "N", default_value = "2", value_parser = clap::value_parser!(u64).range(2..=1 << 20))]
    stepfactor: u64,
    /// Timed calls of each size
    #[arg(short = 'n', long, value_name = "N", default_value = "20", value_parser = clap::value_parser!(u64).range(1..=10_000_000))]
    iters: u64,
    /// Calls before them
    #[arg(
        short = 'w',
        long = "warmup_iters",
        visible_alias = "warmup-iters",
        value_name = "N",
        default_value = "5"
    )]
    warmup: usize,
    /// Whether results are compared element by element, in a call that is not timed
    #[arg(short = 'c', long, value_name = "BOOL", default_value = "true", action = clap::ArgAction::Set)]
    check: bool,
    /// Order in which contributions are folded [default: rank]
    #[arg(long, value_enum)]
    reduction_order: Option<ReductionOrder>,
    /// Which plan when, as in all_reduce:0-4k:tree,4k-:ring
    #[arg(long = "override", value_name = "TEXT", default_value = "")]
    overrides: String,
    /// Constants that plans are chosen by; with --calibrate the file they are written to
    #[arg(long, value_name = "FILE")]
    constants: Option<PathBuf>,
    /// Measure those constants for this transport
    #[arg(long, conflicts_with = "op")]
    calibrate: bool,
    /// Of kernels: type of the operands [default: f32]
    #[arg(long, value_enum)]
    dtype: Option<DtypeWord>,
    /// Of kernels: threads [default: 1]
    #[arg(long, value_name = "N")]
    threads_per_rank: Option<std::num::NonZeroUsize>,
    /// One JSON object a line
    #[arg(long)]
    json: bool,
}

impl BenchArgs {
    /// What is asked for.
    ///
    /// # Errors
    /// Exit 2 for an operation or a transport that is none.
    pub(super) fn job(self, told: Told<'_>) -> Result<BenchJob, Failure> {
        let kernels = self.kernels()?;
        let op = match self.op.as_deref() {
            None | Some(KERNELS) => Operation::AllReduce,
            Some(name) => operation(name).ok_or_else(|| {
                let known: Vec<&str> = OPERATIONS.iter().map(|op| op.name()).collect();
                Failure::usage(format!(
                    "{name} is not measured; choose of {}",
                    known.join(", ")
                ))
            })?,
        };
        let device = self.device()?;
        let transport = ranks::ranks((None, self.transport), told, Ranks::Threads)?;
        if self.minbytes > self.maxbytes {
            return Err(Failure::usage(format!(
                "minbytes={} is more than maxbytes={}",
                self.minbytes, self.maxbytes
            )));
        }
        let order = match self.reduction_order {
            Some(ReductionOrder::Any) => Order::Any,
            None if device != DeviceKind::Cpu => Order::Any,
            _ => Order::Rank,
        };
        let iters = usize::try_from(self.iters).unwrap_or(usize::MAX);
        let factor = usize::try_from(self.stepfactor).unwrap_or(usize::MAX);
        Ok(BenchJob {
            bench: Bench {
                op,
                iters,
                warmup: self.warmup,
                check: self.check,
            },
            transport,
            ranks: told.launched.map_or(self.ranks.get(), |place| place.world),
            device,
            sizes: (self.minbytes, self.maxbytes, factor),
            order,
            overrides: self.overrides,
            constants: self.constants,
            calibrate: self.calibrate,
            kernels,
            json: self.json,
            launched: told.launched.is_some(),
        })
    }
}

impl BenchArgs {
    /// Whose memory the elements lie in.
    fn device(&self) -> Result<DeviceKind, Failure> {
        if self.transport != Some(Transport::Nccl) {
            return match self.device {
                None => Ok(DeviceKind::Cpu),
                Some(_) => Err(Failure::usage(
                    "--device is for --transport nccl; other transports are measured on the memory of hosts",
                )),
            };
        }
        let device = self.device.map_or(DeviceKind::Cuda, Into::into);
        ranks::carries(device, self.reduction_order)?;
        if self.calibrate || !self.overrides.is_empty() || self.constants.is_some() {
            return Err(Failure::usage(
                "--calibrate, --constants and --override are of plans, and NCCL has its own; leave them out, or use another transport",
            ));
        }
        if self.op.as_deref() == Some(KERNELS) {
            return Err(Failure::usage(
                "kernels are timed on the CPU, by one process; leave out --transport nccl",
            ));
        }
        Ok(device)
    }

    /// Whether kernels are to be timed, in which type and on how many threads.
    fn kernels(&self) -> Result<Option<(Dtype, usize)>, Failure> {
        if self.op.as_deref() != Some(KERNELS) {
            if self.dtype.is_some() || self.threads_per_rank.is_some() {
                return Err(Failure::usage(
                    "--dtype and --threads-per-rank are of kernels; collectives are measured in f32",
                ));
            }
            return Ok(None);
        }
        if self.json {
            return Err(Failure::usage(
                "times of kernels are printed as TOML, which quintet plan --times reads; leave out --json",
            ));
        }
        let dtype = self.dtype.map_or(Dtype::F32, Into::into);
        let threads = self.threads_per_rank.map_or(1, std::num::NonZeroUsize::get);
        Ok(Some((dtype, threads)))
    }
}

/// In the place of an operation.
const KERNELS: &str = "kernels";

/// A number of bytes with k, M or G of 1024.
fn bytes(text: &str) -> Result<usize, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let factor: usize = match &text[digits.len()..] {
        "" | "B" => 1,
        "k" | "K" => 1 << 10,
        "m" | "M" => 1 << 20,
        "g" | "G" => 1 << 30,
        unit => return Err(format!("{unit:?} is none of k, M and G")),
    };
    let number: usize = digits
        .parse()
        .map_err(|_| format!("{digits:?} is no number"))?;
    number
        .checked_mul(factor)
        .filter(|bytes| *bytes <= 1 << 36)
        .ok_or_else(|| String::from("more than 64G"))
}
