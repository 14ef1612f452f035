//! Streams and listeners of either family, and how an address is tried.
//!
//! ```text
//! tcp:host:port      every address the name has, IPv6 and IPv4, each for a part of the time left
//! unix:@name         a name in the kernel (Linux): nothing is left behind by a crash
//! unix:/path         a socket file elsewhere, removed when the listener is dropped
//! ```

use std::{
    boxed::Box,
    format,
    io::{self, IoSlice, IoSliceMut, Read, Write},
    net::{
        IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs,
    },
    ops::RangeInclusive,
    os::{
        fd::{AsFd, BorrowedFd},
        unix::net::{UnixListener, UnixStream},
    },
    path::PathBuf,
    string::{String, ToString},
    thread,
    time::{Duration, Instant},
    vec,
    vec::Vec,
};

use super::faulty::Faulty;
use crate::{Error, Result};

/// A connection.
#[derive(Debug)]
pub(crate) enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
    /// One that goes wrong on purpose.
    Faulty(Box<Faulty>),
}

/// What accepts connections. The path of a socket file is removed with it.
#[derive(Debug)]
pub(crate) enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener, Option<PathBuf>),
}

impl Stream {
    pub(crate) fn set_nonblocking(&self, on: bool) -> io::Result<()> {
        match self {
            Self::Tcp(s) => s.set_nonblocking(on),
            Self::Unix(s) => s.set_nonblocking(on),
            Self::Faulty(f) => f.inner.set_nonblocking(on),
        }
    }

    /// How long a blocking read or write may take.
    pub(crate) fn set_timeout(&self, timeout: Duration) -> io::Result<()> {
        let least = timeout.max(Duration::from_millis(1));
        let timeout = Some(least);
        match self {
            Self::Tcp(s) => {
                s.set_read_timeout(timeout)?;
                s.set_write_timeout(timeout)
            }
            Self::Unix(s) => {
                s.set_read_timeout(timeout)?;
                s.set_write_timeout(timeout)
            }
            Self::Faulty(f) => f.inner.set_timeout(least),
        }
    }

    pub(crate) fn shutdown(&self, how: Shutdown) {
        // It may be gone already.
        let _ = match self {
            Self::Tcp(s) => s.shutdown(how),
            Self::Unix(s) => s.shutdown(how),
            Self::Faulty(f) => {
                f.inner.shutdown(how);
                Ok(())
            }
        };
    }

    pub(crate) fn read_vectored(&self, bufs: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        match self {
            Self::Tcp(s) => (&mut &*s).read_vectored(bufs),
            Self::Unix(s) => (&mut &*s).read_vectored(bufs),
            Self::Faulty(f) => f.read_vectored(bufs),
        }
    }

    pub(crate) fn write_vectored(&self, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Self::Tcp(s) => (&mut &*s).write_vectored(bufs),
            Self::Unix(s) => (&mut &*s).write_vectored(bufs),
            Self::Faulty(f) => f.write_vectored(bufs),
        }
    }

    pub(crate) fn write_all(&self, buf: &[u8]) -> io::Result<()> {
        match self {
            Self::Tcp(s) => (&mut &*s).write_all(buf),
            Self::Unix(s) => (&mut &*s).write_all(buf),
            Self::Faulty(f) => f.inner.write_all(buf),
        }
    }

    /// My end's address, where the family has one.
    pub(crate) fn local_ip(&self) -> Option<IpAddr> {
        match self {
            Self::Tcp(s) => s.local_addr().ok().map(|a| a.ip()),
            Self::Unix(_) => None,
            Self::Faulty(f) => f.inner.local_ip(),
        }
    }

    /// Whether it can be told how many bytes wake a sleeper, and is told so.
    pub(crate) fn wake_from(&self, bytes: usize) -> bool {
        #[cfg(target_os = "linux")]
        if let Self::Tcp(s) = self {
            super::kernel::wake_from(s, bytes);
            return true;
        }
        let _ = bytes;
        false
    }

    /// Whether the other end lacks something of what was written, as far as the system says.
    pub(crate) fn is_behind(&self) -> bool {
        match self {
            #[cfg(target_os = "linux")]
            Self::Tcp(s) => super::kernel::unacknowledged(s),
            Self::Faulty(f) => f.inner.is_behind(),
            // What is written lies with the other end at once.
            _ => false,
        }
    }

    /// Whether the other end is on this host.
    pub(crate) fn is_near(&self) -> bool {
        match self {
            Self::Tcp(s) => match (s.local_addr(), s.peer_addr()) {
                (Ok(mine), Ok(other)) => mine.ip() == other.ip(),
                _ => false,
            },
            Self::Unix(_) => true,
            Self::Faulty(f) => f.inner.is_near(),
        }
    }

    /// Small messages go at once; a host that is gone is noticed though nothing is being sent.
    pub(crate) fn tune(&self) {
        // Without these it works, only later or slower.
        match self {
            Self::Tcp(s) => {
                drop(s.set_nodelay(true));
                // A system's own choice may pace what it sends, which on a host only keeps it back.
                #[cfg(target_os = "linux")]
                if self.is_near() {
                    let _ = rustix::net::sockopt::set_tcp_congestion(s, "reno");
                }
            }
            // Tcp finds its own; a unix socket's default is a few turns for each large message.
            Self::Unix(s) => drop(rustix::net::sockopt::set_socket_send_buffer_size(
                s,
                UNIX_BUFFER,
            )),
            Self::Faulty(f) => f.inner.tune(),
        }
    }

    /// On a control connection the kernel gives up a peer's host that acknowledges nothing.
    pub(crate) fn watch(&self) {
        #[cfg(target_os = "linux")]
        if let Self::Tcp(s) = self {
            use rustix::net::sockopt;
            let _ = sockopt::set_socket_keepalive(s, true);
            let _ = sockopt::set_tcp_keepidle(s, Duration::from_secs(1));
            let _ = sockopt::set_tcp_keepintvl(s, Duration::from_secs(1));
            let _ = sockopt::set_tcp_keepcnt(s, 1);
            let _ = sockopt::set_tcp_user_timeout(s, SILENCE_MS);
        }
    }

    /// Another user's process may reach a name in the kernel; it is not let in.
    fn of_this_user(&self) -> bool {
        #[cfg(target_os = "linux")]
        if let Self::Unix(s) = self {
            let me = rustix::process::geteuid();
            return super::kernel::user_of(s).is_some_and(|user| user == me.as_raw() || user == 0);
        }
        true
    }
}

/// Bytes that a unix socket may hold, where the system allows.
const UNIX_BUFFER: usize = 4 << 20;

/// How long sent bytes may stay unacknowledged on a control connection.
#[cfg(target_os = "linux")]
const SILENCE_MS: u32 = 1400;

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(s) => s.as_fd(),
            Self::Unix(s) => s.as_fd(),
            Self::Faulty(f) => f.inner.as_fd(),
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(s) => s.as_fd(),
            Self::Unix(s, _) => s.as_fd(),
        }
    }
}

impl Listener {
    /// Listens on the first free port of `ports` (0: any): where `host` is this host's loopback, only
    /// there, else on all interfaces.
    pub(crate) fn tcp(ports: RangeInclusive<u16>, host: &str) -> Result<Self> {
        let ip = match host {
            "localhost" => Some(Ipv4Addr::LOCALHOST.into()),
            other => other.trim_matches(['[', ']']).parse().ok(),
        };
        let hosts = match ip.filter(IpAddr::is_loopback) {
            Some(ip) => vec![ip],
            // The first serves both families where the system has IPv6.
            None => vec![Ipv6Addr::UNSPECIFIED.into(), Ipv4Addr::UNSPECIFIED.into()],
        };
        let mut last = String::new();
        for port in ports.clone() {
            for &host in &hosts {
                match TcpListener::bind(SocketAddr::new(host, port)) {
                    Ok(listener) => return Self::ready(Self::Tcp(listener)),
                    Err(e) if e.kind() == io::ErrorKind::AddrInUse => {
                        last = format!("{}: {e}", SocketAddr::new(host, port));
                        break;
                    }
                    Err(e) => last = format!("{}: {e}", SocketAddr::new(host, port)),
                }
            }
        }
        let reason = if ports.start() == ports.end() {
            last
        } else {
            format!(
                "no port of {} to {} is free, last {last}",
                ports.start(),
                ports.end()
            )
        };
        Err(Error::System {
            what: "listen",
            reason,
        })
    }

    /// Listens under a name that nobody else has.
    pub(crate) fn unix() -> Result<Self> {
        let name = format!("quintet-{:016x}", super::random_u64()?);
        #[cfg(target_os = "linux")]
        let bound = {
            use std::os::linux::net::SocketAddrExt;
            std::os::unix::net::SocketAddr::from_abstract_name(&name)
                .and_then(|address| UnixListener::bind_addr(&address))
                .map(|listener| Self::Unix(listener, None))
        };
        #[cfg(not(target_os = "linux"))]
        let bound = {
            let path = std::env::temp_dir().join(&name);
            UnixListener::bind(&path).map(|listener| Self::Unix(listener, Some(path)))
        };
        let listener = bound.map_err(|e| Error::System {
            what: "listen",
            reason: format!("unix socket {name}: {e}"),
        })?;
        Self::ready(listener)
    }

    fn ready(self) -> Result<Self> {
        let outcome = match &self {
            Self::Tcp(l) => l.set_nonblocking(true),
            Self::Unix(l, _) => l.set_nonblocking(true),
        };
        outcome.map(|()| self).map_err(|e| Error::System {
            what: "listen",
            reason: e.to_string(),
        })
    }

    /// The port, of tcp.
    pub(crate) fn port(&self) -> u16 {
        match self {
            Self::Tcp(l) => l.local_addr().map_or(0, |a| a.port()),
            Self::Unix(..) => 0,
        }
    }

    /// Where others find it; `host` is used for tcp.
    pub(crate) fn address(&self, host: &str) -> String {
        match self {
            Self::Tcp(_) if host.contains(':') && !host.starts_with('[') => {
                format!("tcp:[{host}]:{}", self.port())
            }
            Self::Tcp(_) => format!("tcp:{host}:{}", self.port()),
            Self::Unix(l, path) => match path {
                Some(path) => format!("unix:{}", path.display()),
                None => format!("unix:@{}", abstract_name(l)),
            },
        }
    }

    /// A connection that is waiting, if there is one; strangers of this host are turned away.
    pub(crate) fn accept(&self) -> io::Result<Option<Stream>> {
        let stream = match self {
            Self::Tcp(l) => l.accept().map(|(s, _)| Stream::Tcp(s)),
            Self::Unix(l, _) => l.accept().map(|(s, _)| Stream::Unix(s)),
        };
        match stream {
            Ok(stream) => {
                stream.set_nonblocking(false)?;
                Ok(Some(stream).filter(Stream::of_this_user))
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(e) => Err(e),
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Self::Unix(_, Some(path)) = self {
            // Somebody may have tidied up before.
            let _ = std::fs::remove_file(path);
        }
    }
}

fn abstract_name(listener: &UnixListener) -> String {
    #[cfg(target_os = "linux")]
    {
        use std::os::linux::net::SocketAddrExt;
        if let Ok(address) = listener.local_addr()
            && let Some(name) = address.as_abstract_name()
        {
            return String::from_utf8_lossy(name).to_string();
        }
    }
    let _ = listener;
    String::new()
}

/// Connects to an address of [`Listener::address`], trying again until `until`.
pub(crate) fn connect(address: &str, until: Instant) -> Result<Stream> {
    let mut pause = Duration::from_millis(2);
    loop {
        let error = match attempt(address, until) {
            Ok(stream) => return Ok(stream),
            Err(error) => error,
        };
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Error::Rendezvous(format!(
                "{address} cannot be reached: {error}"
            )));
        }
        thread::sleep(pause.min(left));
        pause = (pause * 2).min(Duration::from_millis(250));
    }
}

/// One try of every address; the errors of all of them.
pub(crate) fn attempt(address: &str, until: Instant) -> Result<Stream, String> {
    if let Some(name) = address.strip_prefix("unix:@") {
        return connect_abstract(name)
            .map(Stream::Unix)
            .map_err(|e| e.to_string());
    }
    if let Some(path) = address.strip_prefix("unix:") {
        return UnixStream::connect(path)
            .map(Stream::Unix)
            .map_err(|e| e.to_string());
    }
    let name = address.strip_prefix("tcp:").unwrap_or(address);
    let found: Vec<SocketAddr> = name
        .to_socket_addrs()
        .map_err(|e| format!("{name} has no address: {e}"))?
        .collect();
    let mut errors = Vec::new();
    for (i, socket) in found.iter().enumerate() {
        let left = until.saturating_duration_since(Instant::now());
        // One dead address must not eat the time of those after it.
        let share = (left / (found.len() - i) as u32).max(Duration::from_millis(10));
        match TcpStream::connect_timeout(socket, share) {
            Ok(stream) => return Ok(Stream::Tcp(stream)),
            Err(e) => errors.push(format!("{socket}: {e}")),
        }
    }
    if errors.is_empty() {
        errors.push(format!("{name} has no address"));
    }
    Err(errors.join("; "))
}

fn connect_abstract(name: &str) -> io::Result<UnixStream> {
    #[cfg(target_os = "linux")]
    {
        use std::os::linux::net::SocketAddrExt;
        let address = std::os::unix::net::SocketAddr::from_abstract_name(name)?;
        UnixStream::connect_addr(&address)
    }
    #[cfg(not(target_os = "linux"))]
    Err(io::Error::new(
        io::ErrorKind::Unsupported,
        format!("@{name}: names in the kernel are Linux's"),
    ))
}
