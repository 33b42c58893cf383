// Long short-term memory, forward with every gate kept.
//
// A block a sample, a thread a hidden unit; see recurrent.cuh, and forward.cuh for the input. Bound by the latency of a
// step: about 30 cycles for the state, 4 H multiply-adds a thread, and two exponentials with their divisions in a row, those
// of a gate and of the new cell. Operations: 8 H^2 a step and sample; bytes: 6 H values written, and 4 H or the features of
// the input read. A step is ordered as in rnn_forward.cu.

#include "common.cuh"
#include "recurrent.cuh"
#include "forward.cuh"

// `x` is the input's product (T, B, 4 H) or, with INPUTS, the input (T, B, inputs); only then w_ih (4 H, inputs) is read.
// Biases: (4 H), null for none. `fresh` as in rnn_forward. Gates in torch's order i, f, g, o.
extern "C" __global__ void __launch_bounds__(UNIT_BLOCK, 1) lstm_forward(
    const real* x, const real* __restrict__ w_ih, const real* __restrict__ b_ih, const real* __restrict__ b_hh,
    int inputs, const real* __restrict__ weights, real* h0, real* c0, int fresh, real* h, real* c, real* gates, int64 steps, int batch, int hidden) {
    extern __shared__ __align__(16) real shared[];
    HIDDEN_SIZE(hidden);
    const bool active = is_writer(H);
    const int unit = unit_of(H);
    const int64 stride = int64(batch) * H, at = int64(blockIdx.x) * H + unit;
    StepInput<4> input(x, w_ih, b_ih, b_hh, 4, inputs, batch, H, unit, shared);
    UnitWeights<4, 1> w;
    real* const state = w.load(weights, FORWARD_STRIDES(4), unit, shared + input.SHARED);
    real cell = fresh ? real(0) : c0[at];
    put(state, fresh ? real(0) : h0[at]);
    if (fresh && active) h0[at] = c0[at] = cell;
    real *out = h + at, *cells = c + at, *kept = gates + int64(blockIdx.x) * H * 4 + unit;
    real sums[4];
    input.begin(steps);
    unit_barrier();
    input.read(0, sums);
    all_steps<StepInput<4>::DEPTH>(steps, [&](int s, int64 behind) {
        w.add(state + s % 2 * SEGMENT, sums);
        const real f = sigmoid_of(sums[1]), i = sigmoid_of(sums[0]), g = tanh_of(sums[2]), at_o = sums[3];
        input.next_step(s, sums);
        cell = f * cell + i * g;
        const real o = sigmoid_of(at_o);
        if (active) kept[0] = i, kept[H] = f;
        const real value = o * tanh_of(cell);
        put(state + (s + 1) % 2 * SEGMENT, value);
        if (active) kept[2 * H] = g;
        unit_barrier();
        input.next_round(s, behind);
        if (active) *out = value, *cells = cell, kept[3 * H] = o;
        out += stride, cells += stride, kept += 4 * stride;
    });
}
