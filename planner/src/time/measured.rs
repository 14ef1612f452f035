//! Shares of the peaks from kernels that somebody has timed.

use alloc::format;
use alloc::vec::Vec;

use super::Efficiency;
use crate::Invalid;
use crate::cluster::Cluster;

/// What kernels took. Each list may be empty: its share then stays as it was.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Measured {
    /// Products of m x k by k x n, and seconds.
    pub products: Vec<([usize; 3], f64)>,
    /// Operations of causal attention, half of the square, and seconds.
    pub attention: Vec<(f64, f64)>,
    /// Bytes read and written by an element-wise pass, and seconds.
    pub memory: Vec<(f64, f64)>,
}

impl Efficiency {
    /// These, but for what was measured on GPUs of this cluster, whose peak in the type of the
    /// products is `peak`. Of products the share of wide ones and the width of half of that are fitted by least
    /// squares of the relative error: 1 / share = (1 + half_width / width) / gemm is a line in 1 / width.
    ///
    /// ```
    /// use quintet_planner::cluster::Cluster;
    /// use quintet_planner::time::{Efficiency, Measured};
    /// let cluster = Cluster::preset("h100", 8).unwrap();
    /// let took = |n: usize| 2.0 * (n as f64).powi(3) / (989.4e12 * 0.7 * n as f64 / (n as f64 + 300.0));
    /// let products = [512, 2048, 8192].map(|n| ([n; 3], took(n))).to_vec();
    /// let measured = Measured { products, ..Measured::default() };
    /// let fitted = Efficiency::default().measured(&cluster, 989.4e12, &measured)?;
    /// assert!((fitted.gemm - 0.7).abs() < 1e-9 && (fitted.half_width - 300.0).abs() < 1e-6);
    /// # Ok::<(), quintet_planner::Invalid>(())
    /// ```
    ///
    /// # Errors
    /// A time that is none, or less than the peaks allow.
    pub fn measured(
        self,
        cluster: &Cluster,
        peak: f64,
        measured: &Measured,
    ) -> Result<Self, Invalid> {
        let mut fitted = self;
        let mut shares = Vec::new();
        for ([m, n, k], seconds) in &measured.products {
            let what = format!("a product of {m} x {n} x {k}");
            let operations = 2.0 * *m as f64 * *n as f64 * *k as f64;
            let share = share(&what, operations, *seconds, peak)?;
            shares.push((*m.min(n).min(k) as f64, share));
        }
        if let Some((gemm, half_width)) = line(&shares, self.half_width) {
            (fitted.gemm, fitted.half_width) = (gemm, half_width);
        }
        let of = |what: &str, all: &[(f64, f64)], peak: f64, kept: f64| {
            let mut done = [0.0; 2];
            for &(amount, seconds) in all {
                share(what, amount, seconds, peak)?;
                done = [done[0] + amount, done[1] + seconds];
            }
            Ok(if all.is_empty() {
                kept
            } else {
                done[0] / done[1] / peak
            })
        };
        fitted.attention = of("attention", &measured.attention, peak, self.attention)?;
        let bandwidth = cluster.memory_bandwidth;
        fitted.memory = of(
            "a pass over memory",
            &measured.memory,
            bandwidth,
            self.memory,
        )?;
        Ok(fitted)
    }
}

/// The share of a peak at which so much was done; a little above 1 is the clock's fault.
fn share(what: &str, amount: f64, seconds: f64, peak: f64) -> Result<f64, Invalid> {
    let share = amount / seconds / peak;
    if !(seconds.is_finite() && seconds > 0.0 && amount > 0.0) {
        return Err(Invalid(format!(
            "{what} took {seconds} s; a time is above 0, of something that is above 0"
        )));
    }
    if share > 1.05 {
        return Err(Invalid(format!(
            "{what} took {:.3e} s, {share:.2} times as fast as the cluster's peak of {peak:.3e} a second allows",
            seconds
        )));
    }
    Ok(share)
}

/// The share of the widest products and the width of half of it; with one width alone that stays.
fn line(shares: &[(f64, f64)], half_width: f64) -> Option<(f64, f64)> {
    let &(first, _) = shares.first()?;
    // Of residuals 1 - share (a + b / width).
    let (mut aa, mut ab, mut bb, mut a1, mut b1) = (0.0, 0.0, 0.0, 0.0, 0.0);
    for &(width, share) in shares {
        let narrow = share / width;
        aa += share * share;
        ab += share * narrow;
        bb += narrow * narrow;
        a1 += share;
        b1 += narrow;
    }
    let determinant = aa * bb - ab * ab;
    let several = shares.iter().any(|(width, _)| *width != first);
    if several && determinant > 0.0 {
        let (a, b) = (
            (a1 * bb - b1 * ab) / determinant,
            (aa * b1 - ab * a1) / determinant,
        );
        if a > 0.0 && b >= 0.0 {
            return Some((1.0 / a, b / a));
        }
    }
    // All alike, or narrow ones faster: one share for the widths as they are.
    let half = if several { 0.0 } else { half_width };
    let (mut up, mut down) = (0.0, 0.0);
    for &(width, share) in shares {
        let x = share * (1.0 + half / width);
        (up, down) = (up + x * x, down + x);
    }
    Some((up / down, half))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fit(products: &[(usize, f64)]) -> Efficiency {
        let cluster = Cluster::preset("h100", 8).unwrap();
        let of = |&(n, share): &(usize, f64)| ([n; 3], 2.0 * (n as f64).powi(3) / 1e12 / share);
        let measured = Measured {
            products: products.iter().map(of).collect(),
            ..Measured::default()
        };
        Efficiency::default()
            .measured(&cluster, 1e12, &measured)
            .unwrap()
    }

    #[test]
    fn one_width_keeps_the_shape_of_the_curve() {
        let fitted = fit(&[(1024, 0.5)]);
        assert_eq!(fitted.half_width, Efficiency::default().half_width);
        assert!((fitted.gemm * fitted.at(1024.0) - 0.5).abs() < 1e-12);
        // Where wide products are no faster, there is no width of half.
        let flat = fit(&[(256, 0.6), (4096, 0.5)]);
        assert!(flat.half_width == 0.0 && (0.5..0.6).contains(&flat.gemm));
        // And nothing measured changes nothing.
        assert_eq!(fit(&[]), Efficiency::default());
    }

    #[test]
    fn shares_of_attention_and_memory_are_of_all_that_was_timed() {
        let cluster = Cluster::preset("h100", 8).unwrap();
        let b = cluster.memory_bandwidth;
        let mut measured = Measured {
            attention: Vec::from([(1e12, 2.0), (3e12, 6.0)]),
            memory: Vec::from([(b, 2.0)]),
            ..Measured::default()
        };
        let fitted = Efficiency::default()
            .measured(&cluster, 1e12, &measured)
            .unwrap();
        assert_eq!((fitted.attention, fitted.memory), (0.5, 0.5));
        measured.memory = Vec::from([(2.0 * b, 1.0)]);
        let refused = Efficiency::default().measured(&cluster, 1e12, &measured);
        assert!(refused.unwrap_err().0.contains("2.00 times as fast"));
        measured.memory = Vec::from([(b, f64::NAN)]);
        let refused = Efficiency::default().measured(&cluster, 1e12, &measured);
        assert!(refused.unwrap_err().0.contains("a time is above 0"));
    }
}
