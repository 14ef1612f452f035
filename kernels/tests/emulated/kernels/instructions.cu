// What instructions compute, through the wrappers that kernels use.

// c = a b by mma.sync: a 16 x 16 and b 16 x 8 (both row-major, bf16 or f16), c 16 x 8 in f32.
// The fragments come through shared memory: a by ldmatrix.x4, b by ldmatrix.x2.trans; c goes out
// through the accumulators' own map.
template <bool BF16> __device__ void product_16(const u16* a, const u16* b, float* c) {
    DYNAMIC_SHARED(bytes);
    u16* s = (u16*)bytes;
    u32 lane = threadIdx.x;
    for (u32 i = lane; i < 256; i += 32) s[i] = a[i];
    for (u32 i = lane; i < 128; i += 32) s[256 + i] = b[i];
    __syncwarp();
    u32 fa[4], fb[2];
    // Matrices of a: rows 0-7 and 8-15 of the left half, then of the right half.
    ldmatrix<4, false>(fa, s + (lane % 8 + 8 * (lane / 8 % 2)) * 16 + 8 * (lane / 16));
    ldmatrix<2, true>(fb, s + 256 + lane % 16 * 8);
    float d[4] = {1, 1, 1, 1};
    if (BF16)
        mma_m16n8k16_bf16(d, fa, fb, d);
    else
        mma_m16n8k16_f16(d, fa, fb, d);
    for (u32 i = 0; i < 4; i++) c[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = d[i];
}

KERNEL(32, product_bf16)(const u16* a, const u16* b, float* c) { product_16<true>(a, b, c); }
KERNEL(32, product_f16)(const u16* a, const u16* b, float* c) { product_16<false>(a, b, c); }

// The same in tf32: a 16 x 8, b 8 x 8, in f32 bits.
KERNEL(32, product_tf32)(const float* a, const float* b, float* c) {
    u32 g = threadIdx.x / 4, t = threadIdx.x % 4, fa[4], fb[2];
    for (u32 i = 0; i < 4; i++) fa[i] = cvt_rna_tf32(a[(g + i % 2 * 8) * 8 + t + i / 2 * 4]);
    for (u32 i = 0; i < 2; i++) fb[i] = cvt_rna_tf32(b[(t + 4 * i) * 8 + g]);
    float d[4] = {1, 1, 1, 1};
    mma_m16n8k8_tf32(d, fa, fb, d);
    for (u32 i = 0; i < 4; i++) c[(g + i / 2 * 8) * 8 + t * 2 + i % 2] = d[i];
}

// Moves n 8x8 matrices through ldmatrix and stmatrix, each transposed or not.
template <int N, bool LT, bool ST> __device__ void move(const u16* x, u16* y) {
    SHARED(u64, words, 2 * 8 * N * 2 + 2);
    u16* in = (u16*)(((u64)words + 15) & ~15ull);
    u16* out = in + 64 * N;
    u32 lane = threadIdx.x, regs[4] = {};
    for (u32 i = lane; i < 64 * N; i += 32) in[i] = x[i];
    __syncwarp();
    u32 row = lane % (8 * N) * 8;
    ldmatrix<N, LT>(regs, in + row);
    stmatrix<N, ST>(out + row, regs);
    __syncwarp();
    for (u32 i = lane; i < 64 * N; i += 32) y[i] = out[i];
}

KERNEL(32, move_1)(const u16* x, u16* y) { move<1, false, false>(x, y); }
KERNEL(32, move_2_in)(const u16* x, u16* y) { move<2, true, false>(x, y); }
KERNEL(32, move_4_out)(const u16* x, u16* y) { move<4, false, true>(x, y); }
KERNEL(32, move_4_both)(const u16* x, u16* y) { move<4, true, true>(x, y); }

// out[k * 32 + lane] for each k-th instruction.
KERNEL(32, lanes)(const u32* x, u32* out) {
    u32 lane = threadIdx.x, v = x[lane], k = 0;
    u32 results[14] = {
        __shfl_sync(FULL_WARP, v, 5),
        __shfl_sync(FULL_WARP, v, (int)lane + 3, 8),
        __shfl_up_sync(FULL_WARP, v, 2),
        __shfl_down_sync(FULL_WARP, v, 3, 16),
        __shfl_xor_sync(FULL_WARP, v, 12),
        __ballot_sync(FULL_WARP, v % 3 == 0),
        (u32)__any_sync(FULL_WARP, v == x[7]),
        (u32)__all_sync(FULL_WARP, v == x[7]),
        __reduce_add_sync(FULL_WARP, v),
        __reduce_min_sync(FULL_WARP, v),
        __reduce_max_sync(FULL_WARP, v),
        __reduce_and_sync(FULL_WARP, v),
        __reduce_or_sync(FULL_WARP, v),
        __reduce_xor_sync(FULL_WARP, v),
    };
    for (; k < 14; k++) out[k * 32 + lane] = results[k];
    // 8 bytes in two halves, over parts of a warp.
    u32 half = lane < 16 ? 0x0000ffffu : 0xffff0000u;
    double d = __shfl_xor_sync(half, 1e10 + (double)v, 1);
    out[k * 32 + lane] = (u32)(d - 1e10);
    int p = (int)lane;
    out[(k + 1) * 32 + lane] = (u32)(__syncthreads_count(p % 5 == 0) + 100 * __syncthreads_and(p >= 0) +
                                     1000 * __syncthreads_or(p == 31) + 10000 * __syncthreads_and(p));
}

// A ring of three stages, filled by cp.async two ahead: y[t] = sum over i of x[i * 64 + 63 - t].
// The last copy of each row is cut to zero bytes where rows end.
KERNEL(64, pipeline)(const float* x, float* y, int rows) {
    constexpr int STAGES = 3;
    SHARED(float, s, STAGES * 64);
    int t = threadIdx.x;
    float sum = 0;
    for (int i = 0; i < STAGES - 1; i++) {
        cp_async_4(&s[i * 64 + t], &x[i < rows ? i * 64 + t : 0], i < rows ? 4 : 0);
        cp_async_commit();
    }
    for (int i = 0; i < rows; i++) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();  // row i is here for all, and row i - 1 is read by all
        int next = i + STAGES - 1, stage = next % STAGES * 64;
        cp_async_4(&s[stage + t], &x[next < rows ? next * 64 + t : 0], next < rows ? 4 : 0);
        cp_async_commit();
        sum += s[i % STAGES * 64 + 63 - t];
    }
    cp_async_wait<0>();
    y[t] = sum;
}

// Producers fill one of two buffers while consumers read the other; named barriers in pairs.
KERNEL(64, producer_and_consumer)(const float* x, float* y, int rows) {
    SHARED(float, s, 64);
    int t = threadIdx.x % 32;
    bool produces = threadIdx.x < 32;
    float sum = 0;
    for (int i = 0; i < rows; i++) {
        int full = 1 + i % 2, empty = 3 + i % 2;
        if (produces) {
            if (i >= 2) bar_sync(empty, 64);
            s[i % 2 * 32 + t] = x[i * 32 + t];
            bar_arrive(full, 64);
        } else {
            bar_sync(full, 64);
            sum += s[i % 2 * 32 + 31 - t];
            if (i + 2 < rows) bar_arrive(empty, 64);
        }
    }
    if (!produces) y[t] = sum;
}

// Shared memory: with stride 1 no conflicts, with stride 32 31 of them, with 33 none.
KERNEL(32, strides)(float* y, int stride) {
    DYNAMIC_SHARED(bytes);
    float* s = (float*)bytes;
    s[threadIdx.x * stride] = 1;
    y[threadIdx.x] = 0;
}

// Global memory: a warp reads 32 words `stride` apart.
KERNEL(32, strides_of_global)(const float* x, float* y, int stride) { y[threadIdx.x] = x[threadIdx.x * stride]; }

KERNEL(64, bounded)(float* y) { y[threadIdx.x] = 1; }

KERNEL(64, conversions)(const float* x, u16* y) { y[threadIdx.x] = cvt_rn_bf16(x[threadIdx.x]); }

KERNEL(64, powers)(const float* x, float* y) { y[threadIdx.x] = ex2(x[threadIdx.x]); }
