//! A run that goes on without a rank that was lost. Launches four of itself; rank 2 ends in the
//! middle, the others find out, and are three.

use quintet_collectives::environment::{Family, Place};
use quintet_collectives::launch::Launch;
use quintet_collectives::process::{environment, from_env};
use quintet_collectives::{Error, ReduceOp, Result};

fn main() -> Result<()> {
    if Place::parse(&environment())?.family == Family::Alone {
        let program = std::env::current_exe().unwrap_or_else(|_| "04_rebuild".into());
        let ended = Launch::new(4, program).run()?;
        std::process::exit(ended.code());
    }
    let process = from_env()?;
    let comm = process.communicator()?;
    for step in 0.. {
        if step == 3 && comm.rank() == 2 {
            // As sudden as a crash, but with an exit code that does not alarm the launcher.
            std::process::exit(0);
        }
        match comm.all_reduce(&mut [1f32; 100], ReduceOp::Sum) {
            Ok(()) => {}
            Err(Error::PeerLost { rank, .. }) => {
                println!("step {step}: rank {rank} is gone");
                break;
            }
            Err(other) => return Err(other),
        }
    }
    drop(comm);
    process.rebuild()?.run(|comm| {
        let mut ranks = [1f32];
        comm.all_reduce(&mut ranks, ReduceOp::Sum)?;
        println!("rank {} of {} ranks goes on", comm.rank(), ranks[0]);
        comm.barrier()
    })
}
