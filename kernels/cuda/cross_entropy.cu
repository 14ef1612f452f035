// Softmax cross-entropy over a shard of the vocabulary; the reductions over shards stand between.
//
//   logit_max        max[t] = max over v of x[t, v], minus infinity over nothing
//   logit_sums       sum[t] = sum over v of e^(x - max)     target[t] = x[t, label] - max if mine, or 0
//   shift_sums       sum[t] = sum e^(here - max), target[t] += here - max if mine: from sums over `here`, my own maximum
//   token_loss       loss[t] = ln(sum) - target, 0 where weight[t] is 0
//   logit_backward   dx[t, v] = weight / sum e^(x - max) - [v is the label] weight, 0 where weight is 0
//
//   shapes     x, dx: tokens x entries, T     label: tokens     max, weight: tokens, Acc
//              stats: 2 x tokens, Acc: sums, then targets
//   block      a row, 256 threads; shift_sums and token_loss 256 threads, one token each
//
// Sums are of one row, in an order that depends on the number of entries alone. The maximum of a
// NaN and a number is the number.

__device__ inline float logarithm(float x) { return logf(x); }
__device__ inline double logarithm(double x) { return log(x); }

template <class A> __device__ inline A larger(A m, A x) { return x > m ? x : m; }

template <class A> __device__ inline A block_max(A x) {
    SHARED(A, part, 32);
    for (int far = 16; far > 0; far /= 2) x = larger(x, __shfl_xor_sync(FULL_WARP, x, far));
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = x;
    __syncthreads();
    for (u32 w = 0; w < blockDim.x / 32; w++) x = larger(x, part[w]);
    return x;
}

template <class A> __device__ inline A minus_infinity() { return (A)-__uint_as_float(0x7f800000u); }

template <class T> __device__ void logit_max(const T* x, Acc<T>* max, i64 entries) {
    i64 row = blockIdx.x * entries;
    Acc<T> m = minus_infinity<Acc<T>>();
    for (i64 v = threadIdx.x; v < entries; v += blockDim.x) m = larger(m, widen(x[row + v]));
    m = block_max(m);
    if (threadIdx.x == 0) max[blockIdx.x] = m;
}

template <class T>
__device__ void logit_sums(const T* x, const int* label, const Acc<T>* max, Acc<T>* stats, i64 first, i64 entries) {
    i64 t = blockIdx.x, row = t * entries, mine = label[t] - first;
    Acc<T> sum = 0, m = max[t];
    for (i64 v = threadIdx.x; v < entries; v += blockDim.x) sum += exponential(widen(x[row + v]) - m);
    sum = block_sum(sum);
    if (threadIdx.x != 0) return;
    stats[t] = sum;
    bool here = mine >= 0 && mine < entries;
    stats[gridDim.x + t] = here ? widen(x[row + mine]) - m : 0;
}

template <class T>
__device__ void shift_sums(T* stats, const int* label, const T* here, const T* max, i64 tokens, i64 first,
                           i64 entries) {
    i64 t = first_element<1>();
    if (t >= tokens) return;
    Acc<T> mine = widen(here[t]), all = widen(max[t]);
    // Of two that are alike, minus infinity too, nothing moves.
    if (mine == all) return;
    i64 at = label[t] - first;
    stats[t] = narrow<T>(widen(stats[t]) * exponential(mine - all));
    if (at >= 0 && at < entries) stats[tokens + t] = narrow<T>(widen(stats[tokens + t]) + (mine - all));
}

template <class T> __device__ void token_loss(const T* stats, const T* weight, T* loss, i64 tokens) {
    i64 t = first_element<1>();
    if (t >= tokens) return;
    Acc<T> value = logarithm(widen(stats[t])) - widen(stats[tokens + t]);
    loss[t] = narrow<T>(widen(weight[t]) == 0 ? 0 : value);
}

template <class T>
__device__ void logit_backward(const T* x, const int* label, const Acc<T>* max, const Acc<T>* stats,
                               const Acc<T>* weight, T* dx, i64 first, i64 entries) {
    i64 t = blockIdx.x, row = t * entries;
    Acc<T> w = weight[t], m = max[t], scale = w / stats[t];
    for (i64 v = threadIdx.x; v < entries; v += blockDim.x) {
        bool hit = label[t] - first == v;
        Acc<T> p = exponential(widen(x[row + v]) - m) * scale;
        dx[row + v] = narrow<T>(w == 0 ? 0 : hit ? p - w : p);
    }
}

#define CROSS_ENTROPY(T, t)                                                                                          \
    KERNEL(256, logit_max_##t)(const T* x, Acc<T>* max, i64 entries) { logit_max<T>(x, max, entries); }              \
    KERNEL(256, logit_sums_##t)                                                                                      \
    (const T* x, const int* label, const Acc<T>* max, Acc<T>* stats, i64 first, i64 entries) {                       \
        logit_sums<T>(x, label, max, stats, first, entries);                                                         \
    }                                                                                                                \
    KERNEL(256, shift_sums_##t)                                                                                      \
    (T* stats, const int* label, const T* here, const T* max, i64 tokens, i64 first, i64 entries) {                  \
        shift_sums<T>(stats, label, here, max, tokens, first, entries);                                              \
    }                                                                                                                \
    KERNEL(256, token_loss_##t)(const T* stats, const T* weight, T* loss, i64 tokens) {                              \
        token_loss<T>(stats, weight, loss, tokens);                                                                  \
    }                                                                                                                \
    KERNEL(256, logit_backward_##t)                                                                                  \
    (const T* x, const int* label, const Acc<T>* max, const Acc<T>* stats, const Acc<T>* weight, T* dx, i64 first,   \
     i64 entries) {                                                                                                  \
        logit_backward<T>(x, label, max, stats, weight, dx, first, entries);                                         \
    }

CROSS_ENTROPY(float, f32)
CROSS_ENTROPY(double, f64)
CROSS_ENTROPY(bf16, bf16)
