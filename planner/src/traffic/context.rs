//! What attention sends over cp.
//!
//! With t tokens of a microbatch here, and of a tensor parallel rank h heads, g KV heads, e wide:
//! a ulysses group of U exchanges q, k, v, o and their gradients, of which each rank keeps h / U
//! heads and max(g / U, 1) KV heads; the outer factor of R places then moves
//! n = t U max(g / U, 1) e elements of k, and as many of v.
//!
//! | way | forward | backward |
//! |-----|---------|----------|
//! | ulysses    | all-to-all: q, k, v, o | do, dq; dk, dv in accumulation |
//! | ring       | 2 n, R - 1 times | the same, and 2 n in accumulation R times |
//! | all-gather | all-gather of n, twice | reduce-scatter of n in accumulation, twice |
//!
//! Forward is sent twice where blocks are computed again.

use alloc::string::String;

use quintet_collectives::plan::CollectiveShape;
use quintet_collectives::{Axis, DType};

use super::{Sum, WireTypes};
use crate::config::CpComm;
use crate::model::{StageLayer, stage_layers};
use crate::{Batch, Error, ModelConfig};

impl Sum<'_> {
    /// What the blocks of this rank send over cp.
    pub(super) fn context(
        &mut self,
        model: &ModelConfig,
        batch: &Batch,
        types: WireTypes,
        chunk: usize,
    ) -> Result<(), Error> {
        let layers = stage_layers(model, self.layout, self.mesh, self.stage(), chunk)?;
        let blocks = layers.iter().filter(|l| matches!(l, StageLayer::Block(_)));
        let times = blocks.count() * (batch.microbatches() / self.layout.dp);
        let (tokens, tp) = (self.tokens(batch), self.layout.tp);
        let ulysses = self.layout.ulysses();
        // Widths of what one rank of a ulysses group has of each token.
        let q = model.heads / tp / ulysses * model.head_dim;
        let kv = ((model.kv_heads / tp).max(1) / ulysses).max(1) * model.head_dim;
        let forwards = self.layout.forwards();
        for (width, dtype, count) in [
            (q, types.storage, 2 * forwards + 2),
            (kv, types.storage, 2 * forwards),
            (kv, types.accumulation, 2),
        ] {
            self.exchange(tokens * width, dtype, count * times)?;
        }
        self.keys(tokens * ulysses * kv, types, times)
    }

    /// The exchange of tokens for heads, `part` elements to each rank.
    fn exchange(&mut self, part: usize, dtype: DType, times: usize) -> Result<(), Error> {
        let ulysses = self.layout.ulysses();
        let place = self.mesh.index(self.rank, Axis::Cp) % ulysses;
        let counts = alloc::vec![part; ulysses];
        let shape = CollectiveShape::AllToAllV {
            send: counts.clone(),
            recv: counts,
        };
        self.add("cp", (place, ulysses), &shape, dtype, times)
    }

    /// Keys and values over the outer factor, `n` elements of each.
    fn keys(&mut self, n: usize, types: WireTypes, times: usize) -> Result<(), Error> {
        let outer = self.layout.cp_outer();
        if outer == 1 {
            return Ok(());
        }
        let (storage, accumulation) = (types.storage, types.accumulation);
        if self.layout.cp_comm == CpComm::AllGather {
            let at = (
                self.mesh.index(self.rank, Axis::Cp) / self.layout.ulysses(),
                outer,
            );
            let counts = alloc::vec![n; outer];
            let gather = CollectiveShape::AllGather {
                counts: counts.clone(),
            };
            let scatter = CollectiveShape::ReduceScatter { counts };
            let forwards = self.layout.forwards();
            self.add("cp", at, &gather, storage, 2 * forwards * times)?;
            return self.add("cp", at, &scatter, accumulation, 2 * times);
        }
        let passes = self.layout.forwards() + 1;
        let hops = passes * (outer - 1) * storage.bytes() + outer * accumulation.bytes();
        *self.traffic.entry(String::from("cp")).or_default() += (2 * n * hops * times) as u64;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use quintet_parallel_layers::Architecture;

    use super::*;
    use crate::Layout;
    use crate::traffic::{step, total};

    fn sent(cp: usize, cp_comm: CpComm, ulysses_degree: Option<usize>) -> u64 {
        let model = ModelConfig {
            vocab: 50,
            hidden: 8,
            layers: 3,
            heads: 4,
            kv_heads: 2,
            head_dim: 2,
            ffn: 12,
            rope_theta: 1e4,
            norm_eps: 1e-5,
            tied: false,
            moe: None,
            window: None,
            dropout: 0.0,
            architecture: Architecture::LLAMA,
        };
        let layout = Layout {
            cp,
            cp_comm,
            ulysses_degree,
            ..Layout::single()
        };
        let batch = Batch {
            seq: 16,
            micro_batch: 1,
            global_batch: 2,
        };
        let types = WireTypes {
            storage: DType::Bf16,
            accumulation: DType::F32,
        };
        step(&model, &layout, &batch, types).map_or(0, |ranks| total(&ranks)["cp"])
    }

    /// 16 tokens of 2 KV heads of 2, k and v: 128 elements; as many of q. 3 blocks, 2 microbatches.
    #[test]
    fn each_way_by_hand() {
        let (kv, q, times) = (128, 128, 6);
        // Each piece of k and v makes cp - 1 hops forward and back, its gradients cp.
        let ring = kv * (2 * 3 * 2 + 4 * 4);
        assert_eq!(sent(4, CpComm::Ring, None), times * ring);
        // An all-gather brings every part to 3 others, a reduce-scatter likewise.
        let gathers = kv * (3 * 2 + 3 * 4);
        assert_eq!(sent(4, CpComm::AllGather, None), times * gathers);
        // A quarter stays. Of 4 ranks 2 share each KV head: every k and v goes to two.
        let moved = |all: u64| all / 4 * 3;
        let storage = (4 * moved(q) + moved(2 * kv)) * 2;
        let gradients = moved(2 * kv) * 4;
        let ulysses = storage + gradients;
        assert_eq!(sent(4, CpComm::Ulysses, None), times * ulysses);
        // Two factors: half of each exchange stays, and a ring of two.
        let storage = (4 * q / 2 + kv / 2) * 2;
        let gradients = kv / 2 * 4;
        let ring = kv * (2 * 2 + 2 * 4);
        let both = storage + gradients + ring;
        assert_eq!(sent(4, CpComm::Ring, Some(2)), times * both);
    }

    #[test]
    fn every_way_is_named_once() {
        let names: Vec<&str> = CpComm::ALL.iter().map(|way| way.name()).collect();
        assert_eq!(names, ["ring", "all-gather", "ulysses"]);
    }
}
