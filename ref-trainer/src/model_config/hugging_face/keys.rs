//! One key of a `config.json`: there or not, and of the kind that it must be.

use serde_json::{Map, Value};

/// A file's keys.
pub(super) type Keys = Map<String, Value>;

/// A key's value; null counts as absent, as it does for Hugging Face.
pub(super) fn present<'a>(keys: &'a Keys, key: &str) -> Option<&'a Value> {
    keys.get(key).filter(|value| !value.is_null())
}

/// A whole number in `0..=most`.
pub(super) fn count(keys: &Keys, key: &str, most: usize) -> Result<Option<usize>, String> {
    whole(keys, key, (0, most))
}

/// A whole number in `1..=most`.
pub(super) fn length(keys: &Keys, key: &str, most: usize) -> Result<Option<usize>, String> {
    whole(keys, key, (1, most))
}

fn whole(keys: &Keys, key: &str, (least, most): (usize, usize)) -> Result<Option<usize>, String> {
    let Some(value) = present(keys, key) else {
        return Ok(None);
    };
    let len = value.as_u64().and_then(|len| usize::try_from(len).ok());
    match len {
        Some(len) if (least..=most).contains(&len) => Ok(Some(len)),
        _ => Err(format!(
            "{key} is {value}; it must be a whole number from {least} to {most}"
        )),
    }
}

/// The same, where it must be there.
pub(super) fn required(keys: &Keys, key: &str, most: usize) -> Result<usize, String> {
    let missing = || format!("{key} is missing; it must be a whole number from 1 to {most}");
    length(keys, key, most)?.ok_or_else(missing)
}

/// The same under one of two spellings; where both are there they must agree.
pub(super) fn either(keys: &Keys, spelt: [&str; 2], most: usize) -> Result<usize, String> {
    let [one, other] = spelt;
    match (length(keys, one, most)?, length(keys, other, most)?) {
        (Some(a), Some(b)) if a != b => {
            Err(format!("{one} is {a} and {other} is {b}; they must agree"))
        }
        (Some(len), _) | (_, Some(len)) => Ok(len),
        (None, None) => required(keys, one, most),
    }
}

/// A number.
pub(super) fn number(keys: &Keys, key: &str) -> Result<Option<f64>, String> {
    let Some(value) = present(keys, key) else {
        return Ok(None);
    };
    match value.as_f64().filter(|x| x.is_finite()) {
        Some(x) => Ok(Some(x)),
        None => Err(format!("{key} is {value}; it must be a number")),
    }
}

/// A flag, where it is there.
pub(super) fn flag(keys: &Keys, key: &str) -> Result<Option<bool>, String> {
    match present(keys, key) {
        None => Ok(None),
        Some(Value::Bool(set)) => Ok(Some(*set)),
        Some(value) => Err(format!("{key} is {value}; it must be true or false")),
    }
}

/// Refuses flags that are set otherwise than what is computed here.
pub(super) fn only(keys: &Keys, flags: &[(&str, bool)]) -> Result<(), String> {
    for (key, only) in flags {
        if let Some(set) = flag(keys, key)?
            && set != *only
        {
            return Err(format!("{key} is {set}; only {only} is computed here"));
        }
    }
    Ok(())
}
