//! A ring all-reduce: the plan drawn, checked, and performed by four threads.
//!
//! `cargo run -p quintet-collectives --example 01_ring`

use quintet_collectives::{
    Algorithm, CollectiveShape, DType, Order, Plan, ReduceOp, Result, World,
};
use quintet_collectives::{cost::Model, plan::check};

fn main() -> Result<()> {
    let plan = Plan::new(CollectiveShape::AllReduce { len: 10 }, Algorithm::Ring, 4)?;
    print!("{plan}");
    check::check(&plan)?;
    let bytes: u64 = (0..4).map(|rank| plan.bytes_sent(rank, DType::F32)).sum();
    println!(
        "sound; {bytes} bytes of f32 in all, 2 (n-1) S = {}",
        2 * 3 * 10 * 4
    );

    let model = Model {
        overrides: "all_reduce:ring".parse()?,
        ..Model::default()
    };
    let sums = World::run(4, |comm| {
        let comm = comm.with_order(Order::Any).with_model(model.clone());
        let mut x = vec![comm.rank() as f32 + 1.0; 1 << 16];
        comm.all_reduce(&mut x, ReduceOp::Sum)?;
        Ok((x[0], comm.stats()))
    })?;
    for (rank, (sum, stats)) in sums.iter().enumerate() {
        println!(
            "rank {rank}: sum {sum}, sent {} bytes in {} messages",
            stats.bytes, stats.messages
        );
    }
    Ok(())
}
