//! A column-parallel layer on two ranks computes, bit by bit, what it computes on one; the sum of
//! its input gradient is the dual of the move that brought the input in.
//!
//! ```text
//! cargo run -p quintet-parallel-layers --example 01_column_parallel
//! ```

use quintet_collectives::transport::local::World;
use quintet_collectives::{Degrees, DeviceMesh, Error as WireError, ProcessGroup};
use quintet_kernels::{Backend, Cpu, Tag};
use quintet_parallel_layers::init::{init_value, local};
use quintet_parallel_layers::region::{Region, apply};
use quintet_parallel_layers::{ColumnParallelLinear, Ctx, Error};

const TOKENS: usize = 2;
const OUT: usize = 5;
const IN: usize = 4;
const SEED: u64 = 7;

/// What a rank ends with: its columns of y, and the whole gradient of x.
type Done = (Vec<f32>, Vec<f32>);

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (one, two) = (on(1)?, on(2)?);
    println!("y {TOKENS} x {OUT} on one rank:");
    print(&one[0].0, OUT);
    for (rank, (y, _)) in two.iter().enumerate() {
        println!("columns on rank {rank} of 2:");
        print(y, y.len() / TOKENS);
    }
    let joined: Vec<f32> = (0..TOKENS)
        .flat_map(|t| two.iter().flat_map(move |(y, _)| row(y, t)))
        .copied()
        .collect();
    println!("joined, bit-equal: {}", joined == one[0].0);
    let worst = one[0].1.iter().zip(&two[1].1).map(|(a, b)| (a - b).abs());
    println!("dx, largest difference: {:e}", worst.fold(0.0, f32::max));
    Ok(())
}

/// Runs the layer on `tp` ranks, which are threads.
fn on(tp: usize) -> Result<Vec<Done>, Box<dyn std::error::Error>> {
    let degrees = Degrees {
        tp,
        ..Default::default()
    };
    let mesh = DeviceMesh::new(degrees)?;
    let layer = ColumnParallelLinear::new(&mesh, "up_proj", OUT, IN);
    let ranks = World::run(tp, |comm| {
        let device = Cpu::new(1);
        // No experts here: in those groups each rank is alone.
        let alone = comm.subgroup(&ProcessGroup::new(vec![comm.rank()], comm.rank())?, "alone")?;
        let ctx = Ctx {
            device: &device,
            tp: &comm,
            replica: &comm,
            ep: &alone,
            etp: &alone,
            cp: Default::default(),
        };
        Ok::<_, WireError>(step(&layer, &mesh, &ctx))
    })?;
    Ok(ranks.into_iter().collect::<Result<_, Error>>()?)
}

fn step<C: quintet_kernels::Collectives<Cpu>>(
    layer: &ColumnParallelLinear,
    mesh: &DeviceMesh,
    ctx: &Ctx<'_, Cpu, C>,
) -> Result<Done, Error> {
    let spec = &layer.params()[0];
    // Each rank draws its own rows of the weight, and no others.
    let w: Vec<f32> = local(spec, mesh, ctx.tp.rank(), |i| init_value(spec, SEED, i));
    let x: Vec<f32> = (0..TOKENS * IN).map(|i| i as f32 - 3.0).collect();
    let y = layer.forward(ctx, TOKENS, &w[..], None, &x[..])?;

    // x came in as Invariant -> Replicate, so its gradient leaves as Partial -> Invariant.
    let dy = vec![1.0; y.as_ref().len()];
    let mut dx = ctx.device.zeros(Tag::Activation, TOKENS * IN)?;
    layer.backward_input(ctx, TOKENS, &w[..], &dy[..], dx.as_mut(), false)?;
    let back = Region::new(false)?.enter().backward()?;
    let dx = apply(ctx, back, dx, TOKENS, IN)?;
    Ok((y.as_ref().to_vec(), dx.as_ref().to_vec()))
}

fn row(y: &[f32], t: usize) -> &[f32] {
    let width = y.len() / TOKENS;
    &y[t * width..(t + 1) * width]
}

fn print(y: &[f32], width: usize) {
    for row in y.chunks(width.max(1)) {
        let row: Vec<String> = row.iter().map(|y| format!("{y:+.4}")).collect();
        println!("  {}", row.join(" "));
    }
}
