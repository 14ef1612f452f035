//! Runs every body over its corpus and over seeded inputs.

use std::fs;
use std::path::{Path, PathBuf};

use quintet_fuzz::BODIES;
use quintet_parallel_layers::philox::Stream;

fn here() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The kept inputs of a body.
fn corpus(name: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(here().join("corpus").join(name));
    let entries = entries.into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).collect()
}

#[test]
fn each_body_has_a_corpus_and_a_target() {
    let manifest = fs::read_to_string(here().join("fuzz/Cargo.toml")).expect("a manifest");
    for (name, _) in BODIES {
        assert!(!corpus(name).is_empty(), "{name} has no corpus");
        let target = format!("fuzz_targets/{name}.rs");
        assert!(manifest.contains(&target), "{name} is no target");
        let text = fs::read_to_string(here().join("fuzz").join(&target)).expect(name);
        assert!(
            text.contains(&format!("quintet_fuzz::{name}(data)")),
            "{target}"
        );
    }
    let kept = fs::read_dir(here().join("corpus"))
        .expect("a folder")
        .flatten();
    for folder in kept {
        let name = folder.file_name();
        assert!(BODIES.iter().any(|(body, _)| name == *body), "{name:?}");
    }
}

/// What is kept stays small: a few kilobytes a body.
#[test]
fn corpora_are_small() {
    let files: Vec<PathBuf> = BODIES.iter().flat_map(|(name, _)| corpus(name)).collect();
    let bytes: u64 = files
        .iter()
        .map(|path| fs::metadata(path).expect("a file").len())
        .sum();
    assert!(
        files.len() <= 900 && bytes < 300_000,
        "{} files, {bytes} bytes",
        files.len()
    );
}

#[test]
fn bodies_hold_over_corpus_and_seeds() {
    for (name, body) in BODIES {
        for path in corpus(name) {
            body(&fs::read(path).expect("a corpus file can be read"));
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
