// All inline PTX: one thin wrapper an instruction, its host twin beside it. Operands are a lane's
// own; pointers to shared memory are generic and converted here. PTX ISA anchors stand above each.
#pragma once

#ifdef __CUDACC_RTC__
__device__ inline u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
#endif

// #data-movement-and-conversion-instructions-cvt: to bf16, nearest even.
__device__ inline u16 cvt_rn_bf16(float x) {
#ifdef __CUDACC_RTC__
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
#else
    u32 bits = __float_as_uint(x);
    if (x != x) return 0x7fff;
    return (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
#endif
}

// As cvt_rn_bf16, two at once: `low` in the low half.
__device__ inline u32 cvt_rn_bf16x2(float low, float high) {
#ifdef __CUDACC_RTC__
    u32 bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
#else
    return (u32)cvt_rn_bf16(low) | (u32)cvt_rn_bf16(high) << 16;
#endif
}

// #data-movement-and-conversion-instructions-ld: 16 bytes in one access; p is a multiple of 16.
__device__ inline void ld_16(void* to, const void* p SITE) {
#ifdef __CUDACC_RTC__
    *(uint4*)to = *(const uint4*)p;
#else
    emu_load(to, p, 16, file, line);
#endif
}

// #data-movement-and-conversion-instructions-st: as ld_16.
__device__ inline void st_16(void* p, const void* from SITE) {
#ifdef __CUDACC_RTC__
    *(uint4*)p = *(const uint4*)from;
#else
    emu_store(p, from, 16, file, line);
#endif
}

// As ld_16 and st_16, 8 bytes; p is a multiple of 8.
__device__ inline void ld_8(void* to, const void* p SITE) {
#ifdef __CUDACC_RTC__
    *(uint2*)to = *(const uint2*)p;
#else
    emu_load(to, p, 8, file, line);
#endif
}
__device__ inline void st_8(void* p, const void* from SITE) {
#ifdef __CUDACC_RTC__
    *(uint2*)p = *(const uint2*)from;
#else
    emu_store(p, from, 8, file, line);
#endif
}

// #data-movement-and-conversion-instructions-cp-async: `bytes` of 16 to shared memory, the rest
// zeros; both pointers are multiples of 16.
__device__ inline void cp_async_16(void* to, const void* from, int bytes SITE) {
#ifdef __CUDACC_RTC__
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes)
                 : "memory");
#else
    emu_cp_async(to, from, 16, bytes, file, line);
#endif
}

// As cp_async_16, 4 bytes (cached in L1).
__device__ inline void cp_async_4(void* to, const void* from, int bytes SITE) {
#ifdef __CUDACC_RTC__
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes)
                 : "memory");
#else
    emu_cp_async(to, from, 4, bytes, file, line);
#endif
}

// #data-movement-and-conversion-instructions-cp-async-commit-group
__device__ inline void cp_async_commit() {
#ifdef __CUDACC_RTC__
    asm volatile("cp.async.commit_group;" ::: "memory");
#else
    emu_cp_commit();
#endif
}

// #data-movement-and-conversion-instructions-cp-async-wait-group: until at most N of this
// thread's groups are still on the way. Other threads see the data after a barrier.
template <int N> __device__ inline void cp_async_wait() {
#ifdef __CUDACC_RTC__
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#else
    emu_cp_wait(N);
#endif
}

// #parallel-synchronization-and-communication-instructions-bar: `threads` is a multiple of 32.
__device__ inline void bar_sync(int id, int threads SITE) {
#ifdef __CUDACC_RTC__
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
#else
    emu_barrier(EMU_SYNC, id, threads, 0, file, line);
#endif
}

// As bar_sync, without waiting: what was done before is seen by those who sync.
__device__ inline void bar_arrive(int id, int threads SITE) {
#ifdef __CUDACC_RTC__
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
#else
    emu_barrier(EMU_ARRIVE, id, threads, 0, file, line);
#endif
}

// #warp-level-matrix-instructions-ldmatrix: N 8x8 matrices of 16 bits. Lane 8j + r gives the
// address of row r of matrix j; lane l receives row l/4, columns 2(l%4) and the next (or, with
// T, of the transpose).
template <int N, bool T> __device__ inline void ldmatrix(u32* d, const void* row SITE) {
    static_assert(N == 1 || N == 2 || N == 4, "1, 2 or 4 matrices");
#ifdef __CUDACC_RTC__
    u32 a = shared_address(row);
    if constexpr (N == 1 && !T)
        asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(d[0]) : "r"(a) : "memory");
    if constexpr (N == 1 && T)
        asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];" : "=r"(d[0]) : "r"(a) : "memory");
    if constexpr (N == 2 && !T)
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                     : "=r"(d[0]), "=r"(d[1])
                     : "r"(a)
                     : "memory");
    if constexpr (N == 2 && T)
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                     : "=r"(d[0]), "=r"(d[1])
                     : "r"(a)
                     : "memory");
    if constexpr (N == 4 && !T)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                     : "r"(a)
                     : "memory");
    if constexpr (N == 4 && T)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                     : "r"(a)
                     : "memory");
#else
    emu_matrix(T ? EMU_LDMATRIX_T : EMU_LDMATRIX, N, (void*)row, d, file, line);
#endif
}

// #warp-level-matrix-instructions-stmatrix: the mirror of ldmatrix. sm_90 and later.
template <int N, bool T> __device__ inline void stmatrix(void* row, const u32* s SITE) {
    static_assert(N == 1 || N == 2 || N == 4, "1, 2 or 4 matrices");
#ifdef __CUDACC_RTC__
    u32 a = shared_address(row);
    if constexpr (N == 1 && !T)
        asm volatile("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%0], {%1};" ::"r"(a), "r"(s[0]) : "memory");
    if constexpr (N == 1 && T)
        asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(a), "r"(s[0]) : "memory");
    if constexpr (N == 2 && !T)
        asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(a), "r"(s[0]), "r"(s[1])
                     : "memory");
    if constexpr (N == 2 && T)
        asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(a), "r"(s[0]), "r"(s[1])
                     : "memory");
    if constexpr (N == 4 && !T)
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(a), "r"(s[0]),
                     "r"(s[1]), "r"(s[2]), "r"(s[3])
                     : "memory");
    if constexpr (N == 4 && T)
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(a), "r"(s[0]),
                     "r"(s[1]), "r"(s[2]), "r"(s[3])
                     : "memory");
#else
    emu_matrix(T ? EMU_STMATRIX_T : EMU_STMATRIX, N, row, (u32*)s, file, line);
#endif
}

// #warp-level-matrix-fragment-mma-16816-float: d = a b + c; a 16x16, b 16x8 (by columns), c and d
// 16x8 in f32.
__device__ inline void mma_m16n8k16_bf16(float* d, const u32* a, const u32* b, const float* c SITE) {
#ifdef __CUDACC_RTC__
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, "
        "%11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]),
          "f"(c[3]));
#else
    emu_mma(EMU_MMA_BF16, d, a, b, c, file, line);
#endif
}

// The same with f16 operands.
__device__ inline void mma_m16n8k16_f16(float* d, const u32* a, const u32* b, const float* c SITE) {
#ifdef __CUDACC_RTC__
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, "
        "%12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]),
          "f"(c[3]));
#else
    emu_mma(EMU_MMA_F16, d, a, b, c, file, line);
#endif
}

// #warp-level-matrix-fragment-mma-1688: a 16x8, b 8x8 in tf32 (f32 bits, the low 13 ignored).
__device__ inline void mma_m16n8k8_tf32(float* d, const u32* a, const u32* b, const float* c SITE) {
#ifdef __CUDACC_RTC__
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, "
        "%12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]),
          "f"(c[3]));
#else
    emu_mma(EMU_MMA_TF32, d, a, b, c, file, line);
#endif
}

// #data-movement-and-conversion-instructions-cvt: f32 to tf32, nearest, ties away from zero.
__device__ inline u32 cvt_rna_tf32(float x) {
#ifdef __CUDACC_RTC__
    u32 bits;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
    return bits;
#else
    u32 bits = __float_as_uint(x);
    if ((bits & 0x7f800000u) == 0x7f800000u) return bits;
    return (bits + 0x1000u) & ~0x1fffu;
#endif
}

// #floating-point-instructions-ex2: 2^x, within 2 ulp.
__device__ inline float ex2(float x) {
#ifdef __CUDACC_RTC__
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return exp2f(x);
#endif
}
