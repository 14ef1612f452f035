//! Pages of help.

use super::*;

/// `[default: x; verify: y]` in a help text is what happens without the flag.
#[test]
fn help_tells_the_truth_about_defaults() {
    let command = command();
    let mut checked = 0;
    for arg in command.find_subcommand("train").unwrap().get_arguments() {
        let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
        let Some((_, defaults)) = help.split_once("[default: ") else {
            continue;
        };
        for default in defaults.trim_end_matches(']').split("; ") {
            let (verifies, value) = match default.strip_prefix("verify: ") {
                Some(value) => (true, value),
                None => (false, default),
            };
            if value.contains(' ') {
                continue;
            }
            let flag = format!("--{}={value}", arg.get_long().unwrap());
            let same = if verifies {
                verify(&format!("verify {flag}")) == verify("verify")
            } else {
                train(&format!("train {flag}")) == train("train")
            };
            assert!(same, "{flag}: {help}");
            checked += 1;
        }
    }
    assert!(checked > 30, "{checked}");
}

#[test]
fn help_and_version_are_printed() {
    for line in [
        "--help",
        "-h",
        "train --help",
        "verify -h",
        "eval --help",
        "help",
        "plan --help",
    ] {
        let Ok(Command::Print(text)) = run(line) else {
            panic!("{line}")
        };
        assert!(text.contains("Usage:") && !text.contains('\x1b'), "{line}");
    }
    let Ok(Command::Print(help)) = run("--help") else {
        panic!()
    };
    for heading in [
        "Layout:",
        "Model:",
        "Optimiser:",
        "Run:",
        "Output:",
        "Exit codes:",
    ] {
        assert!(help.contains(heading), "{heading}");
    }
    assert!(matches!(run("--version"), Ok(Command::Print(text)) if text.starts_with("quintet ")));
}
