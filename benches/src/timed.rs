//! The CPU with every op written into the [`profile`](crate::profile) of the calling thread.
//!
//! The layers, the sharding and the trainer are generic over the device, so a profile of a real
//! step needs no change in any of them.

use std::ops::Range;

use quintet_collectives::{
    Communicator, Error as WireError, Pending as Started, ReduceOp, Transport,
};
use quintet_kernels::moe::{Combine, Routed};
use quintet_kernels::{
    AdamWSpec, Attention, AttentionSpec, Backend, Carry, Collectives, Cpu, CpuBuf, CpuEvent,
    CrossEntropy, CrossEntropySpec, Data, DropoutSpec, Embedding, EmbeddingSpec, Error, Float,
    Gemm, GemmSpec, GroupedGemm, Meter, Norm, NormSpec, Optimizer, Pending, Permute, Places,
    Pointwise, Queue, Real, Rope, RopeSpec, Router, RouterSpec, SgdSpec, Tag, Trans, Wire,
};

use crate::profile::{line, line_of};

/// A [`Cpu`] that keeps a book.
#[derive(Debug, Clone)]
pub struct Timed(pub Cpu);

type Done = Result<(), Error>;

impl Backend for Timed {
    type Buf<T: Data> = CpuBuf<T>;
    type Ref<'a, T: Data> = &'a [T];
    type Mut<'a, T: Data> = &'a mut [T];
    type Event = CpuEvent;

    fn zeros<T: Data>(&self, tag: Tag, len: usize) -> Result<CpuBuf<T>, Error> {
        line("device: zeros", || self.0.zeros(tag, len))
    }

    fn alloc<T: Data>(&self, tag: Tag, len: usize) -> Result<CpuBuf<T>, Error> {
        line("device: alloc", || self.0.alloc(tag, len))
    }

    fn upload<T: Data>(&self, tag: Tag, host: &[T]) -> Result<CpuBuf<T>, Error> {
        line("device: upload", || self.0.upload(tag, host))
    }

    fn download<T: Data>(&self, src: &[T], host: &mut [T]) -> Done {
        line("device: download", || self.0.download(src, host))
    }

    fn copy<T: Data>(&self, src: &[T], dst: &mut [T]) -> Done {
        line("device: copy", || self.0.copy(src, dst))
    }

    fn len<T: Data>(view: &[T]) -> usize {
        Cpu::len(view)
    }

    fn whole<T: Data>(buf: &CpuBuf<T>) -> &[T] {
        Cpu::whole(buf)
    }

    fn whole_mut<T: Data>(buf: &mut CpuBuf<T>) -> &mut [T] {
        Cpu::whole_mut(buf)
    }

    fn slice<'a, T: Data>(view: Self::Ref<'a, T>, range: Range<usize>) -> Self::Ref<'a, T> {
        Cpu::slice(view, range)
    }

    fn split_mut<'a, T: Data>(
        view: Self::Mut<'a, T>,
        at: usize,
    ) -> (Self::Mut<'a, T>, Self::Mut<'a, T>) {
        Cpu::split_mut(view, at)
    }

    fn reborrow<'a, T: Data>(view: &'a mut &mut [T]) -> &'a mut [T] {
        Cpu::reborrow(view)
    }

    fn as_ref<'a, T: Data>(view: &'a &mut [T]) -> &'a [T] {
        Cpu::as_ref(view)
    }

    fn record(&self, queue: Queue) -> CpuEvent {
        self.0.record(queue)
    }

    fn wait(&self, queue: Queue, event: &CpuEvent) {
        line("wait: event", || self.0.wait(queue, event));
    }

    fn meter(&self) -> &Meter {
        self.0.meter()
    }
}

impl Gemm for Timed {
    fn gemm<I: Float, O: Float<Acc = I::Acc>>(
        &self,
        spec: &GemmSpec,
        a: &[I],
        b: &[I],
        bias: Option<&[I]>,
        residual: Option<&[O]>,
        c: &mut [O],
    ) -> Done {
        let name = match (spec.a, spec.b) {
            (Trans::N, Trans::T) => "gemm NT (forward)",
            (Trans::N, Trans::N) => "gemm NN (backward input)",
            (Trans::T, Trans::N) => "gemm TN (backward weight)",
            (Trans::T, Trans::T) => "gemm TT",
        };
        let shape = [spec.m, spec.n, spec.k];
        line_of((name, shape), || self.0.gemm(spec, a, b, bias, residual, c))
    }
}

impl Attention for Timed {
    fn attention<E: Float>(
        &self,
        spec: &AttentionSpec,
        qkv: (&[E], &[E], &[E]),
        places: Places<&[i32]>,
        o: &mut [E],
        lse: &mut [E::Acc],
    ) -> Done {
        line("attention: forward", || {
            self.0.attention(spec, qkv, places, o, lse)
        })
    }

    fn attention_delta<E: Float>(
        &self,
        spec: &AttentionSpec,
        d_o: &[E],
        o: &[E],
        delta: &mut [E::Acc],
    ) -> Done {
        line("attention: delta", || {
            self.0.attention_delta(spec, d_o, o, delta)
        })
    }

    fn attention_backward<E: Float>(
        &self,
        spec: &AttentionSpec,
        qkv: (&[E], &[E], &[E]),
        places: Places<&[i32]>,
        d_o: &[E],
        lse_delta: (&[E::Acc], &[E::Acc]),
        dqkv: (&mut [E], &mut [E], &mut [E]),
    ) -> Done {
        line("attention: backward", || {
            self.0
                .attention_backward(spec, qkv, places, d_o, lse_delta, dqkv)
        })
    }

    fn attention_step<E: Float>(
        &self,
        spec: &AttentionSpec,
        qkv: (&[E], &[E], &[E]),
        places: Places<&[i32]>,
        carry: Carry<&mut [E::Acc]>,
    ) -> Done {
        line("attention: forward, one piece", || {
            self.0.attention_step(spec, qkv, places, carry)
        })
    }

    fn attention_finish<E: Float>(
        &self,
        spec: &AttentionSpec,
        carry: Carry<&[E::Acc]>,
        o: &mut [E],
        lse: &mut [E::Acc],
    ) -> Done {
        line("attention: finish", || {
            self.0.attention_finish(spec, carry, o, lse)
        })
    }

    fn attention_backward_step<E: Float>(
        &self,
        spec: &AttentionSpec,
        qkv: (&[E], &[E], &[E]),
        places: Places<&[i32]>,
        d_o: &[E],
        lse_delta: (&[E::Acc], &[E::Acc]),
        dqkv: (&mut [E::Acc], &mut [E::Acc], &mut [E::Acc]),
    ) -> Done {
        line("attention: backward, one piece", || {
            self.0
                .attention_backward_step(spec, qkv, places, d_o, lse_delta, dqkv)
        })
    }
}

impl Norm for Timed {
    fn rms_norm<E: Float>(
        &self,
        spec: &NormSpec,
        x: &[E],
        residual: Option<(&[E], &mut [E])>,
        w: &[E],
        y: &mut [E],
        rstd: &mut [E::Acc],
    ) -> Done {
        line("norm: forward", || {
            self.0.rms_norm(spec, x, residual, w, y, rstd)
        })
    }

    fn rms_norm_backward_input<E: Float>(
        &self,
        spec: &NormSpec,
        h: &[E],
        w: &[E],
        rstd: &[E::Acc],
        dy: &[E],
        dresidual: Option<&[E]>,
        dh: &mut [E],
    ) -> Done {
        line("norm: backward input", || {
            self.0
                .rms_norm_backward_input(spec, h, w, rstd, dy, dresidual, dh)
        })
    }

    fn rms_norm_backward_weight<E: Float>(
        &self,
        spec: &NormSpec,
        h: &[E],
        rstd: &[E::Acc],
        dy: &[E],
        dw: &mut [E::Acc],
    ) -> Done {
        line("norm: backward weight", || {
            self.0.rms_norm_backward_weight(spec, h, rstd, dy, dw)
        })
    }

    fn layer_norm<E: Float>(
        &self,
        spec: &NormSpec,
        x: &[E],
        residual: Option<(&[E], &mut [E])>,
        wb: (&[E], &[E]),
        y: &mut [E],
        stats: (&mut [E::Acc], &mut [E::Acc]),
    ) -> Done {
        line("norm: forward", || {
            self.0.layer_norm(spec, x, residual, wb, y, stats)
        })
    }

    fn layer_norm_backward_input<E: Float>(
        &self,
        spec: &NormSpec,
        h: &[E],
        w: &[E],
        stats: (&[E::Acc], &[E::Acc]),
        dy: &[E],
        dresidual: Option<&[E]>,
        dh: &mut [E],
    ) -> Done {
        line("norm: backward input", || {
            self.0
                .layer_norm_backward_input(spec, h, w, stats, dy, dresidual, dh)
        })
    }

    fn layer_norm_backward_weight<E: Float>(
        &self,
        spec: &NormSpec,
        h: &[E],
        stats: (&[E::Acc], &[E::Acc]),
        dy: &[E],
        dwb: (&mut [E::Acc], &mut [E::Acc]),
    ) -> Done {
        line("norm: backward weight", || {
            self.0.layer_norm_backward_weight(spec, h, stats, dy, dwb)
        })
    }
}

impl Rope for Timed {
    fn rope<E: Float>(&self, spec: &RopeSpec, pos: &[i32], x: &mut [E]) -> Done {
        line("rope", || self.0.rope(spec, pos, x))
    }
}

impl Pointwise for Timed {
    fn swiglu<E: Float>(&self, g: &[E], u: &[E], y: &mut [E]) -> Done {
        line("swiglu: forward", || self.0.swiglu(g, u, y))
    }

    fn swiglu_backward<E: Float>(
        &self,
        g: &[E],
        u: &[E],
        dy: &[E],
        dg: &mut [E],
        du: &mut [E],
    ) -> Done {
        line("swiglu: backward", || {
            self.0.swiglu_backward(g, u, dy, dg, du)
        })
    }

    fn gelu<E: Float>(&self, x: &[E], y: &mut [E]) -> Done {
        line("gelu: forward", || self.0.gelu(x, y))
    }

    fn gelu_backward<E: Float>(&self, x: &[E], dy: &[E], dx: &mut [E]) -> Done {
        line("gelu: backward", || self.0.gelu_backward(x, dy, dx))
    }

    fn add<E: Float>(&self, x: &mut [E], y: &[E]) -> Done {
        line("add", || self.0.add(x, y))
    }

    fn add_rows<E: Float>(&self, dy: &[E], db: &mut [E::Acc]) -> Done {
        line("add rows", || self.0.add_rows(dy, db))
    }

    fn dropout<E: Float>(&self, spec: &DropoutSpec, at: &[i32], x: &mut [E]) -> Done {
        line("dropout", || self.0.dropout(spec, at, x))
    }

    fn cast<I: Float, O: Float>(&self, x: &[I], y: &mut [O]) -> Done {
        line("cast", || self.0.cast(x, y))
    }
}

/// Its products are written down one by one, as gemms.
impl GroupedGemm for Timed {}

impl Router for Timed {
    fn route<A: Real>(
        &self,
        spec: &RouterSpec,
        logits: &[A],
        bias: Option<&[A]>,
        out: Routed<'_, Self, A>,
    ) -> Done {
        let out = Routed {
            choice_tk: out.choice_tk,
            weight_tk: out.weight_tk,
            sums_e: out.sums_e,
        };
        line("router: forward", || self.0.route(spec, logits, bias, out))
    }

    fn route_backward<A: Real>(
        &self,
        spec: &RouterSpec,
        logits: &[A],
        choice: &[i32],
        dweight_and_dsums: (&[A], &[A]),
        dlogits: &mut [A],
    ) -> Done {
        line("router: backward", || {
            self.0
                .route_backward(spec, logits, choice, dweight_and_dsums, dlogits)
        })
    }
}

impl Permute for Timed {
    fn gather_rows<E: Float>(&self, width: usize, index: &[i32], x: &[E], y: &mut [E]) -> Done {
        line("rows: gather", || self.0.gather_rows(width, index, x, y))
    }

    fn combine<E: Float>(
        &self,
        by: Combine<'_, Self>,
        weight: Option<&[E::Acc]>,
        x: &[E],
        y: &mut [E],
    ) -> Done {
        line("rows: combine", || {
            self.0.combine(untimed(by), weight, x, y)
        })
    }

    fn combine_backward<E: Float>(
        &self,
        by: Combine<'_, Self>,
        weight_and_x: (&[E::Acc], &[E]),
        dy: &[E],
        dx: &mut [E],
        dweight: &mut [E::Acc],
    ) -> Done {
        line("rows: combine backward", || {
            self.0
                .combine_backward(untimed(by), weight_and_x, dy, dx, dweight)
        })
    }
}

fn untimed(by: Combine<'_, Timed>) -> Combine<'_, Cpu> {
    Combine {
        tokens: by.tokens,
        topk: by.topk,
        width: by.width,
        rows_tk: by.rows_tk,
        pairs_r: by.pairs_r,
    }
}

impl Embedding for Timed {
    fn embedding<E: Float>(
        &self,
        spec: &EmbeddingSpec,
        ids: &[i32],
        table: &[E],
        y: &mut [E],
    ) -> Done {
        line("embedding: forward", || {
            self.0.embedding(spec, ids, table, y)
        })
    }

    fn embedding_backward<E: Float>(
        &self,
        spec: &EmbeddingSpec,
        ids: &[i32],
        dy: &[E],
        dtable: &mut [E::Acc],
    ) -> Done {
        line("embedding: backward", || {
            self.0.embedding_backward(spec, ids, dy, dtable)
        })
    }
}

impl CrossEntropy for Timed {
    fn logit_max<E: Float>(
        &self,
        spec: &CrossEntropySpec,
        logits: &[E],
        max: &mut [E::Acc],
    ) -> Done {
        line("cross-entropy: max", || self.0.logit_max(spec, logits, max))
    }

    fn logit_sums<E: Float>(
        &self,
        spec: &CrossEntropySpec,
        logits: &[E],
        labels: &[i32],
        max: &[E::Acc],
        stats: &mut [E::Acc],
    ) -> Done {
        line("cross-entropy: sums", || {
            self.0.logit_sums(spec, logits, labels, max, stats)
        })
    }

    fn shift_sums<A: Float>(
        &self,
        spec: &CrossEntropySpec,
        labels: &[i32],
        here: &[A],
        max: &[A],
        stats: &mut [A],
    ) -> Done {
        line("cross-entropy: shift", || {
            self.0.shift_sums(spec, labels, here, max, stats)
        })
    }

    fn token_loss<A: Float>(&self, stats: &[A], weight: &[A], loss: &mut [A]) -> Done {
        line("cross-entropy: loss", || {
            self.0.token_loss(stats, weight, loss)
        })
    }

    fn logit_backward<E: Float>(
        &self,
        spec: &CrossEntropySpec,
        logits: &[E],
        labels: &[i32],
        max: &[E::Acc],
        stats: &[E::Acc],
        weight: &[E::Acc],
        dlogits: &mut [E],
    ) -> Done {
        line("cross-entropy: backward", || {
            self.0
                .logit_backward(spec, logits, labels, max, stats, weight, dlogits)
        })
    }
}

impl Optimizer for Timed {
    fn adamw<E: Float>(
        &self,
        spec: &AdamWSpec,
        grad: &[E::Acc],
        master: &mut [E::Acc],
        moments: (&mut [E::Acc], &mut [E::Acc]),
        param: Option<&mut [E]>,
    ) -> Done {
        line("optimizer: adamw", || {
            self.0.adamw(spec, grad, master, moments, param)
        })
    }

    fn sgd<E: Float>(
        &self,
        spec: &SgdSpec,
        grad: &[E::Acc],
        master: &mut [E::Acc],
        param: Option<&mut [E]>,
    ) -> Done {
        line("optimizer: sgd", || self.0.sgd(spec, grad, master, param))
    }

    fn add_squares<T: Float>(&self, x: &[T], out: &mut [f64]) -> Done {
        line("norm of the gradient", || self.0.add_squares(x, out))
    }
}

impl<T: Data> Pending<Timed, T> for Started<CpuBuf<T>> {
    fn event(&self) -> CpuEvent {
        self.done().into()
    }

    fn wait_on(self, _: &Timed, _: Queue) -> Result<CpuBuf<T>, WireError> {
        line("wait: started", || self.wait())
    }

    fn wait_host(self) -> Result<CpuBuf<T>, WireError> {
        line("wait: started", || self.wait())
    }
}

type Wait<T> = Result<Started<CpuBuf<T>>, WireError>;

impl<L: Transport + Send + 'static> Collectives<Timed> for Communicator<L> {
    type Pending<T: Wire> = Started<CpuBuf<T>>;

    fn rank(&self) -> usize {
        self.rank()
    }

    fn world(&self) -> usize {
        self.world()
    }

    fn all_reduce<T: Wire>(&self, buf: &mut [T], op: ReduceOp) -> Result<(), WireError> {
        line(blocking(self), || self.all_reduce(buf, op))
    }

    fn all_gather<T: Wire>(
        &self,
        mine: &[T],
        counts: &[usize],
        all: &mut [T],
    ) -> Result<(), WireError> {
        line(blocking(self), || self.all_gather_v(mine, all, counts))
    }

    fn reduce_scatter<T: Wire>(
        &self,
        all: &[T],
        counts: &[usize],
        mine: &mut [T],
        op: ReduceOp,
    ) -> Result<(), WireError> {
        line(blocking(self), || {
            self.reduce_scatter_v(all, mine, counts, op)
        })
    }

    fn all_to_all<T: Wire>(
        &self,
        send: &[T],
        send_counts: &[usize],
        recv: &mut [T],
        recv_counts: &[usize],
    ) -> Result<(), WireError> {
        line(blocking(self), || {
            self.all_to_all_v(send, send_counts, recv, recv_counts)
        })
    }

    fn broadcast<T: Wire>(&self, buf: &mut [T], root: usize) -> Result<(), WireError> {
        line(blocking(self), || self.broadcast(buf, root))
    }

    fn start_all_reduce<T: Wire>(&self, buf: CpuBuf<T>, op: ReduceOp, after: CpuEvent) -> Wait<T> {
        line(START, || self.start_all_reduce(buf, op, after))
    }

    fn start_reduce_scatter<T: Wire>(
        &self,
        buf: CpuBuf<T>,
        counts: &[usize],
        op: ReduceOp,
        after: CpuEvent,
    ) -> Wait<T> {
        line(START, || {
            self.start_reduce_scatter_v(buf, counts, op, after)
        })
    }

    fn start_all_gather<T: Wire>(
        &self,
        buf: CpuBuf<T>,
        counts: &[usize],
        after: CpuEvent,
    ) -> Wait<T> {
        line(START, || self.start_all_gather_v(buf, counts, after))
    }

    fn start_send<T: Wire>(&self, to: usize, tag: u64, buf: CpuBuf<T>, after: CpuEvent) -> Wait<T> {
        line(START, || self.start_send(buf, to, tag, after))
    }

    fn start_recv<T: Wire>(&self, from: usize, tag: u64, buf: CpuBuf<T>) -> Wait<T> {
        line(START, || self.start_recv(buf, from, tag, ()))
    }
}

const START: &str = "wire: start";

/// Groups of the trainer by what they are for.
fn blocking<L: Transport + Send + 'static>(group: &Communicator<L>) -> &'static str {
    match group.name() {
        "tp" => "wire: blocking, tp",
        "pp" => "wire: blocking, pp",
        "world of training" => "wire: blocking, world",
        _ => "wire: blocking, other",
    }
}
