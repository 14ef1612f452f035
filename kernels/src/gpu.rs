//! A GPU as a [`Backend`]: what the ops of this crate are on any device that [`Launch`]es.
//!
//! ```text
//! Gpu<L> --Arc--> launcher    Emulated, or a driver
//!            +--> meter       bytes by tag
//! op(spec, views) -> checks lengths -> Call { module, function, grid, block, args } -> launcher
//! ```
//!
//! Queues are streams. A view is an address and a length. Memory is
//! freed in the order of the compute queue; who uses it on the other queue lets compute wait
//! before the buffer is dropped, as a started collective does when it gives its buffer back.
//!
//! An op returns when its launch is queued. What fails later is told by the next call, at the
//! latest by [`Backend::download`].

mod attention;
mod cross_entropy;
mod embedding;
mod fold;
mod fused;
mod gemm;
#[cfg(test)]
mod golden;
mod moe;
mod norm;
mod optimizer;
mod pointwise;
mod rope;
mod view;

use alloc::format;
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::any::TypeId;
use core::marker::PhantomData;
use core::ops::Range;
use std::sync::{Mutex, PoisonError};

use half::bf16;

use crate::error::need;
#[cfg(feature = "wire")]
use crate::launch::Libraries;
use crate::launch::{Arg, Call, Launch, Stream};
use crate::{Backend, Data, Dropout, Error, Float, Meter, Queue, Tag};

#[cfg(feature = "wire")]
pub(crate) use fold::Folded;
pub use fold::{Fold, PARTS};
pub use fused::{Activation, FusedSpec};
pub use view::{GpuMut, GpuRef};

/// A GPU behind a launcher. Clones are the same device.
#[derive(Debug, Clone)]
pub struct Gpu<L: Launch>(Arc<Inner<L>>);

#[derive(Debug)]
struct Inner<L: Launch> {
    launcher: L,
    /// Compute and communication.
    streams: [Stream; 2],
    meter: Meter,
    /// For sums over a whole array: [`optimizer::PARTS`] f64s.
    parts: u64,
    /// Tables of RoPE.
    frequencies: Mutex<Vec<rope::Frequencies>>,
    /// Streams of communicators, by a number of the communicator's and what goes there.
    #[cfg(feature = "wire")]
    lanes: Mutex<Vec<((u64, u64), Stream)>>,
}

impl<L: Launch> Gpu<L> {
    /// The device behind `launcher`.
    ///
    /// # Errors
    /// [`Error::Memory`] where it has not a few KiB left.
    pub fn new(launcher: L) -> Result<Self, Error> {
        Self::on(launcher, [Stream(0), Stream(1)])
    }

    /// The same on streams of its own, for several ranks that share a device: compute and
    /// communication.
    ///
    /// # Errors
    /// As [`Gpu::new`].
    pub fn on(launcher: L, streams: [Stream; 2]) -> Result<Self, Error> {
        let bytes = optimizer::PARTS * size_of::<f64>();
        Ok(Self(Arc::new(Inner {
            parts: launcher.alloc("partial sums", bytes)?,
            launcher,
            streams,
            meter: Meter::default(),
            frequencies: Mutex::default(),
            #[cfg(feature = "wire")]
            lanes: Mutex::default(),
        })))
    }

    /// What runs the launches.
    #[must_use]
    pub fn launcher(&self) -> &L {
        &self.0.launcher
    }

    /// The stream of this key, made when it is first asked for, for libraries to work on.
    #[cfg(feature = "wire")]
    pub(crate) fn lane(&self, key: (u64, u64), of: &dyn Libraries) -> Stream {
        let mut lanes = self.0.lanes.lock().unwrap_or_else(PoisonError::into_inner);
        let known = lanes.iter().find(|lane| lane.0 == key).map(|lane| lane.1);
        known.unwrap_or_else(|| {
            let stream = of.fresh_stream();
            lanes.push((key, stream));
            stream
        })
    }

    /// The stream of a queue.
    #[cfg(feature = "wire")]
    pub(crate) fn stream_of(&self, queue: Queue) -> Stream {
        self.0.stream(queue)
    }

    fn launch(
        &self,
        kernel: (&str, &str),
        grid: u64,
        block: [u32; 3],
        args: &[Arg],
    ) -> Result<(), Error> {
        self.launch_with(kernel, grid, (block, 0), args)
    }

    /// The same with `shared` bytes of dynamic shared memory.
    fn launch_with(
        &self,
        (module, function): (&str, &str),
        grid: u64,
        (block, shared): ([u32; 3], u32),
        args: &[Arg],
    ) -> Result<(), Error> {
        if grid == 0 {
            return Ok(());
        }
        // Grids that no driver takes are refused there, by name.
        let grid = [u32::try_from(grid).unwrap_or(u32::MAX), 1, 1];
        self.0.launcher.launch(
            self.0.compute(),
            &Call {
                module,
                function,
                grid,
                block,
                shared,
                args,
            },
        )
    }

    /// Launches `function` on `n` elements, `pack` a thread.
    fn launch_flat(
        &self,
        (module, function): (&str, &str),
        n: usize,
        pack: usize,
        args: &[Arg],
    ) -> Result<(), Error> {
        let blocks = n.div_ceil(pack).div_ceil(THREADS as usize);
        self.launch((module, function), blocks as u64, [THREADS, 1, 1], args)
    }
}

impl<L: Launch> Drop for Inner<L> {
    fn drop(&mut self) {
        let compute = self.compute();
        self.launcher.free(compute, self.parts);
        let tables = self
            .frequencies
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner);
        for table in tables {
            self.launcher.free(compute, table.ptr);
        }
    }
}

/// Threads of most blocks: what the kernels' launch bounds say.
const THREADS: u32 = 256;

impl<L: Launch> Inner<L> {
    fn stream(&self, queue: Queue) -> Stream {
        self.streams[queue as usize]
    }

    fn compute(&self) -> Stream {
        self.stream(Queue::Compute)
    }
}

/// Device memory, counted under its tag until dropped.
#[derive(Debug)]
pub struct GpuBuf<L: Launch, T: Data> {
    ptr: u64,
    len: usize,
    tag: Tag,
    device: Arc<Inner<L>>,
    data: PhantomData<T>,
}

impl<L: Launch, T: Data> Drop for GpuBuf<L, T> {
    fn drop(&mut self) {
        self.device.launcher.free(self.device.compute(), self.ptr);
        let bytes = self.len * size_of::<T>();
        self.device.meter.sub(self.tag, bytes);
    }
}

impl<L: Launch> Backend for Gpu<L> {
    type Buf<T: Data> = GpuBuf<L, T>;
    type Ref<'a, T: Data> = GpuRef<'a, L, T>;
    type Mut<'a, T: Data> = GpuMut<'a, L, T>;
    type Event = L::Event;

    fn zeros<T: Data>(&self, tag: Tag, len: usize) -> Result<GpuBuf<L, T>, Error> {
        let buf = self.alloc::<T>(tag, len)?;
        let bytes = len * size_of::<T>();
        self.0.launcher.fill(self.0.compute(), buf.ptr, 0, bytes)?;
        Ok(buf)
    }

    fn alloc<T: Data>(&self, tag: Tag, len: usize) -> Result<GpuBuf<L, T>, Error> {
        let bytes = len.checked_mul(size_of::<T>()).ok_or(Error::Memory {
            bytes: usize::MAX,
            tag: tag.name(),
        })?;
        let ptr = self.0.launcher.alloc(tag.name(), bytes)?;
        self.0.meter.add(tag, bytes);
        Ok(GpuBuf {
            ptr,
            len,
            tag,
            device: self.0.clone(),
            data: PhantomData,
        })
    }

    fn upload<T: Data>(&self, tag: Tag, host: &[T]) -> Result<GpuBuf<L, T>, Error> {
        let buf = self.alloc::<T>(tag, host.len())?;
        let bytes = bytemuck::cast_slice(host);
        self.0.launcher.upload(self.0.compute(), bytes, buf.ptr)?;
        Ok(buf)
    }

    fn download<T: Data>(&self, src: GpuRef<'_, L, T>, host: &mut [T]) -> Result<(), Error> {
        need("download", "host", src.len, host.len())?;
        let bytes = bytemuck::cast_slice_mut(host);
        self.0.launcher.download(self.0.compute(), src.ptr, bytes)
    }

    fn copy<T: Data>(&self, src: GpuRef<'_, L, T>, dst: GpuMut<'_, L, T>) -> Result<(), Error> {
        need("copy", "dst", src.len, dst.len)?;
        let bytes = src.len * size_of::<T>();
        self.0
            .launcher
            .copy(self.0.compute(), src.ptr, dst.ptr, bytes)
    }

    fn len<T: Data>(view: GpuRef<'_, L, T>) -> usize {
        view.len
    }

    fn whole<T: Data>(buf: &GpuBuf<L, T>) -> GpuRef<'_, L, T> {
        GpuRef {
            ptr: buf.ptr,
            len: buf.len,
            device: &buf.device,
            data: PhantomData,
        }
    }

    fn whole_mut<T: Data>(buf: &mut GpuBuf<L, T>) -> GpuMut<'_, L, T> {
        GpuMut {
            ptr: buf.ptr,
            len: buf.len,
            device: &buf.device,
            data: PhantomData,
        }
    }

    fn slice<'a, T: Data>(view: Self::Ref<'a, T>, range: Range<usize>) -> Self::Ref<'a, T> {
        let end = range.end.min(view.len);
        let start = range.start.min(end);
        GpuRef {
            ptr: view.ptr + (start * size_of::<T>()) as u64,
            len: end - start,
            device: view.device,
            data: PhantomData,
        }
    }

    fn split_mut<'a, T: Data>(
        view: Self::Mut<'a, T>,
        at: usize,
    ) -> (Self::Mut<'a, T>, Self::Mut<'a, T>) {
        let at = at.min(view.len);
        let part = |first: usize, len: usize| GpuMut {
            ptr: view.ptr + (first * size_of::<T>()) as u64,
            len,
            device: view.device,
            data: PhantomData,
        };
        (part(0, at), part(at, view.len - at))
    }

    fn reborrow<'a, T: Data>(view: &'a mut GpuMut<'_, L, T>) -> GpuMut<'a, L, T> {
        GpuMut {
            ptr: view.ptr,
            len: view.len,
            device: view.device,
            data: PhantomData,
        }
    }

    fn as_ref<'a, T: Data>(view: &'a GpuMut<'_, L, T>) -> GpuRef<'a, L, T> {
        GpuRef {
            ptr: view.ptr,
            len: view.len,
            device: view.device,
            data: PhantomData,
        }
    }

    fn record(&self, queue: Queue) -> L::Event {
        self.0.launcher.record(self.0.stream(queue))
    }

    fn wait(&self, queue: Queue, event: &L::Event) {
        self.0.launcher.wait(self.0.stream(queue), event);
    }

    fn meter(&self) -> &Meter {
        &self.0.meter
    }
}

/// The ending of the kernels for storage type `E`.
fn suffix<E: Float>(op: &'static str) -> Result<&'static str, Error> {
    let known = [
        (TypeId::of::<f32>(), "f32"),
        (TypeId::of::<f64>(), "f64"),
        (TypeId::of::<bf16>(), "bf16"),
    ];
    let found = known.iter().find(|k| k.0 == TypeId::of::<E>());
    found.map(|k| k.1).ok_or(Error::Spec {
        op,
        why: "GPU kernels are there for f32, f64 and bf16",
    })
}

/// The name of a kernel that moves 16 bytes at a time where all of `ptrs` and `n` elements allow
/// it, and how many elements that are; else the one that moves one.
fn packed<E: Float>(
    op: &'static str,
    name: &str,
    ptrs: &[u64],
    n: usize,
) -> Result<(String, usize), Error> {
    let suffix = suffix::<E>(op)?;
    let pack = 16 / size_of::<E>();
    let wide = n.is_multiple_of(pack) && ptrs.iter().all(|p| p.is_multiple_of(16));
    Ok(match wide {
        true => (format!("{name}_{suffix}_wide"), pack),
        false => (format!("{name}_{suffix}"), 1),
    })
}

/// What kernels take to draw what is let go; of none, nothing is.
fn draws(of: Option<Dropout>) -> [Arg; 6] {
    let Some(of) = of else {
        let none = Arg::I64(0);
        return [Arg::U32(0), Arg::U32(0), Arg::F64(1.0), none, none, none];
    };
    [
        Arg::U32(of.least()),
        Arg::U32(of.site),
        Arg::F64(of.scale()),
        Arg::I64(of.seed as i64),
        Arg::I64(of.step as i64),
        Arg::I64(of.sample as i64),
    ]
}

/// A number in the accumulation type of `E`.
fn acc<E: Float>(x: f64) -> Arg {
    if size_of::<E::Acc>() == size_of::<f64>() {
        Arg::F64(x)
    } else {
        Arg::F32(x as f32)
    }
}

fn len(n: usize) -> Arg {
    Arg::I64(n as i64)
}

fn pointers(ptrs: &[u64]) -> Vec<Arg> {
    ptrs.iter().map(|&p| Arg::Ptr(p)).collect()
}

/// The address of a view, or null.
fn ptr_or_null<L: Launch, T>(view: Option<&GpuRef<'_, L, T>>) -> Arg {
    Arg::Ptr(view.map_or(0, |v| v.ptr))
}
