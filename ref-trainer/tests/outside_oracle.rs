//! Our models against Hugging Face's, computed by `transformers` in float64 and stored with their
//! parameters, tokens, loss and every gradient (`tests/outside_oracle/make.py` made them).
//!
//! The oracle, one rank of these crates, and layouts of them: all to 1e-9.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use quintet_collectives::transport::local::World;
use quintet_planner::config::{Batch, Layout};
use quintet_ref_trainer::compare::{Tensors, compare_above};
use quintet_ref_trainer::convert::{Convert, convert};
use quintet_ref_trainer::data::{Sample, Samples};
use quintet_ref_trainer::job::{Dtype, Job, OptimizerKind, OptimizerOptions};
use quintet_ref_trainer::model_config::Model;
use quintet_ref_trainer::oracle;
use quintet_ref_trainer::rank::Begin;
use quintet_ref_trainer::record::record_on;
use quintet_ref_trainer::weights;
use quintet_ref_trainer::weights::names::{self, Experts};
use safetensors::{Dtype as Stored, SafeTensors};

const BOUND: f64 = 1e-9;
/// A gradient below this share of the largest is judged as of that size (a bias of GPT-2's keys
/// has none but rounding).
const FLOOR: f64 = 1e-6;

const NAMES: [&str; 7] = [
    "llama",
    "llama-tied",
    "qwen2",
    "gpt2",
    "mixtral",
    "qwen3-moe",
    "glm4-moe",
];

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/outside_oracle")
        .join(name)
}

/// A model of theirs: what it is, its parameters, and what it made of the samples.
struct Fixture {
    model: Model,
    params: Tensors,
    samples: Vec<Sample>,
    loss: f64,
    grads: Tensors,
}

fn fixture(name: &str) -> Fixture {
    let folder = folder(name);
    let text = std::fs::read_to_string(folder.join("config.json")).unwrap();
    let model = Model::from_json(name, &text).unwrap();
    let params = weights::read(&folder, &model.config).unwrap();
    let bytes = std::fs::read(folder.with_extension("expected.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let whole = |name: &str| -> Vec<i64> {
        let view = file.tensor(name).unwrap();
        assert_eq!(view.dtype(), Stored::I64);
        let all = view.data().as_chunks::<8>().0.iter();
        all.map(|bytes| i64::from_le_bytes(*bytes)).collect()
    };
    let real = |name: &str| -> Vec<f64> {
        let view = file.tensor(name).unwrap();
        assert_eq!(view.dtype(), Stored::F64, "{name}");
        let all = view.data().as_chunks::<8>().0.iter();
        all.map(|bytes| f64::from_le_bytes(*bytes)).collect()
    };
    let (tokens, mask) = (whole("tokens"), whole("mask"));
    let seq = file.tensor("mask").unwrap().shape()[1];
    let samples = tokens
        .chunks(seq + 1)
        .zip(mask.chunks(seq))
        .map(|(tokens, mask)| Sample {
            tokens: tokens.iter().map(|t| u32::try_from(*t).unwrap()).collect(),
            mask: mask.iter().map(|m| *m == 1).collect(),
            documents: vec![],
        })
        .collect();
    // In memory their experts are fused. What no gradient reaches (the bias of a choice) has none.
    let grads = oracle::param_shapes(&model.config)
        .into_iter()
        .map(|(name, shape)| {
            let [stored] = &names::stored(&model.config, &name, Experts::Fused)[..] else {
                panic!("{name} is more than one tensor");
            };
            let len = shape.iter().product();
            if name.ends_with("e_score_correction_bias") {
                assert!(file.tensor(&stored.name).is_err());
                return (name, vec![0.0; len]);
            }
            let theirs = real(&stored.name);
            let ours = (0..len).map(|i| theirs[stored.at(&shape, i)]).collect();
            (name, ours)
        })
        .collect();
    Fixture {
        model,
        params,
        samples,
        loss: real("loss")[0],
        grads,
    }
}

fn assert_equal(what: &str, loss: f64, grads: &Tensors, fixture: &Fixture) {
    let off = (loss - fixture.loss).abs() / fixture.loss;
    assert!(off < BOUND, "{what}: loss {loss}, theirs {}", fixture.loss);
    let worst = compare_above(grads, &fixture.grads, FLOOR);
    assert!(
        worst.relative < BOUND,
        "{what}: gradient of {} is off by {:e}",
        worst.worst,
        worst.relative
    );
    assert!(grads.keys().eq(fixture.grads.keys()), "{what}");
}

/// One step of a layout from their parameters on their samples.
fn of_layout(name: &str, fixture: &Fixture, layout: Layout) {
    let job = Job {
        model: fixture.model.config.clone(),
        layout,
        batch: Batch {
            seq: fixture.samples[0].mask.len(),
            micro_batch: 1,
            global_batch: fixture.samples.len(),
        },
        steps: 1,
        dtype: Dtype::F64,
        optimizer: OptimizerOptions {
            kind: OptimizerKind::Sgd,
            clip_grad: 0.0,
            ..Job::verify().optimizer
        },
        ..Job::verify()
    };
    let world = World::new(job.layout.world()).unwrap();
    let samples = Samples::given(fixture.samples.clone());
    let record = record_on::<f64>(&world, &job, &samples, Begin::Init, |rank| {
        rank.fill_with(|entry, index| fixture.params[&entry.spec.name][index])
    });
    let step = &record.unwrap().steps[0];
    assert_equal(
        &format!("{name} {:?}", job.layout),
        step.loss,
        &step.grads,
        fixture,
    );
}

fn check(name: &str) {
    let fixture = fixture(name);
    let done = oracle::step(&fixture.model.config, &fixture.params, &fixture.samples).unwrap();
    assert_equal(&format!("{name}, oracle"), done.loss, &done.grads, &fixture);
    let one = Layout::single();
    let cut = |dp, tp, pp, cp, sequence_parallel| Layout {
        dp,
        tp,
        pp,
        cp,
        sequence_parallel,
        ..one.clone()
    };
    let dense = [
        one.clone(),
        cut(2, 1, 1, 1, false),
        cut(2, 2, 1, 1, false),
        cut(1, 4, 1, 1, true),
        cut(1, 1, 2, 1, false),
        cut(1, 1, 1, 2, false),
        cut(1, 2, 1, 3, true),
        cut(2, 2, 2, 1, true),
        cut(2, 2, 2, 2, true),
    ];
    let experts = fixture.model.config.moe.map_or(1, |moe| moe.experts);
    for layout in dense {
        // Alone, and with the experts over as many ranks as divide them.
        let folded = layout.dp * layout.tp * layout.cp;
        let fits = |ep: &usize| folded.is_multiple_of(*ep) && experts.is_multiple_of(*ep);
        let most = (1..=folded).rev().find(fits).unwrap();
        for ep in BTreeSet::from([1, most]) {
            let etp = BTreeSet::from([1, if experts > 1 { folded / ep } else { 1 }]);
            for etp in etp {
                of_layout(
                    name,
                    &fixture,
                    Layout {
                        ep,
                        etp,
                        ..layout.clone()
                    },
                );
            }
        }
    }
}

#[test]
fn llama() {
    check("llama");
    check("llama-tied");
}

#[test]
fn qwen2() {
    check("qwen2");
}

#[test]
fn gpt2() {
    check("gpt2");
}

#[test]
fn mixtral() {
    check("mixtral");
}

#[test]
fn qwen3_moe() {
    check("qwen3-moe");
}

#[test]
fn glm4_moe() {
    check("glm4-moe");
}

/// What `write` writes, `read` reads: names, thirds and transposes go both ways.
#[test]
fn written_back() {
    for name in NAMES {
        let fixture = fixture(name);
        let to = std::env::temp_dir().join(format!("quintet-{}-{name}", std::process::id()));
        weights::write(&to, &fixture.model, &fixture.params).unwrap();
        let text = std::fs::read_to_string(to.join("config.json")).unwrap();
        let model = Model::from_json(name, &text).unwrap();
        assert_eq!(model.config, fixture.model.config);
        assert_eq!(weights::read(&to, &model.config).unwrap(), fixture.params);
        let twice = weights::write(&to, &fixture.model, &fixture.params);
        assert!(twice.is_err(), "{name} was overwritten");
        // The same tensors under the same names as they wrote them.
        let stored = |folder: &Path| -> BTreeMap<String, (Vec<usize>, Vec<u8>)> {
            let bytes = std::fs::read(folder.join("model.safetensors")).unwrap();
            let file = SafeTensors::deserialize(&bytes).unwrap();
            let all = file.iter();
            all.map(|(n, t)| (n.to_string(), (t.shape().to_vec(), t.data().to_vec())))
                .collect()
        };
        assert_eq!(stored(&to), stored(&folder(name)), "{name}");
        std::fs::remove_dir_all(&to).unwrap();
    }
}

/// Theirs -> a checkpoint of ours -> theirs: the same parameters, and the checkpoint has the loss
/// that they have, under another layout.
#[test]
fn converted_both_ways() {
    let root = std::env::temp_dir().join(format!("quintet-{}-convert", std::process::id()));
    std::fs::create_dir_all(&root).unwrap();
    for name in NAMES {
        let (ours, theirs) = (root.join(format!("{name}.ours")), root.join(name));
        let go = |from: &Path, to: &Path| {
            let (from, to) = (from.to_path_buf(), to.to_path_buf());
            convert(&Convert { from, to })
        };
        go(&folder(name), &ours).unwrap();
        go(&ours, &theirs).unwrap();
        let fixture = fixture(name);
        let again = weights::read(&theirs, &fixture.model.config).unwrap();
        assert_eq!(again, fixture.params, "{name}");
        assert!(go(&ours, &theirs).is_err(), "{name} was overwritten");
    }
    assert!(
        convert(&Convert {
            from: root.join("nothing"),
            to: root.join("new"),
        })
        .is_err()
    );
    std::fs::remove_dir_all(&root).unwrap();
}

/// A file cut anywhere, or with another model's parameters, is one sentence and nothing else.
#[test]
fn torn_and_foreign_files_are_refused() {
    let root = std::env::temp_dir().join(format!("quintet-{}-torn", std::process::id()));
    std::fs::create_dir_all(&root).unwrap();
    let fixture = fixture("qwen2");
    let bytes = std::fs::read(folder("qwen2").join("model.safetensors")).unwrap();
    let said = |bytes: &[u8]| {
        std::fs::write(root.join("model.safetensors"), bytes).unwrap();
        let failure = weights::read(&root, &fixture.model.config).unwrap_err();
        assert_eq!(failure.exit as u8, 3);
        assert!(!failure.sentence.trim().contains('\n'));
        failure.sentence
    };
    for len in (0..bytes.len()).step_by(97) {
        said(&bytes[..len]);
    }
    let gpt2 = std::fs::read(folder("gpt2").join("model.safetensors")).unwrap();
    assert!(said(&gpt2).contains("no parameter of the model"));
    let llama = std::fs::read(folder("llama").join("model.safetensors")).unwrap();
    said(&llama);
    let mut longer = bytes.clone();
    longer.push(0);
    said(&longer);
    std::fs::remove_dir_all(&root).unwrap();
}
