//! Processes of one host that share buffers: every rank reads the inputs and writes the outputs of
//! all in place. Launches four of itself; `QUINTET_TRANSPORT=auto` would share among those of a host only.

use quintet_collectives::environment::{Family, Place};
use quintet_collectives::launch::Launch;
use quintet_collectives::process::{environment, from_env};
use quintet_collectives::{ReduceOp, Result};

fn main() -> Result<()> {
    if Place::parse(&environment())?.family == Family::Alone {
        let program = std::env::current_exe().unwrap_or_else(|_| "05_shared_buffers".into());
        let launch = Launch::new(4, program);
        // Where there is no memory to share, sockets do the same.
        let ended = if cfg!(target_os = "linux") {
            launch.env("QUINTET_TRANSPORT", "shm").run()?
        } else {
            launch.run()?
        };
        std::process::exit(ended.code());
    }
    let process = from_env()?;
    process.run(|comm| {
        let mut gradients = comm.alloc::<f32>(1 << 20)?;
        gradients.fill(comm.rank() as f32);
        comm.all_reduce(&mut gradients, ReduceOp::Sum)?;
        if comm.rank() == 0 {
            let shared = if gradients.is_shared() {
                "shared"
            } else {
                "private"
            };
            println!("{} elements, {shared}: {}", gradients.len(), gradients[0]);
        }
        comm.barrier()
    })
}
