//! Every plan, every world up to 17, many lengths: sound, and drawn as the golden text has it.

use std::collections::BTreeMap;

use quintet_collectives::plan::{Action, Hosts, Local, Plan, PlanSpec, What, check};
use quintet_collectives::{Algorithm, CollectiveShape as S, DType, Order, chunk, plan};

/// Counts that are even, ragged, with zeros, and all at one rank.
fn counts(world: usize, len: usize) -> Vec<Vec<usize>> {
    let even = chunk::chunk_lens(len, world).collect();
    let zeros = (0..world)
        .map(|r| if r % 2 == 0 { 0 } else { len + r })
        .collect();
    let one = (0..world)
        .map(|r| if r == world / 2 { len } else { 0 })
        .collect();
    vec![even, zeros, one]
}

fn shapes(world: usize, len: usize) -> Vec<S> {
    let mut shapes = vec![S::AllReduce { len }, S::AllToAll { len }, S::Barrier];
    for root in [0, world / 2, world - 1] {
        shapes.push(S::Broadcast { len, root });
        shapes.push(S::Reduce { len, root });
    }
    for counts in counts(world, len) {
        shapes.push(S::ReduceScatter {
            counts: counts.clone(),
        });
        shapes.push(S::AllGather {
            counts: counts.clone(),
        });
        shapes.push(S::Gather {
            counts: counts.clone(),
            root: world - 1,
        });
        shapes.push(S::Scatter {
            counts,
            root: world / 2,
        });
    }
    shapes
}

/// Every algorithm with the parameters it takes.
fn specs(world: usize) -> Vec<PlanSpec> {
    let mut specs: Vec<PlanSpec> = Algorithm::ALL.map(PlanSpec::from).to_vec();
    for chunk_len in [1, 3, 1000] {
        for algorithm in [Algorithm::Ring, Algorithm::Tree, Algorithm::DoubleTree] {
            specs.push(PlanSpec {
                chunk_len: Some(chunk_len),
                ..algorithm.into()
            });
        }
    }
    for hosts in host_shapes(world) {
        specs.push(PlanSpec {
            hosts: Some(hosts),
            ..Algorithm::TwoLevel.into()
        });
    }
    specs
}

/// One host, one rank a host, blocks that do not divide the world, all but one together, rank by
/// rank in turn, and scattered.
fn host_shapes(world: usize) -> Vec<Hosts> {
    let ids = |id: &dyn Fn(usize) -> usize| Hosts::new(&(0..world).map(id).collect::<Vec<_>>());
    vec![
        Hosts::blocks(world, world),
        Hosts::blocks(world, 1),
        Hosts::blocks(world, 3),
        ids(&|r| usize::from(r == 0)),
        ids(&|r| r % 3),
        ids(&|r| 100 - (r * r + 1) % 5),
    ]
}

#[test]
fn every_plan_is_sound() {
    let mut checked = BTreeMap::new();
    for world in 1..=17 {
        for spec in specs(world) {
            for len in [0, 1, world - 1, world, world + 1, 2 * world + 3] {
                for shape in shapes(world, len) {
                    // The pieces of long chains are looked at with a few lengths only.
                    if spec.chunk_len == Some(1) && len > world {
                        continue;
                    }
                    if let Ok(plan) = Plan::from_spec(shape, spec.clone(), world) {
                        check::check(&plan).unwrap();
                        *checked.entry(spec.algorithm).or_insert(0) += 1;
                    }
                }
            }
        }
    }
    println!("{checked:?}");
    for algorithm in Algorithm::ALL {
        assert!(checked[&algorithm] > 300, "{checked:?}");
    }
}

#[test]
fn a_long_buffer_is_sound() {
    for world in [3, 8, 13] {
        for spec in specs(world).into_iter().filter(|s| s.chunk_len != Some(1)) {
            let chunk_len = spec.chunk_len.map(|len| 20 * len);
            let spec = PlanSpec { chunk_len, ..spec };
            for shape in shapes(world, 1001) {
                if let Ok(plan) = Plan::from_spec(shape, spec.clone(), world) {
                    check::check(&plan).unwrap();
                }
            }
        }
    }
}

#[test]
fn every_zero_pattern_of_all_to_all_v_is_sound() {
    for world in 1..=3usize {
        for pattern in 0..1 << (world * world) {
            let count = |from: usize, to: usize| {
                if pattern >> (from * world + to) & 1 == 1 {
                    1 + from + 2 * to
                } else {
                    0
                }
            };
            let plans: Vec<Plan> = (0..world)
                .map(|r| {
                    let send = (0..world).map(|to| count(r, to)).collect();
                    let recv = (0..world).map(|from| count(from, r)).collect();
                    Plan::new(S::AllToAllV { send, recv }, Algorithm::Pairwise, world).unwrap()
                })
                .collect();
            check::check_ranks(&plans).unwrap();
        }
    }
}

#[test]
fn the_choice_is_sound_and_in_rank_order_where_asked() {
    for world in [1, 2, 8, 17] {
        for len in [0, 5, 20_000] {
            for shape in shapes(world, len) {
                let plan = Plan::chosen(shape.clone(), world, DType::F32, Order::Rank).unwrap();
                assert_eq!(plan.fold_order(), plan::FoldOrder::RankOrder, "{shape:?}");
                Plan::chosen(shape, world, DType::F32, Order::Any).unwrap();
            }
        }
    }
}

/// The checker is itself checked: each planted fault must be found.
#[test]
fn planted_faults_are_found() {
    let plan = |algorithm| Plan::new(S::AllReduce { len: 10 }, algorithm, 4).unwrap();
    let fault = |plan: &Plan, break_it: &dyn Fn(&mut Vec<Vec<plan::Round>>)| {
        let mut rounds: Vec<_> = (0..4).map(|r| plan.rounds(r)).collect();
        break_it(&mut rounds);
        check::check_rounds(&vec![plan.clone(); 4], &rounds)
            .unwrap_err()
            .fault()
    };
    let ring = plan(Algorithm::Ring);
    let pairwise = plan(Algorithm::Pairwise);
    let text = fault(&ring, &|rounds| rounds[1][2].sends.clear());
    assert!(text.contains("bytes"), "{text}");
    let text = fault(&ring, &|rounds| rounds[2][0].recvs[0].from = 3);
    assert!(text.contains("deadlock"), "{text}");
    let text = fault(&pairwise, &|rounds| {
        rounds[0][0].sends[0].what = What::Input(0..3)
    });
    assert!(
        text.contains("fold of") || text.contains("expects"),
        "{text}"
    );
    let text = fault(&pairwise, &|rounds| {
        rounds[3][1].recvs[1].action = Action::Store(0)
    });
    assert!(text.contains("output"), "{text}");
    let text = fault(&pairwise, &|rounds| {
        rounds[0][0].then = vec![Local::Finish { input: 0..3, at: 0 }]
    });
    assert!(text.contains("fold of"), "{text}");
}

#[test]
fn a_plan_that_cannot_be_is_refused() {
    assert!(Plan::new(S::AllReduce { len: 1 }, Algorithm::Ring, 0).is_err());
    assert!(Plan::new(S::Broadcast { len: 1, root: 4 }, Algorithm::Direct, 4).is_err());
    assert!(Plan::new(S::AllGather { counts: vec![1; 3] }, Algorithm::Ring, 4).is_err());
    assert!(Plan::new(S::AllGather { counts: vec![1; 4] }, Algorithm::Tree, 4).is_err());
    let huge = S::AllGather {
        counts: vec![usize::MAX, 2],
    };
    assert!(Plan::new(huge, Algorithm::Ring, 2).is_err());
}

/// Counts beyond 32 bits: formulas and ranges only, nothing is allocated.
#[test]
fn lengths_beyond_four_gigabytes_add_up() {
    for len in [(1usize << 31) - 1, (1 << 31) + 1, (1 << 32) + 1] {
        for algorithm in [Algorithm::Ring, Algorithm::Pairwise] {
            let plan = Plan::new(S::AllReduce { len }, algorithm, 7).unwrap();
            let total: u64 = (0..7).map(|r| plan.bytes_sent(r, DType::F32)).sum();
            assert_eq!(total, 2 * 6 * len as u64 * 4);
            assert_eq!(plan.chunk(6).end, len);
        }
    }
}

#[test]
fn plans_are_drawn_as_the_golden_text() {
    let ring = Plan::new(S::AllReduce { len: 10 }, Algorithm::Ring, 4).unwrap();
    let pairwise = Plan::new(S::AllReduce { len: 10 }, Algorithm::Pairwise, 3).unwrap();
    let tree = Plan::new(S::Broadcast { len: 5, root: 1 }, Algorithm::Tree, 5).unwrap();
    golden("ring.txt", include_str!("golden/ring.txt"), &ring);
    golden(
        "pairwise.txt",
        include_str!("golden/pairwise.txt"),
        &pairwise,
    );
    golden("tree.txt", include_str!("golden/tree.txt"), &tree);
}

/// `QUINTET_BLESS=1` writes the files anew; read the diff before keeping it.
fn golden(name: &str, expected: &str, plan: &Plan) {
    let got = plan.to_string();
    if std::env::var_os("QUINTET_BLESS").is_some() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("tests/golden")
            .join(name);
        std::fs::write(path, &got).unwrap();
    } else {
        assert_eq!(got, expected, "{name} differs; it is now:\n{got}");
    }
}
