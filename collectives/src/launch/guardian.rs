//! Whoever is left when the launcher is gone.

use std::{
    format,
    io::Write,
    os::unix::process::CommandExt,
    process::{Child, ChildStdin, Command, Stdio},
    string::{String, ToString},
    vec::Vec,
};

use super::Rank;

/// A shell that kills the groups it was last told of when the pipe to it ends.
pub(super) struct Guardian(Option<(Child, ChildStdin)>);

const GUARD: &str = "trap '' HUP INT TERM; live=; while read -r groups; do live=$groups; done; \
                     for group in $live; do kill -KILL -\"$group\" 2>/dev/null; done";

impl Guardian {
    /// None where there is no shell: then only the parent's death signal remains.
    pub(super) fn start() -> Self {
        let started = Command::new("/bin/sh")
            .args(["-c", GUARD])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn();
        Self(started.ok().and_then(|mut child| {
            let pipe = child.stdin.take()?;
            Some((child, pipe))
        }))
    }

    pub(super) fn watch(&mut self, ranks: &[Rank]) {
        let live: Vec<String> = ranks
            .iter()
            .filter(|rank| rank.status.is_none())
            .filter_map(|rank| Some(rank.group?.as_raw_nonzero().to_string()))
            .collect();
        if let Some((_, pipe)) = &mut self.0 {
            // A shell that is gone guards nothing; the ranks are still waited for here.
            let _ = pipe.write_all(format!("{}\n", live.join(" ")).as_bytes());
        }
    }

    pub(super) fn dismiss(&mut self) {
        self.watch(&[]);
        if let Some((mut child, pipe)) = self.0.take() {
            drop(pipe);
            let _ = child.wait();
        }
    }
}
