//! Each operation with inputs and the output it must give, and what performs one as a communicator does.

use quintet_collectives::cost::Model;
use quintet_collectives::plan::{CollectiveShape as S, FoldOrder, Plan};
use quintet_collectives::transport::sim::Part;
use quintet_collectives::{Algorithm, Communicator, Element, Order, ReduceOp, Result, Transport};

/// Outputs and bytes by rank.
pub type Outputs<E> = Result<(Vec<Vec<E>>, Vec<u64>)>;

/// As a communicator performs them, its plans forced: in shared memory where that is as good.
pub fn on_calls<E: Element, T: Transport + Send + 'static>(
    ends: Vec<T>,
    parts: &[Part<E>],
) -> Outputs<E> {
    let ranks: Vec<Result<(Vec<E>, u64)>> = std::thread::scope(|scope| {
        let threads: Vec<_> = ends
            .into_iter()
            .zip(parts)
            .map(|(end, part)| scope.spawn(move || call(end, part)))
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    });
    Ok(ranks
        .into_iter()
        .collect::<Result<Vec<_>>>()?
        .into_iter()
        .unzip())
}

/// One rank's part of [`on_calls`].
pub fn call<E: Element, T: Transport + Send + 'static>(
    end: T,
    part: &Part<E>,
) -> Result<(Vec<E>, u64)> {
    let (plan, me) = (&part.plan, end.rank());
    let order = match plan.fold_order() {
        FoldOrder::RankOrder => Order::Rank,
        FoldOrder::Fixed => Order::Any,
    };
    let forced = format!("{}:{}", plan.shape().operation(), plan.algorithm());
    let model = Model {
        overrides: forced.parse()?,
        ..Model::default()
    };
    let comm = Communicator::new(end).with_order(order).with_model(model);
    let (x, op) = (&part.input, part.redop);
    let mut y = vec![E::zeroed(); plan.output_len(me)];
    match plan.shape() {
        S::AllReduce { .. } => comm.all_reduce_into(x, &mut y, op)?,
        S::ReduceScatter { counts } => comm.reduce_scatter_v(x, &mut y, counts, op)?,
        S::AllGather { counts } => comm.all_gather_v(x, &mut y, counts)?,
        S::Gather { counts, root } => comm.gather_v(x, &mut y, counts, *root)?,
        S::Scatter { counts, root } => comm.scatter_v(x, &mut y, counts, *root)?,
        S::AllToAll { .. } => comm.all_to_all(x, &mut y)?,
        S::AllToAllV { send, recv } => comm.all_to_all_v(x, send, &mut y, recv)?,
        S::Barrier => comm.barrier()?,
        S::Broadcast { root, .. } => {
            if me == *root {
                y.copy_from_slice(x);
            }
            comm.broadcast(&mut y, *root)?;
        }
        S::Reduce { root, .. } => {
            let mut buffer = x.clone();
            comm.reduce(&mut buffer, op, *root)?;
            if me == *root {
                y = buffer;
            }
        }
    }
    Ok((y, comm.stats().bytes))
}

/// A small exact value that tells rank and place.
pub fn value(rank: usize, i: usize) -> i32 {
    ((rank * 7 + i * 3) % 11) as i32 - 3
}

pub fn serial(redop: ReduceOp, world: usize, i: usize) -> i32 {
    let parts = (0..world).map(|r| value(r, i));
    match redop {
        ReduceOp::Sum | ReduceOp::Avg => parts.sum(),
        ReduceOp::Prod => parts.fold(1, i32::wrapping_mul),
        ReduceOp::Min => parts.min().unwrap(),
        ReduceOp::Max => parts.max().unwrap(),
    }
}

/// Each shape with the output it must give at each rank.
pub fn cases(world: usize, len: usize, redop: ReduceOp) -> Vec<(Vec<S>, Vec<Vec<i32>>)> {
    let all = |f: &dyn Fn(usize) -> Vec<i32>| (0..world).map(f).collect::<Vec<_>>();
    let same = |shape: S| vec![shape; world];
    let whole: Vec<i32> = (0..len).map(|i| serial(redop, world, i)).collect();
    let counts: Vec<usize> = (0..world)
        .map(|r| if r % 3 == 1 { 0 } else { (len + r) % 5 })
        .collect();
    let start = |r: usize| counts[..r].iter().sum::<usize>();
    let gathered: Vec<i32> = (0..world)
        .flat_map(|r| (0..counts[r]).map(move |i| value(r, i)))
        .collect();
    let root = world / 2;
    let at_root = |x: &[i32], r: usize| if r == root { x.to_vec() } else { vec![] };
    let sent = |from: usize, to: usize| (from * 2 + to * to + len) % 4;
    let v = (0..world)
        .map(|r| S::AllToAllV {
            send: (0..world).map(|to| sent(r, to)).collect(),
            recv: (0..world).map(|from| sent(from, r)).collect(),
        })
        .collect();
    let v_out = all(&|r| {
        let part = |from: usize| {
            let before: usize = (0..r).map(|to| sent(from, to)).sum();
            (before..before + sent(from, r)).map(move |i| value(from, i))
        };
        (0..world).flat_map(part).collect()
    });
    vec![
        (same(S::AllReduce { len }), all(&|_| whole.clone())),
        (same(S::Reduce { len, root }), all(&|r| at_root(&whole, r))),
        (
            same(S::ReduceScatter {
                counts: counts.clone(),
            }),
            all(&|r| {
                (0..counts[r])
                    .map(|i| serial(redop, world, start(r) + i))
                    .collect()
            }),
        ),
        (
            same(S::AllGather {
                counts: counts.clone(),
            }),
            all(&|_| gathered.clone()),
        ),
        (
            same(S::Gather {
                counts: counts.clone(),
                root,
            }),
            all(&|r| at_root(&gathered, r)),
        ),
        (
            same(S::Scatter {
                counts: counts.clone(),
                root,
            }),
            all(&|r| (0..counts[r]).map(|i| value(root, start(r) + i)).collect()),
        ),
        (
            same(S::Broadcast { len, root }),
            all(&|_| (0..len).map(|i| value(root, i)).collect()),
        ),
        (
            same(S::AllToAll { len }),
            all(&|r| {
                (0..world)
                    .flat_map(|q| (0..len).map(move |i| value(q, r * len + i)))
                    .collect()
            }),
        ),
        (v, v_out),
        (same(S::Barrier), all(&|_| vec![])),
    ]
}

pub fn parts<E: Element>(
    shapes: &[S],
    algorithm: Algorithm,
    redop: ReduceOp,
    f: impl Fn(i32) -> E,
) -> Option<Vec<Part<E>>> {
    let world = shapes.len();
    shapes
        .iter()
        .enumerate()
        .map(|(r, shape)| {
            let plan = Plan::new(shape.clone(), algorithm, world).ok()?;
            let input = (0..plan.input_len(r)).map(|i| f(value(r, i))).collect();
            Some(Part { plan, redop, input })
        })
        .collect()
}
