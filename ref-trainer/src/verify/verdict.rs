//! What a proof found, as it is printed.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;

use crate::failure::Failure;
use crate::tolerance::Each;

/// What a proof found; `--json` prints it.
#[derive(Debug, Clone, Serialize)]
pub struct Verdict {
    /// Whether everything holds.
    pub ok: bool,
    /// Steps compared.
    pub steps: u64,
    /// Worst relative difference of the loss from the oracle's.
    pub loss_rel: f64,
    /// Worst relative difference of a gradient (see [`Difference`](crate::compare::Difference)).
    pub grad_rel_max: f64,
    /// The parameter in which it was found.
    pub worst: String,
    /// Worst relative difference of a parameter after an update.
    pub param_rel_max: f64,
    /// Worst relative difference of the gradient's norm.
    pub grad_norm_rel: f64,
    /// Worst relative difference of the losses of balance (0 without experts).
    pub aux_rel: f64,
    /// Choices of experts in which two were as good as equal, and which the oracle took over.
    pub ties: u64,
    /// Whether every expert was chosen, and every choice dropped, as often as by the oracle.
    pub routed_equal: bool,
    /// The largest of `bounds`.
    pub bound: f64,
    /// What each of these must not exceed: what is promised in f64, else derived from how far
    /// roundings take the oracle (see [`crate::tolerance`]).
    pub bounds: Each,
    /// Which quantities have the twin's bits.
    pub bit_equal: BitEqual,
    /// The first copies that differ (a parameter from its master weight, too); empty where none do.
    pub copies_differ: String,
    /// Bytes sent by group, worked out before the first message.
    pub bytes_predicted: BTreeMap<String, u64>,
    /// Bytes sent by group, counted.
    pub bytes_counted: BTreeMap<String, u64>,
    /// Whether collectives were performed where a device's memory lies (by NCCL, or by copies and the fold
    /// kernel among ranks that share a device) and not through the host.
    pub on_device: bool,
    /// Bytes held by category on the fullest rank, at rest and at the highest, worked out before
    /// anything was allocated.
    pub memory_predicted: BTreeMap<String, Held>,
    /// The same as allocations were counted.
    pub memory_counted: BTreeMap<String, Held>,
    /// The first rank and category in which these differ; empty where none do.
    pub memory_differs: String,
}

/// Bytes of a category on one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Held {
    /// Between steps.
    pub at_rest: u64,
    /// The most during a step.
    pub peak: u64,
}

impl Verdict {
    /// One JSON object on a line.
    ///
    /// # Errors
    /// Where JSON refuses it.
    pub fn json(&self) -> Result<String, Failure> {
        serde_json::to_string(self)
            .map(|text| text + "\n")
            .map_err(|e| Failure::data(format!("the verdict cannot be written as JSON: {e}")))
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let said = |ok: bool| if ok { "ok" } else { "DIFFERS" };
        writeln!(
            f,
            "{} steps against the oracle (plain f64, one device)",
            self.steps
        )?;
        let worst = format!("gradients (worst: {})", self.worst);
        let (bits, bounds) = (self.bit_equal, self.bounds);
        for (what, value, bound, bits) in [
            ("loss", self.loss_rel, bounds.loss, bits.loss),
            (&worst, self.grad_rel_max, bounds.grads, bits.grads),
            (
                "gradient norm",
                self.grad_norm_rel,
                bounds.norm,
                bits.grad_norm,
            ),
            ("parameters", self.param_rel_max, bounds.params, bits.params),
            ("losses of balance", self.aux_rel, bounds.aux, false),
        ] {
            if what == "losses of balance" && value == 0.0 {
                continue;
            }
            let twin = if bits { ", the twin's bits" } else { "" };
            let said = said(value <= bound);
            writeln!(f, "  {what:<50} {value:>9.1e} of {bound:.1e}  {said}{twin}")?;
        }
        if self.ties > 0 {
            let what = "choices of experts that rounding decided";
            writeln!(f, "  {what:<50} {:>9}", self.ties)?;
        }
        if !self.routed_equal {
            writeln!(
                f,
                "  experts were not chosen as often as by the oracle: DIFFERS"
            )?;
        }
        let copies = if self.copies_differ.is_empty() {
            "equal"
        } else {
            &self.copies_differ
        };
        writeln!(f, "  copies on several ranks: {copies}")?;
        for (group, predicted) in &self.bytes_predicted {
            let counted = self.bytes_counted.get(group).copied().unwrap_or(0);
            let same = if counted == *predicted {
                "equal"
            } else {
                "DIFFERS"
            };
            writeln!(
                f,
                "  bytes of {group}: predicted {predicted}, counted {counted}, {same}"
            )?;
        }
        for (group, counted) in &self.bytes_counted {
            if !self.bytes_predicted.contains_key(group) {
                writeln!(
                    f,
                    "  bytes of {group}: predicted none, counted {counted}, DIFFERS"
                )?;
            }
        }
        if self.on_device {
            writeln!(f, "  collectives: performed where the device's memory lies")?;
        }
        for (category, predicted) in &self.memory_predicted {
            let (rest, peak) = (predicted.at_rest, predicted.peak);
            let counted = self.memory_counted.get(category).copied();
            let counted = counted.unwrap_or_default();
            let said = match counted == *predicted {
                true => "equal".into(),
                false => format!("{} at rest, DIFFERS", counted.at_rest),
            };
            writeln!(
                f,
                "  {category} on the fullest rank: predicted {peak} bytes, {rest} at rest; counted {}, {said}",
                counted.peak
            )?;
        }
        let memory = if self.memory_differs.is_empty() {
            "equal on every rank"
        } else {
            &self.memory_differs
        };
        writeln!(f, "  bytes allocated: {memory}")?;
        writeln!(
            f,
            "{}",
            if self.ok {
                "all ok"
            } else {
                "the layout is not what one device computes"
            }
        )
    }
}

/// Which quantities have the twin's bits, over all steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct BitEqual {
    /// The loss.
    pub loss: bool,
    /// Every gradient.
    pub grads: bool,
    /// The norm.
    pub grad_norm: bool,
    /// Every parameter.
    pub params: bool,
}
