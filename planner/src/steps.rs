//! The order in which a layout is decided, with the figures at each turn: memory first, tensor
//! parallelism inside the node, stages across nodes, the rest to replicas with ZeRO, then context and
//! experts, then the run is watched.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use crate::Invalid;
use crate::search::{Candidate, Found, Pins, Request, search};

/// One turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// What is decided.
    pub title: &'static str,
    /// The figures, and what follows.
    pub lines: Vec<String>,
}

const GIB: f64 = (1_u64 << 30) as f64;

/// Decides turn by turn; the layout at the end, where one fits.
///
/// # Errors
/// Where cluster or job cannot be at all.
pub fn steps(request: &Request) -> Result<(Vec<Step>, Option<Candidate>), Invalid> {
    let mut decided = request.clone();
    decided.keep = 1;
    let mut all = Vec::from([memory(request)]);
    let world = request.cluster.gpus;
    let powers = |most: usize| (0..).map(|k| 1_usize << k).take_while(move |n| *n <= most);
    let node = request.cluster.gpus_per_node.min(world);
    let (tp, lines) = turn(&decided, powers(node), "tp", |pins, n| pins.tp = Some(n))?;
    all.push(Step {
        title: "tensor parallelism, inside the node",
        lines,
    });
    decided.pins.tp = request.pins.tp.or(tp);
    let left = world / decided.pins.tp.unwrap_or(1);
    let most = left.min(request.shape.config.layers);
    let (pp, lines) = turn(&decided, powers(most), "pp", |pins, n| pins.pp = Some(n))?;
    all.push(Step {
        title: "pipeline stages, across nodes",
        lines,
    });
    decided.pins.pp = request.pins.pp.or(pp);
    let zero = 0..=3_usize;
    let set = |pins: &mut Pins, n: usize| pins.zero_stage = u8::try_from(n).ok();
    let (zero, mut lines) = turn(&decided, zero, "zero-stage", set)?;
    let left = left / decided.pins.pp.unwrap_or(1);
    lines.push(format!(
        "{left} ranks are left for replicas and for cutting sequences"
    ));
    all.push(Step {
        title: "the rest to replicas, with ZeRO",
        lines,
    });
    decided.pins.zero_stage = request.pins.zero_stage.or(set_of(zero));
    let (cp, mut lines) = turn(&decided, powers(left.min(64)), "cp", |pins, n| {
        pins.cp = Some(n)
    })?;
    if request.job.seq < 32_768 {
        lines.push(format!(
            "sequences of {} tokens are below 32,768: cut them only where a microbatch of one does not fit",
            request.job.seq
        ));
    }
    all.push(Step {
        title: "context parallelism",
        lines,
    });
    decided.pins.cp = request.pins.cp.or(cp);
    if let Some(moe) = request.shape.config.moe {
        let degrees = powers(moe.experts);
        let (ep, mut lines) = turn(&decided, degrees, "ep", |pins, n| pins.ep = Some(n))?;
        lines.push(String::from(
            "ep folds into dp x cp x tp: it takes no ranks of its own",
        ));
        all.push(Step {
            title: "expert parallelism",
            lines,
        });
        decided.pins.ep = request.pins.ep.or(ep);
    }
    let found = search(&decided)?;
    let best = found.best.first().cloned();
    all.push(watch(&found));
    Ok((all, best))
}

fn set_of(zero: Option<usize>) -> Option<u8> {
    zero.and_then(|n| u8::try_from(n).ok())
}

fn memory(request: &Request) -> Step {
    let parameters = request.shape.parameters() as f64;
    let job = &request.job;
    let (storage, acc) = (job.types.storage.bytes(), job.types.accumulation.bytes());
    let state = job.moments + usize::from(storage != acc);
    let each = (storage + acc + state * acc) as f64;
    let usable = request.cluster.usable() as f64;
    let least = whole(parameters * each / usable);
    Step {
        title: "memory",
        lines: Vec::from([
            format!(
                "{:.1} billion parameters x {each} bytes (parameter {storage}, gradient {acc}, optimizer {}) = {:.1} GB",
                parameters / 1e9,
                state * acc,
                parameters * each / 1e9
            ),
            format!(
                "one GPU leaves {:.1} GiB to a model: the states alone fill {least} of them; {} are there",
                usable / GIB,
                request.cluster.gpus
            ),
        ]),
    }
}

/// The whole number at or above, without a mathematics library.
fn whole(x: f64) -> u64 {
    let floor = x as u64;
    floor + u64::from(floor as f64 != x)
}

/// Tries each value: the best, and a line for each.
fn turn(
    request: &Request,
    values: impl Iterator<Item = usize>,
    name: &str,
    set: impl Fn(&mut Pins, usize),
) -> Result<(Option<usize>, Vec<String>), Invalid> {
    let (mut best, mut lines) = (None::<(usize, f64)>, Vec::new());
    for value in values {
        let mut tried = request.clone();
        let before = tried.pins;
        set(&mut tried.pins, value);
        // What the asker has pinned is not tried otherwise.
        if pinned_otherwise(&before, &tried.pins) {
            continue;
        }
        let found = search(&tried)?;
        let Some(candidate) = found.best.first() else {
            lines.push(format!("{name} {value}: {}", why_not(&found, request)));
            continue;
        };
        let rate = candidate.tokens_per_second() / request.cluster.gpus as f64;
        lines.push(format!(
            "{name} {value}: {rate:.0} tokens/s a GPU, MFU {:.1} %, {:.1} GiB on the fullest rank",
            100.0 * candidate.mfu(request, &found.flops),
            candidate.held.total() as f64 / GIB
        ));
        if best.is_none_or(|(_, most)| rate > most) {
            best = Some((value, rate));
        }
    }
    if let Some((value, _)) = best {
        lines.push(format!("decided: {name} {value}"));
    }
    Ok((best.map(|(value, _)| value), lines))
}

fn pinned_otherwise(before: &Pins, after: &Pins) -> bool {
    let changed = |a: Option<usize>, b: Option<usize>| a.is_some() && a != b;
    changed(before.tp, after.tp)
        || changed(before.pp, after.pp)
        || changed(before.cp, after.cp)
        || changed(before.ep, after.ep)
        || (before.zero_stage.is_some() && before.zero_stage != after.zero_stage)
}

fn why_not(found: &Found, request: &Request) -> String {
    if let Some(tightest) = &found.tightest {
        return format!(
            "nothing fits; the nearest takes {:.1} of {:.1} GiB",
            tightest.held.total() as f64 / GIB,
            request.cluster.usable() as f64 / GIB
        );
    }
    let first = found.rejected.first();
    first.map_or_else(|| String::from("no such mesh"), |r| r.example.clone())
}

fn watch(found: &Found) -> Step {
    let mut lines = Vec::new();
    match found.best.first() {
        None => lines.push(String::from("nothing fits, so there is nothing to watch")),
        Some(candidate) => {
            let total = candidate.time.total();
            for (name, seconds) in candidate.time.named() {
                if seconds > 0.0 {
                    lines.push(format!(
                        "{name}: {seconds:.3} s, {:.1} % of the step",
                        100.0 * seconds / total
                    ));
                }
            }
            lines.push(String::from(
                "what a run measures beside these says which constant of the model to replace",
            ));
        }
    }
    Step {
        title: "watch the run",
        lines,
    }
}
