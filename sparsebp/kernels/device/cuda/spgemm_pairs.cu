// Every entry of C is summed from the list of its products. A block owns a tile of neighbouring entries, whose values of A
// lie near each other, for one tile of the batch: x runs along the batch, y along the entries. A thread sums in a
// register, so there are no atomics, and one order of sums. Floor, per product and sample: 2 operations and two values
// read, most of them from a cache; a word of 4 or 8 bytes a product, read once for the batch.

#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256) spgemm_pairs(
    const WORD* __restrict__ words, const unsigned short* __restrict__ starts,
    const unsigned short* __restrict__ lengths, const int64* __restrict__ pieces, int shift,
    const real* __restrict__ a_data, int a_step, const real* __restrict__ b_data, int b_step, real* __restrict__ out,
    int batch, int tiles) {
    constexpr int columns = 11;  // of the table: the first entry of C, that of A, the first word, and what the host reads
    const int64* const piece = pieces + int64(blockIdx.x / tiles) * columns;
    const int sample = (blockIdx.x % tiles) * blockDim.x + threadIdx.x;
    if (sample >= batch) return;
    const int64 end = piece[columns], a_width = a_step ? batch : 1, b_width = b_step ? batch : 1;
    const real* const a = a_data + piece[1] * a_width + sample * a_step;
    const real* const b = b_data + sample * b_step;
    const unsigned long long mask = (1ull << shift) - 1;
    for (int64 c = piece[0] + threadIdx.y; c < end; c += blockDim.y) {
        real sum = 0;
        const WORD* const own = words + piece[2] + starts[c];
        for (int p = 0; p < lengths[c]; ++p) {
            const unsigned long long word = own[p];
            sum += a[int64(word & mask) * a_width] * b[int64(word >> shift) * b_width];
        }
        out[c * batch + sample] = sum;
    }
}
