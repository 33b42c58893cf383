// The weight gradients of a recurrence from the sums that its backward left for every chunk and sample (weight_sums.cuh).
//
// `parts` (count, entries), with entries of a part (values, H) and values in the order of WeightSums: GATES rows over the
// state, GATES rows over `inputs` inputs (of which `features` are there), and the columns of ga. Eight entries (a sector of
// memory in float32) a block, in rows of threads that take every ROWS-th part in turn; then a tree over the rows. The order is
// fixed, so the result is the same on every run. Bytes: the parts once.

#include "common.cuh"

constexpr int ENTRIES = 8, ROWS = 64;

// Columns of ga are in torch's order of gates; but where there are more of them than gates, those of the input begin with the
// last one: a GRU's n, r, z, and r, z, n over the state.
extern "C" __global__ void __launch_bounds__(512, 1) sum_weights(
    const real* __restrict__ parts, real* __restrict__ w_ih, real* __restrict__ w_hh, real* __restrict__ b_ih,
    real* __restrict__ b_hh, int64 count, int hidden, int features, int inputs, int gates, int columns) {
    __shared__ real table[ROWS][ENTRIES];
    const int entries = (gates * (hidden + inputs) + columns) * hidden;
    const int e = blockIdx.x * ENTRIES + threadIdx.x, row = threadIdx.y;
    real sum = 0;
    if (e < entries)
#pragma unroll 8
        for (int64 p = row; p < count; p += ROWS) sum += parts[p * entries + e];
    table[row][threadIdx.x] = sum;
    for (int half = ROWS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (row < half) table[row][threadIdx.x] += table[row + half][threadIdx.x];
    }
    if (row > 0 || e >= entries) return;
    sum = table[0][threadIdx.x];
    const int last_first = columns > gates ? gates - 1 : 0;
    const int unit = e % hidden, over_state = gates * hidden, over_inputs = gates * inputs;
    int v = e / hidden;
    if (v < over_state) {
        w_hh[(v / hidden * hidden + unit) * hidden + v % hidden] = sum;
        return;
    }
    v -= over_state;
    if (v < over_inputs) {
        const int gate = (v / inputs + last_first) % gates, input = v % inputs;
        if (input < features) w_ih[(gate * hidden + unit) * features + input] = sum;
        return;
    }
    v -= over_inputs;
    if (b_ih && v < gates) b_ih[(v + last_first) % gates * hidden + unit] = sum;
    if (b_hh && v >= columns - gates) b_hh[(v - (columns - gates)) * hidden + unit] = sum;
}
