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
        for algorithm in Algorithm::ALL {
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
                    // Single elements in long chains are many messages and nothing new.
                    if spec.chunk_len == Some(1) && (world > 9 || len > world) {
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

/// Faults of the kinds that new plans invite; each must be found.
#[test]
fn planted_faults_of_the_newer_plans_are_found() {
    let fault = |spec: PlanSpec, n: usize, break_it: &dyn Fn(&mut Vec<Vec<plan::Round>>)| {
        let plan = Plan::from_spec(S::AllReduce { len: 30 }, spec, n).unwrap();
        let mut rounds: Vec<_> = (0..n).map(|r| plan.rounds(r)).collect();
        check::check_rounds(&vec![plan.clone(); n], &rounds).unwrap();
        break_it(&mut rounds);
        let found = check::check_rounds(&vec![plan.clone(); n], &rounds);
        found.unwrap_err().fault()
    };
    let doubling = || PlanSpec::from(Algorithm::RecursiveDoubling);
    // Two receipts change places.
    let text = fault(doubling(), 8, &|rounds| {
        let (one, other) = rounds.split_at_mut(1);
        std::mem::swap(&mut one[0][1].recvs, &mut other[0][1].recvs);
    });
    assert!(text.contains("deadlock"), "{text}");
    // The result goes to the wrong one of the extra ranks.
    let text = fault(doubling(), 7, &|rounds| {
        let last = rounds[1].len() - 1;
        rounds[1][last].sends[0].to = 2;
    });
    assert!(text.contains("deadlock"), "{text}");
    // What is given away is wanted once more.
    let text = fault(doubling(), 8, &|rounds| {
        rounds[0][1].sends[0].what = What::Partial(0..30);
    });
    assert!(text.contains("fold of"), "{text}");
    // A chunk begins one element late.
    let pieces = PlanSpec {
        chunk_len: Some(4),
        ..Algorithm::DoubleTree.into()
    };
    let text = fault(pieces, 8, &|rounds| {
        for round in rounds.iter_mut().flatten() {
            for recv in &mut round.recvs {
                if let Action::Store(at) = &mut recv.action {
                    *at = if *at == 4 { 5 } else { *at };
                }
            }
        }
    });
    assert!(
        text.contains("before it is there") || text.contains("fold of"),
        "{text}"
    );
    // An all-to-all block is laid down in the wrong place of the stash.
    let plan = Plan::new(S::AllToAll { len: 2 }, Algorithm::Bruck, 8).unwrap();
    let mut rounds: Vec<_> = (0..8).map(|r| plan.rounds(r)).collect();
    for recv in &mut rounds[3][0].recvs {
        if let Action::Parts(parts) = &mut recv.action {
            let last = parts.len() - 1;
            parts.swap(0, last);
        }
    }
    let found = check::check_rounds(&vec![plan; 8], &rounds)
        .unwrap_err()
        .fault();
    assert!(found.contains("fold of"), "{found}");
    // In place, an output is stored over an input that is still to be read.
    let plan = Plan::new(S::AllReduce { len: 8 }, Algorithm::Pairwise, 4).unwrap();
    let mut rounds: Vec<_> = (0..4).map(|r| plan.rounds(r)).collect();
    let late = Local::Copy { input: 7..8, at: 7 };
    rounds[0][1].then.push(late);
    let found = check::check_rounds(&vec![plan; 4], &rounds)
        .unwrap_err()
        .fault();
    assert!(found.contains("overwritten"), "{found}");
}

#[test]
fn no_rank_is_inner_in_both_trees() {
    for n in 1..=200 {
        let mut seen = [vec![false; n + 1], vec![false; n + 1]];
        for rank in 0..n {
            let seats = plan::seats(rank, n);
            let inner = seats.map(|(_, seat)| seat.left.is_some() || seat.right.is_some());
            assert!(!(inner[0] && inner[1]), "rank {rank} of {n}");
            for (tree, (number, seat)) in seats.into_iter().enumerate() {
                assert!(!std::mem::replace(&mut seen[tree][number], true));
                assert!(seat.depth <= n.ilog2() as usize);
                assert_eq!(seat.parent.is_none(), seat.depth == 0);
                for kid in [seat.left, seat.right].into_iter().flatten() {
                    let owner = (0..n).map(|r| plan::seats(r, n)[tree]);
                    let kids: Vec<_> = owner.filter(|(at, _)| *at == kid).collect();
                    assert_eq!(kids.len(), 1);
                    assert_eq!(kids[0].1.parent, Some(number));
                }
            }
        }
    }
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
    let sentence = |spec: PlanSpec| {
        let refused = Plan::from_spec(S::AllReduce { len: 1 }, spec, 4).unwrap_err();
        refused.to_string()
    };
    let ring = |chunk_len| PlanSpec {
        chunk_len,
        ..Algorithm::Ring.into()
    };
    let hosts = |algorithm: Algorithm, world| PlanSpec {
        hosts: Some(Hosts::blocks(world, 2)),
        ..algorithm.into()
    };
    assert!(sentence(ring(Some(0))).contains("at least one element"));
    let bruck = PlanSpec {
        chunk_len: Some(1),
        ..Algorithm::Bruck.into()
    };
    assert!(sentence(bruck).contains("not cut into chunks"));
    assert!(sentence(Algorithm::TwoLevel.into()).contains("host of each rank"));
    assert!(sentence(hosts(Algorithm::TwoLevel, 5)).contains("given for 5 ranks"));
    assert!(sentence(hosts(Algorithm::Ring, 4)).contains("no account of hosts"));
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
    let pieces = PlanSpec {
        chunk_len: Some(2),
        ..Algorithm::Pairwise.into()
    };
    let pieces = Plan::from_spec(S::AllReduce { len: 10 }, pieces, 3).unwrap();
    let tree = Plan::new(S::Broadcast { len: 5, root: 1 }, Algorithm::Tree, 5).unwrap();
    golden("ring.txt", include_str!("golden/ring.txt"), &ring);
    golden(
        "pairwise.txt",
        include_str!("golden/pairwise.txt"),
        &pairwise,
    );
    golden(
        "pairwise_in_pieces.txt",
        include_str!("golden/pairwise_in_pieces.txt"),
        &pieces,
    );
    golden("tree.txt", include_str!("golden/tree.txt"), &tree);
    let all_reduce = S::AllReduce { len: 10 };
    let made = |shape: &S, spec: PlanSpec, world| Plan::from_spec(shape.clone(), spec, world);
    let doubling = made(&all_reduce, Algorithm::RecursiveDoubling.into(), 5).unwrap();
    golden(
        "doubling.txt",
        include_str!("golden/doubling.txt"),
        &doubling,
    );
    let halving = made(&all_reduce, Algorithm::HalvingDoubling.into(), 8).unwrap();
    golden("halving.txt", include_str!("golden/halving.txt"), &halving);
    let bruck = made(&S::AllToAll { len: 2 }, Algorithm::Bruck.into(), 5).unwrap();
    golden("bruck.txt", include_str!("golden/bruck.txt"), &bruck);
    let double_tree = PlanSpec {
        chunk_len: Some(3),
        ..Algorithm::DoubleTree.into()
    };
    let double_tree = made(&all_reduce, double_tree, 4).unwrap();
    golden(
        "double_tree.txt",
        include_str!("golden/double_tree.txt"),
        &double_tree,
    );
    let two_level = PlanSpec {
        hosts: Some(Hosts::blocks(5, 3)),
        ..Algorithm::TwoLevel.into()
    };
    let two_level = made(&all_reduce, two_level, 5).unwrap();
    golden(
        "two_level.txt",
        include_str!("golden/two_level.txt"),
        &two_level,
    );
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
