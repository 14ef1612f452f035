//! Starting the ranks of one host as processes (`std`, unix).
//!
//! ```text
//! Launch::new(4, "program").run()
//!    |-- store            the ranks meet here; it outlives any of them
//!    |-- rank 0..3        each a process group of its own, output prefixed with [rank]
//!    +-- guardian         a shell at the other end of a pipe: when this process is gone, however it
//!                         went, the pipe ends and the groups are killed
//! ```
//!
//! A rank that fails is waited for by the others for a moment, so that they can say whom they lost;
//! then they are asked to end, and then killed. SIGINT, SIGTERM and SIGHUP are passed on. What ranks
//! print can be looked at on its way ([`Launch::listen`]).

use std::{
    ffi::{OsStr, OsString},
    format,
    os::unix::process::{CommandExt, ExitStatusExt},
    process::{Child, Command, ExitStatus, Stdio},
    string::{String, ToString},
    sync::Arc,
    thread,
    time::{Duration, Instant},
    vec::Vec,
};

use rustix::process::{Pid, Signal, kill_process_group};

use crate::{
    Error, Result,
    environment::{OURS, Variables},
    store::StoreServer,
    transport::socket::random_u64,
};

mod guardian;
mod output;
mod signals;

use guardian::Guardian;
use output::{Ear, printer};
use signals::Signals;

/// Ranks to be started on this host.
///
/// ```no_run
/// use quintet_collectives::launch::Launch;
/// let ended = Launch::new(4, "./program").args(["--steps", "10"]).run()?;
/// std::process::exit(ended.code());
/// # #[allow(unreachable_code)]
/// # Ok::<(), quintet_collectives::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Launch {
    ranks: usize,
    program: OsString,
    args: Vec<OsString>,
    variables: Vec<(OsString, OsString)>,
    patience: Duration,
    signals_wait: bool,
    bare: bool,
    ear: Ear,
}

/// How a launch ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ended {
    /// The rank that failed first, one that a signal ended before all that ended by themselves; none
    /// where all ended well or a signal came.
    pub first: Option<usize>,
    /// Its exit code, if it had one.
    pub exit: Option<i32>,
    /// The signal that ended it, or that this process was asked to end with.
    pub signal: Option<i32>,
}

impl Ended {
    /// What a shell would say: the exit code, or 128 and the signal.
    #[must_use]
    pub fn code(&self) -> i32 {
        match (self.exit, self.signal) {
            (Some(code), _) => code,
            (None, Some(signal)) => 128 + signal,
            (None, None) => 0,
        }
    }
}

impl Launch {
    /// `ranks` processes of `program`.
    #[must_use]
    pub fn new(ranks: usize, program: impl AsRef<OsStr>) -> Self {
        Self {
            ranks,
            program: program.as_ref().to_os_string(),
            args: Vec::new(),
            variables: Vec::new(),
            patience: Duration::from_secs(2),
            signals_wait: false,
            bare: false,
            ear: Ear(Arc::new(|_, _| true)),
        }
    }

    /// `ear` is given each line that a rank prints and that passes by here, and says whether it is
    /// printed. It is called on a thread of that rank's output.
    #[must_use]
    pub fn listen(mut self, ear: impl Fn(usize, &[u8]) -> bool + Send + Sync + 'static) -> Self {
        self.ear = Ear(Arc::new(ear));
        self
    }

    /// A first signal is passed on and nothing more: the ranks take the time they need to end. The
    /// second kills them.
    #[must_use]
    pub fn signals_wait(mut self) -> Self {
        self.signals_wait = true;
        self
    }

    /// Whose stdout is this process's own, a terminal where that is one, and whose stderr is printed
    /// without the rank before each line.
    #[must_use]
    pub fn bare(mut self) -> Self {
        self.bare = true;
        self
    }

    /// With these arguments.
    #[must_use]
    pub fn args<S: AsRef<OsStr>>(mut self, args: impl IntoIterator<Item = S>) -> Self {
        let args = args.into_iter().map(|arg| arg.as_ref().to_os_string());
        self.args.extend(args);
        self
    }

    /// With this environment variable beside those of this process.
    #[must_use]
    pub fn env(mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        let pair = (name.as_ref().to_os_string(), value.as_ref().to_os_string());
        self.variables.push(pair);
        self
    }

    /// How long the others may go on after a rank has failed, and then again after they were asked
    /// to end (default: two seconds).
    #[must_use]
    pub fn patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// Starts the ranks and waits for all of them. What they print is printed here, each line
    /// behind `[rank]`. Nothing they started is left in their process groups afterwards.
    ///
    /// # Errors
    /// [`Error::Layout`] for no ranks, [`Error::System`] where the program cannot be started.
    pub fn run(&self) -> Result<Ended> {
        if self.ranks == 0 {
            return Err(Error::Layout(String::from(
                "a launch has at least one rank",
            )));
        }
        let secret = format!("{:016x}{:016x}", random_u64()?, random_u64()?);
        let run = format!("launch-{:016x}", random_u64()?);
        let store = StoreServer::start(
            0..=0,
            "127.0.0.1",
            &format!("{run}/{OURS}"),
            secret.as_bytes(),
        )?;
        let signals = Signals::listen()?;
        let mut ranks = Ranks {
            children: Vec::new(),
            guardian: Guardian::start(),
        };
        let common = [
            ("QUINTET_WORLD_SIZE", self.ranks.to_string()),
            ("QUINTET_LOCAL_WORLD_SIZE", self.ranks.to_string()),
            ("QUINTET_MASTER_ADDR", String::from("127.0.0.1")),
            ("QUINTET_MASTER_PORT", store.port().to_string()),
            ("QUINTET_MASTER_SERVED", String::from("1")),
            ("QUINTET_RUN_ID", run),
            ("QUINTET_SECRET", secret),
            (PARENT, std::process::id().to_string()),
        ];
        for rank in 0..self.ranks {
            ranks.start(self.command(rank, &common), rank, self)?;
        }
        let ended = ranks.wait(&signals, self);
        drop(ranks);
        drop(store);
        Ok(ended)
    }

    fn command(&self, rank: usize, common: &[(&str, String)]) -> Command {
        let mut command = Command::new(&self.program);
        command
            .args(&self.args)
            .envs(common.iter().map(|(name, value)| (name, value)))
            .env("QUINTET_RANK", rank.to_string())
            .env("QUINTET_LOCAL_RANK", rank.to_string())
            .envs(self.variables.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stdout(if self.bare {
                Stdio::inherit()
            } else {
                Stdio::piped()
            })
            .stderr(Stdio::piped())
            // Signals of a terminal come to the launcher alone, which passes them on.
            .process_group(0);
        command
    }
}

/// The variable that holds the launcher's process number.
const PARENT: &str = "QUINTET_LAUNCHER_PID";

/// Makes the end of the launcher that started this very process the end of this process (Linux). A
/// process further down is left to the guardian.
pub(crate) fn tie(variables: &Variables) -> Result<()> {
    let Some(parent) = variables.get(PARENT) else {
        return Ok(());
    };
    #[cfg(target_os = "linux")]
    {
        let is_parent = || {
            rustix::process::getppid()
                .is_some_and(|pid| pid.as_raw_nonzero().to_string() == *parent)
        };
        if is_parent() {
            let tied = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
            // The launcher may have ended in between, and no signal come.
            if tied.is_ok() && !is_parent() {
                return Err(Error::Environment(String::from(
                    "the launcher of this rank has ended",
                )));
            }
        }
    }
    let _ = parent;
    Ok(())
}

/// The started ranks; whoever is left is killed when it is dropped.
struct Ranks {
    children: Vec<Rank>,
    guardian: Guardian,
}

struct Rank {
    child: Child,
    group: Option<Pid>,
    /// Becomes readable when the process ends.
    #[cfg(target_os = "linux")]
    end: Option<std::os::fd::OwnedFd>,
    status: Option<ExitStatus>,
    printers: Vec<thread::JoinHandle<()>>,
}

impl Ranks {
    fn start(&mut self, mut command: Command, rank: usize, launch: &Launch) -> Result<()> {
        let prefix = if launch.bare {
            String::new()
        } else {
            format!("[{rank}] ")
        };
        let ear = || {
            let ear = launch.ear.0.clone();
            move |line: &[u8]| ear(rank, line)
        };
        let started = command.spawn().map_err(|e| Error::System {
            what: "start a rank",
            reason: format!("{}: {e}", command.get_program().to_string_lossy()),
        });
        let mut child = started?;
        let group = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        let (out, err) = (child.stdout.take(), child.stderr.take());
        let mut printers = Vec::new();
        if let Some(out) = out {
            printers.extend(printer(&prefix, out, ear(), false));
        }
        if let Some(err) = err {
            printers.extend(printer(&prefix, err, ear(), true));
        }
        self.children.push(Rank {
            #[cfg(target_os = "linux")]
            end: group.and_then(|pid| {
                use rustix::process::{PidfdFlags, pidfd_open};
                pidfd_open(pid, PidfdFlags::empty()).ok()
            }),
            child,
            group,
            status: None,
            printers,
        });
        self.guardian.watch(&self.children);
        Ok(())
    }

    fn wait(&mut self, signals: &Signals, launch: &Launch) -> Ended {
        let patience = launch.patience;
        let mut ended = Ended {
            first: None,
            exit: None,
            signal: None,
        };
        // When the rest is asked to end, and when it is killed.
        let mut steps: Option<(Instant, Instant)> = None;
        let mut asked = false;
        loop {
            for (rank, status) in self.reap() {
                if !status.success() && ended.first.is_none() && ended.signal.is_none() {
                    ended.first = Some(rank);
                    (ended.exit, ended.signal) = (status.code(), status.signal());
                    let ask = Instant::now() + patience;
                    steps.get_or_insert((ask, ask + patience));
                } else if status.signal().is_some() && ended.exit.is_some() && !asked {
                    // Nobody here sent it: those that ended by themselves have lost this one, and
                    // were only seen earlier.
                    ended.first = Some(rank);
                    (ended.exit, ended.signal) = (None, status.signal());
                }
            }
            if self.children.iter().all(|rank| rank.status.is_some()) {
                return ended;
            }
            if let Some(signal) = signals.take() {
                self.signal(signal);
                if ended.first.is_none() {
                    ended.signal = Some(signal.as_raw());
                }
                let now = Instant::now();
                // The second one means it.
                if asked {
                    steps = Some((now, now));
                } else if !launch.signals_wait {
                    steps = Some((now, now + 2 * patience));
                }
                asked = true;
            }
            if let Some((ask, kill)) = steps {
                let now = Instant::now();
                if now >= kill {
                    self.signal(Signal::KILL);
                } else if now >= ask && !core::mem::replace(&mut asked, true) {
                    self.signal(Signal::TERM);
                }
            }
            self.doze();
        }
    }

    /// Sleeps until a rank ends, or for a moment: signals and deadlines are looked at in between.
    /// The sooner an end is seen, the surer it is known to be the first.
    fn doze(&self) {
        #[cfg(target_os = "linux")]
        {
            use rustix::event::{PollFd, PollFlags, Timespec, poll};
            let live = self.children.iter().filter(|rank| rank.status.is_none());
            let ends: Option<Vec<_>> = live.map(|rank| rank.end.as_ref()).collect();
            if let Some(ends) = ends {
                let fds = ends.into_iter().map(|fd| PollFd::new(fd, PollFlags::IN));
                let moment = Timespec {
                    tv_sec: 0,
                    tv_nsec: 25_000_000,
                };
                // A signal ends it early.
                let _ = poll(&mut fds.collect::<Vec<_>>(), Some(&moment));
                return;
            }
        }
        thread::sleep(Duration::from_millis(5));
    }

    /// Ranks that have ended since the last look.
    fn reap(&mut self) -> Vec<(usize, ExitStatus)> {
        let mut ended = Vec::new();
        for (number, rank) in self.children.iter_mut().enumerate() {
            if rank.status.is_none()
                && let Ok(Some(status)) = rank.child.try_wait()
            {
                rank.status = Some(status);
                ended.push((number, status));
                // What it left behind in its group is nobody's any more.
                if let Some(group) = rank.group {
                    let _ = kill_process_group(group, Signal::KILL);
                }
            }
        }
        if !ended.is_empty() {
            self.guardian.watch(&self.children);
        }
        ended
    }

    fn signal(&self, signal: Signal) {
        for rank in self.children.iter().filter(|rank| rank.status.is_none()) {
            if let Some(group) = rank.group {
                // It may have ended just now.
                let _ = kill_process_group(group, signal);
            }
        }
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        self.signal(Signal::KILL);
        for rank in &mut self.children {
            // Killed or ended: it can only succeed.
            let _ = rank.child.wait();
        }
        // Somebody who left the group may still hold the pipe; the rest has been printed by then.
        let until = Instant::now() + Duration::from_secs(1);
        let printing = |rank: &Rank| rank.printers.iter().any(|printer| !printer.is_finished());
        while self.children.iter().any(printing) && Instant::now() < until {
            thread::sleep(Duration::from_millis(1));
        }
        self.guardian.dismiss();
    }
}
