// Sums over parts (count, entries), for the weight gradients of a recurrence.
//
// Eight entries (a sector of memory in float32) a block, in rows of threads that take every ROWS-th part in turn; then a tree
// over the rows. The order is fixed, so the result is the same on every run. Bytes: the parts once.

#include "common.cuh"

constexpr int ENTRIES = 8, ROWS = 64;

// The sum of entry e in the first row of threads, 0 in the others.
__device__ __forceinline__ real sum_of_parts(const real* __restrict__ parts, int64 count, int entries, int e) {
    __shared__ real table[ROWS][ENTRIES];
    const int row = threadIdx.y;
    real sum = 0;
    if (e < entries)
#pragma unroll 16
        for (int64 p = row; p < count; p += ROWS) sum += parts[p * entries + e];
    table[row][threadIdx.x] = sum;
    for (int half = ROWS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (row < half) table[row][threadIdx.x] += table[row + half][threadIdx.x];
    }
    return row > 0 ? real(0) : table[0][threadIdx.x];
}

// All weight gradients from the sums that a backward left for every chunk and sample (weight_sums.cuh): entries (values, H),
// with values in the order of WeightSums: GATES rows over the state, GATES rows over `inputs` inputs (of which `features` are
// there), and the columns of ga.
//
// Columns of ga are in torch's order of gates; but where there are more of them than gates, those of the input begin with the
// last one: a GRU's n, r, z, and r, z, n over the state.
extern "C" __global__ void __launch_bounds__(512, 1) sum_weights(
    const real* __restrict__ parts, real* __restrict__ w_ih, real* __restrict__ w_hh, real* __restrict__ b_ih,
    real* __restrict__ b_hh, int64 count, int hidden, int features, int inputs, int gates, int columns) {
    const int entries = (gates * (hidden + inputs) + columns) * hidden, e = blockIdx.x * ENTRIES + threadIdx.x;
    const real sum = sum_of_parts(parts, count, entries, e);
    if (threadIdx.y > 0 || e >= entries) return;
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

// Where weight gradients are products: the biases' from ga (count, columns), and w_ih from its product (`size` entries), whose
// rows are in the order of ga's columns. Of those the ones from `first` on belong to the state, and the others, up to the last
// `first`, to the input, beginning with torch's last gate. Blocks behind those of the sums move the product.
extern "C" __global__ void __launch_bounds__(512, 1) sum_gates(
    const real* __restrict__ ga, const real* __restrict__ product, real* __restrict__ w_ih, real* __restrict__ b_ih,
    real* __restrict__ b_hh, int64 count, int columns, int first, int64 size) {
    const int rows = columns - first, tiles = b_ih || b_hh ? (columns + ENTRIES - 1) / ENTRIES : 0;
    if (int(blockIdx.x) >= tiles) {
        const int64 e = (int64(blockIdx.x - tiles) * ROWS + threadIdx.y) * ENTRIES + threadIdx.x;
        if (e < size) w_ih[e] = product[(e + size / rows * first) % size];
        return;
    }
    const int e = blockIdx.x * ENTRIES + threadIdx.x;
    const real sum = sum_of_parts(ga, count, columns, e);
    if (threadIdx.y > 0 || e >= columns) return;
    if (b_ih && e < rows) b_ih[(e < first ? e + rows : e) - first] = sum;
    if (b_hh && e >= first) b_hh[e - first] = sum;
}

// The same sums of `piece` rows each, as parts: few columns and many rows would leave most of a GPU idle.
extern "C" __global__ void __launch_bounds__(512, 1) sum_pieces(
    const real* __restrict__ ga, real* __restrict__ parts, int64 count, int columns, int piece) {
    const int tiles = (columns + ENTRIES - 1) / ENTRIES, e = blockIdx.x % tiles * ENTRIES + threadIdx.x;
    const int64 p = blockIdx.x / tiles, begin = p * piece;
    const real sum = sum_of_parts(ga + begin * columns, min(int64(piece), count - begin), columns, e);
    if (threadIdx.y == 0 && e < columns) parts[p * columns + e] = sum;
}
