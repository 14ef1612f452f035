// LayerNorm over rows of `dim`, with a residual taken in on the way.
//
//   forward    h = x + r (or x)   n = (h - mean) rstd   rstd = 1 / sqrt(var + eps)   y = w n + b
//   backward   g = w dy     dh = dres + rstd (g - mean(g) - n mean(g n))
//              dw += sum_t dy n     db += sum_t dy
//
//   shapes     x, r, h, y, dy, dres, dh: rows x dim     w, b: dim     mean, rstd: rows, Acc
//              dw, db: dim, Acc
//   absent     r (then h is not written either) and dres may be null
//   blocks     as in rms_norm.cu
//
// The variance is summed about the mean in a second pass over the row, so it does not cancel.

template <class T, int V>
__device__ void layer_norm(
    const T* x, const T* r, T* h, const T* w, const T* b, T* y, Acc<T>* mean, Acc<T>* rstd, i64 dim, Acc<T> eps) {
    i64 row = (i64)blockIdx.x * dim, first = threadIdx.x * V, step = blockDim.x * V;
    Acc<T> sum = 0;
    for (i64 d = first; d < dim; d += step) {
        Pack<T, V> hs = load<T, V>(x + row + d);
        if (r) {
            Pack<T, V> rs = load<T, V>(r + row + d);
            for (int k = 0; k < V; k++) hs.at[k] = narrow<T>(widen(hs.at[k]) + widen(rs.at[k]));
            store(h + row + d, hs);
        }
        for (int k = 0; k < V; k++) sum += widen(hs.at[k]);
    }
    Acc<T> center = block_sum(sum) / (Acc<T>)dim, squares = 0;
    const T* from = r ? h : x;
    for (i64 d = first; d < dim; d += step) {
        Pack<T, V> hs = load<T, V>(from + row + d);
        for (int k = 0; k < V; k++) {
            Acc<T> off = widen(hs.at[k]) - center;
            squares = multiply_add(off, off, squares);
        }
    }
    Acc<T> scale = 1 / root(block_sum(squares) / (Acc<T>)dim + eps);
    for (i64 d = first; d < dim; d += step) {
        Pack<T, V> hs = load<T, V>(from + row + d), ws = load<T, V>(w + d), bs = load<T, V>(b + d);
        for (int k = 0; k < V; k++) {
            Acc<T> n = (widen(hs.at[k]) - center) * scale;
            hs.at[k] = narrow<T>(multiply_add(widen(ws.at[k]), n, widen(bs.at[k])));
        }
        store(y + row + d, hs);
    }
    if (threadIdx.x == 0) {
        mean[blockIdx.x] = center;
        rstd[blockIdx.x] = scale;
    }
}

template <class T, int V>
__device__ void layer_norm_backward_input(const T* h, const T* w, const Acc<T>* mean, const Acc<T>* rstd, const T* dy,
                                          const T* dres, T* dh, i64 dim) {
    i64 row = (i64)blockIdx.x * dim, first = threadIdx.x * V, step = blockDim.x * V;
    Acc<T> center = mean[blockIdx.x], scale = rstd[blockIdx.x], gs = 0, gn = 0;
    for (i64 d = first; d < dim; d += step) {
        Pack<T, V> hs = load<T, V>(h + row + d), ws = load<T, V>(w + d), dys = load<T, V>(dy + row + d);
        for (int k = 0; k < V; k++) {
            Acc<T> g = widen(ws.at[k]) * widen(dys.at[k]);
            gs += g;
            gn = multiply_add(g, (widen(hs.at[k]) - center) * scale, gn);
        }
    }
    gs = block_sum(gs) / (Acc<T>)dim;
    gn = block_sum(gn) / (Acc<T>)dim;
    for (i64 d = first; d < dim; d += step) {
        Pack<T, V> hs = load<T, V>(h + row + d), ws = load<T, V>(w + d), dys = load<T, V>(dy + row + d);
        Pack<T, V> rest = {}, dhs;
        if (dres) rest = load<T, V>(dres + row + d);
        for (int k = 0; k < V; k++) {
            Acc<T> g = widen(ws.at[k]) * widen(dys.at[k]), n = (widen(hs.at[k]) - center) * scale;
            Acc<T> through = scale * (g - gs - n * gn);
            dhs.at[k] = narrow<T>(dres ? widen(rest.at[k]) + through : through);
        }
        store(dh + row + d, dhs);
    }
}

template <class T>
__device__ void layer_norm_backward_weight(const T* h, const Acc<T>* mean, const Acc<T>* rstd, const T* dy, Acc<T>* dw,
                                           Acc<T>* db, i64 rows, i64 dim) {
    SHARED(Acc<T>, w_part, 32 * 33);
    SHARED(Acc<T>, b_part, 32 * 33);
    u32 tx = threadIdx.x, ty = threadIdx.y;
    i64 d = (i64)blockIdx.x * 32 + tx;
    Acc<T> w_sum = 0, b_sum = 0;
    if (d < dim)
        for (i64 t = ty; t < rows; t += 32) {
            Acc<T> g = widen(dy[t * dim + d]);
            w_sum = multiply_add(g, (widen(h[t * dim + d]) - mean[t]) * rstd[t], w_sum);
            b_sum += g;
        }
    w_part[ty * 33 + tx] = w_sum;
    b_part[ty * 33 + tx] = b_sum;
    __syncthreads();
    if (ty != 0 || d >= dim) return;
    for (u32 k = 1; k < 32; k++) {
        w_sum += w_part[k * 33 + tx];
        b_sum += b_part[k * 33 + tx];
    }
    dw[d] += w_sum;
    db[d] += b_sum;
}

#define LAYER_NORM(T, V, t)                                                                                           \
    KERNEL(256, layer_norm_##t)                                                                                       \
    (const T* x, const T* r, T* h, const T* w, const T* b, T* y, Acc<T>* mean, Acc<T>* rstd, i64 dim, Acc<T> eps) {   \
        layer_norm<T, V>(x, r, h, w, b, y, mean, rstd, dim, eps);                                                     \
    }                                                                                                                 \
    KERNEL(256, layer_norm_backward_input_##t)                                                                        \
    (const T* h, const T* w, const Acc<T>* mean, const Acc<T>* rstd, const T* dy, const T* dres, T* dh, i64 dim) {    \
        layer_norm_backward_input<T, V>(h, w, mean, rstd, dy, dres, dh, dim);                                         \
    }
#define LAYER_NORM_WEIGHT(T, t)                                                                                       \
    KERNEL(1024, layer_norm_backward_weight_##t)                                                                      \
    (const T* h, const Acc<T>* mean, const Acc<T>* rstd, const T* dy, Acc<T>* dw, Acc<T>* db, i64 rows, i64 dim) {    \
        layer_norm_backward_weight<T>(h, mean, rstd, dy, dw, db, rows, dim);                                          \
    }

LAYER_NORM(float, 1, f32)
LAYER_NORM(double, 1, f64)
LAYER_NORM(bf16, 1, bf16)
LAYER_NORM(float, 4, f32_wide)
LAYER_NORM(double, 2, f64_wide)
LAYER_NORM(bf16, 8, bf16_wide)
LAYER_NORM_WEIGHT(float, f32)
LAYER_NORM_WEIGHT(double, f64)
LAYER_NORM_WEIGHT(bf16, bf16)
