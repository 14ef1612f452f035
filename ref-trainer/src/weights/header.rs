//! What the header of a safetensors file must not say, looked at before the reader of that format
//! takes it: it would keep one of two tensors of the same name without a word, and adds up ends
//! that may be past any file.

use std::collections::BTreeSet;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Error, IgnoredAny, MapAccess, Visitor};

/// Finds a tensor that is there twice or ends past the file; a header that is none is left to the
/// reader.
///
/// # Errors
/// What is wrong with it.
pub(super) fn check(bytes: &[u8]) -> Result<(), String> {
    let Some((len, rest)) = bytes.split_first_chunk::<8>() else {
        return Ok(());
    };
    let len = usize::try_from(u64::from_le_bytes(*len)).unwrap_or(usize::MAX);
    let Some((header, data)) = rest.split_at_checked(len) else {
        return Ok(());
    };
    let found: Tensors = serde_json::from_slice(header).map_err(|e| e.to_string())?;
    match found.0.iter().find(|(_, end)| *end > data.len() as u64) {
        None => Ok(()),
        Some((name, end)) => Err(format!(
            "{name} ends at byte {end} of {} that are there",
            data.len()
        )),
    }
}

/// (name, end) of each tensor.
struct Tensors(Vec<(String, u64)>);

#[derive(Deserialize)]
struct Place {
    data_offsets: (u64, u64),
}

impl<'de> Deserialize<'de> for Tensors {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(Each)
    }
}

struct Each;

impl<'de> Visitor<'de> for Each {
    type Value = Tensors;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Tensors, M::Error> {
        let (mut names, mut all) = (BTreeSet::new(), Vec::new());
        while let Some(name) = map.next_key::<String>()? {
            if !names.insert(name.clone()) {
                return Err(M::Error::custom(format!("{name} is there twice")));
            }
            if name == "__metadata__" {
                map.next_value::<IgnoredAny>()?;
            } else {
                let place: Place = map.next_value()?;
                all.push((name, place.data_offsets.1));
            }
        }
        Ok(Tensors(all))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(header: &str, data: usize) -> Vec<u8> {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.resize(bytes.len() + data, 0);
        bytes
    }

    #[test]
    fn twice_and_past_the_end() {
        let one = r#""x": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}"#;
        assert_eq!(check(&file(&format!("{{{one}}}"), 2)), Ok(()));
        let twice = check(&file(&format!("{{{one}, {one}}}"), 2));
        assert!(twice.is_err_and(|e| e.contains("x is there twice")));
        let short = check(&file(&format!("{{{one}}}"), 1));
        assert_eq!(short, Err("x ends at byte 2 of 1 that are there".into()));
        // Ends whose sum wraps round.
        let each = (1u64 << 61) - 1;
        let tensor = |i: u64| {
            format!(
                r#""{i}": {{"dtype": "U8", "shape": [{each}], "data_offsets": [{}, {}]}}"#,
                i * each,
                (i + 1) * each
            )
        };
        let all: Vec<String> = (0..8).map(tensor).collect();
        assert!(check(&file(&format!("{{{}}}", all.join(",")), 8)).is_err());
        // What is no file at all is for the reader to say.
        assert_eq!(check(&[]), Ok(()));
        assert_eq!(check(&u64::MAX.to_le_bytes()), Ok(()));
    }
}
