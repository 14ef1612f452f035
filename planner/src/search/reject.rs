//! Why layouts do not go.

use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::vec::Vec;

use crate::closed::held::Held;
use crate::{Batch, Invalid, Layout};

/// One rule, and how often it was broken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rejected {
    /// The rule: a sentence about one layout with its numbers left out.
    pub rule: String,
    /// Layouts that broke it, or meshes where all of a mesh does.
    pub count: u64,
    /// The sentence about the first of them, with what would have to change.
    pub example: String,
}

/// The layout that is over memory by least.
#[derive(Debug, Clone, PartialEq)]
pub struct Tightest {
    /// How it is cut.
    pub layout: Layout,
    /// How much it learns from at once.
    pub batch: Batch,
    /// What its fullest rank would hold.
    pub held: Held,
}

/// Rules that only figures judge.
const OVER: &str = "over memory";
const SLOWER: &str = "slower than those shown, whatever the schedule";

/// Rules as they are broken.
#[derive(Debug, Default)]
pub(super) struct Rules(BTreeMap<String, (u64, String)>);

impl Rules {
    pub(super) fn broken(&mut self, invalid: &Invalid) {
        self.counted(invalid, 1);
    }

    /// The same sentence, so many times.
    pub(super) fn counted(&mut self, invalid: &Invalid, count: u64) {
        let entry = self.0.entry(rule(&invalid.0));
        entry.or_insert_with(|| (0, invalid.0.clone())).0 += count;
    }

    pub(super) fn over_memory(&mut self, count: u64, example: impl FnOnce() -> String) {
        self.figures(OVER, count, example);
    }

    pub(super) fn slower(&mut self, count: u64) {
        self.figures(SLOWER, count, || {
            String::from(
                "what its layers compute and send alone takes longer than a whole step of those shown",
            )
        });
    }

    fn figures(&mut self, rule: &str, count: u64, example: impl FnOnce() -> String) {
        match self.0.get_mut(rule) {
            Some(entry) => entry.0 += count,
            None => {
                self.0.insert(String::from(rule), (count, example()));
            }
        }
    }

    pub(super) fn sorted(self) -> Vec<Rejected> {
        let of = |(rule, (count, example))| Rejected {
            rule,
            count,
            example,
        };
        let mut all: Vec<Rejected> = self.0.into_iter().map(of).collect();
        all.sort_by(|a, b| b.count.cmp(&a.count).then_with(|| a.rule.cmp(&b.rule)));
        all
    }
}

/// A sentence with its numbers left out, up to where it names the remedy.
fn rule(text: &str) -> String {
    let said = text.split([';', ':']).next().unwrap_or(text);
    let mut rule = String::new();
    for c in said.chars() {
        match (c.is_ascii_digit(), rule.ends_with('#')) {
            (true, true) => {}
            (true, false) => rule.push('#'),
            _ => rule.push(c),
        }
    }
    // The digit of a name is no number.
    rule.replace("#f#b", "1f1b").replace("zb-h#", "zb-h1")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rule_is_a_sentence_without_its_numbers() {
        let mut rules = Rules::default();
        for text in [
            "tp=3 does not divide 128 heads; divisors: 1, 2",
            "pp=127 is more stages than the model's 126 layers; use at most 126",
            "tp=16 does not divide 24 heads; divisors: 1",
        ] {
            rules.broken(&Invalid(String::from(text)));
        }
        let all = rules.sorted();
        assert_eq!(all[0].rule, "tp=# does not divide # heads");
        assert_eq!((all[0].count, all.len()), (2, 2));
        assert!(all[0].example.contains("divisors: 1, 2"));
        assert_eq!(
            rule("schedule zb-h1 or 1f1b of 12"),
            "schedule zb-h1 or 1f1b of #"
        );
    }
}
