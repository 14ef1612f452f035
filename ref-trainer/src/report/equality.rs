//! The equality table, printed.

use std::fmt;

use super::human::thousands;
use super::{EqualityTable, Verdict};

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Verdict::BitEqual => "bit-equal",
            Verdict::Ok => "ok",
            Verdict::Differs => "DIFFERS",
        })
    }
}

/// ```text
/// equality with one device (same seed, same batches)
///   step  quantity            ours    max diff       bound  verdict
///      3  loss             2.41873     2.4e-07     1.0e-05  ok
///      3  parameters                   0.0e+00              bit-equal
///
///   bytes      predicted       counted
///   dp         3,211,264     3,211,264  equal
/// ```
impl fmt::Display for EqualityTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "equality with {}", self.against)?;
        let names = self.rows.iter().map(|row| row.quantity.chars().count());
        let wide = names.chain([8]).max().unwrap_or(8);
        writeln!(
            f,
            "  step  {:<wide$}  {:>10}  {:>9}  {:>9}  verdict",
            "quantity", "ours", "max diff", "bound"
        )?;
        for row in &self.rows {
            let step = row.step.map_or("all".to_string(), |s| s.to_string());
            let value = row.value.map_or(String::new(), short);
            let verdict = row.verdict();
            let bound = if row.bound > 0.0 {
                format!("{:.1e}", row.bound)
            } else {
                String::new()
            };
            writeln!(
                f,
                "  {step:>4}  {:<wide$}  {value:>10}  {:>9}  {bound:>9}  {verdict}",
                row.quantity,
                format!("{:.1e}", row.difference),
            )?;
        }
        self.traffic(f)
    }
}

impl EqualityTable {
    fn traffic(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let groups: std::collections::BTreeSet<&String> = self
            .bytes_predicted
            .keys()
            .chain(self.bytes_counted.keys())
            .collect();
        if groups.is_empty() {
            return Ok(());
        }
        let wide = groups
            .iter()
            .map(|name| name.chars().count())
            .max()
            .unwrap_or(0)
            .max(14);
        writeln!(
            f,
            "\n  {:<wide$}  {:>16}  {:>16}",
            "bytes of group", "predicted", "counted"
        )?;
        for group in groups {
            let of = |map: &std::collections::BTreeMap<String, u64>| map.get(group).copied();
            let (predicted, counted) = (of(&self.bytes_predicted), of(&self.bytes_counted));
            let show = |n: Option<u64>| n.map_or("-".to_string(), thousands);
            let verdict = if predicted == counted {
                "equal"
            } else {
                "DIFFERS"
            };
            writeln!(
                f,
                "  {group:<wide$}  {:>16}  {:>16}  {verdict}",
                show(predicted),
                show(counted)
            )?;
        }
        Ok(())
    }
}

/// About six digits, wherever the point is.
fn short(value: f64) -> String {
    if value == 0.0 || (1e-3..1e4).contains(&value.abs()) {
        format!("{value:.5}")
    } else {
        format!("{value:.3e}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::EqualityRow;

    fn table() -> EqualityTable {
        let row = |step, quantity: &str, value, difference, bound, bit_equal| EqualityRow {
            step,
            quantity: quantity.into(),
            value,
            difference,
            bound,
            bit_equal,
        };
        EqualityTable {
            against: "one device (same seed, same batches)".into(),
            losses: Vec::new(),
            rows: vec![
                row(Some(300), "loss", Some(2.418_73), 2.4e-7, 1e-5, false),
                row(Some(300), "grad norm", Some(1.0e-9), 0.0, 0.0, true),
                row(
                    None,
                    "parameters (model.norm.weight)",
                    None,
                    f64::NAN,
                    1e-5,
                    false,
                ),
            ],
            bytes_predicted: [("dp".into(), 3_211_264), ("tp".into(), 9)].into(),
            bytes_counted: [("dp".into(), 3_211_264), ("pp".into(), 5)].into(),
        }
    }

    #[test]
    fn printed() {
        let golden = "\
equality with one device (same seed, same batches)
  step  quantity                              ours   max diff      bound  verdict
   300  loss                               2.41873     2.4e-7     1.0e-5  ok
   300  grad norm                         1.000e-9      0.0e0             bit-equal
   all  parameters (model.norm.weight)                    NaN     1.0e-5  DIFFERS

  bytes of group         predicted           counted
  dp                     3,211,264         3,211,264  equal
  pp                             -                 5  DIFFERS
  tp                             9                 -  DIFFERS
";
        assert_eq!(table().to_string(), golden);
    }

    #[test]
    fn holds_only_where_all_hold() {
        let mut table = table();
        assert!(!table.holds());
        table.rows.pop();
        assert!(!table.holds());
        table.bytes_counted = table.bytes_predicted.clone();
        assert!(table.holds());
        table.rows[0].difference = 1e-4;
        assert!(!table.holds());
        // No bound: only the same bits will do.
        table.rows[0] = EqualityRow {
            difference: 0.0,
            bound: 0.0,
            ..table.rows[0].clone()
        };
        assert!(!table.holds());
    }
}
