// The loss: one pass over memory, so the floor is bytes / bandwidth.

#include "common.cuh"

// A warp a row. Bytes: logits read (twice, the second time from cache), grad written. Operations: about 10 an entry.
extern "C" __global__ void __launch_bounds__(256) softmax_cross_entropy(
    const real* __restrict__ logits, const int64* __restrict__ target, real* __restrict__ losses,
    real* __restrict__ grad, int64 rows, int64 classes) {
    const int64 row = int64(blockIdx.x) * blockDim.y + threadIdx.y;
    if (row >= rows) return;
    const int lane = threadIdx.x;
    const real* const in = logits + row * classes;
    real* const out = grad + row * classes;

    const int64 wanted = target[row];
    if (wanted < 0 || wanted >= classes) {  // as on the host: the row shows the mistake, nothing is read elsewhere
        for (int64 c = lane; c < classes; c += WARP) out[c] = real(nan(""));
        if (lane == 0) losses[row] = real(nan(""));
        return;
    }

    real largest = in[0];
    for (int64 c = lane; c < classes; c += WARP) largest = in[c] > largest ? in[c] : largest;
    largest = warp_max(largest);
    real total = 0;  // an entry that is NaN or infinite makes this NaN, and with it the loss
    for (int64 c = lane; c < classes; c += WARP) {
        const real value = exp_of(in[c] - largest);
        out[c] = value;  // read again below by the same lane
        total += value;
    }
    total = warp_sum(total);
    for (int64 c = lane; c < classes; c += WARP) out[c] = out[c] / total - (c == wanted ? real(1) : real(0));
    if (lane == 0) losses[row] = log_of(total) - (in[wanted] - largest);
}
