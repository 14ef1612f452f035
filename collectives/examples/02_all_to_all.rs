//! A ragged all-to-all, as experts need it: every rank sends each token to the rank that holds its
//! expert, and gets it back in place.
//!
//! `cargo run -p quintet-collectives --example 02_all_to_all`

use quintet_collectives::{Result, World};

fn main() -> Result<()> {
    const WORLD: usize = 4;
    let received = World::run(WORLD, |comm| {
        let rank = comm.rank();
        // Rank r has r + 1 tokens; token t goes to rank t * t mod world.
        let mut tokens: Vec<(usize, f32)> = (0..=rank)
            .map(|t| (t * t % WORLD, (10 * rank + t) as f32))
            .collect();
        tokens.sort_by_key(|(to, _)| *to);
        let input: Vec<f32> = tokens.iter().map(|(_, token)| *token).collect();
        let send: Vec<usize> = (0..WORLD)
            .map(|to| tokens.iter().filter(|(t, _)| *t == to).count())
            .collect();

        // The counts travel first: nobody else knows them.
        let mut counts = [0i64; WORLD];
        comm.all_to_all(
            &send.iter().map(|&c| c as i64).collect::<Vec<_>>(),
            &mut counts,
        )?;
        let recv: Vec<usize> = counts.iter().map(|&c| c as usize).collect();
        let mut here = vec![0f32; recv.iter().sum()];
        comm.all_to_all_v(&input, &send, &mut here, &recv)?;

        // And back: the same call with the counts exchanged is the inverse, and the adjoint.
        let mut back = vec![0f32; input.len()];
        comm.all_to_all_v(&here, &recv, &mut back, &send)?;
        assert_eq!(back, input);
        Ok(here)
    })?;
    for (rank, tokens) in received.iter().enumerate() {
        println!("rank {rank} holds {tokens:?}");
    }
    Ok(())
}
