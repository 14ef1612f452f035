//! Which plan when, and why: the table of predicted times for an all-reduce, and what a simulation
//! on the links of the hosts makes of the plan chosen.
//!
//! `cargo run --release -p quintet-collectives --example explain -- WORLD BYTES HOSTS OVERRIDES`
//!
//! All four may be left out. A ring over 4,096 ranks: `-- 4096 4194304 512 all_reduce:ring`.

use std::{env, process::ExitCode, time::Instant};

use quintet_collectives::{
    CollectiveShape, DType, Error, Order, Plan, Result,
    cost::{Constants, Model, Simulated, Topology, simulate},
    plan::Hosts,
};

fn main() -> ExitCode {
    let mut args = env::args().skip(1);
    let mut number = |default| args.next().map_or(Ok(default), |arg| arg.parse::<usize>());
    let (Ok(world), Ok(bytes), Ok(hosts)) = (number(64), number(1 << 20), number(8)) else {
        eprintln!("explain [WORLD [BYTES [HOSTS [OVERRIDES]]]]: the first three are numbers");
        return ExitCode::from(2);
    };
    let overrides = args.next().unwrap_or_default();
    match tables(world, bytes, hosts.max(1), &overrides) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::from(2)
        }
    }
}

fn tables(world: usize, bytes: usize, hosts: usize, overrides: &str) -> Result<()> {
    let model = Model {
        within: Constants::SHM,
        between: Constants::TCP,
        topology: Some(Topology::new(Hosts::blocks(world, world.div_ceil(hosts)))),
        overrides: overrides.parse()?,
    };
    let shape = CollectiveShape::AllReduce { len: bytes / 4 };
    let mut refused = None;
    for order in [Order::Rank, Order::Any] {
        let table = model.explain(&shape, world, DType::F32, order)?;
        print!("{table}");
        match model.plan(shape.clone(), world, DType::F32, order) {
            Ok(plan) => simulated(&plan, &model)?,
            Err(error @ Error::Override { .. }) => {
                println!("  {error}");
                refused = Some(error);
            }
            Err(error) => return Err(error),
        }
        println!();
    }
    // What one order refuses the other may allow.
    match refused {
        Some(error) if overrides.is_empty() => Err(error),
        _ => Ok(()),
    }
}

fn simulated(plan: &Plan, model: &Model) -> Result<()> {
    let start = Instant::now();
    let found: Simulated = simulate(plan, DType::F32, model)?;
    let busiest = found
        .links
        .iter()
        .max_by(|a, b| a.busy.total_cmp(&b.busy))
        .map_or(String::new(), |load| {
            format!(", busiest link {} ({} bytes)", load.link, load.bytes)
        });
    println!(
        "  simulated: {:.2} us in {} rounds, {} messages{busiest}; took {:.2?}",
        found.seconds() * 1e6,
        plan.rounds_len(),
        found.messages,
        start.elapsed(),
    );
    Ok(())
}
