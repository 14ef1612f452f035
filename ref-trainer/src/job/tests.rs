use super::*;
use proptest::prelude::*;

#[test]
fn the_defaults_are_sound() {
    for job in [Job::default(), Job::demo(), Job::verify()] {
        job.check().unwrap();
    }
    assert_eq!(Job::demo().layout.world(), 16);
}

#[test]
fn a_job_survives_its_file() {
    let mut job = Job::demo();
    job.layout.stage_layers = Some(vec![1, 3]);
    job.data = DataSource::File("a b/ü.txt".into());
    job.save = Some("ckpt".into());
    for job in [job, Job::verify(), Job::default()] {
        let back: Job = serde_json::from_str(&job.to_json().unwrap()).unwrap();
        assert_eq!(back, job);
    }
}

#[test]
fn a_file_may_be_short_but_not_misspelt() {
    let job: Job = Job::from_json(r#"{"layout": {"tp": 4}, "steps": 7}"#).unwrap();
    assert_eq!((job.layout.tp, job.layout.dp, job.steps), (4, 1, 7));
    assert_eq!(job.optimizer, OptimizerOptions::default());
    for text in [
        r#"{"step": 7}"#,
        r#"{"layout": {"tpp": 4}}"#,
        r#"{"layout": {"schedule": "zb-h3"}}"#,
        "[]",
        "",
    ] {
        assert!(Job::from_json(text).is_err(), "{text}");
    }
}

#[test]
fn each_bound_is_named() {
    let cases: &[(&str, fn(&mut Job))] = &[
        ("dp is 18446744073709551615", |j| j.layout.dp = usize::MAX),
        ("tp=0", |j| j.layout.tp = 0),
        ("ranks", |j| {
            j.layout.dp = 512;
            j.layout.tp = 4;
            j.batch.global_batch = 1024;
        }),
        ("the model's heads", |j| j.model.heads = usize::MAX),
        ("pipeline-layout", |j| {
            j.layout.stage_layers = Some(vec![usize::MAX, 2])
        }),
        ("lr is NaN", |j| j.optimizer.lr = f64::NAN),
        ("clip-grad is inf", |j| {
            j.optimizer.clip_grad = f64::INFINITY
        }),
        ("adam-beta2 is 1", |j| j.optimizer.beta2 = 1.0),
        ("adam-eps", |j| j.optimizer.eps = 0.0),
        ("min-lr 1", |j| j.optimizer.min_lr = 1.0),
        ("mask-fraction", |j| j.mask_fraction = 1.0),
        ("mask-samples", |j| j.mask_samples = Some(1.5)),
        ("steps is 0", |j| j.steps = 0),
        ("threads-per-rank is 0", |j| j.threads_per_rank = 0),
        ("save-interval", |j| j.save_interval = 5),
    ];
    for (words, spoil) in cases {
        let mut job = Job::default();
        spoil(&mut job);
        let failure = job.check().unwrap_err();
        assert_eq!(failure.exit, crate::failure::Exit::Usage);
        assert!(failure.sentence.contains(words), "{}", failure.sentence);
    }
}

proptest! {
    /// Every bit of every number comes back, or a rerun would not be the same run.
    #[test]
    fn floats_survive_the_file(lr in any::<f64>().prop_filter("finite", |x| x.is_finite()), seed in any::<u64>()) {
        let mut job = Job { seed, ..Job::default() };
        job.optimizer.lr = lr;
        let back: Job = serde_json::from_str(&job.to_json().unwrap()).unwrap();
        prop_assert_eq!(back.optimizer.lr.to_bits(), lr.to_bits());
        prop_assert_eq!(back.seed, seed);
    }
}
