// One kernel a detector: with bad = 0 it is right and writes what the test expects, with bad = 1
// it holds the fault. x and y have one element a thread of the grid.

__device__ inline i64 here() { return (i64)blockIdx.x * blockDim.x + threadIdx.x; }

KERNEL(128, reads_past_the_end)(const float* x, float* y, int bad) {
    i64 i = here();
    y[i] = x[i + bad];
}

KERNEL(128, writes_before_the_start)(const float* x, float* y, int bad) {
    i64 i = here();
    y[i - bad] = x[i];
}

KERNEL(128, runs_over_a_shared_array)(const float* x, float* y, int bad) {
    SHARED(float, first, 128);
    SHARED(float, second, 128);
    u32 t = threadIdx.x;
    first[bad && t == 127 ? 128 : t] = x[here()];
    second[t] = 0;
    y[here()] = first[t] + second[t];
}

KERNEL(128, runs_over_dynamic_shared)(const float* x, float* y, int bad) {
    DYNAMIC_SHARED(bytes);
    float* s = (float*)bytes;
    s[bad && threadIdx.x == 127 ? 128 : threadIdx.x] = x[here()];
    y[here()] = s[threadIdx.x];
}

KERNEL(128, is_misaligned)(const float* x, float* y, int bad) {
    const char* p = (const char*)x + 2 * bad;
    y[here()] = here() == 0 ? *(const float*)p : x[here()];
}

KERNEL(128, loads_wide_misaligned)(const float* x, float* y, int bad) {
    float four[4];
    ld_16(four, x + bad);
    y[here()] = four[0] + x[here()] - four[0];
}

KERNEL(128, lacks_a_barrier)(const float* x, float* y, int bad) {
    SHARED(float, s, 128);
    u32 t = threadIdx.x;
    s[t] = 0;
    __syncthreads();
    s[t] = x[here()];
    if (!bad) __syncthreads();
    y[here()] = s[127 - t];
}

KERNEL(128, writes_over_readers)(const float* x, float* y, int bad) {
    SHARED(float, s, 128);
    u32 t = threadIdx.x;
    s[t] = 0;
    __syncthreads();
    s[t] = x[here()];
    __syncthreads();
    float far = s[127 - t];
    if (!bad) __syncthreads();
    s[t] = far;
    y[here()] = s[t];
}

// All read the place long before it is written again; nothing but time stands between.
KERNEL(128, overwrites_what_others_read)(const float* x, float* y, int bad) {
    SHARED(float, s, 128);
    SHARED(float, place, 1);
    u32 t = threadIdx.x;
    s[t] = x[here()];
    if (t == 0) place[0] = 0;
    __syncthreads();
    float zero = place[0], own = 0;
    if (!bad) __syncthreads();
    if (t == 0) {
        for (u32 i = 0; i < 400; i++) own += s[i % 128];
        place[0] = own;
    }
    y[here()] = s[t] + zero;
}

KERNEL(128, lacks_a_syncwarp)(const float* x, float* y, int bad) {
    SHARED(float, s, 128);
    u32 t = threadIdx.x;
    s[t] = 0;
    __syncthreads();
    s[t] = x[here()];
    if (!bad) __syncwarp();
    y[here()] = s[t ^ 31];
}

// syncwarp orders one warp, not two.
KERNEL(128, syncwarps_for_two_warps)(const float* x, float* y, int bad) {
    SHARED(float, s, 128);
    u32 t = threadIdx.x;
    s[t] = 0;
    __syncthreads();
    s[t] = x[here()];
    __syncwarp();
    y[here()] = s[bad ? t ^ 32 : t ^ 1];
}

KERNEL(128, orders_by_shuffle)(const float* x, float* y, int bad) {
    SHARED(float, s, 128);
    u32 t = threadIdx.x;
    s[t] = 0;
    __syncthreads();
    s[t] = x[here()];
    float z = __shfl_xor_sync(FULL_WARP, 0.0f, 1);
    if (!bad) __syncwarp();
    y[here()] = s[t ^ 1] + z;
}

KERNEL(128, orders_by_vote)(const float* x, float* y, int bad) {
    SHARED(float, s, 128);
    u32 t = threadIdx.x;
    s[t] = 0;
    __syncthreads();
    s[t] = x[here()];
    int one = __all_sync(FULL_WARP, 1);
    if (!bad) __syncwarp();
    y[here()] = one * s[t ^ 1];
}

KERNEL(128, orders_by_reduction)(const float* x, float* y, int bad) {
    SHARED(float, s, 128);
    u32 t = threadIdx.x;
    s[t] = 0;
    __syncthreads();
    s[t] = x[here()];
    u32 lanes = __reduce_add_sync(FULL_WARP, 1);
    if (!bad) __syncwarp();
    y[here()] = (float)lanes / 32 * s[t ^ 1];
}

KERNEL(128, orders_by_mma)(const float* x, float* y, int bad) {
    SHARED(float, s, 128);
    u32 t = threadIdx.x;
    s[t] = 0;
    __syncthreads();
    u32 a[4] = {}, b[2] = {};
    float d[4] = {};
    s[t] = x[here()];
    mma_m16n8k16_bf16(d, a, b, d);
    if (!bad) __syncwarp();
    y[here()] = s[t ^ 1] + d[0];
}

// The rows that a warp's other lanes wrote are read through ldmatrix.
KERNEL(128, orders_by_ldmatrix)(const float* x, float* y, int bad) {
    SHARED(float, s, 128);
    SHARED(float, rows, 516);
    u32 t = threadIdx.x, lane = t % 32, d;
    float* mine = (float*)(((u64)rows + 15) & ~15ull) + t / 32 * 32;
    mine[lane] = 1;
    __syncthreads();
    mine[lane] = 0;
    s[t] = x[here()];
    if (!bad) __syncwarp();
    ldmatrix<1, false>(&d, mine + lane % 8 * 4);
    __syncwarp();
    y[here()] = s[t] + (float)d;
}

// What ldmatrix reads it does not order: s is read without a syncwarp of its own.
KERNEL(128, trusts_ldmatrix)(const float* x, float* y, int bad) {
    SHARED(float, s, 128);
    SHARED(float, rows, 516);
    u32 t = threadIdx.x, lane = t % 32, d;
    s[t] = 0;
    __syncthreads();
    float* mine = (float*)(((u64)rows + 15) & ~15ull) + t / 32 * 32;
    mine[lane] = 0;
    __syncwarp();
    s[t] = x[here()];
    ldmatrix<1, false>(&d, mine + lane % 8 * 4);
    if (!bad) __syncwarp();
    y[here()] = s[t ^ 1] + (float)d;
}

KERNEL(128, trusts_stmatrix)(const float* x, float* y, int bad) {
    SHARED(float, s, 128);
    SHARED(float, rows, 516);
    u32 t = threadIdx.x, lane = t % 32, z = 0;
    s[t] = 0;
    __syncthreads();
    float* mine = (float*)(((u64)rows + 15) & ~15ull) + t / 32 * 32;
    s[t] = x[here()];
    stmatrix<1, false>(mine + lane % 8 * 4, &z);
    if (!bad) __syncwarp();
    y[here()] = s[t ^ 1] + (bad ? 0 : mine[lane]);
}

// Warp 0 produces and arrives, the others consume and sync; with bad the producer takes the
// arrival for a wait and reads what the consumers wrote.
KERNEL(128, takes_arrive_for_sync)(const float* x, float* y, int bad) {
    SHARED(float, s, 128);
    SHARED(float, back, 128);
    u32 t = threadIdx.x;
    back[t] = 0;
    __syncthreads();
    if (t >= 32) back[t] = 1;
    if (t < 32) {
        for (u32 i = t; i < 128; i += 32) s[i] = x[here() - t + i];
        bar_arrive(1, 128);
        // Time for the others to be past the barrier, which is no order.
        float own = 0;
        for (u32 i = 0; i < 400; i++) own += s[t + i % 4 * 32];
        y[here()] = s[t] + (bad ? back[t + 32] : 0.0f) + 0 * own;
    } else {
        bar_sync(1, 128);
        y[here()] = s[t];
    }
}

KERNEL(128, arrives_too_early)(const float* x, float* y, int bad) {
    SHARED(float, s, 128);
    u32 t = threadIdx.x;
    if (t < 32) {
        if (bad) bar_arrive(1, 128);
        for (u32 i = t; i < 128; i += 32) s[i] = x[here() - t + i];
        if (!bad) bar_arrive(1, 128);
        y[here()] = s[t];
    } else {
        bar_sync(1, 128);
        y[here()] = s[t];
    }
}

KERNEL(128, lacks_a_wait)(const float* x, float* y, int bad) {
    SHARED(float, s, 128);
    u32 t = threadIdx.x;
    s[t] = 0;
    __syncthreads();
    cp_async_4(&s[t], &x[here()], 4);
    cp_async_commit();
    if (!bad) cp_async_wait<0>();
    __syncthreads();
    y[here()] = s[127 - t];
}

KERNEL(128, lacks_a_commit)(const float* x, float* y, int bad) {
    SHARED(float, s, 128);
    u32 t = threadIdx.x;
    s[t] = 0;
    __syncthreads();
    cp_async_4(&s[t], &x[here()], 4);
    if (!bad) cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    y[here()] = s[127 - t];
}

// A commit is of the thread's own copies.
KERNEL(128, leaves_the_commit_to_others)(const float* x, float* y, int bad) {
    SHARED(float, s, 128);
    u32 t = threadIdx.x;
    cp_async_4(&s[t], &x[here()], 4);
    if (!bad || t != 40) cp_async_commit();
    __syncthreads();
    cp_async_wait<0>();
    __syncthreads();
    y[here()] = s[127 - t];
}

// Two groups are started; the first is used while the second may be on its way.
KERNEL(128, waits_for_too_few_groups)(const float* x, float* y, int bad) {
    SHARED(float, s, 256);
    u32 t = threadIdx.x;
    cp_async_4(&s[t], &x[here()], 4);
    cp_async_commit();
    cp_async_4(&s[128 + t], &x[here()], 4);
    cp_async_commit();
    if (bad)
        cp_async_wait<2>();
    else
        cp_async_wait<1>();
    float mine = s[t];
    cp_async_wait<0>();
    y[here()] = mine;
}

// The wait serves who waits; others need a barrier.
KERNEL(128, takes_a_wait_for_a_barrier)(const float* x, float* y, int bad) {
    SHARED(float, s, 128);
    u32 t = threadIdx.x;
    s[t] = 0;
    __syncthreads();
    cp_async_4(&s[t], &x[here()], 4);
    cp_async_commit();
    cp_async_wait<0>();
    if (!bad) __syncthreads();
    y[here()] = s[127 - t];
}

// A stage is filled again while others still read it.
KERNEL(128, refills_too_early)(const float* x, float* y, int bad) {
    SHARED(float, s, 128);
    u32 t = threadIdx.x;
    s[t] = 0;
    __syncthreads();
    float last = 0;
    for (int round = 0; round < 3; round++) {
        cp_async_4(&s[t], &x[here()], 4);
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();
        last = s[127 - t];
        if (!bad) __syncthreads();
    }
    y[here()] = last;
}

KERNEL(128, overwrites_a_source)(const float* x, float* y, int bad) {
    SHARED(float, s, 128);
    u32 t = threadIdx.x;
    y[here()] = x[here()];
    cp_async_4(&s[t], &y[here()], 4);
    cp_async_commit();
    if (bad) y[here()] = 0;
    cp_async_wait<0>();
    y[here()] = s[t];
}

KERNEL(128, reads_unwritten_shared)(const float* x, float* y, int bad) {
    SHARED(float, s, 128);
    u32 t = threadIdx.x;
    if (!bad || t != 77) s[t] = x[here()];
    __syncthreads();
    y[here()] = s[127 - t];
}

KERNEL(128, reads_unwritten_global)(const float* x, float* y, int bad) {
    if (!bad) y[here()] = x[here()];
    y[here()] += 0;
}

KERNEL(128, blocks_share_a_place)(const float* x, float* y, int bad) {
    y[bad && threadIdx.x == 5 ? 5 : here()] = x[here()];
}

KERNEL(128, reads_another_block)(const float* x, float* y, int bad) {
    y[here()] = x[here()];
    if (bad && here() == 0) y[0] = y[128];
}

KERNEL(128, lacks_part_of_the_block)(const float* x, float* y, int bad) {
    if (!bad || threadIdx.x < 96) __syncthreads();
    y[here()] = x[here()];
}

KERNEL(128, returns_before_a_barrier)(const float* x, float* y, int bad) {
    y[here()] = x[here()];
    if (bad && threadIdx.x == 3) return;
    __syncthreads();
}

// Half of each warp waits at one barrier, half at another.
KERNEL(128, splits_a_warp)(const float* x, float* y, int bad) {
    y[here()] = x[here()];
    if (bad && threadIdx.x % 32 < 16) {
        __syncthreads();
    } else {
        __syncthreads();
    }
}

KERNEL(128, shuffles_without_some_lanes)(const float* x, float* y, int bad) {
    float v = x[here()];
    if (!bad || threadIdx.x % 32 < 20) v = __shfl_sync(FULL_WARP, v, threadIdx.x % 32);
    __syncthreads();
    y[here()] = v;
}

KERNEL(128, shuffles_after_a_return)(const float* x, float* y, int bad) {
    float v = x[here()];
    y[here()] = v;
    if (bad && threadIdx.x == 9) return;
    __shfl_sync(FULL_WARP, v, 0);
}

KERNEL(128, lacks_its_own_lane)(const float* x, float* y, int bad) {
    float v = x[here()];
    u32 mask = bad ? ~1u : FULL_WARP;
    y[here()] = v + (float)__any_sync(mask, 0);
}

KERNEL(128, disagrees_on_the_mask)(const float* x, float* y, int bad) {
    float v = x[here()];
    u32 half = threadIdx.x % 32 < 16 ? 0x0000ffffu : 0xffff0000u;
    u32 mask = bad && threadIdx.x % 32 == 31 ? FULL_WARP : half;
    y[here()] = v + (float)__any_sync(mask, 0);
}

KERNEL(128, reads_a_lane_outside)(const float* x, float* y, int bad) {
    u32 lane = threadIdx.x % 32;
    float v = x[here()];
    u32 half = lane < 16 ? 0x0000ffffu : 0xffff0000u;
    y[here()] = __shfl_sync(half, v, bad ? lane ^ 16 : lane);
}

KERNEL(128, multiplies_with_half_a_warp)(const float* x, float* y, int bad) {
    u32 a[4] = {}, b[2] = {};
    float d[4] = {};
    y[here()] = x[here()];
    if (!bad || threadIdx.x % 32 < 16) mma_m16n8k16_bf16(d, a, b, d);
}

KERNEL(128, counts_a_barrier_wrongly)(const float* x, float* y, int bad) {
    bar_sync(2, bad && threadIdx.x >= 64 ? 96 : 128);
    y[here()] = x[here()];
}

KERNEL(128, names_no_barrier)(const float* x, float* y, int bad) {
    bar_sync(bad ? 16 : 15, 128);
    y[here()] = x[here()];
}

KERNEL(128, comes_twice)(const float* x, float* y, int bad) {
    y[here()] = x[here()];
    if (threadIdx.x < 32) {
        bar_arrive(3, 128);
        if (bad) bar_arrive(3, 128);
    } else {
        bar_sync(3, 128);
    }
}

KERNEL(128, arrives_and_nobody_syncs)(const float* x, float* y, int bad) {
    y[here()] = x[here()];
    if (bad && threadIdx.x < 32) bar_arrive(4, 64);
}

KERNEL(128, traps)(const float* x, float* y, int bad) {
    y[here()] = x[here()];
    if (bad && here() == 200) __trap();
}

KERNEL(128, copies_memory_past_the_end)(const float* x, float* y, int bad) {
    memcpy(&y[here()], &x[here()], bad && here() == 255 ? 8 : 4);
}

KERNEL(128, sets_memory_of_others)(const float* x, float* y, int bad) {
    SHARED(float, s, 129);
    u32 t = threadIdx.x;
    memset(&s[t], 0, bad ? 8 : 4);
    y[here()] = x[here()] + s[t];
}

KERNEL(128, takes_too_much_static)(const float* x, float* y, int bad) {
    y[here()] = x[here()];
    if (bad) {
        SHARED(float, big, 12289);
        big[threadIdx.x] = 0;
    }
}

KERNEL(128, takes_a_local_for_global)(const float* x, float* y, int bad) {
    SHARED(const float*, where, 1);
    float mine = x[here()];
    if (threadIdx.x == 0) where[0] = bad ? &mine : x;
    __syncthreads();
    y[here()] = mine + (threadIdx.x == 1 ? 0 * *where[0] : 0);
    __syncthreads();
    if (mine != mine) y[here()] = 0;
}
