//! What a step of a small model sends and holds under a few layouts, before anything runs.

use quintet_collectives::DType;
use quintet_parallel_layers::Architecture;
use quintet_planner::states::{self, Bytes, fullest};
use quintet_planner::traffic::{WireTypes, step, total};
use quintet_planner::{Batch, Error, Layout, ModelConfig, validate};

fn main() -> Result<(), Error> {
    let model = ModelConfig {
        vocab: 256,
        hidden: 64,
        layers: 4,
        heads: 4,
        kv_heads: 2,
        head_dim: 16,
        ffn: 176,
        rope_theta: 10_000.0,
        norm_eps: 1e-5,
        tied: true,
        moe: None,
        window: None,
        dropout: 0.0,
        architecture: Architecture::LLAMA,
    };
    let batch = Batch {
        seq: 64,
        micro_batch: 2,
        global_batch: 16,
    };
    let types = WireTypes {
        storage: DType::F32,
        accumulation: DType::F32,
    };
    for (dp, tp, pp, zero_stage) in [
        (8, 1, 1, 0),
        (8, 1, 1, 1),
        (8, 1, 1, 3),
        (1, 4, 2, 0),
        (2, 2, 2, 1),
    ] {
        let layout = Layout {
            dp,
            tp,
            pp,
            zero_stage,
            bucket_bytes: 1,
            ..Layout::single()
        };
        validate(&model, &layout, &batch)?;
        let sent = total(&step(&model, &layout, &batch, types)?);
        println!("dp {dp} tp {tp} pp {pp} zero {zero_stage}: {sent:?}");
        let held = fullest(&states::step(&model, &layout, &batch, types, 2)?);
        for (category, Bytes { at_rest, peak }) in held {
            println!("    {category}: {at_rest} bytes at rest, at most {peak}");
        }
    }
    let refused = Layout {
        tp: 3,
        ..Layout::single()
    };
    if let Err(why) = validate(&model, &refused, &batch) {
        println!("tp 3: {why}");
    }
    Ok(())
}
