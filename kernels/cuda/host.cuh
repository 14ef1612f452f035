// The host's twins of what CUDA C++ has built in, for the emulator (src/emulated). Each call that
// waits, orders or touches memory ends in an emu_ function of src/emulated/calls.rs.
#pragma once

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
#define __restrict__

// Where a call stands, taken at the call.
#define SITE , const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define SITE_ONLY const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define SITE_PASS , file, line

struct uint3 {
    unsigned x, y, z;
};

enum EmuCall {
    EMU_SYNC,
    EMU_ARRIVE,
    EMU_SYNC_COUNT,
    EMU_SYNC_AND,
    EMU_SYNC_OR,
    EMU_SYNCWARP = 16,
    EMU_SHFL_IDX,
    EMU_SHFL_UP,
    EMU_SHFL_DOWN,
    EMU_SHFL_XOR,
    EMU_BALLOT,
    EMU_ANY,
    EMU_ALL,
    EMU_REDUCE_ADD,
    EMU_REDUCE_MIN,
    EMU_REDUCE_MAX,
    EMU_REDUCE_AND,
    EMU_REDUCE_OR,
    EMU_REDUCE_XOR,
    EMU_MMA_BF16,
    EMU_MMA_F16,
    EMU_MMA_TF32,
    EMU_LDMATRIX,
    EMU_LDMATRIX_T,
    EMU_STMATRIX,
    EMU_STMATRIX_T,
};

extern "C" {
uint3 emu_place(int which);
void* emu_shared(const char* name, unsigned bytes, unsigned align, const char* file, int line);
void* emu_dynamic_shared();
void emu_load(void* to, const void* p, unsigned bytes, const char* file, int line);
void emu_store(void* p, const void* from, unsigned bytes, const char* file, int line);
int emu_barrier(int call, int id, int threads, int value, const char* file, int line);
void emu_warp(int call, u32 mask, const u32* in, u32* out, const char* file, int line);
void emu_matrix(int call, int n, void* row, u32* regs, const char* file, int line);
void emu_mma(int call, float* d, const u32* a, const u32* b, const float* c, const char* file, int line);
void emu_cp_async(void* to, const void* from, unsigned bytes, unsigned from_bytes, const char* file, int line);
void emu_cp_commit();
void emu_cp_wait(unsigned groups);
void emu_trap(const char* file, int line);
void* emu_memcpy(void* to, const void* from, unsigned long bytes);
void* emu_memset(void* to, int value, unsigned long bytes);

float expf(float);
float exp2f(float);
float logf(float);
float log1pf(float);
float tanhf(float);
float erff(float);
float sqrtf(float);
float fmaf(float, float, float);
float fabsf(float);
float fmaxf(float, float);
float fminf(float, float);
float rintf(float);
float powf(float, float);
void sincosf(float, float*, float*);
double exp(double);
double exp2(double);
double log(double);
double log1p(double);
double tanh(double);
double erf(double);
double sqrt(double);
double fma(double, double, double);
double fabs(double);
double fmax(double, double);
double fmin(double, double);
double rint(double);
double pow(double, double);
void sincos(double, double*, double*);
}

// Builtins are unseen by the access callbacks; these are ours.
#define memcpy emu_memcpy
#define memset emu_memset

#define threadIdx (emu_place(0))
#define blockIdx (emu_place(1))
#define blockDim (emu_place(2))
#define gridDim (emu_place(3))

// A kernel has internal linkage here; the build script finds it by the mark and puts it in a table.
#ifdef EMU_SCAN
#define KERNEL(bounds, name) emu_found(name, bounds) void name
#else
#define KERNEL(bounds, name) static void name
#endif

// An array of the block's static shared memory; a call finds the block's one array of this site.
#define SHARED(type, name, len) \
    type(&name)[len] = *(type(*)[len])emu_shared(#name, sizeof(type[len]), alignof(type), __FILE__, __LINE__)
#define DYNAMIC_SHARED(name) unsigned char* name = (unsigned char*)emu_dynamic_shared()
#define UNROLL
#define UNROLL_SOME
#define UNROLL_NOT

static inline u32 __float_as_uint(float x) {
    union {
        float f;
        u32 u;
    } v = {x};
    return v.u;
}
static inline float __uint_as_float(u32 x) {
    union {
        u32 u;
        float f;
    } v = {x};
    return v.f;
}
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline double rsqrt(double x) { return 1.0 / sqrt(x); }
static inline int __popc(u32 x) { return __builtin_popcount(x); }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __clz(int x) { return x ? __builtin_clz((u32)x) : 32; }
static inline int min(int a, int b) { return b < a ? b : a; }
static inline int max(int a, int b) { return b > a ? b : a; }
static inline u32 min(u32 a, u32 b) { return b < a ? b : a; }
static inline u32 max(u32 a, u32 b) { return b > a ? b : a; }
static inline i64 min(i64 a, i64 b) { return b < a ? b : a; }
static inline i64 max(i64 a, i64 b) { return b > a ? b : a; }
static inline float min(float a, float b) { return fminf(a, b); }
static inline float max(float a, float b) { return fmaxf(a, b); }

static inline void __syncthreads(SITE_ONLY) { emu_barrier(EMU_SYNC, 0, 0, 0, file, line); }
static inline int __syncthreads_count(int p SITE) { return emu_barrier(EMU_SYNC_COUNT, 0, 0, p, file, line); }
static inline int __syncthreads_and(int p SITE) { return emu_barrier(EMU_SYNC_AND, 0, 0, p, file, line); }
static inline int __syncthreads_or(int p SITE) { return emu_barrier(EMU_SYNC_OR, 0, 0, p, file, line); }
static inline void __syncwarp(u32 mask = 0xffffffffu SITE) { emu_warp(EMU_SYNCWARP, mask, 0, 0, file, line); }
static inline void __trap(SITE_ONLY) { emu_trap(file, line); }

// in: value, lane argument, width; a value of 8 bytes goes in two halves.
template <class T>
static inline T emu_shfl(int call, u32 mask, T value, int arg, int width, const char* file, int line) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles move 4 or 8 bytes");
    union {
        T value;
        u32 word[sizeof(T) / 4];
    } v = {value};
    for (u32 i = 0; i < sizeof(T) / 4; i++) {
        u32 in[3] = {v.word[i], (u32)arg, (u32)width}, out = 0;
        emu_warp(call, mask, in, &out, file, line);
        v.word[i] = out;
    }
    return v.value;
}
template <class T> static inline T __shfl_sync(u32 mask, T x, int lane, int width = 32 SITE) {
    return emu_shfl(EMU_SHFL_IDX, mask, x, lane, width SITE_PASS);
}
template <class T> static inline T __shfl_up_sync(u32 mask, T x, u32 by, int width = 32 SITE) {
    return emu_shfl(EMU_SHFL_UP, mask, x, (int)by, width SITE_PASS);
}
template <class T> static inline T __shfl_down_sync(u32 mask, T x, u32 by, int width = 32 SITE) {
    return emu_shfl(EMU_SHFL_DOWN, mask, x, (int)by, width SITE_PASS);
}
template <class T> static inline T __shfl_xor_sync(u32 mask, T x, int with, int width = 32 SITE) {
    return emu_shfl(EMU_SHFL_XOR, mask, x, with, width SITE_PASS);
}

static inline u32 emu_vote(int call, u32 mask, u32 value, const char* file, int line) {
    u32 out = 0;
    emu_warp(call, mask, &value, &out, file, line);
    return out;
}
static inline u32 __ballot_sync(u32 mask, int p SITE) { return emu_vote(EMU_BALLOT, mask, p != 0 SITE_PASS); }
static inline int __any_sync(u32 mask, int p SITE) { return (int)emu_vote(EMU_ANY, mask, p != 0 SITE_PASS); }
static inline int __all_sync(u32 mask, int p SITE) { return (int)emu_vote(EMU_ALL, mask, p != 0 SITE_PASS); }
static inline u32 __reduce_add_sync(u32 mask, u32 x SITE) { return emu_vote(EMU_REDUCE_ADD, mask, x SITE_PASS); }
static inline u32 __reduce_min_sync(u32 mask, u32 x SITE) { return emu_vote(EMU_REDUCE_MIN, mask, x SITE_PASS); }
static inline u32 __reduce_max_sync(u32 mask, u32 x SITE) { return emu_vote(EMU_REDUCE_MAX, mask, x SITE_PASS); }
static inline u32 __reduce_and_sync(u32 mask, u32 x SITE) { return emu_vote(EMU_REDUCE_AND, mask, x SITE_PASS); }
static inline u32 __reduce_or_sync(u32 mask, u32 x SITE) { return emu_vote(EMU_REDUCE_OR, mask, x SITE_PASS); }
static inline u32 __reduce_xor_sync(u32 mask, u32 x SITE) { return emu_vote(EMU_REDUCE_XOR, mask, x SITE_PASS); }
