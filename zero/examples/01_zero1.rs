//! Four ranks fit y = W x together: each sees its own samples, keeps a quarter of AdamW's state
//! and steps a quarter of W. `cargo run -p quintet-zero --example 01_zero1`

use std::sync::Arc;

use quintet_collectives::{
    Axis, Communicator, Degrees, DeviceMesh, Init, Local, ParamSpec, Placement, ProcessGroup, World,
};
use quintet_kernels::{Backend, Cpu, Tag};
use quintet_zero::{
    Error, FlatLayout, GradSync, GroupSet, LayoutSpec, ParamStore, Partition, Rule,
    ShardedOptimizer, ZeroStage, clip_factor, grad_norm,
};

const RANKS: usize = 4;
const OUT: usize = 6;
const IN: usize = 7;
const SAMPLES: usize = 8;

fn main() -> Result<(), Error> {
    World::new(RANKS)?.go(train)?;
    Ok(())
}

fn train(world: Communicator<Local>) -> Result<(), Error> {
    let mesh = DeviceMesh::new(Degrees {
        dp: RANKS,
        ..Default::default()
    })?;
    let (rank, device) = (world.rank(), Cpu::new(1));

    // What is known about the parameter, written once: every replica uses it in its own way.
    let w = ParamSpec {
        name: "w".into(),
        shape: vec![OUT, IN],
        at_use: vec![(mesh.factor(Axis::Dp), Placement::Replicate)],
        tie: None,
        init: Init::Zeros,
        decay: true,
    };
    let spec = LayoutSpec {
        bucket_bytes: 1 << 20,
        element_bytes: 4,
        tied: &[],
        shard_within: None,
    };
    let layout = Arc::new(FlatLayout::build(&[vec![w]], &mesh, rank, &spec)?);
    let partition = Partition::new(layout.clone(), ZeroStage::One);
    let groups = {
        let parent = world.subgroup(world.group(), "zero")?;
        GroupSet::build(&[&layout], world, |name, ranks| {
            parent.subgroup(&ProcessGroup::new(ranks, rank)?, name)
        })?
    };

    let mut params = ParamStore::<Cpu, f32>::zeros(&device, &partition)?;
    let mut sync = GradSync::new(&device, &partition, &groups)?;
    let rule = Rule::AdamW {
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        weight_decay: 0.0,
    };
    let mut optimizer = ShardedOptimizer::new(&device, &partition, rule, &params)?;
    if rank == 0 {
        print!("{layout}");
    }

    for step in 1..=300 {
        sync.zero()?;
        let loss = backward(rank, params.views(0)?[0], sync.views_mut(0)?.remove(0));
        sync.reduce(&groups, 0)?;
        sync.finish(&groups)?;
        let norm = grad_norm(&device, &[&sync], &groups)?;
        optimizer.step(&mut params, &sync, &groups, 0.03, clip_factor(norm, 1.0))?;
        if rank == 0 && step % 50 == 0 {
            println!("step {step:>3}: rank 0's loss {loss:.6}, norm {norm:.6}");
        }
    }

    let bytes = |tag| device.meter().now(tag);
    let (param, state) = (bytes(Tag::Param), bytes(Tag::Optimizer));
    println!("rank {rank}: {param} bytes of parameters, {state} of optimizer state");
    Ok(())
}

/// Mean squared error of this rank's samples, divided by all ranks' samples, and its gradient.
fn backward(rank: usize, w: &[f32], dw: &mut [f32]) -> f32 {
    let count = (RANKS * SAMPLES) as f32;
    let mut loss = 0.0;
    for sample in 0..SAMPLES {
        let x = |j: usize| ((rank * SAMPLES + sample) as f32 * 0.7 + j as f32 * 1.9).sin();
        for i in 0..OUT {
            let y = (0..IN).map(|j| w[i * IN + j] * x(j)).sum::<f32>();
            let want = (0..IN).map(|j| (i + j) as f32 * 0.1 * x(j)).sum::<f32>();
            loss += (y - want) * (y - want) / count;
            for j in 0..IN {
                dw[i * IN + j] += 2.0 * (y - want) * x(j) / count;
            }
        }
    }
    loss
}
