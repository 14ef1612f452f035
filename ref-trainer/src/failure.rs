//! How a run ends other than well: an exit code for scripts and one sentence for the person.

use std::fmt;
use std::io::{self, Write};
use std::process::ExitCode;

use serde::{Deserialize, Serialize};

use crate::data::DataError;
use crate::model_config::ModelError;

/// Exit codes of every subcommand.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[repr(u8)]
pub enum Exit {
    /// All is well.
    Fine = 0,
    /// The command line, or a layout that cannot be.
    Usage = 2,
    /// Data, a model or a checkpoint could not be read or written.
    Data = 3,
    /// `verify` found that two ways of computing differ.
    Mismatch = 4,
    /// A peer was lost, a wait passed its deadline, or the run was aborted.
    Aborted = 5,
}

impl Exit {
    /// The meaning of an exit code of this program.
    #[must_use]
    pub fn of(code: i32) -> Option<Self> {
        let all = [
            Self::Fine,
            Self::Usage,
            Self::Data,
            Self::Mismatch,
            Self::Aborted,
        ];
        all.into_iter().find(|&exit| exit as i32 == code)
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        ExitCode::from(exit as u8)
    }
}

/// What is wrong and what would be right, in one sentence.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// For scripts.
    pub exit: Exit,
    /// For the person; no full stop, no line break.
    pub sentence: String,
    /// The rank whose end this is a consequence of, where it is one.
    pub lost: Option<usize>,
}

/// The variable under which a rank's failure goes to the process that started it, which says the
/// first cause once for all, and not to the person.
pub const TO_PARENT: &str = "QUINTET_FAILURE_TO_PARENT";

/// What a line on stderr begins with that is a failure for that process.
const MARK: &str = "\u{1e}quintet failed ";

impl Failure {
    /// The failure in a line of a rank's output, if it is one.
    #[must_use]
    pub fn in_line(line: &[u8]) -> Option<Self> {
        serde_json::from_slice(line.strip_prefix(MARK.as_bytes())?).ok()
    }

    fn line(&self) -> String {
        let parent = std::env::var_os(TO_PARENT).is_some();
        match serde_json::to_string(self) {
            Ok(text) if parent => format!("{MARK}{text}\n"),
            _ => format!("quintet: {self}\n"),
        }
    }
}

/// Ends the program: what went wrong goes to stderr, its code to the caller.
#[must_use]
pub fn end(result: Result<Exit, Failure>) -> ExitCode {
    match result {
        Ok(exit) => exit.into(),
        Err(failure) => {
            let _ = io::stderr().write_all(failure.line().as_bytes());
            failure.exit.into()
        }
    }
}

impl Failure {
    /// Usage or layout: exit 2.
    pub fn usage(sentence: impl Into<String>) -> Self {
        Self {
            exit: Exit::Usage,
            sentence: one_line(sentence.into()),
            lost: None,
        }
    }

    /// Data or checkpoint: exit 3.
    pub fn data(sentence: impl Into<String>) -> Self {
        Self {
            exit: Exit::Data,
            sentence: one_line(sentence.into()),
            lost: None,
        }
    }

    /// A difference found: exit 4.
    pub fn mismatch(sentence: impl Into<String>) -> Self {
        Self {
            exit: Exit::Mismatch,
            sentence: one_line(sentence.into()),
            lost: None,
        }
    }

    /// Peer lost, timeout, abort: exit 5.
    pub fn aborted(sentence: impl Into<String>) -> Self {
        Self {
            exit: Exit::Aborted,
            sentence: one_line(sentence.into()),
            lost: None,
        }
    }

    /// A file that could not be read or written: exit 3. `verb` as in "cannot {verb} {path}".
    pub fn file(verb: &str, path: &std::path::Path, error: &std::io::Error) -> Self {
        Self::data(format!("cannot {verb} {}: {error}", path.display()))
    }
}

/// What came from an argument or a file shall neither break the line nor move the cursor.
fn one_line(sentence: String) -> String {
    if sentence.contains(char::is_control) {
        return sentence.replace(char::is_control, "\u{FFFD}");
    }
    sentence
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.sentence)
    }
}

impl std::error::Error for Failure {}

impl From<quintet_planner::config::Invalid> for Failure {
    fn from(invalid: quintet_planner::config::Invalid) -> Self {
        Self::usage(invalid.0)
    }
}

/// A layout is the caller's fault; whatever else a collective reports ends the run.
impl From<quintet_collectives::Error> for Failure {
    fn from(error: quintet_collectives::Error) -> Self {
        match error {
            quintet_collectives::Error::Layout(sentence)
            | quintet_collectives::Error::Environment(sentence)
            | quintet_collectives::Error::Library(sentence) => Self::usage(sentence),
            quintet_collectives::Error::PeerLost { rank, .. } => Self {
                lost: Some(rank),
                ..Self::aborted(error.to_string())
            },
            other => Self::aborted(other.to_string()),
        }
    }
}

impl From<quintet_kernels::Error> for Failure {
    fn from(error: quintet_kernels::Error) -> Self {
        match error {
            quintet_kernels::Error::Collective(inner) => inner.into(),
            #[cfg(feature = "cuda")]
            quintet_kernels::Error::Cuda(inner) if inner.is_missing() => {
                Self::usage(inner.to_string())
            }
            other => Self::aborted(other.to_string()),
        }
    }
}

impl From<quintet_parallel_layers::Error> for Failure {
    fn from(error: quintet_parallel_layers::Error) -> Self {
        match error {
            quintet_parallel_layers::Error::Collective(inner) => inner.into(),
            quintet_parallel_layers::Error::Kernel(inner) => inner.into(),
            other => Self::aborted(other.to_string()),
        }
    }
}

impl From<quintet_parallel_layers::pipeline::Error> for Failure {
    fn from(error: quintet_parallel_layers::pipeline::Error) -> Self {
        Self::aborted(error.to_string())
    }
}

impl From<quintet_zero::Error> for Failure {
    fn from(error: quintet_zero::Error) -> Self {
        match error {
            quintet_zero::Error::Wire(inner) => inner.into(),
            quintet_zero::Error::Kernel(inner) => inner.into(),
            quintet_zero::Error::Checkpoint(sentence) => Self::data(sentence),
            other => Self::aborted(other.to_string()),
        }
    }
}

impl From<quintet_planner::Error> for Failure {
    fn from(error: quintet_planner::Error) -> Self {
        match error {
            quintet_planner::Error::Invalid(inner) => inner.into(),
            quintet_planner::Error::Collective(inner) => inner.into(),
            quintet_planner::Error::Layer(inner) => inner.into(),
            quintet_planner::Error::Zero(inner) => inner.into(),
            quintet_planner::Error::Schedule(inner) => inner.into(),
            other => Self::aborted(other.to_string()),
        }
    }
}

impl From<crate::oracle::OracleError> for Failure {
    fn from(error: crate::oracle::OracleError) -> Self {
        Self::data(error.to_string())
    }
}

/// A name that stands for nothing is a slip on the command line; a file that is no model is data.
impl From<ModelError> for Failure {
    fn from(error: ModelError) -> Self {
        let sentence = error.to_string();
        match error {
            ModelError::Unknown(name) if !name.contains(['/', '.']) => Self::usage(sentence),
            _ => Self::data(sentence),
        }
    }
}

impl From<DataError> for Failure {
    fn from(error: DataError) -> Self {
        Self::data(error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn library_errors_keep_their_code_through_the_layers() {
        use quintet_collectives::Error as Collective;
        let layout = || Collective::Layout("tp=3".into());
        let len = || Collective::Len {
            op: "all_reduce",
            what: "buf",
            expected: 4,
            got: 3,
        };
        let through =
            |e| quintet_parallel_layers::Error::Kernel(quintet_kernels::Error::Collective(e));
        assert_eq!(Failure::from(layout()).exit, Exit::Usage);
        assert_eq!(Failure::from(through(layout())).exit, Exit::Usage);
        assert_eq!(Failure::from(through(len())).exit, Exit::Aborted);
        assert_eq!(Failure::from(through(len())).sentence, len().to_string());
    }

    #[test]
    fn a_missing_model_file_is_data_and_a_wrong_name_is_usage() {
        let exit = |name| Failure::from(crate::model_config::Model::named(name).unwrap_err()).exit;
        assert_eq!(exit("tinny"), Exit::Usage);
        assert_eq!(exit("no/such/config.json"), Exit::Data);
    }

    #[test]
    fn codes_are_the_contract() {
        let codes = [
            Exit::Fine,
            Exit::Usage,
            Exit::Data,
            Exit::Mismatch,
            Exit::Aborted,
        ];
        assert_eq!(codes.map(|e| e as u8), [0, 2, 3, 4, 5]);
    }
}
