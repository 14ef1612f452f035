//! The best layouts of a model on a cluster: `cargo run --release -p quintet-planner --example
//! 03_search [MODEL [GPUS [KIND]]]`.

use quintet_planner::advice::advise;
use quintet_planner::cluster::Cluster;
use quintet_planner::search::{Job, Pins, Request, search};
use quintet_planner::shape::Shape;
use quintet_planner::time::{Efficiency, Practice};
use quintet_planner::{Error, Invalid};

fn main() -> Result<(), Error> {
    let said: Vec<String> = std::env::args().skip(1).collect();
    let word = |at: usize, default: &str| said.get(at).cloned().unwrap_or_else(|| default.into());
    let unknown = |what: String| Invalid(format!("{what} is not known"));
    let gpus = word(1, "64");
    let gpus = gpus.parse().map_err(|_| unknown(gpus.clone()))?;
    let (model, kind) = (word(0, "llama3-70b"), word(2, "h100"));
    let request = Request {
        shape: Shape::named(&model).ok_or_else(|| unknown(model))?,
        cluster: Cluster::preset(&kind, gpus).ok_or_else(|| unknown(kind))?,
        job: Job::bf16(8192, 512),
        pins: Pins::default(),
        efficiency: Efficiency::default(),
        practice: Practice::default(),
        keep: 5,
    };
    let found = search(&request)?;
    for candidate in &found.best {
        let l = &candidate.layout;
        println!(
            "tp {} pp {} cp {} dp {} zero {} {}: {:.0} tokens/s, MFU {:.1} %, {:.1} GiB",
            l.tp,
            l.pp,
            l.cp,
            l.dp,
            l.zero_stage,
            l.schedule,
            candidate.tokens_per_second(),
            100.0 * candidate.mfu(&request, &found.flops),
            candidate.held.total() as f64 / f64::from(1 << 30)
        );
        for advice in advise(&request, candidate) {
            println!("    {}: {}", advice.rule, advice.text);
        }
    }
    for rejected in found.rejected.iter().take(3) {
        println!("{} x {}", rejected.count, rejected.rule);
    }
    Ok(())
}
