//! Plans, override strings and constants.

use quintet_collectives::cost::{Constants, Model, Overrides, Topology, parse, write};
use quintet_collectives::plan::{FoldOrder, Hosts, PlanSpec, check};
use quintet_collectives::{Algorithm, CollectiveShape as Shape, DType, Order, Plan};

use crate::bytes::Bytes;

fn shape(bytes: &mut Bytes<'_>, world: usize) -> Shape {
    let len = bytes.below(24);
    let root = bytes.below(world + 1);
    let kind = bytes.below(9);
    let mut counts = || -> Vec<usize> { (0..world).map(|_| bytes.below(5)).collect() };
    match kind {
        0 => Shape::AllReduce { len },
        1 => Shape::ReduceScatter { counts: counts() },
        2 => Shape::AllGather { counts: counts() },
        3 => Shape::Broadcast { len, root },
        4 => Shape::Reduce { len, root },
        5 => Shape::Gather {
            counts: counts(),
            root,
        },
        6 => Shape::Scatter {
            counts: counts(),
            root,
        },
        7 => Shape::AllToAll { len: len % 4 },
        _ => Shape::Barrier,
    }
}

/// Any plan: refused in a sentence, or sound; and whatever the model chooses is what was asked for.
pub fn plans(data: &[u8]) {
    let mut bytes = Bytes(data);
    let world = 1 + bytes.below(11);
    let algorithm = Algorithm::ALL[bytes.below(Algorithm::ALL.len())];
    let chunk_len = (bytes.below(3) == 1).then(|| bytes.below(6));
    let hosts = (bytes.below(2) == 1 || algorithm == Algorithm::TwoLevel)
        .then(|| Hosts::new(&(0..world).map(|_| bytes.below(4)).collect::<Vec<_>>()));
    let shape = shape(&mut bytes, world);
    let spec = PlanSpec {
        algorithm,
        chunk_len,
        hosts: hosts.clone(),
    };
    match Plan::from_spec(shape.clone(), spec, world) {
        Ok(plan) => check::check(&plan).expect("a plan that is made is sound"),
        Err(error) => assert!(!error.to_string().contains('\n')),
    }
    let model = Model {
        topology: hosts.map(Topology::new),
        ..Model::default()
    };
    for order in [Order::Rank, Order::Any] {
        match model.plan(shape.clone(), world, DType::Bf16, order) {
            Ok(plan) => {
                let apart = plan.fold_order() == FoldOrder::RankOrder;
                assert!(order == Order::Any || apart, "{plan}");
                check::check(&plan).expect("what is chosen is sound");
            }
            Err(error) => assert!(!error.to_string().contains('\n')),
        }
    }
}

/// Every matrix of counts is a sound all_to_all_v.
pub fn ragged(data: &[u8]) {
    let mut bytes = Bytes(data);
    let world = 1 + bytes.below(6);
    let counts: Vec<usize> = (0..world * world).map(|_| bytes.below(4)).collect();
    let plans: Vec<Plan> = (0..world)
        .map(|rank| {
            let send = counts[rank * world..(rank + 1) * world].to_vec();
            let recv = counts.iter().skip(rank).step_by(world).copied().collect();
            Plan::new(Shape::AllToAllV { send, recv }, Algorithm::Pairwise, world)
                .expect("counts are one per rank")
        })
        .collect();
    check::check_ranks(&plans).expect("every matrix is sound");
}

/// Words that override strings and constants are made of, so that many inputs get far.
const WORDS: [&str; 48] = [
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "reduce",
    "all_to_all",
    "all_to_all_v",
    "barrier",
    "gather",
    "send",
    ":",
    ":",
    ":",
    ",",
    ",",
    ";",
    ";",
    "^",
    "/",
    "-",
    "-",
    "0",
    "1",
    "4k",
    "64K",
    "1m",
    "2g",
    "99999999999999999999",
    "17179869184g",
    "direct",
    "pairwise",
    "ring",
    "tree",
    "recursive_doubling",
    "halving_doubling",
    "bruck",
    "double_tree",
    "two_level",
    " ",
    "\n",
    "[tcp]",
    "latency ",
    "overhead ",
    "send ",
    "fold ",
    "1e-6",
    "é",
    "#",
];

fn text(data: &[u8]) -> String {
    let words = data
        .iter()
        .map(|byte| match WORDS.get(usize::from(*byte) % 64) {
            Some(word) => (*word).to_string(),
            None => char::from(*byte).to_string(),
        });
    words.collect()
}

/// Any override string: refused in a sentence, or read as what it prints; and followed or refused.
pub fn overrides(data: &[u8]) {
    let text = text(data);
    let overrides: Overrides = match text.parse() {
        Ok(overrides) => overrides,
        Err(error) => {
            // The string is quoted, so that its own line breaks do not break the sentence.
            assert!(!error.to_string().contains('\n'), "{error}");
            return;
        }
    };
    let again: Overrides = overrides
        .to_string()
        .parse()
        .expect("it reads what it prints");
    assert_eq!(again, overrides);
    let model = Model {
        overrides,
        ..Model::default()
    };
    for len in [0, 1 << 10, 1 << 20] {
        for order in [Order::Rank, Order::Any] {
            let shape = Shape::AllReduce { len };
            match model.choose(&shape, 8, DType::F32, order) {
                Ok(spec) => {
                    Plan::from_spec(shape, spec, 8).expect("what is chosen can be made");
                }
                Err(error) => assert!(!error.to_string().contains('\n')),
            }
        }
    }
}

/// Any text of constants: refused by line, or read back as it was.
pub fn constants(data: &[u8]) {
    let text = text(data);
    if let Ok(all) = parse(&text) {
        assert_eq!(parse(&write(&all)).as_ref(), Ok(&all));
    }
    // And a good one with one byte changed.
    let mut good = write(&[("tcp".to_string(), Constants::TCP)]).into_bytes();
    let mut bytes = Bytes(data);
    let at = (usize::from(bytes.byte()) << 8 | usize::from(bytes.byte())) % good.len();
    good[at] = bytes.byte() % 128;
    let good = String::from_utf8(good).expect("still ASCII");
    if let Ok(all) = parse(&good) {
        assert_eq!(parse(&write(&all)).as_ref(), Ok(&all));
    }
}
