// y = x/2 (1 + tanh z) = x s(2z), the tanh form of GELU: z = sqrt(2/pi) (x + 0.044715 x^3) and
// s(a) = 1 / (1 + e^-a), which does not cancel where z is far below zero.
//
//   backward   dx = dy (s + x s (1 - s) 2z'),  z' = sqrt(2/pi) (1 + 3 0.044715 x^2), 1 - s = s(-2z)
//
//   shapes     all arrays: n
//   block      256 threads, V elements each: 16 bytes, or one where that does not fit

template <class A> struct Gelu {
    A s, rest, slope;

    __device__ explicit Gelu(A x) {
        const A twice = (A)1.5957691216057308, cubic = (A)0.044715;
        A z = twice * (x + cubic * x * x * x);
        s = 1 / (1 + exponential(-z));
        rest = 1 / (1 + exponential(z));
        slope = twice * (1 + 3 * cubic * x * x);
    }
};

template <class T, int V> __device__ void gelu(const T* x, T* y, i64 n) {
    i64 i = first_element<V>();
    if (i >= n) return;
    Pack<T, V> xs = load<T, V>(x + i), ys;
    for (int k = 0; k < V; k++) {
        Acc<T> a = widen(xs.at[k]);
        ys.at[k] = narrow<T>(a * Gelu<Acc<T>>(a).s);
    }
    store(y + i, ys);
}

template <class T, int V> __device__ void gelu_backward(const T* x, const T* dy, T* dx, i64 n) {
    i64 i = first_element<V>();
    if (i >= n) return;
    Pack<T, V> xs = load<T, V>(x + i), dys = load<T, V>(dy + i), dxs;
    for (int k = 0; k < V; k++) {
        Acc<T> a = widen(xs.at[k]);
        Gelu<Acc<T>> g(a);
        dxs.at[k] = narrow<T>(widen(dys.at[k]) * (g.s + a * g.s * g.rest * g.slope));
    }
    store(dx + i, dxs);
}

#define GELU(T, V, t)                                                                   \
    KERNEL(256, gelu_##t)(const T* x, T* y, i64 n) { gelu<T, V>(x, y, n); }             \
    KERNEL(256, gelu_backward_##t)(const T* x, const T* dy, T* dx, i64 n) {             \
        gelu_backward<T, V>(x, dy, dx, n);                                              \
    }

GELU(float, 1, f32)
GELU(double, 1, f64)
GELU(bf16, 1, bf16)
GELU(float, 4, f32_wide)
GELU(double, 2, f64_wide)
GELU(bf16, 8, bf16_wide)
