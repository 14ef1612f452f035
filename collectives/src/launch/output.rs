//! What ranks print, on its way to whoever started them.

use std::{
    format,
    io::{self, BufRead, BufReader, Read, Write},
    string::ToString,
    sync::Arc,
    thread,
    vec::Vec,
};

/// Who looks at what ranks print.
#[derive(Clone)]
pub(super) struct Ear(pub(super) Arc<dyn Fn(usize, &[u8]) -> bool + Send + Sync>);

impl core::fmt::Debug for Ear {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("Ear")
    }
}

/// Prints what a rank says, line by line.
pub(super) fn printer(
    prefix: &str,
    from: impl Read + Send + 'static,
    ear: impl Fn(&[u8]) -> bool + Send + 'static,
    to_stderr: bool,
) -> Option<thread::JoinHandle<()>> {
    let prefix = prefix.to_string();
    let thread = thread::Builder::new().name(format!("output {prefix}"));
    let body = move || {
        let mut reader = BufReader::new(from);
        let mut line = Vec::new();
        loop {
            line.clear();
            line.extend(prefix.bytes());
            // A line without end is printed in parts.
            let read = (&mut reader).take(LINE).read_until(b'\n', &mut line);
            if !matches!(read, Ok(n) if n > 0) || line.len() == prefix.len() {
                return;
            }
            if line.last() != Some(&b'\n') {
                line.push(b'\n');
            }
            if !ear(&line[prefix.len()..]) {
                continue;
            }
            // Nobody may be listening any more; the rank must not be held up by that.
            let _ = if to_stderr {
                io::stderr().lock().write_all(&line)
            } else {
                io::stdout().lock().write_all(&line)
            };
        }
    };
    thread.spawn(body).ok()
}

/// Bytes of the longest line that is printed in one part.
const LINE: u64 = 64 << 10;
