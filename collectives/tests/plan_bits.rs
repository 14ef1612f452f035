//! What a plan computes, to the bit, against a fold that knows nothing of plans: each algorithm's
//! order is written down here once more, as brackets over ranks.

use quintet_collectives::cost::{Model, Topology};
use quintet_collectives::plan::{Hosts, PlanSpec};
use quintet_collectives::transport::sim::{Delivery, Part, Sim};
use quintet_collectives::{
    Algorithm as A, CollectiveShape as S, Element, Order, Plan, ReduceOp, World, chunk,
};

/// Brackets over ranks.
#[derive(Clone, Debug, PartialEq)]
enum Fold {
    Rank(usize),
    Two(Box<Fold>, Box<Fold>),
}

use Fold::{Rank, Two};

fn two(left: Fold, right: Fold) -> Fold {
    Two(Box::new(left), Box::new(right))
}

fn left_fold(ranks: impl IntoIterator<Item = usize>) -> Fold {
    ranks.into_iter().map(Rank).reduce(two).unwrap()
}

fn binomial(n: usize, real: &dyn Fn(usize) -> Fold) -> Fold {
    fn below(node: usize, levels: u32, n: usize, real: &dyn Fn(usize) -> Fold) -> Fold {
        let kids = (0..levels)
            .map(|k| (node + (1 << k), k))
            .filter(|(kid, _)| *kid < n);
        kids.fold(real(node), |sum, (kid, k)| two(sum, below(kid, k, n, real)))
    }
    below(0, n.next_power_of_two().trailing_zeros(), n, real)
}

/// The ranks of a world folded to a power of two.
fn paired(n: usize) -> Vec<Fold> {
    let p = 1 << n.ilog2();
    let pairs = n - p;
    let first = (0..pairs).map(|i| two(Rank(2 * i), Rank(2 * i + 1)));
    first.chain((2 * pairs..n).map(Rank)).collect()
}

/// In order: everything left of the top, the top, everything right of it.
fn in_order(numbers: &[usize]) -> Option<Fold> {
    let top = numbers.len().checked_ilog2().map(|log| (1 << log) - 1)?;
    let own = Rank(numbers[top]);
    let left = match in_order(&numbers[..top]) {
        Some(left) => two(left, own),
        None => own,
    };
    Some(match in_order(&numbers[top + 1..]) {
        Some(right) => two(left, right),
        None => left,
    })
}

/// The ranks by their number in each of the two trees.
fn numbered(n: usize, second: bool) -> Vec<usize> {
    match second {
        false => (0..n).collect(),
        true if n.is_multiple_of(2) => (0..n).rev().collect(),
        true => (0..n).map(|i| (i + n - 1) % n).collect(),
    }
}

/// The order in which `element` of the whole is folded.
fn declared(shape: &S, spec: &PlanSpec, n: usize, element: usize) -> Fold {
    let len = shape.len(n);
    let owner = || {
        let ends = |r: usize| match shape {
            S::ReduceScatter { counts } => counts[..=r].iter().sum(),
            _ => chunk::chunk(len, n, r).end,
        };
        (0..n).find(|r| element < ends(*r)).unwrap()
    };
    let root = shape.root().unwrap_or(0);
    match spec.algorithm {
        _ if n == 1 => Rank(0),
        A::Direct | A::Pairwise | A::Bruck => left_fold(0..n),
        A::Ring if shape.root().is_some() => {
            let ranks = (0..n).rev().map(|i| Rank((root + i) % n));
            ranks.reduce(|sum, rank| two(rank, sum)).unwrap()
        }
        A::Ring => left_fold((1..=n).map(|i| (owner() + i) % n)),
        A::Tree => binomial(n, &|node| Rank((node + root) % n)),
        A::HalvingDoubling if matches!(shape, S::ReduceScatter { .. }) => {
            let mut parts = paired(n);
            while parts.len() > 1 {
                let far = parts.split_off(parts.len() / 2);
                parts = parts.into_iter().zip(far).map(|(l, r)| two(l, r)).collect();
            }
            parts.remove(0)
        }
        A::RecursiveDoubling | A::HalvingDoubling => {
            let mut parts = paired(n);
            while parts.len() > 1 {
                let pairs = parts.chunks(2);
                parts = pairs
                    .map(|pair| two(pair[0].clone(), pair[1].clone()))
                    .collect();
            }
            parts.remove(0)
        }
        A::DoubleTree => {
            let second = element >= chunk::chunk(len, 2, 0).end;
            if shape.root().is_none() {
                return in_order(&numbered(n, second)).unwrap();
            }
            let others: Vec<usize> = numbered(n - 1, second)
                .into_iter()
                .map(|i| (root + 1 + i) % n)
                .collect();
            two(Rank(root), in_order(&others).unwrap())
        }
        A::TwoLevel => levels(shape, spec.hosts.as_ref().unwrap(), owner, root),
    }
}

fn levels(shape: &S, hosts: &Hosts, owner: impl Fn() -> usize, root: usize) -> Fold {
    if shape.root().is_some() {
        let first = hosts.host(root);
        return binomial(hosts.len(), &|h| {
            let host = (first + h) % hosts.len();
            let ranks = hosts.members(host);
            let start = if host == first { hosts.place(root) } else { 0 };
            binomial(ranks.len(), &|i| Rank(ranks[(start + i) % ranks.len()]))
        });
    }
    let owner = owner();
    let home = hosts.host(owner);
    let sum = |host: usize| {
        let ranks = hosts.members(host);
        let carrier = ranks[hosts.place(owner) % ranks.len()];
        let others = ranks.iter().copied().filter(|rank| *rank != carrier);
        left_fold(std::iter::once(carrier).chain(others))
    };
    let others = (0..hosts.len()).filter(|host| *host != home);
    others.fold(sum(home), |total, host| two(total, sum(host)))
}

fn value<E: Element>(fold: &Fold, op: ReduceOp, of: &impl Fn(usize) -> E) -> E::Wide {
    match fold {
        Rank(rank) => of(*rank).widen(),
        Two(left, right) => {
            let (l, r) = (value(left, op, of), value(right, op, of));
            match op {
                ReduceOp::Sum | ReduceOp::Avg => l.add(r),
                ReduceOp::Prod => l.mul(r),
                ReduceOp::Min => l.lesser(r),
                ReduceOp::Max => l.greater(r),
            }
        }
    }
}

/// A type that test inputs can be made of: of very different sizes, so that the order shows.
trait Sample: Element {
    fn sample(bits: u64) -> Self;
}

macro_rules! sample {
    ($($t:ty: $from:expr),*) => {$(impl Sample for $t {
        fn sample(bits: u64) -> Self {
            #[allow(clippy::redundant_closure_call)]
            ($from)(bits)
        }
    })*};
}

fn float(bits: u64) -> f64 {
    match bits {
        MINUS_ZERO => return -0.0,
        ZERO => return 0.0,
        _ => {}
    }
    let size = (bits % 13) as i32 - 6;
    let sign = if bits & 64 == 0 { 1.0 } else { -1.0 };
    sign * (1.0 + (bits >> 11) as f64 / (1u64 << 53) as f64) * 2f64.powi(size)
}

sample!(
    f64: float,
    f32: |bits| float(bits) as f32,
    half::bf16: |bits| half::bf16::from_f64(float(bits)),
    half::f16: |bits| half::f16::from_f64(float(bits)),
    i32: |bits| bits as i32,
    i64: |bits| bits as i64,
    u8: |bits| bits as u8
);

const MINUS_ZERO: u64 = u64::MAX;
const ZERO: u64 = u64::MAX - 1;

/// The input of a rank. Of least and greatest every other is a zero with a sign: of equals the left
/// one is kept, so that the sign tells the order.
fn input<E: Sample>(op: ReduceOp, rank: usize, index: usize) -> E {
    let bits = bits(rank, index);
    let signs = matches!(op, ReduceOp::Min | ReduceOp::Max) && index % 2 == 1;
    E::sample(match bits & 1 {
        _ if !signs => bits,
        0 => ZERO,
        _ => MINUS_ZERO,
    })
}

fn bits(rank: usize, index: usize) -> u64 {
    let mut x = (rank as u64 + 1) << 32 | index as u64;
    for _ in 0..3 {
        x ^= x >> 29;
        x = x.wrapping_mul(0xbf58_476d_1ce4_e5b9);
    }
    x
}

/// What rank `rank` must end with: each element as (its fold, where it lies in the inputs).
fn expected<E: Sample>(plan: &Plan, rank: usize, op: ReduceOp) -> Vec<E> {
    let (shape, n) = (plan.shape(), plan.world());
    let at = |from: usize, index: usize| input::<E>(op, from, index);
    let folded = |element: usize| {
        let fold = declared(shape, plan.spec(), n, element);
        let sum = value::<E>(&fold, op, &|rank| at(rank, element));
        let sum = if op == ReduceOp::Avg {
            sum.divided(n)
        } else {
            sum
        };
        E::narrow(sum)
    };
    (0..plan.output_len(rank))
        .map(|i| match shape {
            S::AllReduce { .. } | S::Reduce { .. } => folded(i),
            S::ReduceScatter { .. } => folded(plan.chunk(rank).start + i),
            S::Broadcast { root, .. } => at(*root, i),
            S::AllGather { .. } => {
                let owner = (0..n).find(|r| plan.chunk(*r).contains(&i)).unwrap();
                at(owner, i - plan.chunk(owner).start)
            }
            S::AllToAll { len } => at(i / len, rank * len + i % len),
            _ => unreachable!(),
        })
        .collect()
}

fn run<E: Sample>(plan: &Plan, op: ReduceOp, delivery: Delivery, seed: u64) {
    let parts: Vec<Part<E>> = (0..plan.world())
        .map(|rank| Part {
            plan: plan.clone(),
            redop: op,
            input: (0..plan.input_len(rank))
                .map(|i| input::<E>(op, rank, i))
                .collect(),
        })
        .collect();
    let outcome = Sim { delivery, seed }.run(&parts).unwrap();
    for (rank, output) in outcome.outputs.iter().enumerate() {
        let expected = expected::<E>(plan, rank, op);
        let same = bytemuck::cast_slice::<E, u8>(output) == bytemuck::cast_slice(&expected);
        assert!(
            same,
            "{:?} by {:?} over {}, {op}: rank {rank} has {output:?}, not {expected:?}",
            plan.shape(),
            plan.spec(),
            plan.world()
        );
        assert_eq!(outcome.bytes[rank], plan.bytes_sent(rank, E::DTYPE));
    }
}

fn specs(n: usize) -> Vec<PlanSpec> {
    let mut specs: Vec<PlanSpec> = A::ALL.map(PlanSpec::from).to_vec();
    for algorithm in [A::Ring, A::Tree, A::DoubleTree, A::Pairwise] {
        specs.push(PlanSpec {
            chunk_len: Some(2),
            ..algorithm.into()
        });
    }
    let scattered: Vec<usize> = (0..n).map(|r| (r * r + 1) % 4).collect();
    for hosts in [Hosts::blocks(n, 3), Hosts::new(&scattered)] {
        specs.push(PlanSpec {
            hosts: Some(hosts),
            ..A::TwoLevel.into()
        });
    }
    specs
}

fn shapes(n: usize, len: usize) -> Vec<S> {
    let even: Vec<usize> = chunk::chunk_lens(len, n).collect();
    let ragged: Vec<usize> = (0..n)
        .map(|r| if r % 3 == 1 { 0 } else { r % 4 + 1 })
        .collect();
    let mut shapes = vec![S::AllReduce { len }, S::AllToAll { len: len.min(5) }];
    for root in [0, n - 1] {
        shapes.push(S::Broadcast { len, root });
        shapes.push(S::Reduce { len, root });
    }
    for counts in [even, ragged] {
        let again = counts.clone();
        shapes.push(S::ReduceScatter { counts });
        shapes.push(S::AllGather { counts: again });
    }
    shapes
}

fn plans(n: usize, len: usize) -> Vec<Plan> {
    let mut plans = Vec::new();
    for spec in specs(n) {
        let made = shapes(n, len)
            .into_iter()
            .filter_map(|shape| Plan::from_spec(shape, spec.clone(), n).ok());
        plans.extend(made);
    }
    plans
}

#[test]
fn every_plan_has_the_bits_of_its_declared_order() {
    let mut ran = 0;
    for n in [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17] {
        for len in [0, 1, n - 1, n + 1, 37] {
            for plan in plans(n, len) {
                let delivery = if ran % 2 == 0 {
                    Delivery::Rendezvous
                } else {
                    Delivery::Bounded(1)
                };
                run::<f32>(&plan, ReduceOp::Sum, delivery, ran);
                ran += 1;
            }
        }
    }
    assert!(ran > 3000, "{ran}");
}

#[test]
fn every_type_and_operator_is_folded_in_that_order() {
    for n in [5, 8] {
        for (seed, plan) in (0..).zip(plans(n, 19)) {
            for op in [
                ReduceOp::Sum,
                ReduceOp::Prod,
                ReduceOp::Min,
                ReduceOp::Max,
                ReduceOp::Avg,
            ] {
                run::<half::bf16>(&plan, op, Delivery::Bounded(64), seed);
                run::<half::f16>(&plan, op, Delivery::Rendezvous, seed);
                run::<f64>(&plan, op, Delivery::Rendezvous, seed);
                run::<i32>(&plan, op, Delivery::Bounded(8), seed);
                run::<i64>(&plan, op, Delivery::Rendezvous, seed);
                run::<u8>(&plan, op, Delivery::Bounded(1), seed);
            }
        }
    }
}

/// The inputs are such that the order shows: else the tests above could not fail.
#[test]
fn different_orders_have_different_bits() {
    let sum = |fold: &Fold, i| value::<f32>(fold, ReduceOp::Sum, &|r| f32::sample(bits(r, i)));
    let orders = [
        left_fold(0..8),
        binomial(8, &Rank),
        left_fold((1..=8).map(|r| r % 8)),
        in_order(&numbered(8, false)).unwrap(),
        in_order(&numbered(8, true)).unwrap(),
    ];
    for (a, one) in orders.iter().enumerate() {
        for other in &orders[..a] {
            let differ = (0..37).filter(|i| sum(one, *i).to_bits() != sum(other, *i).to_bits());
            assert!(differ.count() > 5, "{one:?} {other:?}");
        }
    }
}

/// Chunk lengths do not change what is computed.
#[test]
fn chunking_keeps_the_bits() {
    let shape = S::AllReduce { len: 53 };
    for algorithm in [A::Ring, A::Tree, A::DoubleTree, A::Pairwise] {
        for chunk_len in [1, 5, 100] {
            let spec = PlanSpec {
                chunk_len: Some(chunk_len),
                ..algorithm.into()
            };
            let plan = Plan::from_spec(shape.clone(), spec, 6).unwrap();
            run::<f32>(&plan, ReduceOp::Sum, Delivery::Rendezvous, 1);
        }
    }
}

/// The same plans by threads, chosen by override strings; in place and not.
#[test]
fn threads_have_the_same_bits() {
    for n in [2, 3, 6, 8] {
        for spec in specs(n) {
            let shape = S::AllReduce { len: 41 };
            let Ok(plan) = Plan::from_spec(shape.clone(), spec.clone(), n) else {
                continue;
            };
            let chunk = spec
                .chunk_len
                .map_or(String::new(), |len| format!("/{}", 2 * len));
            let text = format!("all_reduce:{}{chunk}", spec.algorithm);
            let model = Model {
                overrides: text.parse().unwrap(),
                topology: spec.hosts.clone().map(Topology::new),
                ..Model::default()
            };
            let Ok(chosen) = model.plan(shape, n, half::bf16::DTYPE, Order::Any) else {
                // Hosts that are all one, or all alone, are no two levels.
                assert_eq!(spec.algorithm, A::TwoLevel);
                continue;
            };
            assert_eq!(chosen, plan);
            let outputs = World::run(n, |comm| {
                let comm = comm.with_order(Order::Any).with_model(model.clone());
                let x: Vec<half::bf16> = (0..41)
                    .map(|i| Sample::sample(bits(comm.rank(), i)))
                    .collect();
                let (mut in_place, mut apart) = (x.clone(), vec![half::bf16::ZERO; 41]);
                comm.all_reduce(&mut in_place, ReduceOp::Avg)?;
                comm.all_reduce_into(&x, &mut apart, ReduceOp::Avg)?;
                assert_eq!(
                    comm.stats().bytes,
                    2 * plan.bytes_sent(comm.rank(), half::bf16::DTYPE)
                );
                Ok([in_place, apart])
            })
            .unwrap();
            for (rank, both) in outputs.iter().enumerate() {
                let expected = expected::<half::bf16>(&plan, rank, ReduceOp::Avg);
                assert_eq!(both[0], expected, "{text} over {n}");
                assert_eq!(both[1], expected, "{text} over {n}");
            }
        }
    }
}
