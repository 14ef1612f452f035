//! What a message and a fold cost, and the text they are kept in.
//!
//! ```text
//! [tcp]
//! latency 1.2e-5                          seconds until a message is there, beside its bytes
//! overhead 2e-6                           seconds that each message keeps its sender busy
//! send 1048576:2e-10 33554432:3e-10 -:4e-10   seconds a byte, while the buffer is at most so long
//! fold 1048576:1e-10 33554432:2e-10 -:3e-10
//! ```
//!
//! `#` starts a comment. A file holds any number of transports, each once, each with all four lines.

use alloc::{
    format,
    string::{String, ToString},
    vec::Vec,
};
use core::fmt::{self, Write as _};

use crate::{Error, Result};

/// Seconds a byte while the whole buffer is at most `up_to` bytes long.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Piece {
    /// Bytes of the whole buffer of a call; `u64::MAX` has no bound.
    pub up_to: u64,
    /// Seconds a byte.
    pub per_byte: f64,
}

/// Seconds a byte by the length of the buffer: fits L2, fits L3, in memory. The last piece has no
/// bound.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Curve(pub [Piece; 3]);

impl Curve {
    /// The same for every length.
    #[must_use]
    pub const fn flat(per_byte: f64) -> Self {
        let piece = Piece {
            up_to: u64::MAX,
            per_byte,
        };
        Self([piece; 3])
    }

    /// Bounds of 1 MiB and 32 MiB.
    #[must_use]
    pub const fn cached(l2: f64, l3: f64, memory: f64) -> Self {
        Self([
            Piece {
                up_to: 1 << 20,
                per_byte: l2,
            },
            Piece {
                up_to: 32 << 20,
                per_byte: l3,
            },
            Piece {
                up_to: u64::MAX,
                per_byte: memory,
            },
        ])
    }

    /// Seconds a byte for a buffer of `bytes`.
    #[must_use]
    pub fn at(&self, bytes: u64) -> f64 {
        let [small, middle, large] = self.0;
        if bytes <= small.up_to {
            small.per_byte
        } else if bytes <= middle.up_to {
            middle.per_byte
        } else {
            large.per_byte
        }
    }
}

/// What one transport costs. The defaults are round figures of small machines, to be replaced by
/// measured ones.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Constants {
    /// Seconds from the last byte sent to the receiver going on.
    pub latency: f64,
    /// Seconds that each message keeps its sender busy, whatever its length.
    pub overhead: f64,
    /// Sending.
    pub send: Curve,
    /// Folding what came onto what is there.
    pub fold: Curve,
}

const FOLD: Curve = Curve::cached(0.8e-10, 1.2e-10, 2.5e-10);

impl Constants {
    /// Threads of one process.
    pub const LOCAL: Self = Self {
        latency: 3e-6,
        overhead: 0.3e-6,
        send: Curve::cached(1e-10, 1.5e-10, 3e-10),
        fold: FOLD,
    };

    /// Processes over shared memory.
    pub const SHM: Self = Self {
        latency: 4e-6,
        overhead: 0.5e-6,
        send: Curve::cached(2e-10, 2.5e-10, 5e-10),
        fold: FOLD,
    };

    /// Processes over Unix sockets.
    pub const UNIX: Self = Self {
        latency: 8e-6,
        overhead: 3e-6,
        send: Curve::cached(3e-10, 4e-10, 6e-10),
        fold: FOLD,
    };

    /// TCP on a 10 Gbit/s network.
    pub const TCP: Self = Self {
        latency: 30e-6,
        overhead: 5e-6,
        send: Curve::flat(8e-10),
        fold: FOLD,
    };

    /// The default of a transport by its name, where there is one.
    #[must_use]
    pub fn of(transport: &str) -> Option<Self> {
        match transport {
            "local" | "sim" => Some(Self::LOCAL),
            "shm" => Some(Self::SHM),
            "unix" => Some(Self::UNIX),
            "tcp" => Some(Self::TCP),
            _ => None,
        }
    }
}

impl fmt::Display for Constants {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "latency {:e}", self.latency)?;
        writeln!(f, "overhead {:e}", self.overhead)?;
        for (name, curve) in [("send", &self.send), ("fold", &self.fold)] {
            write!(f, "{name}")?;
            for piece in curve.0 {
                match piece.up_to {
                    u64::MAX => write!(f, " -:{:e}", piece.per_byte)?,
                    up_to => write!(f, " {up_to}:{:e}", piece.per_byte)?,
                }
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

/// The text of some transports' constants; [`parse`] gives the very same numbers back.
///
/// ```
/// use quintet_collectives::cost::{Constants, parse, write};
/// let text = write(&[("local".into(), Constants::LOCAL), ("tcp".into(), Constants::TCP)]);
/// assert_eq!(parse(&text)?[1], ("tcp".to_string(), Constants::TCP));
/// # Ok::<(), quintet_collectives::Error>(())
/// ```
#[must_use]
pub fn write(all: &[(String, Constants)]) -> String {
    let mut text = String::new();
    for (name, constants) in all {
        // Writing to a string cannot fail.
        let _ = write!(text, "[{name}]\n{constants}");
    }
    text
}

/// Reads what [`write()`] wrote, or somebody by hand.
///
/// # Errors
/// [`Error::Constants`] naming the line.
pub fn parse(text: &str) -> Result<Vec<(String, Constants)>> {
    let mut all: Vec<(String, Draft)> = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.split('#').next().unwrap_or("").trim();
        let refuse = |reason: String| Error::Constants {
            line: number,
            reason,
        };
        if let Some(name) = line
            .strip_prefix('[')
            .and_then(|rest| rest.strip_suffix(']'))
        {
            if name.trim().is_empty() || name != name.trim() || name.contains(['[', ']']) {
                return Err(refuse(format!("{name:?} is no name of a transport")));
            }
            if all.iter().any(|(earlier, _)| earlier == name) {
                return Err(refuse(format!("{name} comes twice")));
            }
            all.push((name.to_string(), Draft::new(number)));
        } else if !line.is_empty() {
            let (_, draft) = all
                .last_mut()
                .ok_or_else(|| refuse("a transport such as [tcp] must come first".to_string()))?;
            draft.line(line).map_err(refuse)?;
        }
    }
    all.into_iter()
        .map(|(name, draft)| Ok((name, draft.finish()?)))
        .collect()
}

/// A transport whose lines have not all been read.
struct Draft {
    line: usize,
    latency: Option<f64>,
    overhead: Option<f64>,
    send: Option<Curve>,
    fold: Option<Curve>,
}

impl Draft {
    fn new(line: usize) -> Self {
        Self {
            line,
            latency: None,
            overhead: None,
            send: None,
            fold: None,
        }
    }

    fn line(&mut self, line: &str) -> Result<(), String> {
        let (key, value) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        let twice = match key {
            "latency" => self.latency.replace(seconds(value)?).is_some(),
            "overhead" => self.overhead.replace(seconds(value)?).is_some(),
            "send" => self.send.replace(curve(value)?).is_some(),
            "fold" => self.fold.replace(curve(value)?).is_some(),
            _ => {
                return Err(format!(
                    "{key:?} is none of latency, overhead, send and fold"
                ));
            }
        };
        if twice {
            return Err(format!("{key} comes twice"));
        }
        Ok(())
    }

    fn finish(self) -> Result<Constants> {
        let missing = |name: &str| Error::Constants {
            line: self.line,
            reason: format!("the transport that begins here has no {name}"),
        };
        Ok(Constants {
            latency: self.latency.ok_or_else(|| missing("latency"))?,
            overhead: self.overhead.ok_or_else(|| missing("overhead"))?,
            send: self.send.ok_or_else(|| missing("send"))?,
            fold: self.fold.ok_or_else(|| missing("fold"))?,
        })
    }
}

/// A time: finite, not negative, below an hour.
fn seconds(text: &str) -> Result<f64, String> {
    match text.trim().parse::<f64>() {
        Ok(seconds) if (0.0..3600.0).contains(&seconds) => Ok(seconds),
        _ => Err(format!(
            "{:?} is no time in seconds from 0 to below 3600",
            text.trim()
        )),
    }
}

fn curve(text: &str) -> Result<Curve, String> {
    let mut pieces = Vec::new();
    for word in text.split_whitespace() {
        let (up_to, per_byte) = word
            .split_once(':')
            .ok_or_else(|| format!("{word:?} is not bytes:seconds"))?;
        let up_to = match up_to {
            "-" => u64::MAX,
            digits => digits
                .parse()
                .map_err(|_| format!("{digits:?} is no number of bytes"))?,
        };
        pieces.push(Piece {
            up_to,
            per_byte: seconds(per_byte)?,
        });
    }
    let pieces: [Piece; 3] = pieces
        .try_into()
        .map_err(|got: Vec<Piece>| format!("{} pieces were given where 3 are needed", got.len()))?;
    if pieces[0].up_to > pieces[1].up_to || pieces[2].up_to != u64::MAX {
        return Err("the bounds must ascend, and the last must be -".to_string());
    }
    Ok(Curve(pieces))
}
