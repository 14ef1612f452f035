//! One rank of a ring of processes, whoever starts it:
//!
//! ```text
//! mpirun -n 4 ./03_processes
//! srun -n 4 ./03_processes
//! torchrun --no-python --nproc-per-node 4 ./03_processes
//! quintet launch -n 4 -- ./03_processes
//! RANK=0 WORLD_SIZE=2 MASTER_ADDR=localhost ./03_processes & RANK=1 ...
//! ```
//!
//! Started by hand alone, it launches four of itself. `QUINTET_TRANSPORT=shm` lets ranks of one host share memory.

use quintet_collectives::environment::{Family, Place};
use quintet_collectives::launch::Launch;
use quintet_collectives::process::{environment, from_env};
use quintet_collectives::{ReduceOp, Result};

fn main() -> Result<()> {
    if Place::parse(&environment())?.family == Family::Alone {
        let program = std::env::current_exe().unwrap_or_else(|_| "03_processes".into());
        let ended = Launch::new(4, program).run()?;
        std::process::exit(ended.code());
    }
    from_env()?.run(|comm| {
        let (rank, world) = (comm.rank(), comm.world());
        // A token goes round and every rank adds its number.
        let (right, left) = ((rank + 1) % world, (rank + world - 1) % world);
        let mut token = [0u8];
        if rank == 0 {
            comm.send(&token, right, 0)?;
        }
        comm.recv(&mut token, left, 0)?;
        token[0] += rank as u8;
        if rank > 0 {
            comm.send(&token, right, 0)?;
        }
        let mut sum = [rank as f32];
        comm.all_reduce(&mut sum, ReduceOp::Sum)?;
        if rank == 0 {
            println!(
                "the token came back with {}, the sum is {}",
                token[0], sum[0]
            );
        }
        comm.barrier()
    })
}
