use super::*;
use std::sync::{Arc, Mutex};

#[derive(Clone, Default)]
struct Page(Arc<Mutex<Vec<u8>>>);

impl Page {
    fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }
}

impl Write for Page {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

struct Lost(io::ErrorKind);

impl Write for Lost {
    fn write(&mut self, _: &[u8]) -> io::Result<usize> {
        Err(self.0.into())
    }

    fn flush(&mut self) -> io::Result<()> {
        Err(self.0.into())
    }
}

const PLAIN: Look = Look {
    live: false,
    colour: false,
    columns: usize::MAX,
};

fn step(step: u64) -> StepReport {
    StepReport {
        step,
        loss: 2.418_73,
        grad_norm: 1.0312,
        tokens: 1024,
        tokens_per_s: 21_340.0,
        step_ms: 48.0,
        comm_wait_ms: [("dp", 2.0), ("pp", 4.5), ("tp", 5.4)]
            .map(|(k, v)| (k.to_string(), v))
            .into(),
        bubble: 0.19,
        ..StepReport::default()
    }
}

fn table() -> EqualityTable {
    EqualityTable {
        against: "nobody".into(),
        ..EqualityTable::default()
    }
}

fn run(job: &Job, look: Look) -> String {
    let page = Page::default();
    let mut console = Console::new(job, 0, look, Box::new(page.clone()));
    console.banner(job, &Forecast::default()).unwrap();
    for s in 1..=job.steps {
        console.step(&step(s)).unwrap();
    }
    console.note("a note").unwrap();
    console.finish(Some(&table())).unwrap();
    page.text()
}

#[test]
fn a_line_says_it_all() {
    let page = Page::default();
    let mut console = Console::new(&Job::demo(), 0, PLAIN, Box::new(page.clone()));
    for s in 32..=40 {
        console.step(&step(s)).unwrap();
    }
    console
        .step(&StepReport {
            held_out: Some(2.5),
            ..step(41)
        })
        .unwrap();
    let golden = "\
step:  40/300  loss: 2.41873  grad_norm:  1.0312  tps:  21333  wait: tp 11% pp 9% dp 4%  bubble: 19%
step:  41/300  loss: 2.41873  grad_norm:  1.0312  tps:  21333  wait: tp 11% pp 9% dp 4%  bubble: 19%  held_out: 2.50000
";
    assert_eq!(page.text(), golden);
}

#[test]
fn a_narrow_terminal_gets_lines_that_fit() {
    let page = Page::default();
    let narrow = Look {
        columns: 80,
        ..PLAIN
    };
    let mut console = Console::new(&Job::demo(), 0, narrow, Box::new(page.clone()));
    let report = StepReport {
        held_out: Some(2.5),
        ..step(40)
    };
    console.step(&report).unwrap();
    let golden =
        "step:  40/300  loss: 2.41873  grad_norm:  1.0312  tps:  21333  held_out: 2.50000\n";
    assert!(golden.len() <= 80 + 1, "{}", golden.len());
    assert_eq!(page.text(), golden);
}

#[test]
fn off_a_terminal_no_escape_code_is_printed() {
    let text = run(&Job::demo(), PLAIN);
    assert!(!text.contains('\x1b') && !text.contains('\r'));
    assert_eq!(text.matches("step:").count(), 31);
    assert!(
        text.contains("layout") && text.contains("a note") && text.contains("equality with nobody")
    );
}

#[test]
fn json_is_steps_and_nothing_else() {
    let job = Job {
        log_format: LogFormat::Json,
        steps: 4,
        ..Job::demo()
    };
    let text = run(
        &job,
        Look {
            live: true,
            colour: true,
            columns: usize::MAX,
        },
    );
    let steps: Vec<u64> = text
        .lines()
        .map(|line| serde_json::from_str::<StepReport>(line).unwrap().step)
        .collect();
    assert_eq!(steps, [1, 2, 3, 4]);
}

#[test]
fn quiet_leaves_the_table() {
    let text = run(
        &Job {
            quiet: true,
            ..Job::demo()
        },
        PLAIN,
    );
    assert_eq!(
        text,
        "\nequality with nobody\n  step  quantity        ours   max diff      bound  verdict\n\n"
    );
}

#[test]
fn a_closed_pipe_ends_nothing() {
    let closed = Lost(io::ErrorKind::BrokenPipe);
    let mut console = Console::new(&Job::demo(), 0, PLAIN, Box::new(closed));
    console.banner(&Job::demo(), &Forecast::default()).unwrap();
    console.step(&step(1)).unwrap();
    console.finish(Some(&table())).unwrap();
}

#[test]
fn a_full_disk_is_said() {
    for log_format in [LogFormat::Plain, LogFormat::Json] {
        let job = Job {
            log_format,
            ..Job::demo()
        };
        let full = Lost(io::ErrorKind::StorageFull);
        let mut console = Console::new(&job, 0, PLAIN, Box::new(full));
        let lost = console.step(&step(1)).unwrap_err();
        assert_eq!(lost.exit, crate::failure::Exit::Data);
        assert!(lost.sentence.contains("stdout"), "{lost}");
        // And again at the end, for who did not listen.
        assert_eq!(console.finish(None), Err(lost));
    }
}

#[test]
fn numbers_that_are_none_are_printed_too() {
    let page = Page::default();
    let mut console = Console::new(&Job::demo(), 0, PLAIN, Box::new(page.clone()));
    let report = StepReport {
        step: 1,
        loss: f64::NAN,
        grad_norm: f64::INFINITY,
        ..StepReport::default()
    };
    console.step(&report).unwrap();
    assert!(
        page.text()
            .contains("loss:     NaN  grad_norm:     inf  tps:      0  bubble: -")
    );
}

#[test]
fn intervals_are_round() {
    assert_eq!(
        [1, 30, 31, 300, 1000, 10_000].map(interval),
        [1, 1, 2, 10, 50, 500]
    );
    assert!(interval(u64::MAX) > 0);
}
