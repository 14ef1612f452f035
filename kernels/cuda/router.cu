// The router of experts: scores, the choice, its weights, and the sums that losses of balance need.
//
//   p[e]         softmax over e of logit[e], or sigmoid(logit[e])
//   choice[k]    the topk largest p[e] + bias[e], largest first; of equals the lower e
//   weight[k]    scale p[choice[k]] [/ (sum over the choice of p + least)]
//   sums[e]      sum over tokens of q[e]: q = p, of sigmoids p / (sum over e of p + least)
//   sums[E]      sum over tokens of z^2, z = ln(sum over e of e^logit[e])
//   backward     dp[e] = (dsums[e] - [<p, dsums> / by]) / by + [e chosen as k] scale (dw[k] - [pull]) / sum
//                dlogit = p (dp - <p, dp>), or dp p (1 - p); + 2 dsums[E] z e^(logit - z)
//
//   shapes       logit, dlogit: tokens x experts     choice, weight, dweight: tokens x topk
//                bias: experts, may be null     sums, dsums: experts + 1; all but choice in A
//   route        a warp a token, 8 warps a block; lane l has experts l, l + 32, ...
//   route_sums   32 experts a block (the last of all has z); 8 warps take tokens in turn and are
//                added in order: no atomics
//
// Experts already chosen are known by their place in the order (score, then index): the next is the
// best of those that come after the last.

__device__ inline float logarithm(float x) { return logf(x); }
__device__ inline double logarithm(double x) { return log(x); }

template <class A> __device__ inline A warp_max(A x) {
    for (int far = 16; far > 0; far /= 2) {
        A other = __shfl_xor_sync(FULL_WARP, x, far);
        x = other > x ? other : x;
    }
    return x;
}

template <class A> __device__ inline A minus_infinity() { return (A)-__uint_as_float(0x7f800000u); }

// How logits of one token become scores.
template <class A> struct Scores {
    const A* logit;
    i64 experts;
    int sigmoid;
    A max, sum, by;  // of the exponentials; what scores are divided by to be shares

    __device__ A of(i64 e) const {
        if (sigmoid) return 1 / (1 + exponential(-logit[e]));
        return exponential(logit[e] - max) / sum;
    }
    __device__ A z() const { return max + logarithm(sum); }
};

template <class A> __device__ Scores<A> scores_of(const A* logit, i64 experts, int sigmoid, A least) {
    int lane = threadIdx.x % 32;
    Scores<A> s = {logit, experts, sigmoid, minus_infinity<A>(), 0, 1};
    for (i64 e = lane; e < experts; e += 32) s.max = logit[e] > s.max ? logit[e] : s.max;
    s.max = warp_max(s.max);
    for (i64 e = lane; e < experts; e += 32) s.sum += exponential(logit[e] - s.max);
    s.sum = warp_sum(s.sum);
    if (sigmoid) {
        A total = 0;
        for (i64 e = lane; e < experts; e += 32) total += s.of(e);
        s.by = warp_sum(total) + least;
    }
    return s;
}

// What the weights of a choice are divided by.
template <class A>
__device__ A sum_of_choice(const Scores<A>& s, const int* choice, i64 topk, int normalize, A least) {
    if (!normalize) return 1;
    A sum = 0;
    for (i64 k = 0; k < topk; k++) sum += s.of(choice[k]);
    return sum + least;
}

// The token of this warp; beyond the last where there is none.
__device__ inline i64 token_of_warp() { return (i64)blockIdx.x * 8 + threadIdx.x / 32; }

template <class A>
__device__ void route(const A* logits, const A* bias, int* choice, A* weight, i64 tokens, i64 experts, i64 topk,
                      int sigmoid, int normalize, A scale, A least) {
    i64 t = token_of_warp();
    if (t >= tokens) return;
    int lane = threadIdx.x % 32;
    Scores<A> s = scores_of(logits + t * experts, experts, sigmoid, least);
    A last = 0, sum = 0;
    int before = -1;
    for (i64 k = 0; k < topk; k++) {
        A best = 0;
        int at = -1;
        for (i64 e = lane; e < experts; e += 32) {
            A key = s.of(e) + (bias ? bias[e] : 0);
            bool after = before < 0 || key < last || (key == last && e > before);
            if (after && (at < 0 || key > best)) {
                best = key;
                at = (int)e;
            }
        }
        for (int far = 16; far > 0; far /= 2) {
            A key = __shfl_xor_sync(FULL_WARP, best, far);
            int e = __shfl_xor_sync(FULL_WARP, at, far);
            if (e >= 0 && (at < 0 || key > best || (key == best && e < at))) {
                best = key;
                at = e;
            }
        }
        last = best;
        before = at < 0 ? 0 : at;  // none is left where scores are no numbers
        sum += s.of(before);
        if (lane == 0) choice[t * topk + k] = before;
        __syncwarp();
    }
    A by = normalize ? sum + least : (A)1;
    for (i64 k = lane; k < topk; k += 32) weight[t * topk + k] = scale * s.of(choice[t * topk + k]) / by;
}

template <class A>
__device__ void route_sums(const A* logits, A* sums, i64 tokens, i64 experts, int sigmoid, A least) {
    SHARED(A, part, 8 * 32);
    i64 e = (i64)blockIdx.x * 32 + threadIdx.x % 32;
    A sum = 0;
    for (i64 t = threadIdx.x / 32; t < tokens; t += 8) {
        Scores<A> s = scores_of(logits + t * experts, experts, sigmoid, least);
        if (e < experts) sum += s.of(e) / s.by;
        if (e == experts) sum += s.z() * s.z();
    }
    part[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x >= 32 || e > experts) return;
    sum = 0;
    for (int w = 0; w < 8; w++) sum += part[w * 32 + threadIdx.x];
    sums[e] = sum;
}

template <class A>
__device__ void route_backward(const A* logits, const int* choice, const A* dweight, const A* dsums, A* dlogits,
                               i64 tokens, i64 experts, i64 topk, int sigmoid, int normalize, A scale, A least) {
    i64 t = token_of_warp();
    if (t >= tokens) return;
    int lane = threadIdx.x % 32;
    Scores<A> s = scores_of(logits + t * experts, experts, sigmoid, least);
    const int* chosen = choice + t * topk;
    const A* dw = dweight + t * topk;
    A by = sum_of_choice(s, chosen, topk, normalize, least), pull = 0, share_pull = 0, score_pull = 0;
    for (i64 k = 0; normalize && k < topk; k++) pull += dw[k] * s.of(chosen[k]) / by;
    if (sigmoid) {
        for (i64 e = lane; e < experts; e += 32) share_pull += s.of(e) * dsums[e];
        share_pull = warp_sum(share_pull) / s.by;
    }
    auto dscore = [&](i64 e) {
        A dp = (dsums[e] - share_pull) / s.by;
        for (i64 k = 0; k < topk; k++)
            if (chosen[k] == e) dp += scale * (dw[k] - pull) / by;
        return dp;
    };
    if (!sigmoid) {
        for (i64 e = lane; e < experts; e += 32) score_pull += s.of(e) * dscore(e);
        score_pull = warp_sum(score_pull);
    }
    A z = s.z(), twice = 2 * dsums[experts] * z;
    for (i64 e = lane; e < experts; e += 32) {
        A p = s.of(e), dp = dscore(e), dl = sigmoid ? dp * p * (1 - p) : p * (dp - score_pull);
        dlogits[t * experts + e] = dl + twice * exponential(logits[t * experts + e] - z);
    }
}

#define ROUTER(A, t)                                                                                                  \
    KERNEL(256, route_##t)                                                                                            \
    (const A* logits, const A* bias, int* choice, A* weight, i64 tokens, i64 experts, i64 topk, int sigmoid,          \
     int normalize, A scale, A least) {                                                                               \
        route<A>(logits, bias, choice, weight, tokens, experts, topk, sigmoid, normalize, scale, least);              \
    }                                                                                                                 \
    KERNEL(256, route_sums_##t)                                                                                       \
    (const A* logits, A* sums, i64 tokens, i64 experts, int sigmoid, A least) {                                       \
        route_sums<A>(logits, sums, tokens, experts, sigmoid, least);                                                 \
    }                                                                                                                 \
    KERNEL(256, route_backward_##t)                                                                                   \
    (const A* logits, const int* choice, const A* dweight, const A* dsums, A* dlogits, i64 tokens, i64 experts,       \
     i64 topk, int sigmoid, int normalize, A scale, A least) {                                                        \
        route_backward<A>(logits, choice, dweight, dsums, dlogits, tokens, experts, topk, sigmoid, normalize, scale,  \
                          least);                                                                                     \
    }

ROUTER(float, f32)
ROUTER(double, f64)
