//! `--log-format megatron`: the lines of Megatron-LM's training log, which people's scrapers read.
//!
//! ```text
//!  [2026-01-31 12:00:00] iteration       10/     300 | consumed samples:          160 | elapsed time per
//!  iteration (ms): 61.4 | learning rate: 6.666667E-04 | global batch size:    16 | lm loss: 3.512345E+00 |
//!  loss scale: 1.0 | grad norm: 1.234 | number of skipped iterations:   0 | number of nan iterations:   0 |
//! ```
//!
//! on one line. Loss and time are means over the steps since the line before, as there. A step is
//! never skipped here, and one whose gradient is no number ends the run, so both counts are 0; nothing
//! is scaled, so the scale is 1. Times are UTC.

use std::time::{SystemTime, UNIX_EPOCH};

use super::StepReport;
use super::human::utc;

/// What a line tells of several steps.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(super) struct Means {
    /// Steps since the line before.
    pub(super) steps: u64,
    /// Their losses, summed.
    pub(super) loss: f64,
    /// Their losses of balance, summed.
    pub(super) aux: f64,
    /// Their z-losses, summed.
    pub(super) z: f64,
    /// Their milliseconds, summed.
    pub(super) ms: f64,
}

impl Means {
    pub(super) fn add(&mut self, report: &StepReport) {
        self.steps += 1;
        self.loss += report.loss;
        self.ms += report.step_ms;
        if let Some(experts) = &report.experts {
            self.aux += experts.aux_loss;
            self.z += experts.z_loss;
        }
    }
}

/// The line of a step, ended.
pub(super) fn line(now: u64, report: &StepReport, steps: u64, batch: u64, means: &Means) -> String {
    let n = means.steps.max(1) as f64;
    let mut line = format!(
        " [{}] iteration {:8}/{steps:8} | consumed samples: {:12} | elapsed time per iteration (ms): {:.1} | learning rate: {} | global batch size: {batch:5} | lm loss: {} |",
        utc(now),
        report.step,
        report.step.saturating_mul(batch),
        means.ms / n,
        scientific(report.lr),
        scientific(means.loss / n),
    );
    for (name, sum) in [("load_balancing_loss", means.aux), ("z_loss", means.z)] {
        if sum > 0.0 {
            line += &format!(" {name}: {} |", scientific(sum / n));
        }
    }
    line += &format!(
        " loss scale: 1.0 | grad norm: {:.3} | number of skipped iterations:   0 | number of nan iterations:   0 |\n",
        report.grad_norm
    );
    line
}

/// The three lines of a held-out loss.
pub(super) fn validation(step: u64, loss: f64) -> String {
    let perplexity = loss.min(20.0).exp();
    let text = format!(
        " validation loss at iteration {step} | lm loss value: {} | lm loss PPL: {} | ",
        scientific(loss),
        scientific(perplexity)
    );
    let rule = "-".repeat(text.chars().count() + 1);
    format!("{rule}\n{text}\n{rule}\n")
}

/// Seconds since 1970, now.
pub(super) fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}

/// As Python's `{:.6E}`: a sign and two digits at least in the exponent.
fn scientific(x: f64) -> String {
    let text = format!("{x:.6E}");
    match text.split_once('E') {
        None => text,
        Some((digits, exponent)) => {
            let (sign, exponent) = match exponent.strip_prefix('-') {
                Some(rest) => ('-', rest),
                None => ('+', exponent),
            };
            format!("{digits}E{sign}{exponent:0>2}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_pythons() {
        for (x, want) in [
            (0.002, "2.000000E-03"),
            (5.5, "5.500000E+00"),
            (0.0, "0.000000E+00"),
            (-1.25e-120, "-1.250000E-120"),
            (1e15, "1.000000E+15"),
            (f64::NAN, "NaN"),
        ] {
            assert_eq!(scientific(x), want);
        }
    }

    #[test]
    fn a_line_is_megatrons() {
        let report = StepReport {
            step: 10,
            lr: 0.002 / 3.0,
            grad_norm: 1.2344,
            ..StepReport::default()
        };
        let mut means = Means::default();
        for (loss, ms) in [(3.0, 60.0), (4.0, 63.0)] {
            means.add(&StepReport {
                loss,
                step_ms: ms,
                ..StepReport::default()
            });
        }
        let want = " [2026-11-30 00:48:52] iteration       10/     300 | consumed samples:          160 | elapsed time per iteration (ms): 61.5 | learning rate: 6.666667E-04 | global batch size:    16 | lm loss: 3.500000E+00 | loss scale: 1.0 | grad norm: 1.234 | number of skipped iterations:   0 | number of nan iterations:   0 |\n";
        assert_eq!(line(1_795_999_732, &report, 300, 16, &means), want);
        means.aux = 4.0;
        let with_experts = line(0, &report, 300, 16, &means);
        assert!(with_experts.contains("| load_balancing_loss: 2.000000E+00 | loss scale"));
    }

    #[test]
    fn a_held_out_loss_stands_between_rules() {
        let text = validation(50, 2.5);
        let lines: Vec<&str> = text.lines().collect();
        let want = " validation loss at iteration 50 | lm loss value: 2.500000E+00 | lm loss PPL: 1.218249E+01 | ";
        assert_eq!(lines[1], want);
        assert_eq!(lines[0].len(), want.len() + 1);
        assert!(lines[0].chars().all(|c| c == '-') && lines[0] == lines[2]);
    }
}
