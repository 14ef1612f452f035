//! Four ranks fit y = V W x together, and each holds a quarter: of V and W, of their gradients and of
//! AdamW's state. V travels while W is in use. `cargo run -p quintet-zero --example 02_zero3`

use std::sync::Arc;

use quintet_collectives::{
    Axis, Communicator, Degrees, DeviceMesh, Init, Local, ParamSpec, Placement, ProcessGroup, World,
};
use quintet_kernels::{Backend, Cpu, Tag};
use quintet_zero::{
    Error, FlatLayout, Gathering, GradSync, GroupSet, LayoutSpec, ParamStore, Partition, Rule,
    ShardedOptimizer, ZeroStage, clip_factor, grad_norm,
};

const RANKS: usize = 4;
/// Widths of x, W x and V W x.
const DIMS: [usize; 3] = [7, 9, 6];
const SAMPLES: usize = 8;

type Comm = Communicator<Local>;
type Params = ParamStore<Cpu, f32>;

fn main() -> Result<(), Error> {
    World::new(RANKS)?.go(train)?;
    Ok(())
}

fn train(world: Comm) -> Result<(), Error> {
    let mesh = DeviceMesh::new(Degrees {
        dp: RANKS,
        ..Default::default()
    })?;
    let (rank, device) = (world.rank(), Cpu::new(1));
    let param = |layer: usize| ParamSpec {
        name: ["w", "v"][layer].into(),
        shape: vec![DIMS[layer + 1], DIMS[layer]],
        at_use: vec![(mesh.factor(Axis::Dp), Placement::Replicate)],
        tie: None,
        init: Init::Zeros,
        decay: true,
    };
    let spec = LayoutSpec {
        bucket_bytes: 1,
        element_bytes: 4,
        tied: &[],
        shard_within: None,
    };
    // Two layers in two buckets: bucket 1 holds W, bucket 0 holds V, as backward reaches them.
    let layers = [vec![param(0)], vec![param(1)]];
    let layout = Arc::new(FlatLayout::build(&layers, &mesh, rank, &spec)?);
    let partition = Partition::new(layout.clone(), ZeroStage::Three);
    let groups = {
        let parent = world.subgroup(world.group(), "zero")?;
        let make =
            |name: &str, ranks: &[usize]| parent.subgroup(&ProcessGroup::new(ranks, rank)?, name);
        // Gathers on communicators of their own do not queue behind reductions.
        GroupSet::build(&[&layout], world, make)?.with_gathering(&[&layout], make)?
    };

    let mut params = Params::zeros(&device, &partition)?;
    params.fill_with(|entry, i| ((i + entry.layer) as f32 * 2.3).sin() * 0.3)?;
    let mut sync = GradSync::new(&device, &partition, &groups)?;
    let rule = Rule::AdamW {
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        weight_decay: 0.0,
    };
    let mut optimizer = ShardedOptimizer::new(&device, &partition, rule, &params)?;
    device.meter().reset_peak();

    for step in 1..=300 {
        sync.zero()?;
        let loss = pass(rank, &mut params, &mut sync, &groups)?;
        sync.finish(&groups)?;
        let norm = grad_norm(&device, &[&sync], &groups)?;
        optimizer.step(&mut params, &sync, &groups, 0.01, clip_factor(norm, 1.0))?;
        if rank == 0 && step % 50 == 0 {
            println!("step {step:>3}: rank 0's loss {loss:.6}, norm {norm:.6}");
        }
    }

    let held = |tag| (device.meter().now(tag), device.meter().peak(tag));
    let [(p, whole), (g, most), (o, _)] = [Tag::Param, Tag::Grad, Tag::Optimizer].map(held);
    println!(
        "rank {rank}: {p} bytes of parameters (at most {whole}), {g} of gradients (at most {most}), {o} of optimizer state"
    );
    Ok(())
}

/// Forward and backward of this rank's samples: the mean squared error, divided by all ranks'
/// samples, and its gradients.
fn pass(
    rank: usize,
    params: &mut Params,
    sync: &mut GradSync<Cpu, Comm, f32>,
    groups: &GroupSet<Comm>,
) -> Result<f32, Error> {
    let count = (RANKS * SAMPLES) as f32;
    let samples = (0..SAMPLES).map(|s| (rank * SAMPLES + s) as f32);
    let x: Vec<Vec<f32>> = samples
        .map(|s| {
            (0..DIMS[0])
                .map(|j| (s * 0.7 + j as f32 * 1.9).sin())
                .collect()
        })
        .collect();
    let mut gathering = Gathering::<Cpu, Comm, f32>::new();
    gathering.ahead(params, groups, 1)?;
    gathering.end_bucket(params, 1)?;
    gathering.ahead(params, groups, 0)?;
    let h: Vec<Vec<f32>> = x.iter().map(|x| times(params_of(params, 0), x)).collect();
    params.release(1)?;
    gathering.end_bucket(params, 0)?;
    let y: Vec<Vec<f32>> = h.iter().map(|h| times(params_of(params, 1), h)).collect();

    let mut loss = 0.0;
    let mut dy = y;
    for (dy, x) in dy.iter_mut().zip(&x) {
        for (i, d) in dy.iter_mut().enumerate() {
            let want: f32 = x
                .iter()
                .enumerate()
                .map(|(j, x)| (i + j) as f32 * 0.1 * x)
                .sum();
            *d -= want;
            loss += *d * *d / count;
            *d *= 2.0 / count;
        }
    }
    // V is in use already: it stays for its backward, and W is fetched beside it.
    gathering.ahead(params, groups, 1)?;
    let dh: Vec<Vec<f32>> = dy
        .iter()
        .map(|d| times_transposed(params_of(params, 1), d))
        .collect();
    add_outer(sync.views_mut(1)?.remove(0), &dy, &h);
    sync.reduce(groups, 0)?;
    params.release(0)?;
    gathering.end_bucket(params, 1)?;
    add_outer(sync.views_mut(0)?.remove(0), &dh, &x);
    sync.reduce(groups, 1)?;
    params.release(1)?;
    Ok(loss)
}

fn params_of(params: &Params, layer: usize) -> &[f32] {
    params.views(layer).map_or(&[], |views| views[0])
}

fn times(w: &[f32], x: &[f32]) -> Vec<f32> {
    let row = |row: &[f32]| row.iter().zip(x).map(|(w, x)| w * x).sum();
    w.chunks(x.len()).map(row).collect()
}

fn times_transposed(w: &[f32], y: &[f32]) -> Vec<f32> {
    let columns = w.len() / y.len();
    let column = |j: usize| {
        y.iter()
            .enumerate()
            .map(|(i, y)| w[i * columns + j] * y)
            .sum()
    };
    (0..columns).map(column).collect()
}

/// `dw += sum over samples of dy x^T`.
fn add_outer(dw: &mut [f32], dy: &[Vec<f32>], x: &[Vec<f32>]) {
    for (dy, x) in dy.iter().zip(x) {
        for (row, dy) in dw.chunks_mut(x.len()).zip(dy) {
            row.iter_mut().zip(x).for_each(|(dw, x)| *dw += dy * x);
        }
    }
}
