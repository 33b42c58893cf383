// Elman recurrence h[t] = f(W_ih x[t] + b + W h[t-1]), forward.
//
// RELU picks f: 0 is tanh, 1 is relu. A block a sample, a thread a hidden unit; see recurrent.cuh, and forward.cuh for the
// input. Bound by the latency of a step, not by operations (2 H^2 a step and sample) or bytes (H values written, and H or
// the features of the input read): about 110 + H cycles. What is to be written or loaded stands behind a step's barrier: it
// is given out while the next step's product, whose loads come first, is under way. The arrays that are loaded ahead and
// written are not __restrict__: their loads would be moved, past barriers, to where they are waited for.

#include "common.cuh"
#include "recurrent.cuh"
#include "forward.cuh"

__device__ __forceinline__ real activation(real x) {
#if RELU
    return x < 0 ? real(0) : x;  // written so that NaN stays NaN
#else
    return tanh_of(x);
#endif
}

// `x` is the input's product (T, B, H) or, with INPUTS, the input (T, B, inputs); only then w_ih (H, inputs) is read. Biases:
// (H), null for none. `fresh`: the state begins at zero, and h0 is written.
extern "C" __global__ void __launch_bounds__(UNIT_BLOCK, 1) rnn_forward(
    const real* x, const real* __restrict__ w_ih, const real* __restrict__ b_ih, const real* __restrict__ b_hh,
    int inputs, const real* __restrict__ weights, real* h0, int fresh, real* h, int64 steps, int batch, int hidden) {
    extern __shared__ __align__(16) real shared[];
    HIDDEN_SIZE(hidden);
    const bool active = is_writer(H);
    const int unit = unit_of(H);
    const int64 stride = int64(batch) * H, at = int64(blockIdx.x) * H + unit;
    StepInput<1> input(x, w_ih, b_ih, b_hh, 1, inputs, batch, H, unit, shared);
    UnitWeights<1, 1> w;
    real* const state = w.load(weights, FORWARD_STRIDES(1), unit, shared + input.SHARED);
    real value = fresh ? real(0) : h0[at];
    if (fresh && active) h0[at] = value;
    put(state, value);
    real* out = h + at;
    real from_x[1];
    input.begin(steps);
    unit_barrier();
    input.read(0, from_x);
    all_steps<StepInput<1>::DEPTH>(steps, [&](int s, int64 behind) {
        real sum[1] = {from_x[0]};
        w.add(state + s % 2 * SEGMENT, sum);
        input.next_step(s, from_x);
        value = activation(sum[0]);
        put(state + (s + 1) % 2 * SEGMENT, value);
        unit_barrier();
        input.next_round(s, behind);
        if (active) *out = value;
        out += stride;
    });
}
