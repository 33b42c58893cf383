// Rows of the affine map of a chunk of an LSTM, whose state is (h, c): see reduction.cuh.
//
// The transposed Jacobian of a step has four blocks,
//   from h to h: A diag(q) + W_o' diag(e)     from h to c: A
//   from c to h: diag(f q)                    from c to c: diag(f)
// with A = W_i' diag(of_i) + W_f' diag(of_f) + W_g' diag(of_g). So a row (p, c) of P becomes
//   c' = p A + c diag(f),   p' = c' diag(q) + p W_o' diag(e):
// two products with H x H matrices, half of what one with 2 H x 2 H takes, and c' can lie where c was.

#if defined(HIDDEN) && defined(ROWS)
static_assert(WAITING > 0, "all columns are unrolled");
constexpr int FACTORS = 8;  // of a unit: of_i, of_f, of_g, none; f, q, e, none. In wide pieces

// Behind which column what was loaded is passed on: where ptxas does not spill.
constexpr int STAGE_AT = REAL_WORDS == 1 ? HIDDEN * 3 / 4 : STORED > 0 ? HIDDEN / 2 : HIDDEN - 1;

// f, q and e of one unit.
struct Diagonals {
    real f, q, e;

    __device__ __forceinline__ Diagonals(const real* factors) {
        real pieces[4];
#pragma unroll
        for (int k = 0; k < 4; k += WIDTH) load_wide(factors + 4 + k, *reinterpret_cast<real(*)[WIDTH]>(pieces + k));
        f = pieces[0], q = pieces[1], e = pieces[2];
    }
};

// The columns of h are those of ChunkRows, `p`; those of c are beside them. Row j of `matrix` holds column j of A, row j of
// `outputs` column j of W_o'; `factors` are those of this sample's units.
struct LstmRows : ChunkRows<0> {
    real c[ROWS][HIDDEN];

    // P <- P J; `exchange` and stage() as in ChunkRows::multiply.
    template <class Stage>
    __device__ __forceinline__ void multiply(
        const real* matrix, const real* outputs, const real* factors, real* exchange, int lane, const Stage& stage) {
        real next[ROWS][WAITING];
        exchange += lane;
#pragma unroll
        for (int j = 0; j < HIDDEN; ++j) {
            if (j == STAGE_AT) stage();
            const Diagonals of(factors + j * FACTORS);
            real to_c[ROWS] = {}, to_output[ROWS] = {};
            column(nullptr, matrix + j * HIDDEN_PADDED, to_c);
            column(nullptr, outputs + j * HIDDEN_PADDED, to_output);
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                c[r][j] = c[r][j] * of.f + to_c[r];
                const real value = c[r][j] * of.q + to_output[r] * of.e;
                if (j < STORED)
                    exchange[(r * STORED + j) * WARP] = value;
                else
                    next[r][j < STORED ? 0 : j - STORED] = value;
            }
        }
        take([](int) { return real(1); }, [&](int r, int k) {
            return k < STORED ? exchange[(r * STORED + k) * WARP] : next[r][k < STORED ? 0 : k - STORED];
        });
    }

    // P = J.
    __device__ __forceinline__ void start(const real* matrix, const real* outputs, const real* factors, int row) {
#pragma unroll
        for (int j = 0; j < HIDDEN; ++j) {
            const Diagonals of(factors + j * FACTORS);
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const int i = row + r, e = j * HIDDEN_PADDED + min(i, HIDDEN - 1);
                c[r][j] = i < HIDDEN ? matrix[e] : i == HIDDEN + j ? of.f : real(0);
                p[r][j] = c[r][j] * of.q + (i < HIDDEN ? outputs[e] * of.e : real(0));
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r) v[r] = 0;
    }

    // To a map as maps.cuh describes it, columns of h first.
    __device__ __forceinline__ void store(real* map, int row) const {
        store_rows(map, row, [&](int r, int k) { return k < HIDDEN ? p[r][min(k, HIDDEN - 1)] : c[r][max(k - HIDDEN, 0)]; });
    }
};
#endif
