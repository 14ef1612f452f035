//! How far two sets of named tensors are apart.

use std::collections::BTreeMap;

/// Logical tensors by name, in f64.
pub type Tensors = BTreeMap<String, Vec<f64>>;

/// The largest difference found, and where.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Difference {
    /// Max over tensors of `||x - r||2 / ||r||2` and of `max|x - r| / max|r|`; infinite where a
    /// reference that is zero is not met by zero, or a value is not finite.
    pub relative: f64,
    /// The tensor in which it was found.
    pub worst: String,
    /// Whether every element has the same bits.
    pub bit_equal: bool,
}

/// Compares `ours` with `reference`, tensor by tensor.
///
/// A tensor that one side lacks, or whose lengths differ, is infinitely far off.
#[must_use]
pub fn compare(ours: &Tensors, reference: &Tensors) -> Difference {
    compare_above(ours, reference, 0.0)
}

/// [`compare`], where a tensor smaller than `floor` times the largest of `reference` is taken to
/// be that large: for gradients, some of which are nothing but what is left of terms that cancel.
///
/// A softmax over one key has no gradient, and one over keys of equal values has none either: those
/// of q and k are then the rounding of terms as large as the gradients beside them, on either side.
/// Where the whole reference is zero, only zero meets it.
#[must_use]
pub fn compare_above(ours: &Tensors, reference: &Tensors, floor: f64) -> Difference {
    compare_sized(ours, reference, floor, 0.0)
}

/// [`compare_above`], where what all tensors are the remains of is known to have been of `size` at
/// least: a loss of balance whose routing is even has no gradient but the rounding of its terms.
#[must_use]
pub fn compare_sized(ours: &Tensors, reference: &Tensors, floor: f64, size: f64) -> Difference {
    let terms = Size {
        norm: floor * size,
        max: floor * size,
    };
    let least = reference
        .values()
        .map(|r| Size::of(r.iter().copied()))
        .fold(terms, |least, r| {
            least.max(Size {
                norm: floor * r.norm,
                max: floor * r.max,
            })
        });
    let mut found = Difference {
        bit_equal: true,
        ..Difference::default()
    };
    let names: std::collections::BTreeSet<&String> = ours.keys().chain(reference.keys()).collect();
    for name in names {
        let (relative, equal) = match (ours.get(name), reference.get(name)) {
            (Some(x), Some(r)) if x.len() == r.len() => (relative(x, r, least), same_bits(x, r)),
            _ => (f64::INFINITY, false),
        };
        found.bit_equal &= equal;
        if relative > found.relative || found.worst.is_empty() {
            found.relative = relative;
            found.worst.clone_from(name);
        }
    }
    found
}

/// `|x - r| / |r|`; infinite where r is zero and x is not, or either is not finite.
#[must_use]
pub fn relative_scalar(x: f64, r: f64) -> f64 {
    ratio((x - r).abs(), r.abs())
}

/// [`relative_scalar`], where an `r` smaller than `least` is taken to be that large.
#[must_use]
pub fn relative_scalar_above(x: f64, r: f64, least: f64) -> f64 {
    let size = r.abs();
    ratio((x - r).abs(), if size < least { least } else { size })
}

/// Two measures of a tensor.
#[derive(Debug, Clone, Copy, Default)]
struct Size {
    norm: f64,
    max: f64,
}

impl Size {
    fn of(values: impl Iterator<Item = f64> + Clone) -> Self {
        let max = values.clone().fold(
            0.0_f64,
            |m, v| if v.is_nan() { f64::NAN } else { m.max(v.abs()) },
        );
        Self {
            norm: values.map(|v| v * v).sum::<f64>().sqrt(),
            max,
        }
    }

    /// The larger of each; what is not a number stays.
    fn max(self, other: Self) -> Self {
        let larger = |a: f64, b: f64| if a < b { b } else { a };
        Self {
            norm: larger(self.norm, other.norm),
            max: larger(self.max, other.max),
        }
    }
}

fn relative(x: &[f64], r: &[f64], least: Size) -> f64 {
    let difference = Size::of(x.iter().zip(r).map(|(a, b)| a - b));
    let size = Size::of(r.iter().copied()).max(least);
    ratio(difference.norm, size.norm).max(ratio(difference.max, size.max))
}

fn ratio(difference: f64, size: f64) -> f64 {
    if difference == 0.0 && size.is_finite() {
        0.0
    } else if size > 0.0 && difference.is_finite() {
        difference / size
    } else {
        f64::INFINITY
    }
}

fn same_bits(x: &[f64], r: &[f64]) -> bool {
    x.iter().zip(r).all(|(a, b)| a.to_bits() == b.to_bits())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensors(values: &[(&str, &[f64])]) -> Tensors {
        values
            .iter()
            .map(|(n, v)| ((*n).to_string(), v.to_vec()))
            .collect()
    }

    #[test]
    fn names_the_worst_tensor() {
        let r = tensors(&[("a", &[1.0, 2.0]), ("b", &[3.0, 4.0])]);
        assert!(compare(&r, &r).bit_equal);
        let x = tensors(&[("a", &[1.0, 2.0]), ("b", &[3.0, 4.4])]);
        let d = compare(&x, &r);
        assert!((d.relative - 0.1).abs() < 1e-12 && d.worst == "b" && !d.bit_equal);
    }

    #[test]
    fn zero_must_be_met_by_zero_and_nan_by_nothing() {
        let zero = tensors(&[("a", &[0.0])]);
        assert_eq!(
            compare(&tensors(&[("a", &[1e-30])]), &zero).relative,
            f64::INFINITY
        );
        assert_eq!(compare(&zero, &zero).relative, 0.0);
        let nan = tensors(&[("a", &[f64::NAN])]);
        assert_eq!(compare(&nan, &nan).relative, f64::INFINITY);
        assert_eq!(
            compare(&nan, &tensors(&[("a", &[1.0])])).relative,
            f64::INFINITY
        );
    }

    #[test]
    fn what_cancels_is_measured_by_what_is_beside_it() {
        let r = tensors(&[("v", &[3.0, 4.0]), ("k", &[0.0])]);
        let x = tensors(&[("v", &[3.0, 4.0]), ("k", &[1e-16])]);
        assert_eq!(compare(&x, &r).relative, f64::INFINITY);
        let d = compare_above(&x, &r, 1e-5);
        assert!(
            (d.relative - 1e-16 / 4e-5).abs() < 1e-20 && d.worst == "k",
            "{d:?}"
        );
        // What is not small is measured as ever, and nothing but zero meets nothing.
        let x = tensors(&[("v", &[3.0, 4.4]), ("k", &[0.0])]);
        assert_eq!(compare_above(&x, &r, 1e-5), compare(&x, &r));
        let zero = tensors(&[("v", &[0.0, 0.0]), ("k", &[0.0])]);
        assert_eq!(compare_above(&x, &zero, 1e-5).relative, f64::INFINITY);
        let nan = tensors(&[("v", &[f64::NAN, 1.0]), ("k", &[0.0])]);
        assert_eq!(compare_above(&r, &nan, 1e-5).relative, f64::INFINITY);
    }

    #[test]
    fn remains_are_measured_by_what_cancelled() {
        let (r, x) = (tensors(&[("a", &[1e-17])]), tensors(&[("a", &[-1e-17])]));
        assert!(compare_above(&x, &r, 1e-5).relative > 1.0);
        assert!((compare_sized(&x, &r, 1e-5, 0.2).relative - 1e-11).abs() < 1e-16);
        let x = tensors(&[("a", &[1e-6])]);
        assert!(compare_sized(&x, &r, 1e-5, 0.2).relative > 0.4);
    }

    #[test]
    fn small_scalars_are_measured_by_the_least() {
        assert_eq!(relative_scalar_above(3.0, 2.0, 4.0), 0.25);
        assert_eq!(relative_scalar_above(3.0, 2.0, 1e-6), 0.5);
        assert_eq!(relative_scalar_above(f64::NAN, 1e-9, 1e-6), f64::INFINITY);
        assert_eq!(relative_scalar_above(1.0, f64::NAN, 1e-6), f64::INFINITY);
    }

    #[test]
    fn a_missing_tensor_is_infinitely_far() {
        let r = tensors(&[("a", &[1.0])]);
        assert_eq!(compare(&Tensors::new(), &r).relative, f64::INFINITY);
        assert_eq!(
            compare(&tensors(&[("a", &[1.0, 2.0])]), &r).relative,
            f64::INFINITY
        );
    }
}
