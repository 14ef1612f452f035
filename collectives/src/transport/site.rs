//! Where in a program a collective was called: small enough to travel with every call.

use core::{fmt, panic::Location};

/// A place in a source file: the end of its path, and the line.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Site {
    path: [u8; Self::PATH],
    len: u8,
    line: u32,
}

impl Site {
    /// Bytes of a path that are kept; of a longer one its end.
    pub const PATH: usize = 40;

    /// Where the caller of the caller stands, as `#[track_caller]` has it.
    #[must_use]
    #[track_caller]
    pub fn here() -> Self {
        let place = Location::caller();
        Self::new(place.file(), place.line())
    }

    /// A place by path and line.
    #[must_use]
    pub fn new(path: &str, line: u32) -> Self {
        let mut start = path.len().saturating_sub(Self::PATH);
        while !path.is_char_boundary(start) {
            start += 1;
        }
        let end = &path.as_bytes()[start..];
        let mut kept = [0; Self::PATH];
        kept[..end.len()].copy_from_slice(end);
        Self {
            path: kept,
            len: end.len() as u8,
            line,
        }
    }

    /// The end of the path.
    #[must_use]
    pub fn path(&self) -> &str {
        let len = usize::from(self.len).min(Self::PATH);
        core::str::from_utf8(&self.path[..len]).unwrap_or("?")
    }

    /// The line, from 1.
    #[must_use]
    pub fn line(&self) -> u32 {
        self.line
    }
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.path(), self.line)
    }
}

impl fmt::Debug for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Site({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    #[test]
    fn long_paths_keep_their_end() {
        let site = Site::new("src/main.rs", 7);
        assert_eq!(site.to_string(), "src/main.rs:7");
        let long = "\u{e9}".repeat(60);
        assert_eq!(Site::new(&long, 1).path(), "\u{e9}".repeat(20));
    }
}
