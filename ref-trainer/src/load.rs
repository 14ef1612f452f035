//! What the routers of a step did: who was chosen how often, what was dropped, how uneven it was.

use quintet_parallel_layers::moe::Routing;
use quintet_planner::config::ModelConfig;

/// Routing of a step, by layer of the model; empty for a model without experts.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Load {
    /// The loss of balance, unweighted: summed over layers, averaged over microbatches.
    pub aux: f64,
    /// The z-loss, unweighted, likewise.
    pub z: f64,
    /// Choices that fell on each expert, those dropped included.
    pub counts: Vec<Vec<u64>>,
    /// Choices that were dropped.
    pub dropped: Vec<u64>,
}

impl Load {
    /// Nothing yet.
    #[must_use]
    pub fn new(model: &ModelConfig) -> Self {
        let Some(moe) = &model.moe else {
            return Self::default();
        };
        Self {
            counts: vec![vec![0; moe.experts]; model.layers],
            dropped: vec![0; model.layers],
            ..Self::default()
        }
    }

    /// Adds what a rank did with a microbatch, whose share in the step is `share`.
    pub fn add(&mut self, layer: usize, routing: &Routing, share: f64) {
        self.aux += share * routing.aux;
        self.z += share * routing.z;
        if let Some(dropped) = self.dropped.get_mut(layer) {
            *dropped += routing.dropped;
        }
        for (sum, n) in self
            .counts
            .iter_mut()
            .skip(layer)
            .take(1)
            .flatten()
            .zip(&routing.counts)
        {
            *sum += n;
        }
    }

    /// As numbers that ranks sum; none where there are no experts. Counts stay exact.
    #[must_use]
    pub fn numbers(&self) -> Vec<f64> {
        if self.counts.is_empty() {
            return Vec::new();
        }
        let counts = self.counts.iter().flatten().chain(&self.dropped);
        let counts = counts.map(|&n| n as f64);
        [self.aux, self.z].into_iter().chain(counts).collect()
    }

    /// Back from [`Load::numbers`].
    #[must_use]
    pub fn from_numbers(model: &ModelConfig, numbers: &[f64]) -> Self {
        let mut load = Self::new(model);
        let mut next = numbers.iter().copied();
        load.aux = next.next().unwrap_or(0.0);
        load.z = next.next().unwrap_or(0.0);
        for n in load.counts.iter_mut().flatten().chain(&mut load.dropped) {
            *n = next.next().unwrap_or(0.0) as u64;
        }
        load
    }

    /// For each expert of a layer +1, 0 or -1: where it had less than the mean, the mean, or more.
    pub fn bias_steps(&self, layer: usize) -> impl Iterator<Item = f64> + '_ {
        let counts = self.counts.get(layer).map_or(&[][..], Vec::as_slice);
        let (all, experts) = (counts.iter().sum::<u64>(), counts.len() as u64);
        counts.iter().map(move |n| match (n * experts).cmp(&all) {
            std::cmp::Ordering::Less => 1.0,
            std::cmp::Ordering::Equal => 0.0,
            std::cmp::Ordering::Greater => -1.0,
        })
    }

    /// The largest share of an expert over its fair share: 1 where all is even, the number of
    /// experts where one has everything. Of the most uneven layer.
    #[must_use]
    pub fn imbalance(&self) -> f64 {
        let of = |counts: &Vec<u64>| {
            let all = counts.iter().sum::<u64>().max(1) as f64;
            let most = counts.iter().copied().max().unwrap_or(0) as f64;
            most * counts.len() as f64 / all
        };
        self.counts.iter().map(of).fold(0.0, f64::max)
    }

    /// Share of all choices that were dropped.
    #[must_use]
    pub fn dropped_share(&self) -> f64 {
        let all = self.counts.iter().flatten().sum::<u64>().max(1) as f64;
        self.dropped.iter().sum::<u64>() as f64 / all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model_config::Model;

    #[test]
    fn numbers_and_back() {
        let model = Model::tiny_moe().config;
        let mut load = Load::new(&model);
        let mut counts = vec![0; 8];
        (counts[0], counts[3]) = (6, 2);
        let routing = Routing {
            counts,
            choices: Vec::new(),
            dropped: 2,
            aux: 1.5,
            z: 3.0,
        };
        load.add(1, &routing, 0.5);
        load.add(1, &routing, 0.5);
        assert_eq!(Load::from_numbers(&model, &load.numbers()), load);
        assert_eq!((load.aux, load.z, load.dropped[1]), (1.5, 3.0, 4));
        assert_eq!(
            load.numbers().len() + 2,
            quintet_planner::traffic::report_len(&model)
        );
        assert_eq!((load.imbalance(), load.dropped_share()), (6.0, 0.25));
        let steps: Vec<f64> = load.bias_steps(1).collect();
        assert_eq!(steps, [-1.0, 1.0, 1.0, -1.0, 1.0, 1.0, 1.0, 1.0]);
        assert!(Load::new(&Model::tiny().config).numbers().is_empty());
    }
}
