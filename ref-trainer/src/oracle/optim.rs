//! Norm, clipping and the two optimizers, on whole parameters by name.

use std::collections::BTreeSet;

use quintet_planner::config::ModelConfig;

use super::{OracleError, Params, param_shapes, value};

/// Root of the sum of squares over every gradient. A tied table is one entry, so it counts once.
#[must_use]
pub fn grad_norm(grads: &Params) -> f64 {
    let squares = grads.values().flatten().map(|g| g * g);
    squares.sum::<f64>().sqrt()
}

/// Multiplies the gradients by `min(1, max_norm / (norm + 1e-6))`, PyTorch's rule, and returns
/// `(norm, factor)`, the norm being that before.
pub fn clip(grads: &mut Params, max_norm: f64) -> (f64, f64) {
    let norm = grad_norm(grads);
    let factor = (max_norm / (norm + 1e-6)).min(1.0);
    for gradient in grads.values_mut().flatten() {
        *gradient *= factor;
    }
    (norm, factor)
}

/// Stochastic gradient descent: `w -= lr (g + decay w)`.
#[derive(Debug, Clone)]
pub struct Sgd {
    weight_decay: f64,
    decayed: BTreeSet<String>,
}

impl Sgd {
    /// Decay acts on what has two dims (matrices and tables), not on norms.
    #[must_use]
    pub fn new(config: &ModelConfig, weight_decay: f64) -> Self {
        Self {
            weight_decay,
            decayed: decayed(config),
        }
    }

    /// One step with learning rate `lr`.
    ///
    /// # Errors
    /// [`OracleError::Missing`] where a parameter has no gradient; some may be updated by then.
    pub fn step(&self, params: &mut Params, grads: &Params, lr: f64) -> Result<(), OracleError> {
        for (name, w) in params.iter_mut() {
            let decay = if self.decayed.contains(name) {
                self.weight_decay
            } else {
                0.0
            };
            for (w, g) in w.iter_mut().zip(value(grads, name)?) {
                *w -= lr * (g + decay * *w);
            }
        }
        Ok(())
    }
}

/// AdamW (Loshchilov and Hutter 2019), decoupled decay, corrected for bias, as PyTorch has it:
///
/// ```text
/// m = b1 m + (1 - b1) g        w = w (1 - lr decay) - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
/// v = b2 v + (1 - b2) g^2
/// ```
#[derive(Debug, Clone)]
pub struct AdamW {
    beta1: f64,
    beta2: f64,
    eps: f64,
    weight_decay: f64,
    decayed: BTreeSet<String>,
    /// t: steps taken so far.
    pub steps: u64,
    /// m, by name; empty before the first step.
    pub first: Params,
    /// v, by name; empty before the first step.
    pub second: Params,
}

impl AdamW {
    /// Decay acts on what has two dims (matrices and tables; a tied table once), not on norms.
    #[must_use]
    pub fn new(config: &ModelConfig, betas: (f64, f64), eps: f64, weight_decay: f64) -> Self {
        Self {
            beta1: betas.0,
            beta2: betas.1,
            eps,
            weight_decay,
            decayed: decayed(config),
            steps: 0,
            first: Params::new(),
            second: Params::new(),
        }
    }

    /// One step with learning rate `lr`.
    ///
    /// # Errors
    /// [`OracleError::Missing`] where a parameter has no gradient; some may be updated by then.
    pub fn step(
        &mut self,
        params: &mut Params,
        grads: &Params,
        lr: f64,
    ) -> Result<(), OracleError> {
        self.steps += 1;
        let correct1 = 1.0 - self.beta1.powf(self.steps as f64);
        let correct2 = 1.0 - self.beta2.powf(self.steps as f64);
        for (name, w) in params.iter_mut() {
            let g = value(grads, name)?;
            let zeros = || vec![0.0; w.len()];
            let m = self.first.entry(name.clone()).or_insert_with(zeros);
            let v = self.second.entry(name.clone()).or_insert_with(zeros);
            let keep = if self.decayed.contains(name) {
                1.0 - lr * self.weight_decay
            } else {
                1.0
            };
            for (((w, g), m), v) in w.iter_mut().zip(g).zip(m).zip(v) {
                *m = self.beta1 * *m + (1.0 - self.beta1) * g;
                *v = self.beta2 * *v + (1.0 - self.beta2) * g * g;
                *w = *w * keep - lr * (*m / correct1) / ((*v / correct2).sqrt() + self.eps);
            }
        }
        Ok(())
    }
}

fn decayed(config: &ModelConfig) -> BTreeSet<String> {
    let shapes = param_shapes(config).into_iter();
    let matrices = shapes.filter(|(_, shape)| shape.len() >= 2);
    matrices.map(|(name, _)| name).collect()
}
