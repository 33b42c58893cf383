// What every kernel file shares.
//
// Types come in as defines: REAL (float or double), INDEX (int or long long, where a file needs it). Offsets into arrays
// are 64-bit throughout: T * B * H * H passes 2^31 soon.

typedef REAL real;
typedef long long int64;

constexpr int WARP = 32;
constexpr unsigned ALL_LANES = 0xffffffffu;

// Sixteen bytes at a time: the widest access that a thread has.
template <class T> struct Wide;
template <> struct Wide<float> {
    typedef float4 type;
    static constexpr int count = 4;
    static __device__ __forceinline__ void unpack(const float4& v, float (&out)[4]) {
        out[0] = v.x, out[1] = v.y, out[2] = v.z, out[3] = v.w;
    }
    static __device__ __forceinline__ float4 pack(const float (&v)[4]) { return float4{v[0], v[1], v[2], v[3]}; }
};
template <> struct Wide<double> {
    typedef double2 type;
    static constexpr int count = 2;
    static __device__ __forceinline__ void unpack(const double2& v, double (&out)[2]) { out[0] = v.x, out[1] = v.y; }
    static __device__ __forceinline__ double2 pack(const double (&v)[2]) { return double2{v[0], v[1]}; }
};
constexpr int WIDTH = Wide<real>::count;

// A length rounded up to whole wide accesses. Padding is always written (zero) before it is read.
__host__ __device__ constexpr int padded(int n) { return (n + WIDTH - 1) / WIDTH * WIDTH; }

// `source` and `target` must be aligned to 16 bytes.
__device__ __forceinline__ void load_wide(const real* source, real (&out)[WIDTH]) {
    Wide<real>::unpack(*reinterpret_cast<const typename Wide<real>::type*>(source), out);
}

__device__ __forceinline__ void store_wide(real* target, const real (&values)[WIDTH]) {
    *reinterpret_cast<typename Wide<real>::type*>(target) = Wide<real>::pack(values);
}

__device__ __forceinline__ real warp_sum(real value) {
    for (int step = WARP / 2; step > 0; step /= 2) value += __shfl_xor_sync(ALL_LANES, value, step);
    return value;
}

__device__ __forceinline__ real warp_max(real value) {
    for (int step = WARP / 2; step > 0; step /= 2) {
        const real other = __shfl_xor_sync(ALL_LANES, value, step);
        value = other > value ? other : value;
    }
    return value;
}

__device__ __forceinline__ float exp_of(float x) { return expf(x); }
__device__ __forceinline__ double exp_of(double x) { return exp(x); }
__device__ __forceinline__ float log_of(float x) { return logf(x); }
__device__ __forceinline__ double log_of(double x) { return log(x); }
__device__ __forceinline__ float sqrt_of(float x) { return sqrtf(x); }
__device__ __forceinline__ double sqrt_of(double x) { return sqrt(x); }

// Zeroes shared memory for all threads of the block; the caller's next barrier makes it visible.
__device__ __forceinline__ void clear(real* shared, int count) {
    for (int e = threadIdx.x; e < count; e += blockDim.x) shared[e] = 0;
}

// How the warp form of reduce-then-scan keeps the affine map u -> P u + v of a chunk and sample: row by row, v behind the
// columns of P. Rows begin 16 bytes or more apart, by an odd number of such pieces: lanes that read a row each meet no bank of
// shared memory twice.

#ifndef STATES
#define STATES 1  // vectors of HIDDEN values that the state of a cell consists of
#endif

#ifdef HIDDEN
constexpr int SIDE = STATES * HIDDEN;  // rows of P
constexpr int ROW_PIECES = padded(SIDE + 1) / WIDTH;
constexpr int PITCH = (ROW_PIECES + (ROW_PIECES % 2 ? 0 : 1)) * WIDTH;
constexpr int MAP = SIDE * PITCH;
#endif
