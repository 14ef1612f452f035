//! Lines of the ledger that say something else: which ranks sum a gradient, what decays, what a
//! parameter's random numbers are keyed by, which copies are tied.

use quintet_collectives::{Axis, Factor, ParamSpec, Placement};
use quintet_parallel_layers::Positions;
use quintet_parallel_layers::init::init_random;
use quintet_planner::config::MoeConfig;
use quintet_planner::model::{borrows_table, tied};
use quintet_ref_trainer::failure::Failure;
use quintet_ref_trainer::job::Job;
use quintet_ref_trainer::oracle::{EMBEDDING, FINAL_NORM, POSITIONS};
use quintet_ref_trainer::record::Recorded;

use super::{Fault, fault, replicas};
use crate::common::plant;
use Placement::{Invariant, Replicate};

pub fn faults() -> Vec<Fault> {
    [sums(), sums_of_experts(), decay(), numbers(), ties()].concat()
}

/// Nobody sums over `axis` what each rank uses in its own way.
fn unsummed(
    rank: &mut Recorded<'_, f64>,
    axis: Axis,
    wanted: impl Fn(&str) -> bool,
) -> Result<(), Failure> {
    plant::ledger(rank, |line| {
        if wanted(&line.name) {
            place(&mut line.at_use, axis, Replicate, Invariant);
        }
    })
}

fn place(at_use: &mut [(Factor, Placement)], axis: Axis, from: Placement, to: Placement) {
    let on_axis = at_use.iter_mut().filter(|(factor, _)| factor.axis == axis);
    for (_, placement) in on_axis.filter(|(_, p)| *p == from) {
        *placement = to;
    }
}

fn is_norm(name: &str) -> bool {
    name.contains("layernorm") || name == FINAL_NORM
}

fn sequence_parallel(job: &Job) -> bool {
    job.layout.sequence_parallel && job.layout.tp > 1
}

fn sums() -> Vec<Fault> {
    vec![
        fault(
            "norms under sequence-parallel: not summed over tp",
            sequence_parallel,
            |rank| unsummed(rank, Axis::Tp, is_norm),
        ),
        fault(
            "a norm without sequence-parallel: summed over tp",
            |job| job.layout.tp > 1 && !job.layout.sequence_parallel,
            |rank| {
                plant::ledger(rank, |line| {
                    if line.name == FINAL_NORM {
                        place(&mut line.at_use, Axis::Tp, Invariant, Replicate);
                    }
                })
            },
        ),
        fault(
            "norms of q and k: not summed over tp",
            |job| job.layout.tp > 1 && job.model.architecture.qk_norm,
            |rank| {
                unsummed(rank, Axis::Tp, |n| {
                    n.contains("q_norm") || n.contains("k_norm")
                })
            },
        ),
        fault(
            "biases of row-parallel layers: not summed over tp",
            |job| sequence_parallel(job) && job.model.architecture.out_bias,
            |rank| {
                unsummed(rank, Axis::Tp, |n| {
                    n.ends_with("o_proj.bias") || n.ends_with("down_proj.bias")
                })
            },
        ),
        fault(
            "learned positions: not summed over tp",
            |job| {
                let learned = matches!(job.model.architecture.positions, Positions::Learned(_));
                sequence_parallel(job) && learned
            },
            |rank| unsummed(rank, Axis::Tp, |n| n == POSITIONS),
        ),
        fault(
            "copies of KV heads: not summed",
            |job| job.model.kv_heads < job.layout.tp,
            |rank| {
                unsummed(rank, Axis::Tp, |n| {
                    n.contains("k_proj") || n.contains("v_proj")
                })
            },
        ),
        fault(
            "gradients: not summed over dp",
            |job| job.layout.dp > 1,
            |rank| unsummed(rank, Axis::Dp, |_| true),
        ),
        fault(
            "gradients: not summed over cp",
            |job| job.layout.cp > 1,
            |rank| unsummed(rank, Axis::Cp, |_| true),
        ),
        fault(
            "one parameter: not summed over dp",
            |job| job.layout.dp > 1,
            |rank| {
                unsummed(rank, Axis::Dp, |n| {
                    n.ends_with("layers.0.self_attn.o_proj.weight")
                })
            },
        ),
        fault(
            "one rank sums a norm over dp, its replicas do not",
            |job| job.layout.dp > 1,
            |rank| {
                let first = rank.rank == 0;
                plant::ledger(rank, |line| {
                    if first && is_norm(&line.name) {
                        place(&mut line.at_use, Axis::Dp, Replicate, Invariant);
                    }
                })
            },
        ),
    ]
}

fn with_experts(job: &Job, on: fn(&MoeConfig) -> bool) -> bool {
    // Where the first block is dense and the only one, there are none.
    let moe = job
        .model
        .moe
        .filter(|moe| moe.first_dense < job.model.layers);
    moe.is_some_and(|moe| on(&moe))
}

fn sums_of_experts() -> Vec<Fault> {
    vec![
        fault(
            "a router: not summed over tp",
            |job| job.layout.tp > 1 && with_experts(job, |_| true),
            |rank| unsummed(rank, Axis::Tp, |n| n.ends_with("mlp.gate.weight")),
        ),
        fault(
            "a router: not summed over cp",
            |job| job.layout.cp > 1 && with_experts(job, |_| true),
            |rank| unsummed(rank, Axis::Cp, |n| n.ends_with("mlp.gate.weight")),
        ),
        fault(
            "experts: not summed over edp",
            |job| {
                let l = &job.layout;
                replicas(job) * l.tp > l.ep * l.etp && with_experts(job, |_| true)
            },
            |rank| unsummed(rank, Axis::Edp, |n| n.contains("mlp.experts")),
        ),
        fault(
            "the gate of shared experts: not summed over tp",
            |job| sequence_parallel(job) && with_experts(job, |moe| moe.shared_gate),
            |rank| unsummed(rank, Axis::Tp, |n| n.contains("shared_expert_gate")),
        ),
        fault(
            "the bias on the choice: summed over dp",
            |job| job.layout.dp > 1 && with_experts(job, |moe| moe.selection_bias),
            |rank| {
                plant::ledger(rank, |line| {
                    if line.name.contains("e_score_correction_bias") {
                        place(&mut line.at_use, Axis::Dp, Invariant, Replicate);
                    }
                })
            },
        ),
    ]
}

fn decays(job: &Job) -> bool {
    job.optimizer.weight_decay > 0.0
}

fn decay() -> Vec<Fault> {
    vec![
        fault("norms decay", decays, |rank| {
            plant::ledger(rank, |line| line.decay |= is_norm(&line.name))
        }),
        fault("nothing decays", decays, |rank| {
            plant::ledger(rank, |line| line.decay = false)
        }),
        fault(
            "the bias on the choice decays",
            |job| decays(job) && with_experts(job, |moe| moe.selection_bias),
            |rank| plant::ledger(rank, |line| line.decay = true),
        ),
    ]
}

/// Draws a parameter's numbers by another name or index than the logical one.
fn drawn(
    rank: &mut Recorded<'_, f64>,
    key: impl Fn(&ParamSpec, usize) -> (String, usize),
) -> Result<(), Failure> {
    let seed = rank.job.seed;
    rank.fill_with(|entry, index| {
        let (name, index) = key(&entry.spec, index);
        let spec = ParamSpec {
            name,
            ..entry.spec.clone()
        };
        init_random(&spec, seed, index)
    })
}

fn numbers() -> Vec<Fault> {
    vec![
        fault(
            "stages draw the numbers of their blocks by local number",
            |job| job.layout.pp > 1,
            |rank| {
                let all = rank.chunks.iter().flat_map(|c| c.params.layout().entries());
                let block = |name: &str| name.split('.').nth(2)?.parse::<usize>().ok();
                let first = all.filter_map(|e| block(&e.spec.name)).min().unwrap_or(0);
                drawn(rank, |spec, index| {
                    let name = match block(&spec.name) {
                        Some(n) => {
                            spec.name
                                .replacen(&format!(".{n}."), &format!(".{}.", n - first), 1)
                        }
                        None => spec.name.clone(),
                    };
                    (name, index)
                })
            },
        ),
        fault(
            "experts draw their numbers by local number",
            |job| job.layout.ep > 1 && with_experts(job, |_| true),
            |rank| {
                let ep = rank.job.layout.ep;
                drawn(rank, |spec, index| {
                    let here = spec.len() / ep;
                    let local = spec.name.contains("mlp.experts");
                    (spec.name.clone(), if local { index % here } else { index })
                })
            },
        ),
        fault(
            "tensor parallel ranks draw by local index",
            |job| job.layout.tp > 1,
            |rank| {
                let place = rank.mesh.index(rank.rank, Axis::Tp);
                drawn(rank, |spec, index| {
                    let wide = spec.name.ends_with("o_proj.weight");
                    (
                        spec.name.clone(),
                        if wide { index + 7 * place } else { index },
                    )
                })
            },
        ),
        fault(
            "a replica begins 1e-6 off",
            |job| job.layout.dp > 1,
            |rank| {
                let second = rank.mesh.index(rank.rank, Axis::Dp) == 1;
                let off = if second { 1.0 + 1e-6 } else { 1.0 };
                let table = |name: &str| name == EMBEDDING;
                plant::set(
                    rank,
                    |name, _, was| if table(name) { was * off } else { was },
                )
            },
        ),
        fault(
            "a tensor parallel rank's norms begin 1e-6 off",
            |job| job.layout.tp > 1,
            |rank| {
                let second = rank.mesh.index(rank.rank, Axis::Tp) == 1;
                let off = if second { 1e-6 } else { 0.0 };
                plant::set(
                    rank,
                    |name, _, was| if is_norm(name) { was + off } else { was },
                )
            },
        ),
    ]
}

fn ties() -> Vec<Fault> {
    vec![
        fault(
            "a table tied over stages: its copies are strangers",
            |job| !tied(&job.model, &job.layout).is_empty(),
            plant::untie,
        ),
        fault(
            "a table tied on one stage: two copies",
            |job| {
                let l = &job.layout;
                let of = |stage| (0..l.chunks()).any(|c| borrows_table(&job.model, l, stage, c));
                (0..l.pp).any(of)
            },
            plant::lend_nothing,
        ),
    ]
}
