// Sequential back-propagation of one sample through a stretch of an Elman recurrence, by one block.

constexpr int DEPTH = STREAMED ? 2 : 8;  // steps that values are loaded ahead; even: two copies of the state alternate

// g[t] = gy[t] + W' gz[t + 1], gz[t] = g[t] * f'(t), for t = end - 1 ... begin. `carry` (H) comes from later steps (null:
// zero), what goes on to earlier ones is left at sample `sample` of `carry_out` (B, H; null: nowhere).
__device__ __forceinline__ void rnn_run_chunk(
    const real* __restrict__ h, const real* __restrict__ weights, const real* __restrict__ gy,
    const real* __restrict__ carry, real* __restrict__ gz, real* __restrict__ carry_out, int64 begin, int64 end,
    int sample, int batch, int hidden, real* shared) {
    HIDDEN_SIZE(hidden);
    const bool active = int(threadIdx.x) < H;
    const int unit = min(int(threadIdx.x), H - 1);
    const int64 stride = int64(batch) * H, at = int64(sample) * H + unit;
    UnitWeights<1, 1> w;
    real* const state = w.load(weights, BACKWARD_STRIDES, unit, shared);

    real u[1] = {carry ? carry[unit] : real(0)};
    real ahead_h[DEPTH], ahead_g[DEPTH];
#pragma unroll
    for (int s = 0; s < DEPTH; ++s) {
        const int64 t = max(end - 1 - s, begin);
        ahead_h[s] = h[at + t * stride];
        ahead_g[s] = gy ? gy[at + t * stride] : real(0);
    }
    unit_barrier();
    const auto step = [&](int s, int64 t) {
        real* const place = state + s % 2 * SEGMENT;
        const real value = (u[0] + ahead_g[s]) * slope(ahead_h[s]);
        place[threadIdx.x] = value;
        if (active) gz[at + t * stride] = value;
        if (t - DEPTH >= begin) {
            ahead_h[s] = h[at + (t - DEPTH) * stride];
            if (gy) ahead_g[s] = gy[at + (t - DEPTH) * stride];
        }
        unit_barrier();
        w.apply(place, u);
    };
    int64 last = end - 1;
    for (; last - DEPTH >= begin - 1; last -= DEPTH)
#pragma unroll
        for (int s = 0; s < DEPTH; ++s) step(s, last - s);
#pragma unroll
    for (int s = 0; s < DEPTH; ++s)
        if (last - s >= begin) step(s, last - s);
    if (active && carry_out) carry_out[at] = u[0];
}
