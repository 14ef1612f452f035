//! The judge of layouts.

use quintet_parallel_layers::Architecture;
use quintet_parallel_layers::pipeline::{Schedule, ScheduleKind, laws};
use quintet_planner::config::MoeConfig;
use quintet_planner::{Batch, CpComm, Layout, ModelConfig, validate};

use crate::bytes::Bytes;

/// Any layout of any model: one sentence, or ranks that cover every block and every sample, and a
/// schedule that obeys its laws.
pub fn layout(data: &[u8]) {
    let mut bytes = Bytes(data);
    let heads = bytes.below(9);
    let model = ModelConfig {
        vocab: bytes.below(40),
        hidden: bytes.below(40),
        layers: bytes.below(9),
        heads,
        kv_heads: bytes.below(heads + 1),
        head_dim: bytes.below(9),
        ffn: bytes.below(40),
        rope_theta: 10_000.0,
        norm_eps: 1e-5,
        tied: bytes.below(2) == 0,
        moe: (bytes.below(2) == 1).then(|| MoeConfig {
            first_dense: bytes.below(9),
            ..MoeConfig::new(bytes.below(9), bytes.below(4), bytes.below(5))
        }),
        window: None,
        dropout: 0.0,
        architecture: Architecture::LLAMA,
    };
    let pp = bytes.below(5);
    let explicit = bytes.below(2) == 1;
    let schedule = ScheduleKind::ALL[bytes.below(ScheduleKind::ALL.len())];
    let virtual_stages = bytes.below(4);
    let places = pp * schedule.chunks().unwrap_or(virtual_stages);
    let layout = Layout {
        dp: bytes.below(5),
        tp: bytes.below(5),
        pp,
        cp: bytes.below(4),
        cp_comm: CpComm::ALL[bytes.below(3)],
        ulysses_degree: (bytes.below(2) == 1).then(|| bytes.below(4)),
        schedule,
        virtual_stages,
        stage_layers: explicit.then(|| (0..places).map(|_| bytes.below(4)).collect()),
        zero_stage: bytes.byte() % 4,
        sequence_parallel: bytes.below(2) == 1,
        hybrid_shard_size: match bytes.below(4) {
            0 => Some(bytes.below(6)),
            _ => None,
        },
        ep: bytes.below(5),
        etp: bytes.below(4),
        ..Layout::single()
    };
    let batch = Batch {
        seq: bytes.below(25),
        micro_batch: bytes.below(4),
        global_batch: bytes.below(17),
    };
    match validate(&model, &layout, &batch) {
        Err(error) => assert!(!error.to_string().contains('\n')),
        Ok(()) => {
            let mut next = 0;
            for place in 0..layout.places() {
                let blocks = layout.blocks(model.layers, place);
                assert!(blocks.start == next && !blocks.is_empty());
                next = blocks.end;
            }
            assert_eq!(next, model.layers);
            assert_eq!(batch.microbatches() % layout.dp, 0);
            assert!(layout.cp == 1 || batch.seq.is_multiple_of(2 * layout.cp));
            assert_eq!(layout.cp_outer() * layout.ulysses(), layout.cp);
            let (ones, mbs) = (vec![1; layout.places()], batch.microbatches() / layout.dp);
            let schedule = Schedule::new(layout.schedule, layout.pp, mbs, &ones);
            assert!(schedule.is_ok_and(|schedule| laws::check(&schedule).is_ok()));
        }
    }
}
