// y = silu(g) u with silu(g) = g s, s = 1 / (1 + e^-g).
//
//   backward   dg = dy u s (1 + g (1 - s))      du = dy g s
//
//   shapes     all arrays: n
//   block      256 threads, V elements each: 16 bytes, or one where that does not fit
//
// e^-g may be infinite; then s is 0 and so is the product. 1 - s is taken as s(-g), which loses
// nothing where s is close to 1.

template <class A> __device__ inline A sigmoid(A g) { return 1 / (1 + exponential(-g)); }

template <class T, int V> __device__ void swiglu(const T* g, const T* u, T* y, i64 n) {
    i64 i = first_element<V>();
    if (i >= n) return;
    Pack<T, V> gs = load<T, V>(g + i), us = load<T, V>(u + i), ys;
    for (int k = 0; k < V; k++) {
        Acc<T> x = widen(gs.at[k]);
        ys.at[k] = narrow<T>(x * sigmoid(x) * widen(us.at[k]));
    }
    store(y + i, ys);
}

template <class T, int V>
__device__ void swiglu_backward(const T* g, const T* u, const T* dy, T* dg, T* du, i64 n) {
    i64 i = first_element<V>();
    if (i >= n) return;
    Pack<T, V> gs = load<T, V>(g + i), us = load<T, V>(u + i), dys = load<T, V>(dy + i), dgs, dus;
    for (int k = 0; k < V; k++) {
        Acc<T> x = widen(gs.at[k]), d = widen(dys.at[k]);
        Acc<T> s = sigmoid(x), rest = sigmoid(-x);
        dgs.at[k] = narrow<T>(d * widen(us.at[k]) * s * (1 + x * rest));
        dus.at[k] = narrow<T>(d * (x * s));
    }
    store(dg + i, dgs);
    store(du + i, dus);
}

#define SWIGLU(T, V, t)                                                                              \
    KERNEL(256, swiglu_##t)(const T* g, const T* u, T* y, i64 n) { swiglu<T, V>(g, u, y, n); }       \
    KERNEL(256, swiglu_backward_##t)(const T* g, const T* u, const T* dy, T* dg, T* du, i64 n) {     \
        swiglu_backward<T, V>(g, u, dy, dg, du, n);                                                  \
    }

SWIGLU(float, 1, f32)
SWIGLU(double, 1, f64)
SWIGLU(bf16, 1, bf16)
SWIGLU(float, 4, f32_wide)
SWIGLU(double, 2, f64_wide)
SWIGLU(bf16, 8, bf16_wide)
