//! What somebody demands instead of the model's choice.
//!
//! ```text
//! overrides  = [ rule { ";" rule } ]
//! rule       = operation ":" item { "," item }
//! item       = [ range ":" ] [ "^" ] algorithm [ "/" bytes ]
//! range      = [ bytes ] "-" [ bytes ]            bytes of the whole buffer, from .. below
//! bytes      = digits [ "k" | "m" | "g" ]         powers of 1024
//!
//! all_reduce:0-64k:recursive_doubling,64k-:ring/256k;all_to_all:^bruck
//! ```
//!
//! An item counts where the buffer is in its range; without a range, always. `^` forbids an
//! algorithm; the items without it that count are the only ones allowed, and of several the model
//! takes the fastest. `/` is the length of a chunk. Nothing is taken silently instead: a demand that
//! cannot be met is an error.

use alloc::{
    format,
    string::{String, ToString},
    vec::Vec,
};
use core::{fmt, ops::Range, str::FromStr};

use crate::{
    Algorithm, Error, Result,
    plan::{Operation, offered, pipelines},
};

/// A parsed override string; empty by default.
///
/// ```
/// use quintet_collectives::cost::Overrides;
/// let overrides: Overrides = "all_reduce:0-4k:recursive_doubling,4k-:ring".parse()?;
/// assert!("all_gather:tree".parse::<Overrides>().is_err()); // which no tree offers
/// # Ok::<(), quintet_collectives::Error>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Overrides {
    rules: Vec<(Operation, Vec<Item>)>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Item {
    range: Option<Range<u64>>,
    forbids: bool,
    algorithm: Algorithm,
    chunk: Option<u64>,
}

/// What the overrides say of one algorithm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Word {
    /// Nothing.
    Free,
    /// It is allowed, with this chunk length in bytes.
    Demanded(Option<u64>),
    /// It is forbidden.
    Forbidden,
    /// Others are demanded.
    Passed,
}

impl Overrides {
    /// Of `algorithm` for `operation` on a buffer of `bytes`.
    pub(super) fn word(&self, operation: Operation, bytes: u64, algorithm: Algorithm) -> Word {
        let rules = self.rules.iter().filter(|(op, _)| *op == operation);
        let counts = |item: &&Item| item.range.as_ref().is_none_or(|r| r.contains(&bytes));
        let (mut word, mut demands) = (Word::Free, false);
        for item in rules.flat_map(|(_, items)| items).filter(counts) {
            demands |= !item.forbids;
            if item.algorithm != algorithm {
                continue;
            }
            word = match word {
                _ if item.forbids => Word::Forbidden,
                Word::Free => Word::Demanded(item.chunk),
                earlier => earlier,
            };
        }
        if word == Word::Free && demands {
            return Word::Passed;
        }
        word
    }
}

impl FromStr for Overrides {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let refuse = |reason| Error::Override {
            text: text.to_string(),
            reason,
        };
        let mut rules = Vec::new();
        if text.trim().is_empty() {
            return Ok(Self::default());
        }
        for rule in text.split(';') {
            rules.push(parse_rule(rule.trim()).map_err(refuse)?);
        }
        Ok(Self { rules })
    }
}

fn parse_rule(rule: &str) -> Result<(Operation, Vec<Item>), String> {
    let (op, items) = rule
        .split_once(':')
        .ok_or_else(|| format!("{rule:?} is not operation:algorithm"))?;
    let op = Operation::ALL
        .into_iter()
        .find(|known| known.name() == op.trim())
        .ok_or_else(|| format!("{:?} is no operation", op.trim()))?;
    let items: Result<Vec<Item>, String> =
        items.split(',').map(|item| parse_item(op, item)).collect();
    Ok((op, items?))
}

fn parse_item(op: Operation, item: &str) -> Result<Item, String> {
    let (range, name) = match item.split_once(':') {
        Some((range, name)) => (Some(parse_range(range.trim())?), name.trim()),
        None => (None, item.trim()),
    };
    if range.is_some() && op == Operation::AllToAllV {
        return Err(
            "the bytes of all_to_all_v differ from rank to rank, so it takes no range".into(),
        );
    }
    let (forbids, name) = match name.strip_prefix('^') {
        Some(name) => (true, name),
        None => (false, name),
    };
    let (name, chunk) = match name.split_once('/') {
        Some((name, chunk)) => (name, Some(parse_bytes(chunk)?)),
        None => (name, None),
    };
    let algorithm = Algorithm::ALL
        .into_iter()
        .find(|known| known.name() == name)
        .ok_or_else(|| {
            let names = Algorithm::ALL.map(Algorithm::name).join(", ");
            format!("{name:?} is none of {names}")
        })?;
    if !offered(op, algorithm) {
        return Err(format!("{algorithm} does not offer {op}"));
    }
    if chunk.is_some() && (forbids || !pipelines(op, algorithm)) {
        return Err(format!("{op} by {algorithm} takes no chunk length here"));
    }
    if chunk == Some(0) {
        return Err("a chunk holds at least one byte".to_string());
    }
    Ok(Item {
        range,
        forbids,
        algorithm,
        chunk,
    })
}

fn parse_range(text: &str) -> Result<Range<u64>, String> {
    let (low, high) = text
        .split_once('-')
        .ok_or_else(|| format!("{text:?} is no range of bytes such as 4k-1m"))?;
    let low = if low.is_empty() { 0 } else { parse_bytes(low)? };
    let high = if high.is_empty() {
        u64::MAX
    } else {
        parse_bytes(high)?
    };
    if low >= high {
        return Err(format!("the range {text} is empty"));
    }
    Ok(low..high)
}

fn parse_bytes(text: &str) -> Result<u64, String> {
    let (digits, shift) = match text.as_bytes().last() {
        Some(b'k' | b'K') => (&text[..text.len() - 1], 10),
        Some(b'm' | b'M') => (&text[..text.len() - 1], 20),
        Some(b'g' | b'G') => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    let number = if digits.bytes().all(|byte| byte.is_ascii_digit()) {
        digits.parse::<u64>().ok()
    } else {
        None
    };
    number
        .and_then(|number| number.checked_mul(1 << shift))
        .ok_or_else(|| format!("{text:?} is no number of bytes"))
}

impl fmt::Display for Overrides {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (op, items)) in self.rules.iter().enumerate() {
            write!(f, "{}{op}:", if i > 0 { ";" } else { "" })?;
            for (i, item) in items.iter().enumerate() {
                f.write_str(if i > 0 { "," } else { "" })?;
                match &item.range {
                    Some(range) if range.end == u64::MAX => write!(f, "{}-:", range.start)?,
                    Some(range) => write!(f, "{}-{}:", range.start, range.end)?,
                    None => {}
                }
                write!(
                    f,
                    "{}{}",
                    if item.forbids { "^" } else { "" },
                    item.algorithm
                )?;
                if let Some(chunk) = item.chunk {
                    write!(f, "/{chunk}")?;
                }
            }
        }
        Ok(())
    }
}
