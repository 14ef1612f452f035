//! Where in a program a collective was called: small enough to travel with every call.

use core::{fmt, panic::Location};

/// A place in a source file: the end of its path, and the line.
#[derive(Clone, Copy)]
pub struct Site(Place);

/// A place of this program need not be spelled out before somebody reads it.
#[derive(Clone, Copy)]
enum Place {
    Here(&'static Location<'static>),
    Told {
        path: [u8; Site::PATH],
        len: u8,
        line: u32,
    },
}

impl Site {
    /// Bytes of a path that are kept; of a longer one its end.
    pub const PATH: usize = 40;

    /// Where the caller of the caller stands, as `#[track_caller]` has it.
    #[must_use]
    #[track_caller]
    pub fn here() -> Self {
        Self(Place::Here(Location::caller()))
    }

    /// A place by path and line.
    #[must_use]
    pub fn new(path: &str, line: u32) -> Self {
        let end = end(path).as_bytes();
        let mut kept = [0; Self::PATH];
        kept[..end.len()].copy_from_slice(end);
        Self(Place::Told {
            path: kept,
            len: end.len() as u8,
            line,
        })
    }

    /// The end of the path.
    #[must_use]
    pub fn path(&self) -> &str {
        match &self.0 {
            Place::Here(place) => end(place.file()),
            Place::Told { path, len, .. } => {
                let len = usize::from(*len).min(Self::PATH);
                core::str::from_utf8(&path[..len]).unwrap_or("?")
            }
        }
    }

    /// The line, from 1.
    #[must_use]
    pub fn line(&self) -> u32 {
        match &self.0 {
            Place::Here(place) => place.line(),
            Place::Told { line, .. } => *line,
        }
    }
}

/// The last bytes of a path, as many as are kept.
fn end(path: &str) -> &str {
    let mut start = path.len().saturating_sub(Site::PATH);
    while !path.is_char_boundary(start) {
        start += 1;
    }
    &path[start..]
}

impl PartialEq for Site {
    fn eq(&self, other: &Self) -> bool {
        if let (Place::Here(one), Place::Here(two)) = (&self.0, &other.0)
            && core::ptr::eq(*one, *two)
        {
            return true;
        }
        self.line() == other.line() && self.path() == other.path()
    }
}

impl Eq for Site {}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.path(), self.line())
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

    #[test]
    fn a_place_is_the_same_however_it_is_known() {
        let (here, there) = (Site::here(), Site::here());
        assert_ne!(here.line(), 0);
        assert_eq!(here, Site::new(here.path(), here.line()));
        assert_ne!(here, Site::new(here.path(), here.line() + 1));
        assert_eq!(here == there, here.line() == there.line());
    }
}
