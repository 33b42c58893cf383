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
    const int unit = threadIdx.x, pitch = padded(3 * H);
    const bool active = unit < H;
    const int64 stride = int64(batch) * H, at = int64(sample) * H + unit, wide = int64(sample) * H * 4 + unit;
    UnitWeights<1, 3> w;
#ifdef HIDDEN
    w.load(weights + unit, H, 0, active);
    real* const state = shared;
#else
    real* const state = w.load(weights, H, shared);
#endif
    clear(state, 2 * pitch);

    real u = active && carry ? carry[unit] : real(0);
    GruStep ahead[DEPTH];
    const auto fetch = [&](GruStep& step, int64 t) {
        if (!active || t < begin) return;
        const real* const kept = gates + t * stride * 4 + wide;
        step.r = kept[0], step.z = kept[H], step.n = kept[2 * H], step.m = kept[3 * H];
        step.before = t > 0 ? h[at + (t - 1) * stride] : h0[at];
        if (gy) step.gy = gy[at + t * stride];
    };
#pragma unroll
    for (int s = 0; s < DEPTH; ++s) {
        ahead[s] = GruStep{0, 0, 0, 0, 0, 0};
        fetch(ahead[s], end - 1 - s);
    }
    unit_barrier();
    for (int64 last = end - 1; last >= begin; last -= DEPTH)
#pragma unroll
        for (int s = 0; s < DEPTH; ++s) {
            const int64 t = last - s;
            if (t < begin) break;
            real* const place = state + s % 2 * pitch;
            const GruStep x = ahead[s];
            const GruFactors f = gru_factors(x.r, x.z, x.n, x.m, x.before);
            const real g = u + x.gy;
            if (active) {
                place[unit] = g * f.of_r, place[H + unit] = g * f.of_z, place[2 * H + unit] = g * f.of_n;
                real* const out = ga + t * stride * 4 + wide;
                out[0] = g * ((1 - x.z) * (1 - x.n * x.n));
                out[H] = g * f.of_r, out[2 * H] = g * f.of_z, out[3 * H] = g * f.of_n;
            }
            fetch(ahead[s], t - DEPTH);
            unit_barrier();
            real sum[1];
            w.apply(place, sum);
            u = sum[0] + x.z * g;
        }
    if (active && carry_out) carry_out[at] = u;
}
