//! Jobs, checkpoints and model files beside flags.

use super::*;

/// The checkpoint's model, and what flags say is to be computed with it.
#[test]
fn eval_takes_a_checkpoints_model_and_flags_win() {
    let dir = crate::report::test_dir::TestDir::new("eval");
    let root = dir.path();
    let was =
        train("train --model tiny-moe --window-size 9 --seq-len 20 --pack-documents --steps 9");
    checkpoint_of(&was, root);
    let eval = |flags: &str| match run(&format!("eval --load {} {flags}", root.display())) {
        Ok(Command::Eval { job, weights, json }) => {
            assert_eq!(weights, Weights::Checkpoint(root.into()));
            (job, json)
        }
        other => panic!("{flags}: {other:?}"),
    };
    let (job, json) = eval("--seq-length 8 --dp 3 --json");
    assert_eq!((job.batch.seq, job.batch.global_batch, json), (8, 9, true));
    assert_eq!((&job.model, job.pack_documents), (&was.model, true));
    let (job, _) = eval("--window-size 5 --pack-documents=false --moe-capacity-factor 2 --ep 1");
    assert_eq!((job.model.window, job.batch.seq), (Some(5), 20));
    assert_eq!(job.model.moe.unwrap().capacity_factor, Some(2.0));
    assert!(!job.pack_documents);
    let (job, _) = eval("--window-size 0");
    assert_eq!(job.model.window, None);
    // Flags that ask for other parameters.
    for flags in ["--num-experts 4", "--untie-embeddings-and-output-weights"] {
        let (job, _) = eval(flags);
        let weights = Weights::Checkpoint(root.into());
        let failure = crate::weights::belong_to(&job, &weights).expect_err(flags);
        assert_eq!(failure.exit, Exit::Usage);
        assert!(failure.sentence.contains("other parameters"), "{failure}");
    }
    assert_eq!(run("eval --load no/such").unwrap_err().exit, Exit::Data);
}

#[test]
fn a_saved_job_runs_again_and_flags_win() {
    let dir = crate::report::test_dir::TestDir::new("config");
    let path = dir.path().join("config.json");
    let job =
        train("--pp 2 --pipeline-layout 1,3 --steps 40 --lr 0.1 --mask-fraction 0.5 --seq-len 20");
    std::fs::write(&path, job.to_json().unwrap()).unwrap();
    let path = path.display();
    assert_eq!(train(&format!("--config {path}")), job);
    assert_eq!(train(&format!("train --config {path}")), job);
    let other = train(&format!(
        "--config {path} --pp 4 --steps 400 --model bench-s"
    ));
    assert_eq!(
        (other.layout.pp, other.layout.stage_layers, other.steps),
        (4, None, 400)
    );
    assert_eq!((other.optimizer, other.batch), (job.optimizer, job.batch));
    assert_eq!(
        verify(&format!("verify --config {path} --steps 2 --dtype f64")),
        Job {
            steps: 2,
            dtype: Dtype::F64,
            ..job.clone()
        }
    );
    std::fs::write(dir.path().join("bad.json"), r#"{"layout": {"tp": 3}}"#).unwrap();
    refused(
        &format!("--config {}", dir.path().join("bad.json").display()),
        "tp=3 does not divide",
    );
    std::fs::write(dir.path().join("list.json"), "[]").unwrap();
    refused(
        &format!("--config {}", dir.path().join("list.json").display()),
        "no saved job",
    );
}

/// What a checkpoint of this job has beside its numbers.
fn checkpoint_of(job: &Job, root: &std::path::Path) {
    let corpus = crate::data::Corpus::built_in();
    let about = crate::checkpoint::about(job, &corpus, 7).unwrap();
    let folder = root.join("step_00000007");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(root.join("latest"), "step_00000007\n").unwrap();
    let meta = serde_json::json!({
        "format": "quintet-checkpoint", "version": 1, "step": 7, "layout": "", "dtype": "f64",
        "optimizer": {"rule": "adamw", "steps": 7, "kinds": []}, "shapes": {}, "files": [],
        "user": about.user,
    });
    // The first line holds the checksum of the rest.
    let rest = format!("{meta:#}\n")
        .trim_start_matches(['{', '\n'])
        .to_string();
    let crc32 = crc32fast::hash(rest.as_bytes());
    let text = format!("{{ \"crc32\": \"{crc32:08x}\",\n{rest}");
    std::fs::write(folder.join("meta.json"), text).unwrap();
}

#[test]
fn a_checkpoint_stands_for_what_flags_do_not_say() {
    let dir = crate::report::test_dir::TestDir::new("adopt");
    let root = dir.path();
    let was = train(
        "train --tp 2 --seed 9 --seq-len 20 --gbs 6 --dtype f64 --lr 0.5 --lr-warmup-iters 3 --steps 400 \
         --mask-fraction 0.25 --untie-embeddings-and-output-weights --quiet",
    );
    checkpoint_of(&was, root);
    let load = format!("train --load {}", root.display());
    let job = train(&load);
    // What is learnt is the checkpoint's; how it is cut and printed is not.
    assert_eq!(
        job,
        was.clone().goes_on(Job {
            load: Some(root.into()),
            ..train("train")
        })
    );
    assert_eq!(
        (job.seed, job.batch, job.optimizer),
        (9, was.batch, was.optimizer)
    );
    assert_eq!((job.layout.tp, job.steps, job.quiet), (1, 300, false));
    let other = train(&format!("{load} --dp 3 --lr 0.25 --seed 10 --mbs 1"));
    assert_eq!(
        (other.layout.dp, other.optimizer.lr, other.seed),
        (3, 0.25, 10)
    );

    let corpus = crate::data::Corpus::built_in();
    let judge = |flags: &str| {
        crate::checkpoint::steps_done(&train(&format!("{load} {flags}")), &corpus, root)
    };
    assert_eq!(judge(""), Ok(7));
    assert_eq!(judge("--dp 3 --tp 4 --zero-stage 1 --seed 9"), Ok(7));
    for (flags, words) in [
        ("--seed 10", ["--seed 9", "not 10"]),
        ("--mask-fraction 0", ["--mask-fraction 0.25", "not 0"]),
        ("--mask-samples 1", ["--mask-samples 0.125", "not 1"]),
        (
            "--pack-documents",
            ["--pack-documents=false", "not --pack-documents=true"],
        ),
        (
            "--window-size 5",
            ["--model tiny (untied)", "(untied, a window of 5)"],
        ),
        ("--model bench-s", ["--model tiny", "bench-s"]),
        (
            "--untie-embeddings-and-output-weights=false",
            ["untied", "not --model tiny (tied)"],
        ),
        ("--steps 7", ["7 steps", "larger"]),
    ] {
        let failure = judge(flags).expect_err(flags);
        assert_eq!(failure.exit, Exit::Usage, "{flags}: {failure}");
        assert!(
            words.iter().all(|w| failure.sentence.contains(w)),
            "{flags}: {failure}"
        );
    }
    let text = crate::data::Corpus::from_bytes("x", b"another text").unwrap();
    let on = |flags: &str| {
        let job = train(&format!("{load} {flags}"));
        crate::checkpoint::steps_done(&job, &text, root).expect_err(flags)
    };
    assert_eq!(on("--data x.txt").exit, Exit::Usage);
    assert!(
        on("--data x.txt")
            .sentence
            .contains("--data embedded, not x.txt")
    );
    assert_eq!(on("").exit, Exit::Data);
    assert_eq!(run("train --load no/such").unwrap_err().exit, Exit::Data);
}

#[test]
fn a_file_says_how_long_a_sequence_may_be() {
    let dir = crate::report::test_dir::TestDir::new("positions");
    let mut model = crate::model_config::Model::tiny();
    model.max_positions = 48;
    let path = dir.path().join("config.json");
    std::fs::write(&path, model.to_json().unwrap()).unwrap();
    let path = path.display();
    assert_eq!(train(&format!("--model {path}")).batch.seq, 48);
    refused(&format!("--model {path} --seq-len 47"), "nearest: 44 or 48");
    let line = format!("train --model {path} --seq-len 47");
    assert_eq!(train(&line).batch.seq, 47);
    for subcommand in ["", "train", "verify"] {
        refused(
            &format!("{subcommand} --model {path} --seq-len 52"),
            "seq-length 52 is more than the 48 positions",
        );
    }
    refused(
        &format!("eval --model {path} --seq-len 52"),
        "use at most 48",
    );
    // Presets are trained from nothing, for any length.
    assert_eq!(train("--model tiny --seq-len 100").batch.seq, 100);
    // A saved job still knows.
    let saved = dir.path().join("job.json");
    std::fs::write(&saved, train(&format!("--model {path}")).to_json().unwrap()).unwrap();
    refused(
        &format!("--config {} --seq-len 52", saved.display()),
        "use at most 48",
    );
    assert_eq!(
        train(&format!(
            "--config {} --seq-len 52 --model tiny",
            saved.display()
        ))
        .max_positions,
        None
    );
}
