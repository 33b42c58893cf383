// What the first phase of reduce-then-scan shares: the affine map of a chunk.
//
// Back-propagation through a chunk is an affine map of the gradient u that comes from later steps: u -> P u + v with
// P = J[begin] ... J[end - 1]. Going forward in time, P <- P J[t], a row of P depends on the same row before: rows are
// spread over lanes and no lane waits for another.

#if defined(HIDDEN) && defined(ROWS)
constexpr int GROUP = (HIDDEN + ROWS - 1) / ROWS;      // lanes that share one P
constexpr int MATRICES = WARP / GROUP;                 // samples of a warp
constexpr int HIDDEN_PADDED = padded(HIDDEN);
constexpr int STAGES = (MATRICES * HIDDEN + WARP - 1) / WARP;  // values of all samples at one step, a lane

// ROWS rows of P in the registers of one lane, and the same rows of v.
struct ChunkRows {
    real p[ROWS][HIDDEN];
    real v[ROWS];

    // P <- P M with M = matrix' * diag(scale); row j of `matrix` holds column j of M before scaling. A loaded word serves
    // ROWS multiply-adds. New rows go by way of this lane's own places in `exchange`, because all of the old row is
    // needed until the last column of the new one is done.
    template <bool SCALED>
    __device__ __forceinline__ void multiply(const real* matrix, const real* scale, real* exchange, int lane) {
#pragma unroll 4
        for (int j = 0; j < HIDDEN; ++j) {
            real sums[ROWS] = {};
#pragma unroll
            for (int k = 0; k < HIDDEN; k += WIDTH) {
                real piece[WIDTH];
                load_wide(matrix + j * HIDDEN_PADDED + k, piece);
#pragma unroll
                for (int c = 0; c < WIDTH; ++c)
#pragma unroll
                    for (int r = 0; r < ROWS; ++r)
                        if (k + c < HIDDEN) sums[r] += p[r][k + c] * piece[c];
            }
#pragma unroll
            for (int r = 0; r < ROWS; ++r)
                exchange[(r * HIDDEN + j) * WARP + lane] = SCALED ? sums[r] * scale[j] : sums[r];
        }
        take(exchange, lane);
    }

    // P = M, written the same way: column j of row r is matrix[j][row] * scale[j].
    template <bool SCALED>
    __device__ __forceinline__ void start(const real* matrix, const real* scale, real* exchange, int lane, int row) {
        for (int j = 0; j < HIDDEN; ++j)
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const real value = row + r < HIDDEN ? matrix[j * HIDDEN_PADDED + row + r] : real(0);
                exchange[(r * HIDDEN + j) * WARP + lane] = SCALED ? value * scale[j] : value;
            }
        take(exchange, lane);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) v[r] = 0;
    }

    // v <- v + P g: the gradient that arrives at this step.
    __device__ __forceinline__ void add(const real* g) {
#pragma unroll
        for (int k = 0; k < HIDDEN; ++k) {
            const real value = g[k];
#pragma unroll
            for (int r = 0; r < ROWS; ++r) v[r] += p[r][k] * value;
        }
    }

    // P is stored column by column, as the combination reads it.
    __device__ __forceinline__ void store(real* matrix, real* vector, int row) const {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            if (row + r >= HIDDEN) continue;
#pragma unroll
            for (int k = 0; k < HIDDEN; ++k) matrix[k * HIDDEN + row + r] = p[r][k];
            if (vector) vector[row + r] = v[r];
        }
    }

  private:
    __device__ __forceinline__ void take(const real* exchange, int lane) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int k = 0; k < HIDDEN; ++k) p[r][k] = exchange[(r * HIDDEN + k) * WARP + lane];
    }
};
#endif

#if !defined(HIDDEN) && defined(ROWS)
// The same for any size: a block holds ROWS rows of P a warp, in shared memory, twice. J[t] has TERMS factored terms:
// J[k][j] = sum over q of coefficient[q](j) * w[q * H + j][k], and with COEFFICIENTS > TERMS the last one is a diagonal.
// `transposed` is w', (H, TERMS * H); `coefficients(t, j, out)` works out those of one unit.
template <int TERMS, int COEFFICIENTS, class Function>
__device__ __forceinline__ void reduce_rows(
    const real* __restrict__ transposed, const real* __restrict__ gy, real* matrix, real* vector, Function coefficients,
    int64 begin, int64 end, int64 stride, int first_row, int H, real* shared) {
    const int lane = threadIdx.x % WARP, row = threadIdx.x / WARP * ROWS, rows = blockDim.x / WARP * ROWS;
    const int pitch = padded(H), outputs = TERMS * H;
    real* current = shared;
    real* next = current + rows * pitch;
    real* const factors = next + rows * pitch;
    real* const incoming = factors + COEFFICIENTS * H;
    real v[ROWS] = {};
    clear(shared, 2 * rows * pitch);

    for (int64 t = begin; t < end; ++t) {
        __syncthreads();
        for (int j = threadIdx.x; j < H; j += blockDim.x) {
            real values[COEFFICIENTS];
            coefficients(t, j, values);
            for (int q = 0; q < COEFFICIENTS; ++q) factors[q * H + j] = values[q];
            incoming[j] = gy ? gy[t * stride + j] : real(0);
        }
        __syncthreads();
        for (int j = lane; j < H; j += WARP) {
            real sums[TERMS][ROWS] = {};
            if (t == begin) {
                for (int r = 0; r < ROWS && first_row + row + r < H; ++r)
                    for (int q = 0; q < TERMS; ++q)
                        sums[q][r] = transposed[int64(first_row + row + r) * outputs + q * H + j];
            } else {
                for (int k = 0; k < H; k += WIDTH) {
                    real pieces[ROWS][WIDTH];
#pragma unroll
                    for (int r = 0; r < ROWS; ++r) load_wide(current + (row + r) * pitch + k, pieces[r]);
#pragma unroll
                    for (int c = 0; c < WIDTH; ++c)
#pragma unroll
                        for (int q = 0; q < TERMS; ++q) {
                            const real weight = k + c < H ? transposed[int64(k + c) * outputs + q * H + j] : real(0);
#pragma unroll
                            for (int r = 0; r < ROWS; ++r) sums[q][r] += pieces[r][c] * weight;
                        }
                }
            }
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                real value = 0;
#pragma unroll
                for (int q = 0; q < TERMS; ++q) value += factors[q * H + j] * sums[q][r];
                if (COEFFICIENTS > TERMS) {
                    const real before = t == begin ? real(first_row + row + r == j) : current[(row + r) * pitch + j];
                    value += factors[(COEFFICIENTS - 1) * H + j] * before;
                }
                next[(row + r) * pitch + j] = value;
            }
        }
        real* const swap = current;
        current = next;
        next = swap;
        __syncwarp();  // the rows of `current` that follow are this warp's own
        if (gy)
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                real sum = 0;
                for (int k = lane; k < H; k += WARP) sum += current[(row + r) * pitch + k] * incoming[k];
                v[r] += warp_sum(sum);
            }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const int i = first_row + row + r;
        if (i >= H) continue;
        for (int k = lane; k < H; k += WARP) matrix[int64(k) * H + i] = current[(row + r) * pitch + k];
        if (vector && lane == 0) vector[i] = v[r];
    }
}
#endif
