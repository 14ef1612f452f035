//! Whatever is typed.

use super::*;

fn word() -> impl Strategy<Value = String> {
    let flags: Vec<String> = CONTRACT
        .split_whitespace()
        .chain(["json", "help"])
        .map(|flag| format!("--{flag}"))
        .collect();
    let values = [
        "0",
        "1",
        "2",
        "3",
        "-1",
        "1e999",
        "nan",
        "inf",
        "18446744073709551615",
        "4294967296",
        "1,3",
        "",
        "=",
        "--",
        "-h",
        "train",
        "verify",
        "eval",
        "plan",
        "gpipe",
        "f64",
        "any",
        "tiny",
        "bench-m",
        "tiny-moe",
        "true",
        "\u{1b}[31m",
        "ü\n",
    ];
    let joined = (
        prop::sample::select(flags.clone()),
        prop::sample::select(values.to_vec()),
    )
        .prop_map(|(flag, value)| format!("{flag}={value}"));
    prop_oneof![
        4 => prop::sample::select(flags),
        4 => prop::sample::select(values.to_vec()).prop_map(String::from),
        4 => joined,
        1 => any::<String>(),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Whatever is typed: a sound job, a page of help, or one sentence.
    #[test]
    fn nothing_typed_panics(words in prop::collection::vec(word(), 0..8)) {
        match parse(std::iter::once("quintet".to_string()).chain(words), &Variables::new()) {
            Ok(Command::Train(job) | Command::Verify { job, .. } | Command::Eval { job, .. }) => {
                prop_assert!(job.check().is_ok());
                let back = Job::from_json(&job.to_json().unwrap()).unwrap();
                prop_assert_eq!(back, job);
            }
            Ok(Command::Convert(_)) => {}
            Ok(Command::Precompile(asked)) => prop_assert!(!asked.archs.is_empty()),
            Ok(Command::Plan(plan)) => prop_assert!(plan.request.cluster.validate().is_ok()),
            Ok(Command::Bench(bench)) => prop_assert!(bench.ranks > 0 && bench.bench.iters > 0),
            Ok(Command::Launch { ranks, command }) => {
                prop_assert!(ranks > 0 && !command.is_empty());
            }
            Ok(Command::Print(text)) => prop_assert!(!text.is_empty()),
            Err(failure) => {
                prop_assert!(matches!(failure.exit, Exit::Usage | Exit::Data));
                prop_assert!(!failure.sentence.contains('\n'), "{}", failure.sentence);
            }
        }
    }

    /// The same with every layout flag sound in form, which gets further in.
    #[test]
    fn no_layout_panics(degrees in prop::collection::vec(0usize..70, 3), batch in prop::collection::vec(0u64..100, 3), zero in 0u8..4, within in 0usize..9) {
        let line = format!(
            "verify --dp {} --tp {} --pp {} --mbs {} --gbs {} --seq-len {} --zero-stage {zero} --hybrid-shard-size {within}",
            degrees[0], degrees[1], degrees[2], batch[0], batch[1], batch[2]
        );
        if let Err(failure) = run(&line) {
            prop_assert_eq!(failure.exit, Exit::Usage);
            prop_assert!(!failure.sentence.contains('\n'));
        }
    }
}
