// What the first phase of reduce-then-scan shares: the affine map of a chunk.
//
// Back-propagation through a chunk is an affine map of the gradient u that comes from later steps: u -> P u + v with
// P = J[begin] ... J[end - 1]. Going forward in time, P <- P J[t], a row of P depends on the same row before: rows are
// spread over lanes and no lane waits for another.

#if defined(HIDDEN) && defined(ROWS)
constexpr int GROUP = (SIDE + ROWS - 1) / ROWS;        // lanes that share one P
constexpr int MATRICES = WARP / GROUP;                 // samples of a warp
static_assert(MATRICES > 0, "the lanes of a warp hold a whole P");
constexpr int HIDDEN_PADDED = padded(HIDDEN);
constexpr int STAGES = (MATRICES * HIDDEN + WARP - 1) / WARP;  // values of all samples at one step, a lane

// Rows of P are needed until the last column of the new ones is done. Meanwhile new columns wait in registers, WAITING of
// them, as far as there is room; the others in this lane's own places of shared memory, which hands out one word a cycle and
// lane and is what a step with few rows waits for. So registers that are left hold KEPT_ROWS rows of W as well. Registers
// have no index, so all columns are unrolled: not worth it where few would fit. LOADED is how many values of a unit a step
// loads; the file that includes this one says so.
constexpr int REAL_WORDS = sizeof(real) / 4, ROW_WORDS = HIDDEN * REAL_WORDS;
constexpr int LOADS = REAL_WORDS == 1 ? 0 : STAGES * LOADED * REAL_WORDS;  // registers; those of floats are in the rest
constexpr int FREE = (STATES > REAL_WORDS ? 160 : 200) - STATES * ROWS * ROW_WORDS - LOADS;  // of 255, beside P
constexpr int ROOM = FREE >= ROWS * ROW_WORDS ? HIDDEN : FREE > 0 ? FREE / (ROWS * REAL_WORDS) : 0;
constexpr int WAITING = 3 * ROOM >= HIDDEN ? ROOM : 0;
constexpr int STORED = HIDDEN - WAITING;
constexpr int LEFT = FREE - ROWS * ROW_WORDS - 24, LEFT_ROWS = STORED > 0 || LEFT < 0 ? 0 : LEFT / ROW_WORDS;
constexpr int KEPT_ROWS = LEFT_ROWS < HIDDEN ? LEFT_ROWS : HIDDEN;

// ROWS rows of P in the registers of one lane, and the same rows of v. The first KEPT rows of the matrix are the same at
// every step.
template <int KEPT> struct ChunkRows {
    real p[ROWS][HIDDEN];
    real v[ROWS];
    real kept[KEPT > 0 ? KEPT : 1][HIDDEN];

    // P <- P M with M = matrix' * diag(scale); row j of `matrix` holds column j of M before scaling by scale(j). A loaded
    // word serves ROWS multiply-adds. stage() is called late, when the values that it passes on have arrived from memory,
    // and before new columns need the registers that they came to. It may change what scale() reads.
    template <class Scale, class Stage>
    __device__ __forceinline__ void multiply(
        const real* matrix, const Scale& scale, real* exchange, int lane, const Stage& stage) {
        real next[ROWS][WAITING > 0 ? WAITING : 1];
        exchange += lane;
        if (WAITING == 0) {
#pragma unroll 4
            for (int j = 0; j < HIDDEN; ++j) put(exchange, j, matrix);
            stage();
        } else {
#pragma unroll
            for (int j = 0; j < HIDDEN; ++j) {
                if (j == HIDDEN * 3 / 4) stage();
                if (j < STORED) {
                    put(exchange, j, matrix);
                    continue;
                }
                real sums[ROWS] = {};
                column(j < KEPT ? kept[j] : nullptr, matrix + j * HIDDEN_PADDED, sums);
#pragma unroll
                for (int r = 0; r < ROWS; ++r) next[r][j - STORED] = sums[r];
            }
        }
        take(scale, [&](int r, int k) {
            return k < STORED ? exchange[(r * STORED + k) * WARP] : next[r][k < STORED ? 0 : k - STORED];
        });
    }

    // P = M, written the same way: column j of row r is matrix[j][row] * scale(j).
    template <class Scale>
    __device__ __forceinline__ void start(const real* matrix, const Scale& scale, int row) {
#pragma unroll
        for (int j = 0; j < KEPT; ++j)
#pragma unroll
            for (int k = 0; k < HIDDEN; ++k) kept[j][k] = matrix[j * HIDDEN_PADDED + k];
        take(scale, [&](int r, int k) { return matrix[k * HIDDEN_PADDED + min(row + r, HIDDEN - 1)]; });
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

    // To a map as common.cuh describes it.
    __device__ __forceinline__ void store(real* map, int row) const {
        store_rows(map, row, [&](int r, int k) { return p[r][k]; });
    }

  protected:
    template <class Value> __device__ __forceinline__ void store_rows(real* map, int row, const Value& value) const {
        map += row * PITCH;  // now: ptxas works out an address for every store, and spills
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            if (row + r >= SIDE) continue;
#pragma unroll
            for (int k = 0; k < PITCH; k += WIDTH) {
                real piece[WIDTH];
#pragma unroll
                for (int c = 0; c < WIDTH; ++c)
                    piece[c] = k + c < SIDE ? value(r, min(k + c, SIDE - 1)) : k + c == SIDE ? v[r] : real(0);
                store_wide(map + r * PITCH + k, piece);
            }
        }
    }

    // sums[r] += row r of P times a row of the matrix, which is `kept` (null: not) and in shared memory.
    __device__ __forceinline__ void column(const real* kept, const real* shared, real (&sums)[ROWS]) const {
#pragma unroll
        for (int k = 0; k < HIDDEN; k += WIDTH) {
            real piece[WIDTH];
            if (!kept) load_wide(shared + k, piece);
#pragma unroll
            for (int c = 0; c < WIDTH; ++c)
#pragma unroll
                for (int r = 0; r < ROWS; ++r)
                    if (k + c < HIDDEN) sums[r] += p[r][k + c] * (kept ? kept[k + c] : piece[c]);
        }
    }

    // Column j of the new P, to this lane's places.
    __device__ __forceinline__ void put(real* own, int j, const real* matrix) const {
        real sums[ROWS] = {};
        column(nullptr, matrix + j * HIDDEN_PADDED, sums);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) own[(r * STORED + j) * WARP] = sums[r];
    }

    template <class Scale, class Value>
    __device__ __forceinline__ void take(const Scale& scale, const Value& value) {
#pragma unroll
        for (int k = 0; k < HIDDEN; ++k) {
            const real factor = scale(k);
#pragma unroll
            for (int r = 0; r < ROWS; ++r) p[r][k] = value(r, k) * factor;
        }
    }
};
#endif

#if !defined(HIDDEN) && defined(ROWS)
// The same for any size: a block holds ROWS rows of P a warp, in shared memory, twice. J[t] has TERMS factored terms:
// J[k][j] = sum over q of coefficient[q](j) * w[q * H + j][k], and with COEFFICIENTS > TERMS the last one is a diagonal.
// `transposed` is w', (H, TERMS * H); `coefficients(t, j, out)` works out those of one unit.
//
// With two STATES, (h, c) of an LSTM, J is made of terms as well. A row (p, c) becomes (p', c') with
//   c'[j] = sum over q < TERMS - 1 of coefficient[q](j) (p w_q')[j] + coefficient[TERMS](j) c[j],
//   p'[j] = coefficient[TERMS + 1](j) c'[j] + coefficient[TERMS - 1](j) (p w_last')[j],
// and c takes the place of c' where it lies.
template <int TERMS, int COEFFICIENTS, class Function>
__device__ __forceinline__ void reduce_rows(
    const real* __restrict__ transposed, const real* __restrict__ gy, real* matrix, real* vector, Function coefficients,
    int64 begin, int64 end, int64 stride, int first_row, int H, real* shared) {
    const int lane = threadIdx.x % WARP, row = threadIdx.x / WARP * ROWS, rows = blockDim.x / WARP * ROWS;
    const int pitch = padded(H), outputs = TERMS * H, side = STATES * H;
    real* current = shared;
    real* next = current + rows * pitch;
    real* const cells = next + rows * pitch;
    real* const factors = cells + (STATES - 1) * rows * pitch;
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
                constexpr int SUMMED = TERMS - (STATES - 1), DIAGONAL = STATES > 1 ? TERMS : COEFFICIENTS - 1;
                real value = 0;
#pragma unroll
                for (int q = 0; q < SUMMED; ++q) value += factors[q * H + j] * sums[q][r];
                if (COEFFICIENTS > TERMS) {
                    const real* const own = STATES > 1 ? cells : current;
                    const int unit = (STATES - 1) * H + j;
                    const real before = t == begin ? real(first_row + row + r == unit) : own[(row + r) * pitch + j];
                    value += factors[DIAGONAL * H + j] * before;
                }
                if constexpr (STATES > 1) {
                    cells[(row + r) * pitch + j] = value;
                    value = factors[(TERMS + 1) * H + j] * value + factors[SUMMED * H + j] * sums[SUMMED][r];
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
        if (i >= side) continue;
        for (int k = lane; k < H; k += WARP) {
            matrix[int64(k) * side + i] = current[(row + r) * pitch + k];
            if (STATES > 1) matrix[int64(H + k) * side + i] = cells[(row + r) * pitch + k];
        }
        if (vector && lane == 0) vector[i] = v[r];
    }
}
#endif
