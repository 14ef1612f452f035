//! What guides to parallelism usually claim, worked out: the figures of `docs/checked-claims.md`.
//!
//! `cargo run -p quintet-planner --example 02_checked_claims`, or with a name behind `--` that claim
//! alone.

use quintet_collectives::plan::{CollectiveShape, bytes_sent};
use quintet_collectives::{DType, Order};
use quintet_parallel_layers::pipeline::{Durations, Schedule, ScheduleKind, StageTime, simulate};
use quintet_planner::closed::sent::{Collective, Sums, When, by_kind};
use quintet_planner::literature::{Offload, deepspeed_zero2, zero};
use quintet_planner::shape::Shape;
use quintet_planner::traffic::{WireTypes, step};
use quintet_planner::{Batch, CpComm, Error, Layout, ModelConfig, validate};

type Named = (&'static str, String);

fn types() -> WireTypes {
    WireTypes {
        storage: DType::Bf16,
        accumulation: DType::F32,
    }
}

fn shape(name: &str) -> Shape {
    Shape::named(name).unwrap_or_else(|| Shape::new(name, small(), 0))
}

/// A model whose rank figures are quick to work out.
fn small() -> ModelConfig {
    ModelConfig {
        layers: 4,
        ..Shape::named("llama3-8b").map_or_else(|| unreachable!("a name of the list"), |s| s.config)
    }
}

/// What the first rank sends to one group in a step.
fn first(layout: &Layout, batch: &Batch, group: &str) -> Result<u64, Error> {
    validate(&small(), layout, batch)?;
    let ranks = step(&small(), layout, batch, types())?;
    Ok(ranks[0].get(group).copied().unwrap_or(0))
}

/// Every claim's name and figure.
///
/// # Errors
/// Where a layout of theirs cannot be.
pub fn claims() -> Result<Vec<Named>, Error> {
    let mut all = model_states()?;
    all.extend(traffic()?);
    all.extend(attention()?);
    all.extend(meshes()?);
    Ok(all)
}

fn model_states() -> Result<Vec<Named>, Error> {
    let whole = zero(70e9, 0, 1) / 1e9;
    let all_reduce = CollectiveShape::AllReduce {
        len: 70_000_000_000,
    };
    let moved = bytes_sent(&all_reduce, 0, 8, DType::F32, Order::Rank)?;
    let gib = |bytes: f64| bytes / (1_u64 << 30) as f64;
    Ok(vec![
        (
            "states-70b",
            format!("weights {:.0} GB, all {whole:.0} GB", 70e9 * 2.0 / 1e9),
        ),
        (
            "gradients-70b",
            format!("{:.0} GB of 2 x 7/8 x 280 GB", moved as f64 / 1e9),
        ),
        (
            "deepspeed-zero-2",
            format!(
                "{:.2} GiB, not {:.2}",
                gib(deepspeed_zero2(2851e6, 8, Offload::None)),
                gib(4.0 * 2851e6 + 16.0 * 2851e6 / 8.0)
            ),
        ),
    ])
}

fn traffic() -> Result<Vec<Named>, Error> {
    let llama = shape("llama3-8b");
    let batch = Batch {
        seq: 4096,
        micro_batch: 1,
        global_batch: 8,
    };
    let tp = Layout {
        tp: 8,
        ..Layout::single()
    };
    let block = by_kind(&llama, &tp, &batch, types(), Sums::Planned).dense;
    let forward = block
        .iter()
        .filter(|f| f.when == When::Forward && f.collective == Collective::AllReduce);
    let forward: u64 = forward.map(|f| f.times).sum();
    let regions = |sequence_parallel| {
        let layout = Layout {
            sequence_parallel,
            ..tp.clone()
        };
        let block = by_kind(&llama, &layout, &batch, types(), Sums::Least).dense;
        block.iter().map(|f| f.bytes * f.times).sum::<u64>() as f64
    };

    let (p, m) = (8, 32);
    let schedule = Schedule::new(ScheduleKind::OneFOneB, p, m, &vec![1; p])?;
    let time = StageTime {
        forward: 1.0,
        backward_input: 2.0,
        backward_weight: 0.0,
    };
    let played = simulate(&schedule, &Durations::equal(p, time, 0.0))?;

    let pp = Layout {
        pp: 4,
        ..Layout::single()
    };
    let boundary = first(&pp, &batch, "pp")?;
    let elements = batch.global_batch * batch.seq * small().hidden;

    // One microbatch a replica: ZeRO-2 and 3 sum and gather for each.
    let dp = |zero_stage| {
        let layout = Layout {
            dp: 8,
            bucket_bytes: 1,
            zero_stage,
            ..Layout::single()
        };
        first(&layout, &batch, "dp").map(|bytes| bytes as f64)
    };
    let count = (dp(0)?, dp(1)?, dp(2)?, dp(3)?);
    // Gradients are f32 on our wire and parameters bf16; the claim counts both in one width.
    let one_width = WireTypes {
        storage: DType::F32,
        accumulation: DType::F32,
    };
    let same = |zero_stage, micro: usize| -> Result<f64, Error> {
        let layout = Layout {
            dp: 8,
            bucket_bytes: 1,
            zero_stage,
            ..Layout::single()
        };
        let batch = Batch {
            global_batch: 8 * micro,
            ..batch
        };
        let ranks = step(&small(), &layout, &batch, one_width)?;
        Ok(ranks[0]["dp"] as f64)
    };
    let ratio = |zero, micro| -> Result<f64, Error> { Ok(same(zero, micro)? / same(0, 1)?) };
    Ok(vec![
        ("tp-all-reduces", format!("{forward} a layer forward")),
        (
            "sequence-parallel",
            format!("{:.2} x the bytes", regions(true) / regions(false)),
        ),
        (
            "bubble-1f1b",
            format!(
                "played {:.4}, (p-1)/(m+p-1) = {:.4}",
                played.bubble(),
                (p - 1) as f64 / (m + p - 1) as f64
            ),
        ),
        (
            "pipeline-boundary",
            format!("{} bytes = 2 x b s h = 2 x {elements}", boundary),
        ),
        (
            "zero-volume",
            format!(
                "ZeRO-1 {:.2}, ZeRO-2 {:.2}, ZeRO-3 {:.2} of DP",
                ratio(1, 1)?,
                ratio(2, 1)?,
                ratio(3, 1)?
            ),
        ),
        (
            "zero-volume-accumulated",
            format!(
                "with 4 microbatches ZeRO-2 {:.2}, ZeRO-3 {:.2} of DP",
                ratio(2, 4)?,
                ratio(3, 4)?
            ),
        ),
        (
            "zero-volume-bf16",
            format!(
                "with f32 gradients and bf16 parameters ZeRO-1 {:.2}, ZeRO-2 {:.2}, ZeRO-3 {:.2} of DP",
                count.1 / count.0,
                count.2 / count.0,
                count.3 / count.0
            ),
        ),
    ])
}

fn attention() -> Result<Vec<Named>, Error> {
    let ring = |seq, cp| {
        let layout = Layout {
            cp,
            cp_comm: CpComm::Ring,
            ..Layout::single()
        };
        let batch = Batch {
            seq,
            micro_batch: 1,
            global_batch: 1,
        };
        first(&layout, &batch, "cp").map(|bytes| bytes as f64)
    };
    let (v3, llama) = (shape("deepseek-v3"), shape("llama3-70b"));
    Ok(vec![
        (
            "ring-attention",
            format!(
                "twice the tokens {:.2} x the bytes; 4 ranks instead of 2 {:.2} x a rank",
                ring(65_536, 4)? / ring(32_768, 4)?,
                ring(32_768, 4)? / ring(32_768, 2)?
            ),
        ),
        (
            "score-matrix",
            format!("{} GiB a head", 131_072_u64 * 131_072 * 2 / (1 << 30)),
        ),
        (
            "latent-cache",
            format!(
                "deepseek-v3 {} bytes a token on each of 8 tp ranks, {} over 8 dp ranks; llama3-70b {} on each of 8 tp ranks of {}",
                v3.cache_bytes(8, 2),
                v3.cache_bytes(1, 2) / 8,
                llama.cache_bytes(8, 2),
                llama.cache_bytes(1, 2)
            ),
        ),
    ])
}

fn meshes() -> Result<Vec<Named>, Error> {
    let cube = Layout {
        tp: 8,
        pp: 8,
        dp: 8,
        ..Layout::single()
    };
    let v3 = shape("deepseek-v3");
    // Megatron's guide: 1024 GPUs, TP 2, PP 16, EP 64.
    let guide = Layout {
        tp: 2,
        pp: 16,
        dp: 32,
        ep: 64,
        ..Layout::single()
    };
    let batch = Batch {
        seq: 4096,
        micro_batch: 1,
        global_batch: 8192,
    };
    validate(&v3.config, &guide, &batch)?;
    Ok(vec![
        ("cube", format!("{} GPUs", cube.world())),
        (
            "ep-folds",
            format!(
                "tp 2 x pp 16 x dp 32 with ep 64 is {} GPUs, not {}",
                guide.world(),
                guide.world() * guide.ep
            ),
        ),
    ])
}

#[allow(
    dead_code,
    reason = "the test that reads the page takes the claims alone"
)]
fn main() -> Result<(), Error> {
    let wanted = std::env::args().nth(1);
    for (name, figure) in claims()? {
        if wanted.as_ref().is_none_or(|wanted| wanted == name) {
            println!("{name}: {figure}");
        }
    }
    Ok(())
}
