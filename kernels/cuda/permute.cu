// Rows to experts and back.
//
//   gather_rows        y[r] = x[index[r]]
//   combine            y[t] = sum over k of w[t, k] x[row of (t, k)], in order of k; without w each counts once
//   combine_rows       dx[r] = w[pair of r] dy[pair of r / topk]
//   combine_weights    dw[t, k] = <dy[t], x[row of (t, k)]>
//
//   shapes     x of gather: rows x width     y: indices x width     index: an int a row, none below 0 or beyond
//              rows: tokens x topk, the row of each pair, -1 where dropped     pairs: rows, the pair of each row
//              w, dw: tokens x topk, Acc     sums in Acc, rounded once
//   block      a row of the result, 256 threads of V elements; combine_weights a warp a pair
//
// An index that names no row stands for a row of zeros. Every sum has one order: no atomics.

template <class T, int V> __device__ void gather_rows(const int* index, const T* x, T* y, i64 rows, i64 width) {
    i64 r = blockIdx.x, from = index[r];
    bool there = from >= 0 && from < rows;
    for (i64 d = threadIdx.x * V; d < width; d += blockDim.x * V) {
        Pack<T, V> pack = {};
        if (there) pack = load<T, V>(x + from * width + d);
        store(y + r * width + d, pack);
    }
}

template <class T>
__device__ void combine(const int* rows_tk, const Acc<T>* weight, const T* x, T* y, i64 rows, i64 topk, i64 width) {
    i64 t = blockIdx.x;
    for (i64 d = threadIdx.x; d < width; d += blockDim.x) {
        Acc<T> sum = 0;
        for (i64 pair = t * topk; pair < (t + 1) * topk; pair++) {
            i64 from = rows_tk[pair];
            if (from < 0 || from >= rows) continue;
            Acc<T> w = weight ? weight[pair] : (Acc<T>)1;
            sum += w * widen(x[from * width + d]);
        }
        y[t * width + d] = narrow<T>(sum);
    }
}

template <class T>
__device__ void combine_rows(const int* pairs, const Acc<T>* weight, const T* dy, T* dx, i64 tokens, i64 topk,
                             i64 width) {
    i64 r = blockIdx.x, pair = pairs[r];
    bool there = pair >= 0 && pair < tokens * topk;
    Acc<T> w = there ? weight[pair] : (Acc<T>)0;
    for (i64 d = threadIdx.x; d < width; d += blockDim.x) {
        Acc<T> value = there ? w * widen(dy[pair / topk * width + d]) : (Acc<T>)0;
        dx[r * width + d] = narrow<T>(value);
    }
}

template <class T>
__device__ void combine_weights(const int* rows_tk, const T* x, const T* dy, Acc<T>* dweight, i64 rows, i64 pairs,
                                i64 topk, i64 width) {
    i64 pair = (i64)blockIdx.x * 8 + threadIdx.x / 32;
    if (pair >= pairs) return;
    i64 from = rows_tk[pair];
    Acc<T> sum = 0;
    if (from >= 0 && from < rows) {
        for (i64 d = threadIdx.x % 32; d < width; d += 32)
            sum += widen(x[from * width + d]) * widen(dy[pair / topk * width + d]);
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) dweight[pair] = sum;
}

#define GATHER(T, V, t)                                                                                       \
    KERNEL(256, gather_rows_##t)(const int* index, const T* x, T* y, i64 rows, i64 width) {                   \
        gather_rows<T, V>(index, x, y, rows, width);                                                          \
    }
#define COMBINE(T, t)                                                                                         \
    KERNEL(256, combine_##t)                                                                                  \
    (const int* rows_tk, const Acc<T>* weight, const T* x, T* y, i64 rows, i64 topk, i64 width) {             \
        combine<T>(rows_tk, weight, x, y, rows, topk, width);                                                 \
    }                                                                                                         \
    KERNEL(256, combine_rows_##t)                                                                             \
    (const int* pairs, const Acc<T>* weight, const T* dy, T* dx, i64 tokens, i64 topk, i64 width) {           \
        combine_rows<T>(pairs, weight, dy, dx, tokens, topk, width);                                          \
    }                                                                                                         \
    KERNEL(256, combine_weights_##t)                                                                          \
    (const int* rows_tk, const T* x, const T* dy, Acc<T>* dweight, i64 rows, i64 pairs, i64 topk, i64 width) { \
        combine_weights<T>(rows_tk, x, dy, dweight, rows, pairs, topk, width);                                \
    }

GATHER(float, 1, f32)
GATHER(double, 1, f64)
GATHER(bf16, 1, bf16)
GATHER(float, 4, f32_wide)
GATHER(double, 2, f64_wide)
GATHER(bf16, 8, bf16_wide)
COMBINE(float, f32)
COMBINE(double, f64)
COMBINE(bf16, bf16)
