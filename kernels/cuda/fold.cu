// fold   y[i] = x_0[i] op x_1[i] op ... in rank order, from the left, in a type that holds sums; rounded once.
//
//   op       0 sum, 1 product, 2 least, 3 greatest; a NaN is the least and the greatest, of equals the left stays
//   shapes   x_0 ... x_15: n each, of which the first `ranks` are read; y: n, which may be one of them
//   after    with `more` x_0 is y, and the sum goes on from there: more ranks than one launch takes
//   divisor  what the fold is divided by before it is rounded: the ranks of a mean, else 1; integers towards 0
//   block    256 threads, V elements each: 16 bytes, or one where that does not fit
//
// Each part is read once, each result written once. Integers wrap.

// The type that elements are folded in.
template <class T> struct WideOf {
    typedef T type;
};
template <> struct WideOf<bf16> {
    typedef float type;
};
template <class T> using Wide = typename WideOf<T>::type;

template <class T> __device__ inline T wide(T x) { return x; }
__device__ inline float wide(bf16 x) { return widen(x); }

template <class T> struct Rounded {
    __device__ static T of(T x) { return x; }
};
template <> struct Rounded<bf16> {
    __device__ static bf16 of(float x) { return narrow<bf16>(x); }
};

// Signed integers wrap where their unsigned twins are added or multiplied.
__device__ inline float plus(float a, float b) { return a + b; }
__device__ inline double plus(double a, double b) { return a + b; }
__device__ inline u32 plus(u32 a, u32 b) { return a + b; }
__device__ inline u64 plus(u64 a, u64 b) { return a + b; }
__device__ inline int plus(int a, int b) { return (int)((u32)a + (u32)b); }
__device__ inline i64 plus(i64 a, i64 b) { return (i64)((u64)a + (u64)b); }
__device__ inline float times(float a, float b) { return a * b; }
__device__ inline double times(double a, double b) { return a * b; }
__device__ inline u32 times(u32 a, u32 b) { return a * b; }
__device__ inline u64 times(u64 a, u64 b) { return a * b; }
__device__ inline int times(int a, int b) { return (int)((u32)a * (u32)b); }
__device__ inline i64 times(i64 a, i64 b) { return (i64)((u64)a * (u64)b); }

template <class A> __device__ inline A fold_two(int op, A a, A b) {
    if (op == 0) return plus(a, b);
    if (op == 1) return times(a, b);
    // A NaN on the left fails both tests and stays.
    bool wins = op == 2 ? b < a : b > a;
    return wins || (b != b && a == a) ? b : a;
}

const int PARTS = 16;

template <class T> struct Parts {
    const T* at[PARTS];
};

template <class T, int V>
__device__ void fold(const Parts<T>& x, T* y, i64 n, int ranks, int op, i64 divisor) {
    i64 i = first_element<V>();
    if (i >= n) return;
    Wide<T> sum[V];
    Pack<T, V> part = load<T, V>(x.at[0] + i);
    UNROLL for (int k = 0; k < V; k++) sum[k] = wide(part.at[k]);
    UNROLL for (int rank = 1; rank < PARTS; rank++) {
        if (rank >= ranks) break;
        part = load<T, V>(x.at[rank] + i);
        UNROLL for (int k = 0; k < V; k++) sum[k] = fold_two(op, sum[k], wide(part.at[k]));
    }
    UNROLL for (int k = 0; k < V; k++) {
        if (divisor != 1) sum[k] = sum[k] / (Wide<T>)divisor;
        part.at[k] = Rounded<T>::of(sum[k]);
    }
    store(y + i, part);
}

#define FOLD(T, V, t)                                                                                              \
    KERNEL(256, fold_##t)(const T* x0, const T* x1, const T* x2, const T* x3, const T* x4, const T* x5,             \
                          const T* x6, const T* x7, const T* x8, const T* x9, const T* x10, const T* x11,           \
                          const T* x12, const T* x13, const T* x14, const T* x15, T* y, i64 n, int ranks, int op,   \
                          i64 divisor) {                                                                            \
        fold<T, V>({{x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15}}, y, n, ranks, op,       \
                   divisor);                                                                                        \
    }

FOLD(float, 1, f32)
FOLD(double, 1, f64)
FOLD(bf16, 1, bf16)
FOLD(int, 1, i32)
FOLD(u32, 1, u32)
FOLD(i64, 1, i64)
FOLD(u64, 1, u64)
FOLD(float, 4, f32_wide)
FOLD(double, 2, f64_wide)
FOLD(bf16, 8, bf16_wide)
FOLD(int, 4, i32_wide)
FOLD(u32, 4, u32_wide)
FOLD(i64, 2, i64_wide)
FOLD(u64, 2, u64_wide)
