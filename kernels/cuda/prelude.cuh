// What every kernel file may use, on either back end.
//
//   types       i64, u64, u32, u16, bf16; Acc<T> is the type that sums of T are taken in
//   kernels     KERNEL(bounds, name)(arguments) { ... }; bounds as in __launch_bounds__
//   memory      SHARED(type, name, len), DYNAMIC_SHARED(name)
//   registers   UNROLL before a loop that indexes an array of the thread: only what is indexed by
//               constants lies in registers. UNROLL_NOT keeps code that stands in many places short,
//               UNROLL_SOME (by four) a long loop that the compiler would unroll whole
//   launches    the CUDA built-ins: threadIdx ..., __syncthreads, shuffles, math
//
// Compiled by NVRTC the built-ins are the device's own and ptx.cuh is inline PTX. Compiled for the
// host they are the emulator's twins. This file and ptx.cuh are the only ones that know which.
#pragma once

typedef long long i64;
typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;

#ifdef __CUDACC_RTC__
#define SITE
#define SITE_ONLY
#define SITE_PASS
#define KERNEL_EMIT(name, ...) extern "C" __global__ void __launch_bounds__(__VA_ARGS__) name
// With ONE_KERNEL only the kernel `name` is compiled for which WANT_name is `~, KERNEL_EMIT`: the others
// are templates that nobody uses.
#ifdef ONE_KERNEL
#define KERNEL_SKIP(name, ...) template <int> __device__ void name
#define KERNEL_SECOND(first, second, ...) second
#define KERNEL_PICK(...) KERNEL_SECOND(__VA_ARGS__, ~)
#define KERNEL(bounds, name) KERNEL_PICK(WANT_##name, KERNEL_SKIP)(name, bounds)
#elif defined NAME_KERNELS  // only to learn their names
#define KERNEL(bounds, name) KERNEL_EMIT(name, bounds)() {} template <int> __device__ void name##_itself
#else
#define KERNEL(bounds, name) KERNEL_EMIT(name, bounds)
#endif
#define SHARED(type, name, len) __shared__ type name[len]
#define DYNAMIC_SHARED(name) extern __shared__ __align__(1024) unsigned char name[]
#define UNROLL _Pragma("unroll")
#define UNROLL_SOME _Pragma("unroll 4")
#define UNROLL_NOT _Pragma("unroll 1")
#else
#include "host.cuh"
#endif

#define FULL_WARP 0xffffffffu

// bfloat16 as its bits: the upper half of an f32.
struct bf16 {
    u16 bits;
};

#include "ptx.cuh"

template <class T> struct AccOf {
    typedef float type;
};
template <> struct AccOf<double> {
    typedef double type;
};
template <class T> using Acc = typename AccOf<T>::type;

// Widens exactly.
__device__ inline float widen(float x) { return x; }
__device__ inline double widen(double x) { return x; }
__device__ inline float widen(bf16 x) { return __uint_as_float((u32)x.bits << 16); }

// Rounds to nearest, ties to even.
template <class T> __device__ inline T narrow(Acc<T> x) { return x; }
template <> __device__ inline bf16 narrow<bf16>(float x) { return bf16{cvt_rn_bf16(x)}; }

// Functions of one name in both widths. root and division are correctly rounded.
__device__ inline float root(float x) { return sqrtf(x); }
__device__ inline double root(double x) { return sqrt(x); }
__device__ inline float exponential(float x) { return expf(x); }
__device__ inline double exponential(double x) { return exp(x); }
__device__ inline float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
__device__ inline double multiply_add(double a, double b, double c) { return fma(a, b, c); }

// V neighbours of a T, moved as one access: they fill 16 bytes, or 8.
template <class T, int V> struct __align__(V * sizeof(T) > 16 ? sizeof(T) : V * sizeof(T)) Pack {
    T at[V];
};

template <class T, int V> __device__ inline Pack<T, V> load(const T* p) {
    Pack<T, V> pack;
    if constexpr (V == 1) {
        pack.at[0] = *p;
    } else {
        static_assert(V * sizeof(T) == 16 || V * sizeof(T) == 8, "packs are 16 or 8 bytes");
        if constexpr (V * sizeof(T) == 16) ld_16(&pack, p);
        else ld_8(&pack, p);
    }
    return pack;
}

template <class T, int V> __device__ inline void store(T* p, const Pack<T, V>& pack) {
    if constexpr (V == 1) {
        *p = pack.at[0];
    } else {
        static_assert(V * sizeof(T) == 16 || V * sizeof(T) == 8, "packs are 16 or 8 bytes");
        if constexpr (V * sizeof(T) == 16) st_16(p, &pack);
        else st_8(p, &pack);
    }
}

// The element that this thread works on first, when each takes V.
template <int V> __device__ inline i64 first_element() { return ((i64)blockIdx.x * blockDim.x + threadIdx.x) * V; }

// The sum over a warp, the same bits in each lane: lanes meet in pairs, then pairs of pairs.
template <class A> __device__ inline A warp_sum(A x) {
    for (int far = 16; far > 0; far /= 2) x += __shfl_xor_sync(FULL_WARP, x, far);
    return x;
}

// The sum over a block of whole warps, the same bits in each thread: warps in order.
template <class A> __device__ inline A block_sum(A x) {
    SHARED(A, part, 32);
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = x;
    __syncthreads();
    A sum = 0;
    for (u32 w = 0; w < blockDim.x / 32; w++) sum += part[w];
    __syncthreads();  // before the next call writes part
    return sum;
}

// Dropout (see src/dropout.rs): whether an element is let go is a function of its place alone.
struct Dropout {
    u32 least;  // the least word of what stays; 0 lets nothing go
    u32 site;
    double scale;
    u64 seed, step, sample;
};

struct Words {
    u32 at[4];
};

// Philox4x32-10 (Salmon et al. 2011): four random words from a counter and a key.
__device__ inline Words philox(Words counter, u32 low, u32 high) {
    UNROLL_NOT for (int round = 0; round < 10; round++) {
        u64 a = (u64)counter.at[0] * 0xd2511f53u, b = (u64)counter.at[2] * 0xcd9e8d57u;
        counter = {(u32)(b >> 32) ^ counter.at[1] ^ low, (u32)b, (u32)(a >> 32) ^ counter.at[3] ^ high, (u32)a};
        low += 0x9e3779b9u;
        high += 0xbb67ae85u;
    }
    return counter;
}

// The draws for one sequence and head.
__device__ inline Words draws_of(const Dropout& of, i64 sequence, i64 head) {
    u32 high = (u32)(of.step >> 32);
    Words counter = {(u32)(of.sample + sequence), ((u32)head & 0xffff) | high << 16, of.site, (u32)of.step};
    return philox(counter, (u32)of.seed, (u32)(of.seed >> 32));
}

// Where the draw of an element stands.
struct Place {
    u32 row, column;
};

__device__ inline bool stays(const Dropout& of, const Words& draws, Place at) {
    Words words = philox({at.row, at.column / 4, draws.at[2], draws.at[3]}, draws.at[0], draws.at[1]);
    u32 low = at.column % 2 ? words.at[1] : words.at[0], high = at.column % 2 ? words.at[3] : words.at[2];
    return (at.column % 4 < 2 ? low : high) >= of.least;
}

// Which of a thread's N elements stay, a bit each: element e is at place_of(e). A loop over elements in registers
// must be unrolled; drawn in a loop of its own, what draws stands once.
template <int N, class PlaceOf> __device__ inline u32 staying(const Dropout& of, const Words& draws, PlaceOf place_of) {
    static_assert(N <= 32, "a bit an element");
    if (!of.least) return ~0u;
    u32 bits = 0;
    UNROLL_NOT for (int e = 0; e < N; e++) bits |= (u32)stays(of, draws, place_of(e)) << e;
    return bits;
}
