// Gated recurrent unit (BPPSA Eq. 10), forward with every gate kept.
//
// A block a sample, a thread a hidden unit; see recurrent.cuh, and forward.cuh for the input. Bound by the latency of a
// step: about 30 cycles for the state, 3 H multiply-adds a thread, and two exponentials with their divisions in a row.
// Operations: 6 H^2 a step and sample; bytes: 5 H values written, and 3 H or the features of the input read. A step is
// ordered as in rnn_forward.cu.

#include "common.cuh"
#include "recurrent.cuh"
#include "forward.cuh"

// `x` is the input's product (T, B, 3 H) or, with INPUTS, the input (T, B, inputs); only then w_ih (3 H, inputs) is read.
// Biases: (3 H), null for none; of b_hh r and z are read. `fresh` as in rnn_forward.
extern "C" __global__ void __launch_bounds__(UNIT_BLOCK, 1) gru_forward(
    const real* x, const real* __restrict__ w_ih, const real* __restrict__ b_ih, const real* __restrict__ b_hh,
    int inputs, const real* __restrict__ weights, const real* __restrict__ b_hn, real* h0, int fresh, real* h,
    real* gates, int64 steps, int batch, int hidden) {
    extern __shared__ __align__(16) real shared[];
    HIDDEN_SIZE(hidden);
    const bool active = is_writer(H);
    const int unit = unit_of(H);
    const int64 stride = int64(batch) * H, at = int64(blockIdx.x) * H + unit;
    StepInput<3> input(x, w_ih, b_ih, b_hh, 2, inputs, batch, H, unit, shared);
    UnitWeights<3, 1> w;
    real* const state = w.load(weights, FORWARD_STRIDES(3), unit, shared + input.SHARED);
    const real bias = b_hn[unit];
    real value = fresh ? real(0) : h0[at];
    if (fresh && active) h0[at] = value;
    put(state, value);
    real *out = h + at, *kept = gates + int64(blockIdx.x) * H * 4 + unit;
    real from_x[3];
    input.begin(steps);
    unit_barrier();
    input.read(0, from_x);
    all_steps<StepInput<3>::DEPTH>(steps, [&](int s, int64 behind) {
        real sums[3] = {from_x[0], from_x[1], bias};
        const real x_n = from_x[2];
        w.add(state + s % 2 * SEGMENT, sums);
        input.next_step(s, from_x);
        const real r = sigmoid_of(sums[0]), m = sums[2];
        const real n = tanh_of(x_n + r * m), z = sigmoid_of(sums[1]);
        if (active) kept[0] = r, kept[3 * H] = m;
        value = (1 - z) * n + z * value;
        put(state + (s + 1) % 2 * SEGMENT, value);
        if (active) kept[H] = z;
        unit_barrier();
        input.next_round(s, behind);
        if (active) *out = value, kept[2 * H] = n;
        out += stride, kept += 4 * stride;
    });
}
