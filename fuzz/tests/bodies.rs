//! Runs every body over its corpus and over seeded inputs.

use std::fs;
use std::path::Path;

use quintet_fuzz::BODIES;
use quintet_parallel_layers::philox::Stream;

#[test]
fn bodies_hold_over_corpus_and_seeds() {
    for (name, body) in BODIES {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("corpus")
            .join(name);
        for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
            body(&fs::read(entry.path()).expect("a corpus file can be read"));
        }
        let stream = Stream::new(1, name);
        for case in 0..4_000 {
            let len = stream.below(case, 40);
            let input: Vec<u8> = (0..len)
                .map(|i| stream.below(1 + case * 64 + i, 256) as u8)
                .collect();
            body(&input);
        }
    }
}
