// Optimizer steps on a flat range, in Acc, with the parameters as they are used written on the way.
//
//   adamw     g = scale grad     m = b1 m + (1-b1) g     v = b2 v + (1-b2) g^2
//             w = w keep - rate m / (root(v) root_v + eps)
//             keep = 1 - lr wd     rate = lr / (1-b1^t)     root_v = 1 / sqrt(1-b2^t)
//   sgd       w -= lr (scale grad + wd w)
//   squares   part[b] = sum of x^2 over the b-th of the grid's ranges, in f64; then out += their sum
//
//   shapes    grad, w, m, v: n, Acc     param: n, T, or null     x: n     part: 256     out: 1
//   blocks    adamw, sgd: 256 threads, one element each
//             squares: up to 256 blocks of 256 threads, thread by thread 256 apart; one block adds up
//
// Numbers that do not depend on the element are worked out in f64 by the host. adamw and sgd give an
// element the same bits wherever the range is cut; squares sums in an order that depends on n alone.

template <class A> struct AdamW {
    A b1, rest1, b2, rest2, eps, scale, keep, rate, root_v;
};

template <class T>
__device__ void adamw(const Acc<T>* grad, Acc<T>* w, Acc<T>* m, Acc<T>* v, T* param, i64 n, AdamW<Acc<T>> s) {
    i64 i = first_element<1>();
    if (i >= n) return;
    Acc<T> g = s.scale * grad[i];
    Acc<T> m_new = multiply_add(s.b1, m[i], s.rest1 * g);
    Acc<T> v_new = multiply_add(s.b2, v[i], s.rest2 * g * g);
    Acc<T> step = s.rate * m_new / multiply_add(root(v_new), s.root_v, s.eps);
    Acc<T> w_new = multiply_add(w[i], s.keep, -step);
    m[i] = m_new;
    v[i] = v_new;
    w[i] = w_new;
    if (param) param[i] = narrow<T>(w_new);
}

template <class T>
__device__ void sgd(const Acc<T>* grad, Acc<T>* w, T* param, i64 n, Acc<T> lr, Acc<T> decay, Acc<T> scale) {
    i64 i = first_element<1>();
    if (i >= n) return;
    Acc<T> w_new = w[i] - lr * (scale * grad[i] + decay * w[i]);
    w[i] = w_new;
    if (param) param[i] = narrow<T>(w_new);
}

// Block b sums a range of its own: ranges are as long as each other, but for the last.
template <class T> __device__ void squares(const T* x, double* part, i64 n) {
    i64 len = (n + gridDim.x - 1) / gridDim.x, from = blockIdx.x * len, to = min(from + len, n);
    double sum = 0;
    for (i64 i = from + threadIdx.x; i < to; i += blockDim.x) {
        double value = widen(x[i]);
        sum = fma(value, value, sum);
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) part[blockIdx.x] = sum;
}

KERNEL(256, add_parts)(const double* part, double* out, int parts) {
    double sum = block_sum((int)threadIdx.x < parts ? part[threadIdx.x] : 0.0);
    if (threadIdx.x == 0) out[0] += sum;
}

#define OPTIMIZER(T, t)                                                                                             \
    KERNEL(256, adamw_##t)                                                                                          \
    (const Acc<T>* grad, Acc<T>* w, Acc<T>* m, Acc<T>* v, T* param, i64 n, Acc<T> b1, Acc<T> rest1, Acc<T> b2,      \
     Acc<T> rest2, Acc<T> eps, Acc<T> scale, Acc<T> keep, Acc<T> rate, Acc<T> root_v) {                             \
        adamw<T>(grad, w, m, v, param, n, {b1, rest1, b2, rest2, eps, scale, keep, rate, root_v});                  \
    }                                                                                                               \
    KERNEL(256, sgd_##t)                                                                                            \
    (const Acc<T>* grad, Acc<T>* w, T* param, i64 n, Acc<T> lr, Acc<T> decay, Acc<T> scale) {                       \
        sgd<T>(grad, w, param, n, lr, decay, scale);                                                                \
    }                                                                                                               \
    KERNEL(256, squares_##t)(const T* x, double* part, i64 n) { squares<T>(x, part, n); }

OPTIMIZER(float, f32)
OPTIMIZER(double, f64)
OPTIMIZER(bf16, bf16)
