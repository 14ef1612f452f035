//! Two ways of doing the same, timed in turns.

use std::time::{Duration, Instant};

/// Seconds per call of both ways, by label and batch.
#[derive(Debug, Default)]
pub struct Sheet(Vec<Row>);

#[derive(Debug)]
struct Row {
    label: String,
    batches: Vec<Batch>,
}

#[derive(Debug, Clone, Copy)]
struct Batch {
    calls: u64,
    ours: f64,
    theirs: f64,
}

/// What a label's batches come to.
#[derive(Debug, Clone, PartialEq)]
pub struct Summary {
    /// As given.
    pub label: String,
    /// Median of our seconds per call.
    pub ours: f64,
    /// Median of theirs.
    pub theirs: f64,
    /// Median of theirs / ours, batch by batch: above 1 ours is the faster.
    pub ratio: f64,
}

impl Sheet {
    /// Calls each `calls` times, the two in turn first, and returns what ours took.
    pub fn batch(
        &mut self,
        label: &str,
        calls: u64,
        mut ours: impl FnMut(),
        mut theirs: impl FnMut(),
    ) -> Duration {
        self.pair(
            label,
            calls,
            || time(calls, &mut ours),
            || time(calls, &mut theirs),
        )
    }

    /// The same for ways that take their own time for `calls` calls.
    pub fn pair(
        &mut self,
        label: &str,
        calls: u64,
        ours: impl FnOnce() -> Duration,
        theirs: impl FnOnce() -> Duration,
    ) -> Duration {
        let row = match self.0.iter().position(|row| row.label == label) {
            Some(row) => row,
            None => {
                let (label, batches) = (label.to_string(), Vec::new());
                self.0.push(Row { label, batches });
                self.0.len() - 1
            }
        };
        let batches = &mut self.0[row].batches;
        let (mine, other);
        if batches.len().is_multiple_of(2) {
            mine = ours();
            other = theirs();
        } else {
            other = theirs();
            mine = ours();
        }
        let each = |time: Duration| time.as_secs_f64() / calls.max(1) as f64;
        let (ours, theirs) = (each(mine), each(other));
        batches.push(Batch {
            calls,
            ours,
            theirs,
        });
        mine
    }

    /// The summaries, in the order in which labels came. Batches with less than a tenth of the
    /// calls of the longest (criterion warms up with such) do not count.
    #[must_use]
    pub fn summaries(&self) -> Vec<Summary> {
        self.0.iter().map(Row::summary).collect()
    }
}

impl Row {
    fn summary(&self) -> Summary {
        let most = self.batches.iter().map(|b| b.calls).max().unwrap_or(0);
        let kept = self.batches.iter().filter(|b| b.calls * 10 >= most);
        let of = |part: fn(&Batch) -> f64| median(kept.clone().map(part));
        Summary {
            label: self.label.clone(),
            ours: of(|b| b.ours),
            theirs: of(|b| b.theirs),
            ratio: of(|b| b.theirs / b.ours),
        }
    }
}

fn time(calls: u64, work: &mut impl FnMut()) -> Duration {
    let start = Instant::now();
    for _ in 0..calls {
        work();
    }
    start.elapsed()
}

/// The middle value, of an even number the mean of both; NaN of none.
///
/// ```
/// assert_eq!(quintet_benches::median([3.0, 1.0, 2.0]), 2.0);
/// assert_eq!(quintet_benches::median([4.0, 1.0]), 2.5);
/// ```
#[must_use]
pub fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut sorted: Vec<f64> = values.into_iter().collect();
    sorted.sort_by(f64::total_cmp);
    let half = sorted.len() / 2;
    match sorted.len() {
        0 => f64::NAN,
        len if len % 2 == 1 => sorted[half],
        _ => f64::midpoint(sorted[half - 1], sorted[half]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warm_up_does_not_count_and_turns_alternate() {
        let mut sheet = Sheet::default();
        let order = std::cell::RefCell::new(String::new());
        for (calls, ours, theirs) in [(1, 9, 1), (100, 100, 200), (100, 200, 200)] {
            sheet.pair(
                "x",
                calls,
                || {
                    order.borrow_mut().push('o');
                    Duration::from_secs(ours)
                },
                || {
                    order.borrow_mut().push('t');
                    Duration::from_secs(theirs)
                },
            );
        }
        let x = &sheet.summaries()[0];
        assert_eq!((x.ours, x.theirs, x.ratio), (1.5, 2.0, 1.5));
        assert_eq!(*order.borrow(), "ottoot");
    }
}
