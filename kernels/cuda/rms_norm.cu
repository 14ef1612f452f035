// RMSNorm over rows of `dim`, with a residual taken in on the way.
//
//   forward    h = x + r (or x)     rstd = 1 / sqrt(mean(h^2) + eps)     y = w h rstd
//   backward   g = w dy     dh = dres + rstd (g - h rstd^2 mean(g h))     dw += sum_t dy h rstd
//
//   shapes     x, r, h, y, dy, dres, dh: rows x dim     w: dim     rstd: rows, Acc     dw: dim, Acc
//   absent     r (then h is not written either) and dres may be null
//
//   forward, backward_input   a block a row, 256 threads of V elements (16 bytes, or one where that
//                             does not fit); each thread reads again only what it wrote itself
//   backward_weight           a block takes 32 columns, 32 threads each; see add.cu
//
// The stored h, rounded to T, is what is normalised. Sums are of one row, in an order that depends
// on dim alone.

template <class T, int V>
__device__ void rms_norm(const T* x, const T* r, T* h, const T* w, T* y, Acc<T>* rstd, i64 dim, Acc<T> eps) {
    i64 row = (i64)blockIdx.x * dim, first = threadIdx.x * V, step = blockDim.x * V;
    Acc<T> squares = 0;
    for (i64 d = first; d < dim; d += step) {
        Pack<T, V> hs = load<T, V>(x + row + d);
        if (r) {
            Pack<T, V> rs = load<T, V>(r + row + d);
            for (int k = 0; k < V; k++) hs.at[k] = narrow<T>(widen(hs.at[k]) + widen(rs.at[k]));
            store(h + row + d, hs);
        }
        for (int k = 0; k < V; k++) squares = multiply_add(widen(hs.at[k]), widen(hs.at[k]), squares);
    }
    Acc<T> scale = 1 / root(block_sum(squares) / (Acc<T>)dim + eps);
    const T* from = r ? h : x;
    for (i64 d = first; d < dim; d += step) {
        Pack<T, V> hs = load<T, V>(from + row + d), ws = load<T, V>(w + d);
        for (int k = 0; k < V; k++) hs.at[k] = narrow<T>(widen(ws.at[k]) * widen(hs.at[k]) * scale);
        store(y + row + d, hs);
    }
    if (threadIdx.x == 0) rstd[blockIdx.x] = scale;
}

template <class T, int V>
__device__ void rms_norm_backward_input(
    const T* h, const T* w, const Acc<T>* rstd, const T* dy, const T* dres, T* dh, i64 dim) {
    i64 row = (i64)blockIdx.x * dim, first = threadIdx.x * V, step = blockDim.x * V;
    Acc<T> gh = 0, scale = rstd[blockIdx.x];
    for (i64 d = first; d < dim; d += step) {
        Pack<T, V> hs = load<T, V>(h + row + d), ws = load<T, V>(w + d), dys = load<T, V>(dy + row + d);
        for (int k = 0; k < V; k++) gh = multiply_add(widen(ws.at[k]) * widen(dys.at[k]), widen(hs.at[k]), gh);
    }
    Acc<T> pull = scale * scale * (block_sum(gh) / (Acc<T>)dim);
    for (i64 d = first; d < dim; d += step) {
        Pack<T, V> hs = load<T, V>(h + row + d), ws = load<T, V>(w + d), dys = load<T, V>(dy + row + d);
        Pack<T, V> rest = {}, dhs;
        if (dres) rest = load<T, V>(dres + row + d);
        for (int k = 0; k < V; k++) {
            Acc<T> g = widen(ws.at[k]) * widen(dys.at[k]);
            Acc<T> through = scale * (g - widen(hs.at[k]) * pull);
            dhs.at[k] = narrow<T>(dres ? widen(rest.at[k]) + through : through);
        }
        store(dh + row + d, dhs);
    }
}

template <class T>
__device__ void rms_norm_backward_weight(
    const T* h, const Acc<T>* rstd, const T* dy, Acc<T>* dw, i64 rows, i64 dim) {
    SHARED(Acc<T>, part, 32 * 33);
    u32 tx = threadIdx.x, ty = threadIdx.y;
    i64 d = (i64)blockIdx.x * 32 + tx;
    Acc<T> sum = 0;
    if (d < dim)
        for (i64 t = ty; t < rows; t += 32)
            sum = multiply_add(widen(dy[t * dim + d]) * rstd[t], widen(h[t * dim + d]), sum);
    part[ty * 33 + tx] = sum;
    __syncthreads();
    if (ty != 0 || d >= dim) return;
    for (u32 k = 1; k < 32; k++) sum += part[k * 33 + tx];
    dw[d] += sum;
}

#define RMS_NORM(T, V, t)                                                                                       \
    KERNEL(256, rms_norm_##t)                                                                                   \
    (const T* x, const T* r, T* h, const T* w, T* y, Acc<T>* rstd, i64 dim, Acc<T> eps) {                       \
        rms_norm<T, V>(x, r, h, w, y, rstd, dim, eps);                                                          \
    }                                                                                                           \
    KERNEL(256, rms_norm_backward_input_##t)                                                                    \
    (const T* h, const T* w, const Acc<T>* rstd, const T* dy, const T* dres, T* dh, i64 dim) {                  \
        rms_norm_backward_input<T, V>(h, w, rstd, dy, dres, dh, dim);                                           \
    }
#define RMS_NORM_WEIGHT(T, t)                                                               \
    KERNEL(1024, rms_norm_backward_weight_##t)                                              \
    (const T* h, const Acc<T>* rstd, const T* dy, Acc<T>* dw, i64 rows, i64 dim) {          \
        rms_norm_backward_weight<T>(h, rstd, dy, dw, rows, dim);                            \
    }

RMS_NORM(float, 1, f32)
RMS_NORM(double, 1, f64)
RMS_NORM(bf16, 1, bf16)
RMS_NORM(float, 4, f32_wide)
RMS_NORM(double, 2, f64_wide)
RMS_NORM(bf16, 8, bf16_wide)
RMS_NORM_WEIGHT(float, f32)
RMS_NORM_WEIGHT(double, f64)
RMS_NORM_WEIGHT(bf16, bf16)
