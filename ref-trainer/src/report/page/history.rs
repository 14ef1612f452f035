//! The steps of a run, thinned so that a run of any length fits a page and a small memory.

use crate::report::StepReport;

/// Steps at an even stride, the first and the last always among them.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct History {
    kept: Vec<StepReport>,
    /// The newest, where the stride passes over it.
    newest: Option<StepReport>,
    stride: u64,
    count: u64,
    held_out: Vec<(u64, f64)>,
    /// By layer and expert, over all steps.
    load: Vec<Vec<u64>>,
}

/// The most steps kept.
const MOST: usize = 1200;

impl History {
    /// Adds a step; steps come in order.
    pub fn add(&mut self, report: &StepReport) {
        self.held_out
            .extend(report.held_out.map(|loss| (report.step, loss)));
        if self.held_out.len() > MOST {
            let mut at = 0;
            self.held_out.retain(|_| {
                at += 1;
                at % 2 == 1
            });
        }
        if let Some(experts) = &report.experts {
            self.load
                .resize(experts.load.len().max(self.load.len()), Vec::new());
            for (sums, counts) in self.load.iter_mut().zip(&experts.load) {
                sums.resize(counts.len().max(sums.len()), 0);
                sums.iter_mut().zip(counts).for_each(|(sum, n)| *sum += n);
            }
        }
        let stride = self.stride.max(1);
        if self.count.is_multiple_of(stride) {
            self.kept.push(report.clone());
            self.newest = None;
        } else {
            self.newest = Some(report.clone());
        }
        self.count += 1;
        if self.kept.len() > MOST {
            let mut at = 0;
            self.kept.retain(|_| {
                at += 1;
                at % 2 == 1
            });
            self.stride = 2 * stride;
        }
    }

    /// The steps kept, in order.
    pub fn steps(&self) -> impl Iterator<Item = &StepReport> {
        self.kept.iter().chain(&self.newest)
    }

    /// (step, loss) on held-out text.
    #[must_use]
    pub fn held_out(&self) -> &[(u64, f64)] {
        &self.held_out
    }

    /// How often each expert was chosen, by layer, over all steps.
    #[must_use]
    pub fn load(&self) -> &[Vec<u64>] {
        &self.load
    }

    /// The number of the newest step; 0 of none.
    #[must_use]
    pub fn last(&self) -> u64 {
        self.steps().last().map_or(0, |report| report.step)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::ExpertReport;

    #[test]
    fn a_long_run_is_thinned_evenly_and_keeps_its_ends() {
        let mut history = History::default();
        for step in 1..=10_001 {
            history.add(&StepReport {
                step,
                held_out: (step % 2 == 0).then_some(1.0),
                experts: Some(ExpertReport {
                    load: vec![vec![1, 2]],
                    ..ExpertReport::default()
                }),
                ..StepReport::default()
            });
        }
        let steps: Vec<u64> = history.steps().map(|r| r.step).collect();
        assert!(steps.len() <= MOST + 1 && steps.len() > MOST / 2);
        assert_eq!((steps[0], history.last()), (1, 10_001));
        let strides: Vec<u64> = steps.windows(2).map(|w| w[1] - w[0]).collect();
        let (body, tail) = strides.split_at(strides.len() - 1);
        assert!(body.iter().all(|s| *s == strides[0]) && tail[0] <= strides[0]);
        assert!(history.held_out().len() <= MOST);
        assert_eq!(history.load(), [vec![10_001, 20_002]]);
        assert_eq!(History::default().last(), 0);
    }
}
