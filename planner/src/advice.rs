//! Rules of the craft, each with the figure that decides it.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use crate::Layout;
use crate::closed::sent::{Collective, Group};
use crate::links::{lie, split};
use crate::literature;
use crate::search::{Candidate, Request};
use crate::time::work;

mod remedy;

pub use remedy::{held, remedies};

/// One rule that speaks about a layout.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Advice {
    /// Its short name, stable.
    pub rule: &'static str,
    /// What it says, with the number behind it.
    pub text: String,
}

/// Narrower than this a product loses more than a fifth of its rate, by the model of time.
fn efficient_width(request: &Request) -> f64 {
    4.0 * request.efficiency.half_width
}

/// Gibibytes with one digit.
fn gib(bytes: u64) -> f64 {
    bytes as f64 / (1_u64 << 30) as f64
}

/// Everything there is to say of a layout.
#[must_use]
pub fn advise(request: &Request, candidate: &Candidate) -> Vec<Advice> {
    let mut all = Vec::new();
    let mut say = |rule, text| all.push(Advice { rule, text });
    tensor(request, candidate, &mut say);
    pipeline(candidate, &mut say);
    context(request, candidate, &mut say);
    experts(request, candidate, &mut say);
    sharding(request, candidate, &mut say);
    all
}

fn tensor(request: &Request, candidate: &Candidate, say: &mut impl FnMut(&'static str, String)) {
    let (l, node) = (&candidate.layout, request.cluster.gpus_per_node);
    let place = Group::Tp.place(&request.shape, l);
    let out = split(lie(place.0, place.1, node), Collective::AllGather, 1.0).1;
    if out > 0.0 {
        say(
            "tp-leaves-its-node",
            format!(
                "tp={} crosses nodes of {node}: {:.0} % of its bytes go at {:.0} GB/s instead of {:.0}; {:.0} % of the step is tp",
                l.tp,
                100.0 * out,
                request.cluster.between.bandwidth / 1e9,
                request.cluster.inside.bandwidth / 1e9,
                100.0 * candidate.time.tp / candidate.time.total()
            ),
        );
    }
    let works = work(
        &request.shape,
        l,
        &candidate.batch,
        request.job.types.storage.bytes(),
    );
    let work = if request.shape.config.moe.is_some() {
        works.moe
    } else {
        works.dense
    };
    let least = efficient_width(request);
    if work.width < least {
        say(
            "narrow-products",
            format!(
                "the narrowest side of a layer's products is {:.0} on each rank (tp={}, etp={}, ep={}); below {least:.0} they run at less than 80 % of the rate of wide ones",
                work.width, l.tp, l.etp, l.ep
            ),
        );
    }
}

fn pipeline(candidate: &Candidate, say: &mut impl FnMut(&'static str, String)) {
    let (l, m) = (&candidate.layout, candidate.microbatches());
    if l.pp > 1 && m < 4 * l.pp {
        let plain = (l.pp - 1) as f64 / (m + l.pp - 1) as f64;
        say(
            "few-microbatches",
            format!(
                "{m} microbatches for pp={} are fewer than 4 pp = {}: (p-1)/(m+p-1) is {:.1} % idle under 1f1b, {:.1} % under {} with {} chunk(s) a stage",
                l.pp,
                4 * l.pp,
                100.0 * plain,
                100.0 * candidate.bubble(),
                l.schedule,
                l.chunks()
            ),
        );
    }
}

/// Tokens below which cutting a sequence is seldom worth its traffic.
const LONG: usize = 32_768;

fn context(request: &Request, candidate: &Candidate, say: &mut impl FnMut(&'static str, String)) {
    let (l, seq) = (&candidate.layout, request.job.seq);
    if l.cp > 1 && seq < LONG {
        say(
            "cp-of-short-sequences",
            format!(
                "cp={} cuts sequences of {seq} tokens, below {LONG}: {:.1} % of the step waits for keys and values",
                l.cp,
                100.0 * candidate.time.cp / candidate.time.total()
            ),
        );
    }
    let work = work(
        &request.shape,
        l,
        &candidate.batch,
        request.job.types.storage.bytes(),
    );
    let share = work.dense.attention / (work.dense.attention + work.dense.products);
    if l.cp > 1 && candidate.time.cp > 0.05 * candidate.time.total() {
        say(
            "cp-not-hidden",
            format!(
                "attention is {:.0} % of a layer's work and does not cover what cp={} sends: {:.1} % of the step",
                100.0 * share,
                l.cp,
                100.0 * candidate.time.cp / candidate.time.total()
            ),
        );
    }
}

fn experts(request: &Request, candidate: &Candidate, say: &mut impl FnMut(&'static str, String)) {
    let (Some(moe), l) = (request.shape.config.moe, &candidate.layout) else {
        return;
    };
    let all = (request.shape.parameters() - request.shape.active()) as f64 * moe.experts as f64
        / (moe.experts - moe.topk).max(1) as f64;
    if l.ep * l.etp == 1 {
        say(
            "experts-under-data-parallelism",
            format!(
                "with ep=1 every replica has all {} experts of a layer, {:.1} billion parameters a pipeline; a token meets {}",
                moe.experts,
                all / 1e9,
                moe.topk
            ),
        );
    }
    say(
        "ep-folds-into-the-world",
        format!(
            "ep={} x etp={} lies in dp x cp x tp = {} and does not multiply the world: {} x {} x {} x {} = {} ranks",
            l.ep,
            l.etp,
            l.dp * l.cp * l.tp,
            l.tp,
            l.pp,
            l.cp,
            l.dp,
            l.world()
        ),
    );
}

fn sharding(request: &Request, candidate: &Candidate, say: &mut impl FnMut(&'static str, String)) {
    let (l, usable) = (&candidate.layout, request.cluster.usable());
    if l.zero_stage == 3 {
        let two = Layout {
            zero_stage: 2,
            ..l.clone()
        };
        let held = held(request, &two, &candidate.batch);
        if held.is_some_and(|held| held.total() <= usable) {
            say(
                "zero-3-where-2-fits",
                format!(
                    "zero-stage 2 would take {:.1} of {:.1} GiB and gathers parameters once a step, not {} times",
                    held.map_or(0.0, |held| gib(held.total())),
                    gib(usable),
                    2 * candidate.microbatches()
                ),
            );
        }
    }
    let whole = literature::zero(request.shape.parameters() as f64, 0, 1);
    let share = candidate.held.states() as f64 / usable as f64;
    if share > 0.7 {
        say(
            "states-fill-the-memory",
            format!(
                "parameters, gradients and optimizer take {:.0} % of the memory ({:.1} GiB; whole they are {:.0} GB at 16 bytes a parameter)",
                100.0 * share,
                gib(candidate.held.states()),
                whole / 1e9
            ),
        );
    }
    // Moments and master weights to the host and back once a step, over a link of a PCIe 5 x16.
    let bytes = 2.0 * candidate.held.optimizer as f64;
    let seconds = bytes / 55e9;
    if share > 0.7 {
        say(
            "offload-traffic",
            format!(
                "keeping the optimizer on the host would free {:.1} GiB and move {:.1} GB a step: {:.2} s at 55 GB/s (PCIe 5 x16), beside a step of {:.2} s",
                gib(candidate.held.optimizer),
                bytes / 1e9,
                seconds,
                candidate.time.total()
            ),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Batch;
    use crate::cluster::Cluster;
    use crate::search::{Job, Pins, search};
    use crate::shape::Shape;
    use crate::time::{Efficiency, Practice};
    use quintet_parallel_layers::Recompute;

    fn said(model: &str, gpus: usize, seq: usize, pins: Pins) -> Vec<Advice> {
        let request = Request {
            shape: Shape::named(model).unwrap(),
            cluster: Cluster::preset("h100", gpus).unwrap(),
            job: Job::bf16(seq, 128),
            pins,
            efficiency: Efficiency::default(),
            practice: Practice::default(),
            keep: 1,
        };
        let found = search(&request).unwrap();
        advise(&request, &found.best[0])
    }

    fn has(all: &[Advice], rule: &str, figure: &str) -> bool {
        all.iter()
            .any(|a| a.rule == rule && a.text.contains(figure))
    }

    #[test]
    fn each_rule_speaks_where_it_should_and_with_its_figure() {
        let wide = Pins {
            tp: Some(16),
            pp: Some(1),
            cp: Some(1),
            ..Pins::default()
        };
        let all = said("llama3-8b", 16, 8192, wide);
        assert!(has(&all, "tp-leaves-its-node", "tp=16 crosses nodes of 8"));
        let narrow = Pins {
            tp: Some(8),
            micro_batch: Some(1),
            ..wide
        };
        let all = said(
            "qwen3-30b-a3b",
            16,
            4096,
            Pins {
                ep: Some(1),
                etp: Some(1),
                ..narrow
            },
        );
        assert!(has(&all, "narrow-products", "below 512"), "{all:?}");
        assert!(has(
            &all,
            "experts-under-data-parallelism",
            "all 128 experts"
        ));
        assert!(has(&all, "ep-folds-into-the-world", "16 ranks"));
        let deep = Pins {
            tp: Some(2),
            pp: Some(8),
            dp: Some(8),
            recompute: Some(Recompute::Full),
            ..Pins::default()
        };
        let all = said("llama3-70b", 128, 4096, deep);
        assert!(
            has(&all, "few-microbatches", "fewer than 4 pp = 32"),
            "{all:?}"
        );
        let cut = Pins {
            cp: Some(2),
            zero_stage: Some(3),
            tp: Some(1),
            pp: Some(1),
            ..Pins::default()
        };
        let all = said("llama3-8b", 16, 8192, cut);
        assert!(has(&all, "cp-of-short-sequences", "below 32768"), "{all:?}");
        assert!(
            has(&all, "zero-3-where-2-fits", "zero-stage 2 would take"),
            "{all:?}"
        );
        // What is well laid out hears nothing of tp, pp and cp.
        let good = Pins {
            tp: Some(1),
            pp: Some(1),
            cp: Some(1),
            zero_stage: Some(1),
            ..Pins::default()
        };
        let all = said("llama3-8b", 64, 8192, good);
        assert!(
            !all.iter()
                .any(|a| a.rule.contains("tp-") || a.rule.contains("cp-")),
            "{all:?}"
        );
    }

    #[test]
    fn a_remedy_takes_less() {
        let request = Request {
            shape: Shape::named("llama3-70b").unwrap(),
            cluster: Cluster::preset("h100", 16).unwrap(),
            job: Job::bf16(8192, 64),
            pins: Pins::default(),
            efficiency: Efficiency::default(),
            practice: Practice::default(),
            keep: 1,
        };
        let layout = Layout {
            tp: 8,
            dp: 2,
            bucket_bytes: 1,
            ..Layout::single()
        };
        let batch = Batch {
            seq: 8192,
            micro_batch: 2,
            global_batch: 64,
        };
        let now = held(&request, &layout, &batch).unwrap().total();
        let all = remedies(&request, &layout, &batch);
        let names: Vec<&str> = all.iter().map(|(name, _)| name.as_str()).collect();
        for name in [
            "zero-stage 1",
            "recompute full",
            "sequence-parallel",
            "micro-batch-size 1",
            "pp 2",
        ] {
            assert!(names.contains(&name), "{names:?}");
        }
        assert!(all.iter().all(|(_, bytes)| *bytes < now) && all.is_sorted_by_key(|(_, b)| *b));
    }
}
