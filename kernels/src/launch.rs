//! What a kernel launch is, and what a device that launches must offer.
//!
//! A [`Launch`] takes calls by module (one `.cu` file), function name, grid, block, shared bytes
//! and arguments, and copies and frees memory in stream order. The emulator is one; a CUDA driver
//! with NVRTC is meant to be another. Nothing here waits but [`Launch::download`] and
//! [`Launch::synchronize`].

use alloc::string::ToString;

use crate::Error;

/// A compute capability, such as 80 for sm_80.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Arch(pub u32);

impl Arch {
    /// The most shared memory of one block in bytes, dynamic and static together (CUDA C++
    /// Programming Guide, table of technical specifications).
    #[must_use]
    pub const fn shared_limit(self) -> u64 {
        let kib = match self.0 {
            80 | 87 => 163,
            90 | 100 | 103 => 227,
            _ => 99,
        };
        kib * 1024
    }
}

/// One argument of a kernel, by value.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Arg {
    /// A device address; 0 where the kernel takes an absent array.
    Ptr(u64),
    /// A signed 32-bit number.
    I32(i32),
    /// An unsigned 32-bit number.
    U32(u32),
    /// A signed 64-bit number.
    I64(i64),
    /// An f32.
    F32(f32),
    /// An f64.
    F64(f64),
}

impl Arg {
    /// Bytes of the argument.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        match self {
            Arg::I32(_) | Arg::U32(_) | Arg::F32(_) => 4,
            Arg::Ptr(_) | Arg::I64(_) | Arg::F64(_) => 8,
        }
    }

    /// The argument's bits, low bytes first.
    #[must_use]
    pub const fn bits(&self) -> u64 {
        match *self {
            Arg::Ptr(x) => x,
            Arg::I32(x) => x as u32 as u64,
            Arg::U32(x) => x as u64,
            Arg::I64(x) => x as u64,
            Arg::F32(x) => x.to_bits() as u64,
            Arg::F64(x) => x.to_bits(),
        }
    }
}

/// One launch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Call<'a> {
    /// The `.cu` file, without its ending.
    pub module: &'a str,
    /// The kernel in it.
    pub function: &'a str,
    /// Blocks along x, y, z.
    pub grid: [u32; 3],
    /// Threads of a block along x, y, z.
    pub block: [u32; 3],
    /// Bytes of dynamic shared memory.
    pub shared: u32,
    /// Arguments in the kernel's order.
    pub args: &'a [Arg],
}

/// What a launch may exceed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Limit {
    /// Threads of a block, in all.
    Threads,
    /// Threads of a block along x, y (1024) or z (64).
    Block(usize),
    /// Blocks along x (2^31 - 1), y or z (65,535).
    Grid(usize),
    /// Bytes of shared memory.
    Shared,
    /// Bytes of arguments (4,096).
    ArgumentBytes,
    /// The kernel's `__launch_bounds__`.
    LaunchBounds,
}

impl core::fmt::Display for Limit {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let dim = |d: &usize| ["x", "y", "z"].get(*d).copied().unwrap_or("?");
        match self {
            Limit::Threads => f.write_str("threads in a block"),
            Limit::Block(d) => write!(f, "threads along {}", dim(d)),
            Limit::Grid(d) => write!(f, "blocks along {}", dim(d)),
            Limit::Shared => f.write_str("bytes of shared memory"),
            Limit::ArgumentBytes => f.write_str("bytes of arguments"),
            Limit::LaunchBounds => f.write_str("threads by its launch bounds"),
        }
    }
}

impl Call<'_> {
    /// Threads of a block.
    #[must_use]
    pub const fn threads(&self) -> u64 {
        self.block[0] as u64 * self.block[1] as u64 * self.block[2] as u64
    }

    /// Blocks of the grid.
    #[must_use]
    pub const fn blocks(&self) -> u64 {
        self.grid[0] as u64 * self.grid[1] as u64 * self.grid[2] as u64
    }

    /// Refuses what `cuLaunchKernel` refuses on `arch`, for a kernel whose launch bounds are
    /// `max_threads` and whose arguments have the bytes `params`.
    ///
    /// # Errors
    /// [`Error::Limit`] or [`Error::Arguments`].
    pub fn check(&self, arch: Arch, max_threads: u32, params: &[u32]) -> Result<(), Error> {
        self.within(Limit::Grid(0), 1, (1 << 31) - 1, u64::from(self.grid[0]))?;
        for d in 1..3 {
            self.within(Limit::Grid(d), 1, 65_535, u64::from(self.grid[d]))?;
        }
        for (d, most) in [1024, 1024, 64].into_iter().enumerate() {
            self.within(Limit::Block(d), 1, most, u64::from(self.block[d]))?;
        }
        self.within(Limit::Threads, 1, 1024, self.threads())?;
        self.within(
            Limit::LaunchBounds,
            1,
            u64::from(max_threads),
            self.threads(),
        )?;
        self.within(
            Limit::Shared,
            0,
            arch.shared_limit(),
            u64::from(self.shared),
        )?;
        self.within(Limit::ArgumentBytes, 0, 4096, param_bytes(params))?;
        if self.args.len() != params.len() {
            return Err(self.arguments("arguments", params.len(), self.args.len()));
        }
        for (arg, &bytes) in self.args.iter().zip(params) {
            if arg.bytes() != bytes as usize {
                return Err(self.arguments("bytes in an argument", bytes as usize, arg.bytes()));
            }
        }
        Ok(())
    }

    fn within(&self, limit: Limit, least: u64, most: u64, got: u64) -> Result<(), Error> {
        if (least..=most).contains(&got) {
            return Ok(());
        }
        Err(Error::Limit {
            kernel: self.function.to_string(),
            limit,
            least,
            most,
            got,
        })
    }

    fn arguments(&self, what: &'static str, expected: usize, got: usize) -> Error {
        Error::Arguments {
            kernel: self.function.to_string(),
            what,
            expected,
            got,
        }
    }
}

/// Bytes of a parameter block: each parameter at a multiple of its own bytes.
fn param_bytes(params: &[u32]) -> u64 {
    params.iter().fold(0, |end, &bytes| {
        let bytes = u64::from(bytes);
        end.next_multiple_of(bytes.clamp(1, 16)) + bytes
    })
}

/// A line of work: what is put on one stream happens in order. It is there once it is named.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Stream(pub u32);

/// A device that allocates, copies and launches. Addresses are the device's own; clones are the
/// same device.
pub trait Launch: Clone + Send + Sync + 'static {
    /// A point of a stream.
    type Event: Clone + Send + Sync + 'static;

    /// The device's compute capability.
    fn arch(&self) -> Arch;

    /// The device's multiprocessors: a product's tiles are chosen so that each has one.
    fn multiprocessors(&self) -> u32;

    /// Allocates `bytes`, at a multiple of 256; what lies there is anything. `tag` names it in
    /// reports.
    ///
    /// # Errors
    /// [`Error::Memory`] where the device has not that much left.
    fn alloc(&self, tag: &'static str, bytes: usize) -> Result<u64, Error>;

    /// Frees what [`Launch::alloc`] gave, after what is on `stream` so far.
    fn free(&self, stream: Stream, ptr: u64);

    /// Puts a launch on `stream`.
    ///
    /// # Errors
    /// [`Error::Limit`], [`Error::Arguments`] or [`Error::NoKernel`] for a call that can not
    /// start; [`Error::Fault`] where an earlier one failed.
    fn launch(&self, stream: Stream, call: &Call<'_>) -> Result<(), Error>;

    /// Sets `bytes` bytes to `value`, in stream order.
    ///
    /// # Errors
    /// [`Error::Fault`] where an earlier operation failed.
    fn fill(&self, stream: Stream, ptr: u64, value: u8, bytes: usize) -> Result<(), Error>;

    /// Copies between device addresses, in stream order.
    ///
    /// # Errors
    /// As [`Launch::fill`].
    fn copy(&self, stream: Stream, src: u64, dst: u64, bytes: usize) -> Result<(), Error>;

    /// Copies from the host, in stream order; `host` may be reused at once.
    ///
    /// # Errors
    /// As [`Launch::fill`].
    fn upload(&self, stream: Stream, host: &[u8], dst: u64) -> Result<(), Error>;

    /// Waits for `stream` and copies to the host.
    ///
    /// # Errors
    /// [`Error::Fault`] where this or an earlier operation failed.
    fn download(&self, stream: Stream, src: u64, host: &mut [u8]) -> Result<(), Error>;

    /// Marks what is on `stream` so far.
    fn record(&self, stream: Stream) -> Self::Event;

    /// Lets `stream` go on only after `event`.
    fn wait(&self, stream: Stream, event: &Self::Event);

    /// Waits for all that is on `stream`.
    ///
    /// # Errors
    /// [`Error::Fault`] where an operation failed.
    fn synchronize(&self, stream: Stream) -> Result<(), Error>;

    /// What libraries are called with that work on this device's memory; none where none can.
    fn libraries(&self) -> Option<&dyn Libraries> {
        None
    }
}

/// What libraries beside the kernels need of a device whose memory they work on.
pub trait Libraries: Send + Sync {
    /// A stream that nobody has named yet.
    fn fresh_stream(&self) -> Stream;

    /// The stream as the device's libraries take it. No two streams of any devices have the same.
    fn stream_handle(&self, stream: Stream) -> u64;

    /// Makes the device the calling thread's, for calls of the device's libraries.
    ///
    /// # Errors
    /// [`Error::Fault`] where the device refuses.
    fn enter(&self) -> Result<(), Error>;

    /// Whether all that is on `stream` is over, without waiting for others.
    ///
    /// # Errors
    /// As [`Launch::synchronize`].
    fn idle(&self, stream: Stream) -> Result<bool, Error>;

    /// A library is about to be called with `stream`, which reads these addresses and bytes: for a device whose
    /// own work is not done on such streams, or that keeps books.
    ///
    /// # Errors
    /// As [`Launch::fill`].
    fn lend(&self, stream: Stream, reads: (u64, usize)) -> Result<(), Error>;

    /// The library is done and has written these addresses and bytes; see [`Libraries::lend`].
    ///
    /// # Errors
    /// As [`Launch::fill`].
    fn filled(&self, stream: Stream, written: (u64, usize)) -> Result<(), Error>;
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use super::*;

    const CALL: Call<'static> = Call {
        module: "m",
        function: "f",
        grid: [1, 1, 1],
        block: [32, 1, 1],
        shared: 0,
        args: &[],
    };

    fn refused(call: Call<'_>, arch: u32, bound: u32, params: &[u32]) -> Option<Limit> {
        match call.check(Arch(arch), bound, params) {
            Ok(()) => None,
            Err(Error::Limit { limit, .. }) => Some(limit),
            Err(error) => panic!("{error}"),
        }
    }

    #[test]
    fn limits_are_the_drivers() {
        let grid = |grid| refused(Call { grid, ..CALL }, 80, 1024, &[]);
        assert_eq!(grid([i32::MAX as u32, 65_535, 65_535]), None);
        assert_eq!(grid([1 << 31, 1, 1]), Some(Limit::Grid(0)));
        assert_eq!(grid([1, 65_536, 1]), Some(Limit::Grid(1)));
        assert_eq!(grid([1, 1, 65_536]), Some(Limit::Grid(2)));
        assert_eq!(grid([1, 0, 1]), Some(Limit::Grid(1)));
        let block = |block, bound| refused(Call { block, ..CALL }, 80, bound, &[]);
        assert_eq!(block([1024, 1, 1], 1024), None);
        assert_eq!(block([512, 2, 2], 1024), Some(Limit::Threads));
        assert_eq!(block([2048, 1, 1], 1024), Some(Limit::Block(0)));
        assert_eq!(block([1, 1, 65], 1024), Some(Limit::Block(2)));
        assert_eq!(block([288, 1, 1], 256), Some(Limit::LaunchBounds));
        let kib = |arch, kib: u32| {
            let shared = kib * 1024;
            refused(Call { shared, ..CALL }, arch, 1024, &[])
        };
        for (arch, most) in [
            (80, 163),
            (86, 99),
            (89, 99),
            (90, 227),
            (100, 227),
            (120, 99),
        ] {
            assert_eq!(kib(arch, most), None);
            assert_eq!(kib(arch, most + 1), Some(Limit::Shared));
        }
    }

    #[test]
    fn arguments_are_counted_and_measured() {
        let args = [Arg::Ptr(0), Arg::I32(1)];
        let call = Call {
            args: &args,
            ..CALL
        };
        assert_eq!(call.check(Arch(80), 1024, &[8, 4]), Ok(()));
        for params in [&[8][..], &[8, 8], &[8, 4, 4]] {
            let refused = call.check(Arch(80), 1024, params);
            assert!(matches!(refused, Err(Error::Arguments { .. })));
        }
        let many = vec![8; 513];
        assert_eq!(refused(CALL, 80, 1024, &many), Some(Limit::ArgumentBytes));
    }
}
