//! NCCL on the memory and the streams of a device, by the launcher: a world of one, and two ranks on one GPU where
//! the library lets them.
//!
//! ```text
//! here                  the stand-ins for the driver (this crate) and for NCCL (collectives/tests/nccl_shim)
//! QUINTET_ON_A_GPU=1    NVIDIA's own, by benches/gpu-check
//! ```
//!
//! No kernel of ours is launched, so that no compiler is needed.
#![allow(unsafe_code)] // it works on addresses

mod alone;
#[path = "../common/mod.rs"]
mod common;
mod shared;

use std::env;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use quintet_collectives::nccl::{Library, Nccl};
use quintet_collectives::plan::CollectiveShape as Shape;
use quintet_collectives::transport::device::{Lane, Span};
use quintet_collectives::transport::local::Local;
use quintet_collectives::{Communicator, Element, Error, Order, ReduceOp, Result};
use quintet_kernels::cuda::Cuda;
use quintet_kernels::launch::{Launch, Libraries, Stream};

use common::{beside, driver, on_a_gpu};

type Comm = Communicator<Nccl<Local>>;

/// The device and the library, for one test at a time: some tell the stand-in to misbehave.
struct Found {
    cuda: Cuda,
    library: Arc<Library>,
    _alone: MutexGuard<'static, ()>,
}

fn found() -> Found {
    static ALONE: Mutex<()> = Mutex::new(());
    static FOUND: OnceLock<(Cuda, Arc<Library>)> = OnceLock::new();
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let first = || {
        if !on_a_gpu() {
            // SAFETY: nothing else of this program reads the environment by C's functions.
            unsafe {
                env::set_var("QUINTET_CUDA_DRIVER", driver());
                env::set_var("QUINTET_NCCL_LIB", beside("libquintet_nccl_shim.so"));
                env::set_var(
                    "QUINTET_NCCL_SHIM",
                    format!("driver={}", driver().display()),
                );
            }
        }
        let library = Library::open().unwrap();
        assert!(!library.on_host(), "{library:?}");
        println!("{library:?} on {}", Cuda::bus_id(0).unwrap());
        (Cuda::new(0).unwrap(), library)
    };
    let (cuda, library) = FOUND.get_or_init(first).clone();
    Found {
        cuda,
        library,
        _alone: alone,
    }
}

impl Found {
    fn comm(&self, end: Local) -> Comm {
        Communicator::new(Nccl::new(end, self.library.clone())).with_order(Order::Any)
    }

    /// A stream that nobody else has.
    fn lane(&self) -> Arc<CudaLane> {
        Arc::new(CudaLane {
            cuda: self.cuda.clone(),
            stream: self.cuda.fresh_stream(),
        })
    }
}

/// A stream of the device.
struct CudaLane {
    cuda: Cuda,
    stream: Stream,
}

fn told(error: quintet_kernels::Error) -> Error {
    Error::System {
        what: "ask the device",
        reason: error.to_string(),
    }
}

impl Lane for CudaLane {
    fn handle(&self) -> u64 {
        self.cuda.stream_handle(self.stream)
    }

    fn enter(&self) -> Result<()> {
        self.cuda.enter().map_err(told)
    }

    fn idle(&self) -> Result<bool> {
        self.cuda.idle(self.stream).map_err(told)
    }
}

/// Elements in the device's memory, on a stream.
struct Memory<E> {
    lane: Arc<CudaLane>,
    ptr: u64,
    len: usize,
    element: PhantomData<E>,
}

impl<E: Element> Memory<E> {
    fn of(lane: &Arc<CudaLane>, host: &[E]) -> Self {
        let cuda = lane.cuda.at_home(lane.stream);
        let bytes = bytemuck::cast_slice(host);
        let ptr = cuda.alloc("a test's", bytes.len().max(1)).unwrap();
        cuda.upload(lane.stream, bytes, ptr).unwrap();
        Self {
            lane: lane.clone(),
            ptr,
            len: host.len(),
            element: PhantomData,
        }
    }

    fn span(&self, range: Range<usize>) -> Span {
        // SAFETY: the tests keep it until the operation is over.
        unsafe { Span::new::<E>(self.ptr, self.len) }.part(range)
    }

    fn whole(&self) -> Span {
        self.span(0..self.len)
    }

    fn read(&self) -> Vec<E> {
        let mut host = vec![E::zeroed(); self.len];
        let bytes = bytemuck::cast_slice_mut(&mut host);
        let lane = &self.lane;
        lane.cuda.download(lane.stream, self.ptr, bytes).unwrap();
        host
    }
}

impl<E> Drop for Memory<E> {
    fn drop(&mut self) {
        self.lane.cuda.free(self.lane.stream, self.ptr);
    }
}

/// A collective from one piece of memory to another; what came.
fn call<E: Element>(
    comm: &Comm,
    lane: &Arc<CudaLane>,
    (shape, redop): (Shape, ReduceOp),
    input: &[E],
    len: usize,
) -> Result<Vec<E>> {
    let (from, to) = (
        Memory::of(lane, input),
        Memory::of(lane, &vec![E::zeroed(); len]),
    );
    let spans = [from.whole(), to.whole()];
    comm.on_device(shape, redop, spans, lane.clone())?;
    assert_eq!(from.read(), input, "the input stays");
    Ok(to.read())
}

/// The folds that `shape` has; where it has none, one.
fn folds(shape: &Shape) -> &'static [ReduceOp] {
    use ReduceOp::{Avg, Max, Min, Prod, Sum};
    match shape.operation().folds() {
        true => &[Sum, Prod, Min, Max, Avg],
        false => &[Sum],
    }
}

/// Stamps a test on every type.
macro_rules! each_type {
    ($body:ident($($argument:expr),*)) => {{
        $body::<f64>($($argument),*, f64::from)?;
        $body::<f32>($($argument),*, |x| x as f32)?;
        $body::<half::bf16>($($argument),*, |x| half::bf16::from_f32(x as f32))?;
        $body::<half::f16>($($argument),*, |x| half::f16::from_f32(x as f32))?;
        $body::<i32>($($argument),*, |x| x)?;
        $body::<i64>($($argument),*, i64::from)?;
        $body::<u8>($($argument),*, |x| x as u8)?;
    }};
}
pub(crate) use each_type;
