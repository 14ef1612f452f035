//! What a person sees: a live line on a terminal, plain lines anywhere else.

use std::collections::BTreeMap;
use std::io::{self, IsTerminal, Write};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::human::{count, percent};
use super::megatron::{self, Means};
use super::metrics::json_line;
use super::{EqualityTable, Forecast, StepReport, banner};
use crate::failure::Failure;
use crate::job::{Job, LogFormat};

/// How to print.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Look {
    /// A live line may be drawn.
    pub live: bool,
    /// Colours may be used.
    pub colour: bool,
    /// Characters of a line.
    pub columns: usize,
}

impl Look {
    /// What stdout and the environment (`NO_COLOR`, `TERM=dumb`) allow.
    #[must_use]
    pub fn of_stdout() -> Self {
        let set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        let dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb");
        let live = io::stdout().is_terminal() && !dumb;
        Self {
            live,
            colour: live && !set("NO_COLOR"),
            columns: if live { columns() } else { usize::MAX },
        }
    }
}

/// Prints the banner, the steps and the table of one run.
pub struct Console {
    out: Box<dyn Write + Send>,
    look: Look,
    format: LogFormat,
    quiet: bool,
    steps: u64,
    interval: u64,
    batch: u64,
    pipeline: bool,
    bar: Option<ProgressBar>,
    recent: Recent,
    /// Why output was lost, if it was.
    lost: Option<Failure>,
}

/// Sums since the last line, so that a line tells of all steps it stands for.
#[derive(Default)]
struct Recent {
    tokens: u64,
    ms: f64,
    wait_ms: BTreeMap<String, f64>,
    bubble_ms: f64,
    means: Means,
}

impl Console {
    /// A console for a job that has done `done` steps.
    #[must_use]
    pub fn new(job: &Job, done: u64, look: Look, out: Box<dyn Write + Send>) -> Self {
        let words = job.log_format == LogFormat::Plain && !job.quiet;
        let live = words && look.live;
        Self {
            out,
            look,
            format: job.log_format,
            quiet: job.quiet,
            steps: job.steps,
            interval: if job.log_interval > 0 {
                job.log_interval
            } else {
                interval(job.steps)
            },
            batch: job.batch.global_batch as u64,
            pipeline: job.layout.pp > 1,
            bar: live.then(|| bar(job.steps, done, look)),
            recent: Recent::default(),
            lost: None,
        }
    }

    /// Says what will run.
    ///
    /// # Errors
    /// Exit 3 where output is lost, as by every other method.
    pub fn banner(&mut self, job: &Job, forecast: &Forecast) -> Result<(), Failure> {
        if self.quiet || self.format == LogFormat::Json {
            return Ok(());
        }
        let title = format!("quintet {}", env!("CARGO_PKG_VERSION"));
        let mut text = format!("{}\n", self.paint("1", &title));
        for (heading, line) in banner::lines(job, forecast) {
            text += &format!("{} {line}\n", self.paint("36", &format!("{heading:<8}")));
        }
        self.print(&(text + "\n"))
    }

    /// Says how a step went.
    ///
    /// # Errors
    /// Exit 3 where JSON refuses the step or output is lost.
    pub fn step(&mut self, report: &StepReport) -> Result<(), Failure> {
        if self.format == LogFormat::Json {
            let line = json_line(report)?;
            return self.print(&line);
        }
        if self.quiet {
            return Ok(());
        }
        self.recent.add(report);
        if let Some(bar) = &self.bar {
            bar.set_message(self.status(report));
            bar.set_position(report.step);
        }
        let due = report.step == 1 || report.step.is_multiple_of(self.interval);
        if due || report.step == self.steps || report.held_out.is_some() {
            let line = match self.format {
                LogFormat::Megatron => self.megatron(report),
                _ => self.line(report),
            };
            self.recent = Recent::default();
            return self.print(&line);
        }
        Ok(())
    }

    /// Prints a line of text above the live line; on stderr where stdout is JSON.
    ///
    /// # Errors
    /// Exit 3 where output is lost.
    pub fn note(&mut self, text: &str) -> Result<(), Failure> {
        if self.format == LogFormat::Json {
            let _ = writeln!(io::stderr(), "{text}");
            Ok(())
        } else if self.quiet {
            Ok(())
        } else {
            self.print(&format!("{text}\n"))
        }
    }

    /// Takes the live line away and prints the table, if there is one.
    ///
    /// # Errors
    /// Exit 3 where output is lost, now or before.
    pub fn finish(&mut self, table: Option<&EqualityTable>) -> Result<(), Failure> {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
        if let Some(table) = table {
            let text = format!("\n{table}\n");
            if self.format == LogFormat::Json {
                let _ = io::stderr().write_all(text.as_bytes());
            } else {
                let painted: String = text.lines().map(|line| self.judged(line) + "\n").collect();
                self.print(&painted)?;
            }
        }
        self.lost.clone().map_or(Ok(()), Err)
    }

    /// A reader that has gone away (a closed pipe) must not end a training run; a disk that is
    /// full must.
    fn print(&mut self, text: &str) -> Result<(), Failure> {
        let out = &mut self.out;
        let mut write = || out.write_all(text.as_bytes()).and_then(|()| out.flush());
        let written = match &self.bar {
            Some(bar) => bar.suspend(write),
            None => write(),
        };
        match written {
            Err(e) if e.kind() != io::ErrorKind::BrokenPipe => {
                let failure = Failure::data(format!("cannot write to stdout: {e}"));
                self.lost.get_or_insert(failure.clone());
                Err(failure)
            }
            _ => Ok(()),
        }
    }

    fn megatron(&self, report: &StepReport) -> String {
        let means = &self.recent.means;
        let line = megatron::line(megatron::now(), report, self.steps, self.batch, means);
        let held_out = report
            .held_out
            .map(|loss| megatron::validation(report.step, loss));
        line + &held_out.unwrap_or_default()
    }

    fn line(&self, report: &StepReport) -> String {
        let wide = self.steps.to_string().len();
        let mut line = format!(
            "step: {:>wide$}/{}  loss: {:7.5}  grad_norm: {:7.4}  tps: {:>6.0}",
            report.step,
            self.steps,
            report.loss,
            report.grad_norm,
            self.recent.tokens_per_s(),
        );
        let held_out = report.held_out;
        let held_out = held_out.map_or(String::new(), |loss| format!("  held_out: {loss:.5}"));
        let mut idle = String::new();
        let waits = self.recent.waits();
        if !waits.is_empty() {
            idle += &format!("  wait: {waits}");
        }
        if self.pipeline {
            idle += &format!("  bubble: {}", percent(self.recent.bubble()));
        }
        // On a narrow terminal the live line alone tells who waits.
        if line.len() + idle.len() + held_out.len() <= self.look.columns {
            line += &idle;
        }
        if !held_out.is_empty() {
            line += &self.paint("33", &held_out);
        }
        line + "\n"
    }

    fn status(&self, report: &StepReport) -> String {
        let mut text = format!(
            "loss {:.4}  norm {:.2}  {} tok/s",
            report.loss,
            report.grad_norm,
            count(self.recent.tokens_per_s() as u64),
        );
        let waits = self.recent.waits();
        if !waits.is_empty() {
            text += &format!("  wait {waits}");
        }
        if self.pipeline {
            text += &format!("  bubble {}", percent(self.recent.bubble()));
        }
        text
    }

    fn paint(&self, code: &str, text: &str) -> String {
        if self.look.colour {
            format!("\x1b[{code}m{text}\x1b[0m")
        } else {
            text.to_string()
        }
    }

    /// A line of the table, its verdict in its colour.
    fn judged(&self, line: &str) -> String {
        for (verdict, code) in [
            ("DIFFERS", "1;31"),
            ("bit-equal", "32"),
            ("  ok", "32"),
            ("  equal", "32"),
        ] {
            if let Some(rest) = line.strip_suffix(verdict) {
                return rest.to_string() + &self.paint(code, verdict);
            }
        }
        line.to_string()
    }
}

impl Recent {
    fn add(&mut self, report: &StepReport) {
        self.tokens += report.tokens;
        self.means.add(report);
        self.ms += report.step_ms;
        self.bubble_ms += report.bubble * report.step_ms;
        for (axis, ms) in &report.comm_wait_ms {
            *self.wait_ms.entry(axis.clone()).or_default() += ms;
        }
    }

    fn tokens_per_s(&self) -> f64 {
        if self.ms > 0.0 {
            self.tokens as f64 * 1000.0 / self.ms
        } else {
            0.0
        }
    }

    fn bubble(&self) -> f64 {
        self.bubble_ms / self.ms
    }

    /// `tp 11% pp 9% dp 4%`, innermost axis first; who waited for nothing is left out.
    fn waits(&self) -> String {
        const ORDER: [&str; 6] = ["tp", "etp", "cp", "ep", "pp", "dp"];
        let place = |axis: &str| {
            ORDER
                .iter()
                .position(|name| *name == axis)
                .unwrap_or(ORDER.len())
        };
        let mut waits: Vec<(&String, &f64)> = self.wait_ms.iter().collect();
        // Half a percent would be printed as nothing.
        waits.retain(|(_, ms)| **ms >= 0.005 * self.ms);
        waits.sort_by_key(|(axis, _)| place(axis));
        let words: Vec<String> = waits
            .iter()
            .map(|(axis, ms)| format!("{axis} {}", percent(**ms / self.ms)))
            .collect();
        words.join(" ")
    }
}

/// The width of the terminal that stdout is; of one that does not say, no limit.
#[cfg(unix)]
fn columns() -> usize {
    match rustix::termios::tcgetwinsize(io::stdout()) {
        Ok(size) if size.ws_col > 0 => usize::from(size.ws_col),
        _ => usize::MAX,
    }
}

#[cfg(not(unix))]
fn columns() -> usize {
    usize::MAX
}

/// The round number of steps that makes at most 30 lines.
fn interval(steps: u64) -> u64 {
    let mut decade: u64 = 1;
    loop {
        for interval in [decade, decade.saturating_mul(2), decade.saturating_mul(5)] {
            if steps / interval <= 30 {
                return interval;
            }
        }
        decade = decade.saturating_mul(10);
    }
}

fn bar(steps: u64, done: u64, look: Look) -> ProgressBar {
    let template = if look.colour {
        "{bar:22.cyan/238} {pos}/{len}  eta {eta}  {wide_msg}"
    } else {
        "{bar:22} {pos}/{len}  eta {eta}  {wide_msg}"
    };
    let style = ProgressStyle::with_template(template)
        .unwrap_or_else(|_| ProgressStyle::default_bar())
        .progress_chars("━╸─");
    let bar = ProgressBar::with_draw_target(Some(steps), ProgressDrawTarget::stdout_with_hz(8));
    bar.set_style(style);
    bar.set_position(done);
    bar.reset_eta();
    bar
}

#[cfg(test)]
mod tests;
