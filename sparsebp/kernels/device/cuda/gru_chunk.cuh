// Sequential back-propagation of one sample through a stretch of a GRU, by one block.

constexpr int DEPTH = STREAMED ? 2 : 4;  // steps that values are loaded ahead; even: two copies of the state alternate

// What the backward reads at one step: the gates, the state before, and the gradient that arrives.
struct GruStep {
    real r, z, n, m, before, gy;
};

// For t = end - 1 ... begin; carries as in rnn_run_chunk. Of the gradients at n, r, z, m the last three are what the
// transposed weights multiply.
__device__ __forceinline__ void gru_run_chunk(
    const real* __restrict__ h, const real* __restrict__ h0, const real* __restrict__ gates,
    const real* __restrict__ weights, const real* __restrict__ gy, const real* __restrict__ carry, real* __restrict__ ga,
    real* __restrict__ carry_out, int64 begin, int64 end, int sample, int batch, int hidden, real* shared) {
    HIDDEN_SIZE(hidden);
    const bool active = int(threadIdx.x) < H;
    const int unit = min(int(threadIdx.x), H - 1);
    const int64 stride = int64(batch) * H, at = int64(sample) * H + unit, wide = int64(sample) * H * 4 + unit;
    UnitWeights<1, 3> w;
    real* const state = w.load(weights, BACKWARD_STRIDES, unit, shared);

    real u = carry ? carry[unit] : real(0);
    GruStep ahead[DEPTH];
    const auto fetch = [&](GruStep& step, int64 t) {
        const real* const kept = gates + t * stride * 4 + wide;
        step.r = kept[0], step.z = kept[H], step.n = kept[2 * H], step.m = kept[3 * H];
        step.before = t > 0 ? h[at + (t - 1) * stride] : h0[at];
        step.gy = gy ? gy[at + t * stride] : real(0);
    };
#pragma unroll
    for (int s = 0; s < DEPTH; ++s) fetch(ahead[s], max(end - 1 - s, begin));
    unit_barrier();
    const auto step = [&](int s, int64 t) {
        real* const place = state + s % 2 * 3 * SEGMENT;
        const GruStep x = ahead[s];
        const GruFactors f = gru_factors(x.r, x.z, x.n, x.m, x.before);
        const real g = u + x.gy, at_r = g * f.of_r, at_z = g * f.of_z, at_m = g * f.of_n;
        place[threadIdx.x] = at_r, place[SEGMENT + threadIdx.x] = at_z, place[2 * SEGMENT + threadIdx.x] = at_m;
        if (active) {
            real* const out = ga + t * stride * 4 + wide;
            out[0] = g * ((1 - x.z) * (1 - x.n * x.n)), out[H] = at_r, out[2 * H] = at_z, out[3 * H] = at_m;
        }
        if (t - DEPTH >= begin) fetch(ahead[s], t - DEPTH);
        unit_barrier();
        real sum[1];
        w.apply(place, sum);
        u = sum[0] + x.z * g;
    };
    int64 last = end - 1;
    for (; last - DEPTH >= begin - 1; last -= DEPTH)
#pragma unroll
        for (int s = 0; s < DEPTH; ++s) step(s, last - s);
#pragma unroll
    for (int s = 0; s < DEPTH; ++s)
        if (last - s >= begin) step(s, last - s);
    if (active && carry_out) carry_out[at] = u;
}
