//! Where the time of a rank goes, call by call.
//!
//! Each thread keeps a book of its own: the ops of a step are called by the rank's thread, whoever
//! helps with them. Time is taken twice: on the wall, and as CPU time of this thread. Wall time
//! without CPU time is waiting (or, with more ranks than cores, somebody else's turn).

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Instant;

use rustix::time::{ClockId, clock_gettime};

/// What was called: a name, and for products m, n, k.
pub type Key = (&'static str, [usize; 3]);

/// Calls of one kind.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Line {
    /// How many.
    pub calls: u64,
    /// Seconds on the wall.
    pub wall: f64,
    /// Seconds of CPU time of the calling thread.
    pub cpu: f64,
}

/// The calls of one thread since it last opened a book.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Book {
    /// By kind.
    pub lines: BTreeMap<Key, Line>,
    /// CPU seconds of the thread, whether in a call or not.
    pub thread: f64,
    /// CPU seconds of the whole process.
    pub process: f64,
}

thread_local! {
    static BOOK: RefCell<Book> = RefCell::default();
}

/// Begins a new book for this thread.
pub fn open() {
    BOOK.set(Book {
        lines: BTreeMap::new(),
        thread: thread_seconds(),
        process: process_seconds(),
    });
}

/// The book as it stands.
#[must_use]
pub fn close() -> Book {
    let mut book = BOOK.take();
    book.thread = thread_seconds() - book.thread;
    book.process = process_seconds() - book.process;
    book
}

/// Does the work and writes it down.
pub fn line<R>(name: &'static str, work: impl FnOnce() -> R) -> R {
    line_of((name, [0; 3]), work)
}

/// The same with a shape.
pub fn line_of<R>(key: Key, work: impl FnOnce() -> R) -> R {
    let (wall, cpu) = (Instant::now(), thread_seconds());
    let result = work();
    let (cpu, wall) = (thread_seconds() - cpu, wall.elapsed().as_secs_f64());
    BOOK.with_borrow_mut(|book| {
        let line = book.lines.entry(key).or_default();
        line.calls += 1;
        line.wall += wall;
        line.cpu += cpu;
    });
    result
}

/// The books of all ranks over `steps` steps as a table, dearest first. `seconds` is what the
/// steps took, `cores` what they had. Wall is the mean over ranks, CPU the sum.
#[must_use]
pub fn table(books: &[Book], steps: u64, seconds: f64, cores: usize) -> String {
    let ranks = books.len().max(1) as f64;
    let (steps, budget) = (steps.max(1) as f64, seconds * cores as f64);
    let mut sum: BTreeMap<Key, Line> = BTreeMap::new();
    for (key, line) in books.iter().flat_map(|book| &book.lines) {
        let all = sum.entry(*key).or_default();
        all.calls += line.calls;
        all.wall += line.wall;
        all.cpu += line.cpu;
    }
    let mut order: Vec<(Key, Line)> = sum.into_iter().collect();
    order.sort_by(|(_, x), (_, y)| y.wall.total_cmp(&x.wall));
    let mut text = format!(
        "{:28} {:>15} {:>9} {:>9} {:>6} {:>9} {:>6} {:>7}\n",
        "call", "m n k", "calls", "wall ms", "%", "cpu ms", "%", "GFLOP/s"
    );
    let mut row = |name: &str, shape: [usize; 3], line: Line| {
        let [m, n, k] = shape;
        let of = if m > 0 {
            format!("{m} {n} {k}")
        } else {
            String::new()
        };
        let flops = 2.0 * (m * n * k) as f64 * line.calls as f64;
        let rate = if m > 0 {
            format!("{:7.1}", flops / line.wall * 1e-9)
        } else {
            String::new()
        };
        let _ = writeln!(
            text,
            "{name:28} {of:>15} {:9.1} {:9.2} {:6.1} {:9.2} {:6.1} {rate:>7}",
            line.calls as f64 / steps,
            line.wall * 1e3 / steps / ranks,
            line.wall * 100.0 / ranks / seconds,
            line.cpu * 1e3 / steps,
            line.cpu * 100.0 / budget,
        );
    };
    let mut rest = Line {
        calls: 0,
        wall: seconds * ranks,
        cpu: books.iter().map(|book| book.thread).sum(),
    };
    let threads = rest.cpu;
    for ((name, shape), line) in order {
        row(name, shape, line);
        rest.wall -= line.wall;
        rest.cpu -= line.cpu;
    }
    row("outside of calls", [0; 3], rest);
    let process = books.iter().map(|book| book.process).fold(0.0, f64::max);
    let beside = Line {
        cpu: process - threads,
        ..Line::default()
    };
    row("threads beside the ranks'", [0; 3], beside);
    let idle = Line {
        cpu: budget - process,
        ..Line::default()
    };
    row("cores idle or taken away", [0; 3], idle);
    text
}

fn thread_seconds() -> f64 {
    seconds(ClockId::ThreadCPUTime)
}

/// CPU seconds that all threads of this process have used.
#[must_use]
pub fn process_seconds() -> f64 {
    seconds(ClockId::ProcessCPUTime)
}

fn seconds(clock: ClockId) -> f64 {
    let now = clock_gettime(clock);
    now.tv_sec as f64 + now.tv_nsec as f64 * 1e-9
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_book_holds_what_was_called_since_it_was_opened() {
        line("before", || ());
        open();
        assert_eq!(line("x", || 7), 7);
        line_of(("y", [2, 3, 4]), || ());
        line("x", || ());
        let book = close();
        assert_eq!(book.lines.len(), 2);
        assert_eq!(book.lines[&("x", [0; 3])].calls, 2);
        let text = table(&[book], 1, 1.0, 1);
        assert!(text.contains("2 3 4") && text.contains("outside of calls"));
    }
}
