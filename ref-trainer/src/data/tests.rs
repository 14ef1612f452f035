use std::path::PathBuf;

use super::*;

fn count_up(len: usize) -> Corpus {
    let bytes: Vec<u8> = (0..len).map(|i| i as u8).collect();
    Corpus::from_bytes("count", &bytes).unwrap()
}

fn scratch(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("quintet-data-{}-{name}", std::process::id()))
}

#[test]
fn any_rank_computes_any_token() {
    let samples = Samples::new(Corpus::built_in(), 7, 64)
        .unwrap()
        .with_mask(RandomMask {
            tokens: 0.3,
            samples: 0.2,
        });
    let batch = samples.batch(5, 12);
    for (index, sample) in batch.iter().enumerate() {
        assert_eq!((sample.tokens.len(), sample.mask.len()), (65, 64));
        for (position, token) in sample.tokens.iter().enumerate() {
            assert_eq!(samples.token(5, index as u64, position), Some(*token));
        }
        for (position, counts) in sample.mask.iter().enumerate() {
            assert_eq!(samples.counts(5, index as u64, position), *counts);
        }
        assert_eq!(samples.token(5, index as u64, 65), None);
    }
    let halves: Vec<Sample> = (0..3).flat_map(|m| samples.microbatch(5, m, 4)).collect();
    assert_eq!(halves, batch);
}

#[test]
fn samples_are_text_of_the_training_part_and_differ() {
    let corpus = Corpus::built_in();
    let train = corpus.part(Part::Train).to_vec();
    let of = |seed| Samples::new(corpus.clone(), seed, 32).unwrap();
    let mut seen = std::collections::BTreeSet::new();
    for (seed, step, index) in [(1, 0, 0), (1, 0, 1), (1, 1, 0), (2, 0, 0), (1, 300, 15)] {
        let sample = of(seed).sample(step, index);
        let bytes: Vec<u8> = sample.tokens.iter().map(|t| *t as u8).collect();
        assert!(train.windows(33).any(|window| window == bytes));
        assert_eq!(sample.valid(), 32);
        assert!(seen.insert(bytes));
    }
}

#[test]
fn every_offset_is_met_and_the_held_out_part_never() {
    let samples = Samples::new(count_up(20), 3, 15).unwrap();
    let starts: std::collections::BTreeSet<u32> =
        (0..200).map(|i| samples.sample(0, i).tokens[0]).collect();
    assert_eq!(starts.into_iter().collect::<Vec<_>>(), [0, 1, 2]);
    assert!((0..200).all(|i| *samples.sample(1, i).tokens.last().unwrap() < 18));
}

#[test]
fn windows_follow_each_other() {
    let corpus = count_up(110);
    assert_eq!(corpus.range(Part::HeldOut), 99..110);
    let firsts = |part, seq| -> Vec<u32> {
        let windows = corpus.windows(part, seq, false).unwrap();
        windows.map(|w| w.tokens[0]).collect()
    };
    assert_eq!(firsts(Part::HeldOut, 4), [99, 104]);
    assert_eq!(firsts(Part::HeldOut, 10), [99]);
    assert_eq!(firsts(Part::Whole, 49), [0, 50]);
    assert_eq!(corpus.windows(Part::Whole, 49, false).unwrap().len(), 2);
}

#[test]
fn a_mask_takes_its_share() {
    let mask = RandomMask {
        tokens: 0.25,
        samples: 0.5,
    };
    let samples = Samples::new(Corpus::built_in(), 7, 64)
        .unwrap()
        .with_mask(mask);
    let valid: Vec<usize> = samples.batch(2, 400).iter().map(Sample::valid).collect();
    let blank = valid.iter().filter(|n| **n == 0).count();
    let share = valid.iter().sum::<usize>() as f64 / (64 * (400 - blank)) as f64;
    assert!((150..250).contains(&blank), "{blank}");
    assert!((0.72..0.78).contains(&share), "{share}");
}

#[test]
fn entropies_have_known_values() {
    assert_eq!(unigram_entropy(b""), 0.0);
    assert_eq!(unigram_entropy(b"aaaa"), 0.0);
    assert!((unigram_entropy(b"abcdabcd") - 4f64.ln()).abs() < 1e-12);
    let all: Vec<u8> = (0..=255).collect();
    assert!((unigram_cross_entropy(&all, b"any text") - 256f64.ln()).abs() < 1e-12);
    assert!((unigram_cross_entropy(b"", b"x") - 256f64.ln()).abs() < 1e-12);

    let corpus = Corpus::built_in();
    let (train, held_out) = (corpus.part(Part::Train), corpus.part(Part::HeldOut));
    let (own, crossed) = (
        unigram_entropy(held_out),
        unigram_cross_entropy(train, held_out),
    );
    assert!((3.0..3.6).contains(&own) && own <= crossed && crossed < own + 0.1);
}

#[test]
fn what_cannot_be_learnt_from_is_refused_in_one_sentence() {
    let said = |path: &Path| Corpus::open(path).unwrap_err().to_string();
    let missing = scratch("missing");
    assert!(said(&missing).contains("no such file"));
    assert!(said(&missing).contains(missing.to_str().unwrap()));
    assert!(said(&std::env::temp_dir()).contains("not a regular file"));
    let empty = scratch("empty");
    fs::write(&empty, b"").unwrap();
    assert!(said(&empty).contains("is empty"));
    fs::write(&empty, b"0123456789").unwrap();
    let short = Corpus::open(&empty).unwrap();
    fs::remove_file(&empty).unwrap();

    assert!(Samples::new(short.clone(), 1, 8).is_ok());
    let refused = Samples::new(short.clone(), 1, 9).unwrap_err().to_string();
    assert!(
        refused.contains("training part (the first 90 %) has 9 bytes"),
        "{refused}"
    );
    assert!(refused.contains("needs 10"), "{refused}");
    for seq in [10, usize::MAX] {
        assert!(Samples::new(short.clone(), 1, seq).is_err());
        assert!(short.windows(Part::Whole, seq, false).is_err());
    }
    assert!(short.windows(Part::HeldOut, 1, false).is_err());

    assert!(short.fits_vocabulary(58).is_ok());
    let refused = short.fits_vocabulary(57).unwrap_err().to_string();
    assert!(refused.contains("byte 57 at offset 9"), "{refused}");
}

#[test]
fn documents_begin_anew_and_no_prediction_crosses_a_border() {
    let samples = Samples::new(Corpus::built_in(), 7, 200).unwrap();
    let samples = samples.with_documents(true).with_mask(RandomMask {
        tokens: 0.1,
        samples: 0.0,
    });
    let mut borders = 0;
    for (index, sample) in samples.batch(3, 20).iter().enumerate() {
        let (documents, positions) = (&sample.documents, sample.positions());
        assert_eq!((documents.len(), positions.len()), (200, 200));
        for t in 0..200 {
            let border = t > 0 && documents[t] != documents[t - 1];
            assert_eq!(
                positions[t],
                if border || t == 0 {
                    0
                } else {
                    positions[t - 1] + 1
                }
            );
            borders += usize::from(border);
            assert!(!border || !sample.mask[t - 1], "a border is predicted");
            assert_eq!(samples.counts(3, index as u64, t), sample.mask[t]);
        }
    }
    assert!(borders > 20);
    let plain = samples.with_documents(false).sample(3, 0);
    assert!(plain.documents.is_empty());
    assert_eq!(plain.positions(), (0..200).collect::<Vec<i32>>());
}
