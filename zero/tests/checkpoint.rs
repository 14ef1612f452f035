//! Checkpoints: any layout into any other, bit for bit; whatever is wrong is refused in words.
#![cfg(feature = "checkpoint")]
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use common::{ADAMW, ALL, Model, Rank, degrees};
use proptest::prelude::*;
use quintet_collectives::{Degrees, World};
use quintet_kernels::Scalar;
use quintet_zero::checkpoint::{About, Meta, Saved, Target, load, save};
use quintet_zero::{Error, Full, Rule, ZeroStage, gather_params, gather_state};

/// A number that a reader in a hurry gets wrong by one bit.
const LR: f64 = 5.121_096_912_410_645e-5;

type State = (Full, BTreeMap<&'static str, Full>);

fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    folder
}

fn ranks<E: Scalar, R: Send>(
    (model, stage): (Model, ZeroStage),
    body: impl Fn(&mut Rank<E>) -> Result<R, Error> + Sync,
) -> Result<Vec<R>, Error> {
    let world = World::new(model.mesh().world()).unwrap();
    world.go(|comm| body(&mut Rank::new(model, comm, stage, ADAMW)?))
}

fn save_rank<E: Scalar>(rank: &Rank<E>, root: &Path, step: u64) -> Result<PathBuf, Error> {
    let user = serde_json::json!({ "lr": LR, "data": [step, 7] });
    let about = About {
        step,
        layout: format!("{:?}", rank.model.degrees),
        user,
    };
    let chunk = Saved {
        params: &rank.params,
        optimizer: &rank.optimizer,
    };
    save(root, &rank.device, &rank.groups, &[chunk], &about)
}

fn load_rank<E: Scalar>(rank: &mut Rank<E>, root: &Path) -> Result<Meta, Error> {
    let chunk = Target {
        params: &mut rank.params,
        optimizer: Some(&mut rank.optimizer),
    };
    load(root, &rank.device, &rank.groups, &mut [chunk])
}

fn state<E: Scalar>(rank: &Rank<E>) -> Result<State, Error> {
    Ok((
        gather_params(&rank.device, &[&rank.params], &rank.groups)?,
        gather_state(&rank.device, &[&rank.optimizer], &rank.groups)?,
    ))
}

fn train<E: Scalar>(
    rank: &mut Rank<E>,
    steps: core::ops::RangeInclusive<u64>,
) -> Result<(), Error> {
    for step in steps {
        rank.backward(step, 0.3)?;
        rank.step(0.01, 1.0)?;
    }
    Ok(())
}

/// A -> B -> A: the state is the same on the way, and A goes on as if nothing had happened.
fn there_and_back<E: Scalar>(name: &str, a: (Model, ZeroStage), b: (Model, ZeroStage)) {
    let (first, second) = (folder(&format!("{name}-1")), folder(&format!("{name}-2")));
    let whole = ranks::<E, _>(a, |rank| {
        train(rank, 1..=2)?;
        save_rank(rank, &first, 2)?;
        let saved = state(rank)?;
        train(rank, 3..=4)?;
        Ok((saved, state(rank)?))
    });
    let (saved, end) = whole.unwrap().remove(0);
    let there = ranks::<E, _>(b, |rank| {
        let meta = load_rank(rank, &first)?;
        assert_eq!((meta.step, rank.optimizer.steps()), (2, 2));
        assert_eq!(meta.user["data"][1], 7);
        assert_eq!(
            meta.user["lr"].as_f64().map(f64::to_bits),
            Some(LR.to_bits())
        );
        save_rank(rank, &second, 2)?;
        state(rank)
    });
    assert!(there.unwrap().iter().all(|s| *s == saved), "{a:?} -> {b:?}");
    let back = ranks::<E, _>(a, |rank| {
        load_rank(rank, &second)?;
        train(rank, 3..=4)?;
        state(rank)
    });
    assert!(
        back.unwrap().iter().all(|s| *s == end),
        "{a:?} -> {b:?} -> {a:?}"
    );
}

#[test]
fn one_rank_to_many_and_back() {
    let one = (Model::new(degrees(1, 1, 1, 1, 1)), ZeroStage::Ddp);
    let many = (Model::new(degrees(2, 2, 1, 2, 4)), ZeroStage::Three);
    there_and_back::<f32>("one-many", one, many);
    there_and_back::<half::bf16>("many-one", many, one);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, failure_persistence: None, ..Default::default() })]
    #[test]
    fn random_meshes(
        a in (1..=3_usize, 1..=3_usize, 1..=2_usize, 1..=2_usize, 0..3_usize, 0..8_usize),
        b in (1..=3_usize, 1..=2_usize, 1..=2_usize, 1..=4_usize, 0..3_usize, 0..8_usize),
        bucket_bytes in 0..300_usize,
    ) {
        let layout = |(pp, dp, cp, tp, ep, zero): (_, _, _, _, usize, usize), bucket_bytes| {
            let ep = if dp * cp * tp % (1 << ep) == 0 { 1 << ep } else { 1 };
            let degrees = Degrees { pp, dp, cp, tp, ep, etp: 1 };
            let within = (zero > 3).then_some(cp);
            (Model { bucket_bytes, within, ..Model::new(degrees) }, ALL[zero % 4])
        };
        there_and_back::<f64>("random", layout(a, 100), layout(b, bucket_bytes));
    }
}

const SMALL: fn() -> (Model, ZeroStage) = || {
    let model = Model::new(degrees(1, 2, 1, 1, 1));
    (
        Model {
            hidden: 2,
            blocks: 1,
            ..model
        },
        ZeroStage::One,
    )
};

fn saved(name: &str) -> PathBuf {
    let root = folder(name);
    let save = |rank: &mut Rank<f32>| {
        train(rank, 1..=1)?;
        save_rank(rank, &root, 1)
    };
    ranks(SMALL(), save).unwrap();
    root
}

/// The sentence with which all ranks refuse, having changed nothing.
fn refusal(root: &Path) -> String {
    let results = ranks::<f32, _>(SMALL(), |rank| {
        let before = state(rank)?;
        let error = load_rank(rank, root).unwrap_err();
        assert_eq!(rank.optimizer.steps(), 0);
        assert!(state(rank)? == before);
        let Error::Checkpoint(text) = error else {
            panic!("{error:?}")
        };
        Ok(text)
    });
    let texts = results.unwrap();
    assert!(texts.iter().all(|t| *t == texts[0]), "{texts:?}");
    texts[0].clone()
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|e| e.unwrap().path());
    let below = |path: PathBuf| {
        if path.is_dir() {
            files(&path)
        } else {
            vec![path]
        }
    };
    entries.flat_map(below).collect()
}

#[test]
fn torn_changed_and_missing_files_are_refused() {
    let root = saved("torn");
    let files = files(&root);
    assert_eq!(files.len(), 6, "{files:?}");
    for file in files {
        let whole = fs::read(&file).unwrap();
        let n = whole.len();
        for cut in [0, 1, 7, 8, 9, n / 3, n / 2, n.saturating_sub(2), n - 1] {
            fs::write(&file, &whole[..cut.min(n - 1)]).unwrap();
            refusal(&root);
        }
        for at in [0, 3, 8, n / 4, n / 2, 3 * n / 4, n - 1] {
            let mut flipped = whole.clone();
            flipped[at.min(n - 1)] ^= 4;
            fs::write(&file, flipped).unwrap();
            refusal(&root);
        }
        fs::write(&file, [&whole[..], b"x"].concat()).unwrap();
        refusal(&root);
        fs::remove_file(&file).unwrap();
        refusal(&root);
        fs::write(&file, &whole).unwrap();
    }
    ranks::<f32, _>(SMALL(), |rank| load_rank(rank, &root)).unwrap();
    // The step's folder will do as well.
    ranks::<f32, _>(SMALL(), |rank| load_rank(rank, &root.join("step_00000001"))).unwrap();
}

#[test]
fn what_is_wrong_is_said() {
    let root = saved("said");
    let meta = root.join("step_00000001/meta.json");
    let text = fs::read_to_string(&meta).unwrap();
    let said = |from: &str, to: &str| {
        // A checksum that fits, so that what is changed is itself looked at.
        let (_, rest) = text.split_once('\n').unwrap();
        let rest = rest.replacen(from, to, 1);
        let crc = crc32fast::hash(rest.as_bytes());
        fs::write(&meta, format!("{{ \"crc32\": \"{crc:08x}\",\n{rest}")).unwrap();
        let sentence = refusal(&root);
        fs::write(&meta, &text).unwrap();
        sentence
    };
    for (from, to, want) in [
        (
            "\"version\": 1",
            "\"version\": 2",
            "its format has version 2; this program reads up to 1",
        ),
        (
            "quintet-checkpoint",
            "other",
            "meta.json is not that of a Quintet checkpoint",
        ),
        (
            "\"dtype\": \"f32\"",
            "\"dtype\": \"f64\"",
            "its parameters are f64, this run's are f32",
        ),
        ("\"adamw\"", "\"sgd\"", "its optimizer is sgd"),
        ("\"0.norm\"", "\"0.worm\"", "it lacks 0.norm"),
        (
            "\"embed\": [\n      5,",
            "\"embed\": [\n      6,",
            "embed has shape [6, 2]",
        ),
        ("model/rank_00000", "model/../../x", "foreign file"),
        (
            "\"step\": 1",
            "\"step\": 2",
            "it was written as model/rank_00000.safetensors of step 1",
        ),
    ] {
        let sentence = said(from, to);
        assert!(sentence.contains(want), "{sentence}");
    }
    assert!(refusal(&root.join("nowhere")).contains("neither `latest` nor meta.json"));
    // Another model's: more names than this one has.
    let (model, stage) = SMALL();
    let more = (Model { blocks: 2, ..model }, stage);
    ranks::<f32, _>(more, |rank| save_rank(rank, &root, 2)).unwrap();
    assert!(refusal(&root).contains("it holds 1.bias, which this model has not"));
    // Two checkpoints of one model with their files mixed.
    let other = saved("said-other");
    for name in ["model/rank_00001.safetensors", "meta.json"] {
        let file = Path::new("step_00000001").join(name);
        fs::copy(root.join(&file), other.join(&file)).unwrap();
    }
    ranks::<f32, _>(SMALL(), |rank| load_rank(rank, &other)).unwrap();
    let file = Path::new("step_00000001/model");
    let (zero, one) = (
        file.join("rank_00000.safetensors"),
        file.join("rank_00001.safetensors"),
    );
    fs::copy(root.join(one), other.join(zero)).unwrap();
    refusal(&other);
}

#[test]
fn saving_again_and_after_a_crash() {
    let root = saved("again");
    // What a save that was cut short leaves behind does not hinder loading or saving.
    fs::create_dir_all(root.join(".step_00000001.tmp/model/rank_00000.safetensors")).unwrap();
    ranks::<f32, _>(SMALL(), |rank| load_rank(rank, &root)).unwrap();
    let second = ranks::<f32, _>(SMALL(), |rank| {
        load_rank(rank, &root)?;
        train(rank, 2..=2)?;
        save_rank(rank, &root, 1)?;
        state(rank)
    });
    let again = ranks::<f32, _>(SMALL(), |rank| {
        load_rank(rank, &root)?;
        state(rank)
    });
    assert!(second.unwrap() == again.unwrap());
    let mut names: Vec<_> = fs::read_dir(&root)
        .unwrap()
        .map(|e| e.unwrap().file_name())
        .collect();
    names.sort();
    assert_eq!(names, ["latest", "step_00000001"]);
    // A place that cannot be written to is one error on all ranks.
    let file = root.join("latest");
    let errors = ranks::<f32, _>(SMALL(), |rank| Ok(save_rank(rank, &file, 1).unwrap_err()));
    let errors = errors.unwrap();
    assert!(
        errors[0] == errors[1] && errors[0].to_string().contains("(rank 0)"),
        "{errors:?}"
    );
}

#[test]
fn a_model_alone() {
    let root = saved("alone");
    fs::remove_dir_all(root.join("step_00000001/optim")).unwrap();
    let alone = (SMALL().0, ZeroStage::Ddp);
    ranks::<f32, _>(alone, |rank| {
        let chunk = Target {
            params: &mut rank.params,
            optimizer: None,
        };
        load(&root, &rank.device, &rank.groups, &mut [chunk])
    })
    .unwrap();
    assert!(refusal(&root).contains("optim"));
    let other = World::new(1).unwrap().go(|comm| {
        let sgd = Rule::Sgd { weight_decay: 0.0 };
        let model = Model {
            degrees: degrees(1, 1, 1, 1, 1),
            ..SMALL().0
        };
        let mut rank = Rank::<f32>::new(model, comm, ZeroStage::One, sgd)?;
        Ok::<_, Error>(load_rank(&mut rank, &root).unwrap_err().to_string())
    });
    assert!(other.unwrap()[0].contains("its optimizer is adamw"));
}
