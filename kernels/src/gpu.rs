//! A GPU as a [`Backend`]: what the ops of this crate are on any device that [`Launch`]es.
//!
//! ```text
//! Gpu<L> --Arc--> launcher    Emulated, or a driver
//!            +--> meter       bytes by tag
//! op(spec, views) -> checks lengths -> Call { module, function, grid, block, args } -> launcher
//! ```
//!
//! Queues are streams: compute is 0, communication 1. A view is an address and a length. Memory is
//! freed in the order of the compute queue; who uses it on the other queue lets compute wait
//! before the buffer is dropped, as a started collective does when it gives its buffer back.
//!
//! An op returns when its launch is queued. What fails later is told by the next call, at the
//! latest by [`Backend::download`].

mod cross_entropy;
mod embedding;
mod gemm;
mod norm;
mod optimizer;
mod pointwise;
mod rope;

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
use crate::launch::{Arg, Call, Launch, Stream};
use crate::{Backend, Data, Error, Float, Meter, Queue, Tag};

/// A GPU behind a launcher. Clones are the same device.
#[derive(Debug, Clone)]
pub struct Gpu<L: Launch>(Arc<Inner<L>>);

#[derive(Debug)]
struct Inner<L: Launch> {
    launcher: L,
    meter: Meter,
    /// For sums over a whole array: [`optimizer::PARTS`] f64s.
    parts: u64,
    /// Tables of RoPE.
    frequencies: Mutex<Vec<rope::Frequencies>>,
}

impl<L: Launch> Gpu<L> {
    /// The device behind `launcher`.
    ///
    /// # Errors
    /// [`Error::Memory`] where it has not a few KiB left.
    pub fn new(launcher: L) -> Result<Self, Error> {
        let bytes = optimizer::PARTS * size_of::<f64>();
        Ok(Self(Arc::new(Inner {
            parts: launcher.alloc("partial sums", bytes)?,
            launcher,
            meter: Meter::default(),
            frequencies: Mutex::default(),
        })))
    }

    /// What runs the launches.
    #[must_use]
    pub fn launcher(&self) -> &L {
        &self.0.launcher
    }

    fn launch(
        &self,
        (module, function): (&str, &str),
        grid: u64,
        block: [u32; 3],
        args: &[Arg],
    ) -> Result<(), Error> {
        if grid == 0 {
            return Ok(());
        }
        // Grids that no driver takes are refused there, by name.
        let grid = [u32::try_from(grid).unwrap_or(u32::MAX), 1, 1];
        self.0.launcher.launch(
            COMPUTE,
            &Call {
                module,
                function,
                grid,
                block,
                shared: 0,
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
        self.launcher.free(COMPUTE, self.parts);
        let tables = self
            .frequencies
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner);
        for table in tables {
            self.launcher.free(COMPUTE, table.ptr);
        }
    }
}

const COMPUTE: Stream = Stream(0);
const COMM: Stream = Stream(1);
/// Threads of most blocks: what the kernels' launch bounds say.
const THREADS: u32 = 256;

fn stream(queue: Queue) -> Stream {
    match queue {
        Queue::Compute => COMPUTE,
        Queue::Comm => COMM,
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
        self.device.launcher.free(COMPUTE, self.ptr);
        let bytes = self.len * size_of::<T>();
        self.device.meter.sub(self.tag, bytes);
    }
}

/// A view of device memory, to read.
#[derive(Debug)]
pub struct GpuRef<'a, T> {
    ptr: u64,
    len: usize,
    data: PhantomData<&'a T>,
}

impl<T> Clone for GpuRef<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for GpuRef<'_, T> {}

/// A view of device memory, to read and write.
#[derive(Debug)]
pub struct GpuMut<'a, T> {
    ptr: u64,
    len: usize,
    data: PhantomData<&'a mut T>,
}

impl<T> GpuRef<'_, T> {
    /// The address of the first element.
    #[must_use]
    pub fn ptr(&self) -> u64 {
        self.ptr
    }
}

impl<T> GpuMut<'_, T> {
    /// The address of the first element.
    #[must_use]
    pub fn ptr(&self) -> u64 {
        self.ptr
    }
}

impl<L: Launch> Backend for Gpu<L> {
    type Buf<T: Data> = GpuBuf<L, T>;
    type Ref<'a, T: Data> = GpuRef<'a, T>;
    type Mut<'a, T: Data> = GpuMut<'a, T>;
    type Event = L::Event;

    fn zeros<T: Data>(&self, tag: Tag, len: usize) -> Result<GpuBuf<L, T>, Error> {
        let buf = self.alloc::<T>(tag, len)?;
        let bytes = len * size_of::<T>();
        self.0.launcher.fill(COMPUTE, buf.ptr, 0, bytes)?;
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
        self.0.launcher.upload(COMPUTE, bytes, buf.ptr)?;
        Ok(buf)
    }

    fn download<T: Data>(&self, src: GpuRef<'_, T>, host: &mut [T]) -> Result<(), Error> {
        need("download", "host", src.len, host.len())?;
        let bytes = bytemuck::cast_slice_mut(host);
        self.0.launcher.download(COMPUTE, src.ptr, bytes)
    }

    fn copy<T: Data>(&self, src: GpuRef<'_, T>, dst: GpuMut<'_, T>) -> Result<(), Error> {
        need("copy", "dst", src.len, dst.len)?;
        let bytes = src.len * size_of::<T>();
        self.0.launcher.copy(COMPUTE, src.ptr, dst.ptr, bytes)
    }

    fn len<T: Data>(view: GpuRef<'_, T>) -> usize {
        view.len
    }

    fn whole<T: Data>(buf: &GpuBuf<L, T>) -> GpuRef<'_, T> {
        GpuRef {
            ptr: buf.ptr,
            len: buf.len,
            data: PhantomData,
        }
    }

    fn whole_mut<T: Data>(buf: &mut GpuBuf<L, T>) -> GpuMut<'_, T> {
        GpuMut {
            ptr: buf.ptr,
            len: buf.len,
            data: PhantomData,
        }
    }

    fn slice<'a, T: Data>(view: Self::Ref<'a, T>, range: Range<usize>) -> Self::Ref<'a, T> {
        let end = range.end.min(view.len);
        let start = range.start.min(end);
        GpuRef {
            ptr: view.ptr + (start * size_of::<T>()) as u64,
            len: end - start,
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
            data: PhantomData,
        };
        (part(0, at), part(at, view.len - at))
    }

    fn reborrow<'a, T: Data>(view: &'a mut GpuMut<'_, T>) -> GpuMut<'a, T> {
        GpuMut {
            ptr: view.ptr,
            len: view.len,
            data: PhantomData,
        }
    }

    fn as_ref<'a, T: Data>(view: &'a GpuMut<'_, T>) -> GpuRef<'a, T> {
        GpuRef {
            ptr: view.ptr,
            len: view.len,
            data: PhantomData,
        }
    }

    fn record(&self, queue: Queue) -> L::Event {
        self.0.launcher.record(stream(queue))
    }

    fn wait(&self, queue: Queue, event: &L::Event) {
        self.0.launcher.wait(stream(queue), event);
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

/// The address of a view, or null.
fn ptr_or_null<T>(view: Option<&GpuRef<'_, T>>) -> Arg {
    Arg::Ptr(view.map_or(0, |v| v.ptr))
}
