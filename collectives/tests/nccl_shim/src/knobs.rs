//! How the stand-in misbehaves on purpose: words, apart by semicolons, in `QUINTET_NCCL_SHIM` or given to
//! `quintetNcclOnHostSet`.
//!
//! ```text
//! version=21400         the version that it says it is
//! fail=CALL:CODE:TEXT   each CALL answers CODE, its last words are TEXT;   fail=  no more
//! broken=CODE           a communicator with something under way is found in this state
//! late=N                a kernel takes N looks longer
//! stall=1               no kernel ever ends;  stall=0  they do again
//! lost=RANK             kernels of this rank of any communicator never run
//! across=FOLDER         ranks are processes, which leave each other what they give in this folder
//! driver=PATH           memory and streams are those of this library, the stand-in for the driver
//! ```

use std::ffi::c_int;
use std::path::PathBuf;

/// What it was told.
#[derive(Debug, Clone)]
pub struct Knobs {
    /// The version that it says it is.
    pub version: c_int,
    /// Which call fails, with what code and words.
    pub fail: Option<(String, c_int, String)>,
    /// The state of communicators with something under way.
    pub broken: Option<c_int>,
    /// Looks that a kernel takes longer.
    pub late: u32,
    /// Whether nothing ends.
    pub stall: bool,
    /// The rank whose kernels never run.
    pub lost: Option<usize>,
    /// Where ranks that are processes meet.
    pub across: Option<PathBuf>,
    /// Whose memory and streams it works with.
    pub driver: Option<PathBuf>,
}

impl Default for Knobs {
    fn default() -> Self {
        Self {
            version: 23000,
            fail: None,
            broken: None,
            late: 1,
            stall: false,
            lost: None,
            across: None,
            driver: None,
        }
    }
}

impl Knobs {
    pub(crate) fn from_environment() -> Self {
        let mut knobs = Self::default();
        if let Ok(words) = std::env::var("QUINTET_NCCL_SHIM") {
            knobs.set(&words);
        }
        knobs
    }

    pub(crate) fn set(&mut self, words: &str) -> bool {
        let mut words = words
            .split(';')
            .map(str::trim)
            .filter(|word| !word.is_empty());
        words.all(|word| self.word(word).is_some())
    }

    fn word(&mut self, word: &str) -> Option<()> {
        let (name, value) = word.split_once('=')?;
        match name {
            "version" => self.version = value.parse().ok()?,
            "fail" if value.is_empty() => self.fail = None,
            "fail" => {
                let mut parts = value.splitn(3, ':');
                let (call, code) = (parts.next()?, parts.next()?);
                self.fail = Some((call.into(), code.parse().ok()?, parts.next()?.into()));
            }
            "broken" => self.broken = value.parse().ok(),
            "late" => self.late = value.parse().ok()?,
            "stall" => self.stall = value == "1",
            "lost" => self.lost = value.parse().ok(),
            "across" => self.across = Some(value.into()),
            "driver" => self.driver = Some(value.into()),
            _ => return None,
        }
        Some(())
    }

    pub(crate) fn fails(&self, call: &str) -> Option<(c_int, String)> {
        let (name, code, text) = self.fail.as_ref()?;
        (name == call).then(|| (*code, text.clone()))
    }
}
