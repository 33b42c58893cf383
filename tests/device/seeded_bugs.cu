// Kernels that are wrong in one way each, and a few that are right. test_executor.py names the line that must be found:
// one that ends in `// BUG`
// inside the kernel. A race is found at the later of its two accesses, so which line that is depends on the order.
#define TILE 32
#define ALL 0xffffffffu

extern "C" __global__ void missing_barrier(float* x) {
    __shared__ float s[64];
    s[threadIdx.x] = 0.f;
    __syncthreads();
    s[threadIdx.x] = x[threadIdx.x];  // BUG
    x[threadIdx.x] = s[63 - threadIdx.x];  // BUG
}

extern "C" __global__ void missing_second_barrier(float* x, int rounds) {
    __shared__ float s[64];
    float v = x[threadIdx.x];
    for (int i = 0; i < rounds; ++i) {
        s[threadIdx.x] = v;  // BUG
        __syncthreads();
        v += s[(threadIdx.x + 1) % 64];  // BUG
    }
    x[threadIdx.x] = v;
}

extern "C" __global__ void shared_race(float* x) {
    __shared__ float s[2];
    s[threadIdx.x % 2] = x[threadIdx.x];  // BUG
    __syncthreads();
    x[threadIdx.x] = s[threadIdx.x % 2];
}

extern "C" __global__ void global_race(float* x) {
    x[0] += 1.f;  // BUG
}

extern "C" __global__ void race_between_blocks(float* x) {
    if (blockIdx.x == 0) x[threadIdx.x] = 1.f;
    if (blockIdx.x == 1) x[32 + threadIdx.x] = x[threadIdx.x];
}

extern "C" __global__ void race_of_a_late_writer(float* x, float* y) {  // block 0 reads, block 1 reads and then writes
    y[blockIdx.x * blockDim.x + threadIdx.x] = x[0];
    __syncthreads();
    if (blockIdx.x == 1 && threadIdx.x == 0) x[0] = 2.f;
}

extern "C" __global__ void out_of_bounds_global(float* x, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i <= n) x[i] = 1.f;  // BUG
}

extern "C" __global__ void out_of_bounds_read(const float* x, float* y) {
    y[threadIdx.x] = x[int(threadIdx.x) - 1];  // BUG
}

extern "C" __global__ void far_out_of_bounds(float* x) {
    x[(1ll << 40) + threadIdx.x] = 1.f;  // BUG
}

extern "C" __global__ void null_pointer(float* x, const float* optional) {
    x[threadIdx.x] = optional[threadIdx.x];  // BUG
}

extern "C" __global__ void out_of_bounds_dynamic_shared(float* x) {
    extern __shared__ __align__(16) float d[];
    d[threadIdx.x + 1] = 1.f;  // BUG
    __syncthreads();
    x[threadIdx.x] = d[threadIdx.x];
}

extern "C" __global__ void out_of_bounds_static_shared(float* x) {
    __shared__ float s[TILE], next[TILE];
    next[threadIdx.x] = 0.f;
    s[threadIdx.x + 1] = 1.f;  // BUG
    __syncthreads();
    x[threadIdx.x] = s[threadIdx.x] + next[threadIdx.x];
}

extern "C" __global__ void out_of_bounds_static_shared_inner(float* x) {
    __shared__ float s[4][TILE];
    s[1][threadIdx.x + 1] = 1.f;  // BUG
    __syncthreads();
    x[threadIdx.x] = s[1][threadIdx.x];
}

extern "C" __global__ void out_of_bounds_static_shared_pointer(float* x) {
    __shared__ float s[TILE];
    __shared__ float next[TILE];
    next[threadIdx.x] = 0.f;
    float* p = s;
    p += threadIdx.x;
    p[1] = 1.f;  // BUG
    __syncthreads();
    x[threadIdx.x] = s[threadIdx.x] + next[threadIdx.x];
}

extern "C" __global__ void out_of_bounds_local(float* x, int n) {
    float r[4] = {};
    for (int i = 0; i < n; ++i) r[i] = x[i];  // BUG
    x[threadIdx.x] = r[0] + r[n - 1];
}

extern "C" __global__ void uninitialised_shared(float* x) {
    __shared__ float s[64];
    if (threadIdx.x < 32) s[threadIdx.x] = 1.f;
    __syncthreads();
    x[threadIdx.x] = s[threadIdx.x];  // BUG
}

extern "C" __global__ void shared_of_the_last_block(float* x) {  // block 0 writes it, block 1 must not rely on that
    extern __shared__ float d[];
    if (blockIdx.x == 0) d[threadIdx.x] = 1.f;
    __syncthreads();
    x[blockIdx.x * blockDim.x + threadIdx.x] = d[threadIdx.x];  // BUG
}

extern "C" __global__ void uninitialised_global(REAL* scratch, REAL* x) {
    if (threadIdx.x < 31) scratch[threadIdx.x] = 1;
    __syncthreads();
    x[threadIdx.x] = scratch[threadIdx.x];  // BUG
}

extern "C" __global__ void divergent_barrier(float* x) {
    if (threadIdx.x < 16) {
        __syncthreads();
        x[threadIdx.x] = 1.f;
    } else {
        x[threadIdx.x] = 2.f;
        __syncthreads();
    }
}

extern "C" __global__ void deadlock(float* x) {
    float v = x[threadIdx.x];
    if (threadIdx.x % 32 < 16) v = __shfl_down_sync(ALL, v, 1);  // BUG
    __syncthreads();
    x[threadIdx.x] = v;
}

extern "C" __global__ void misaligned_vector(float* x) {
    const float4* p = reinterpret_cast<const float4*>(x + 1);
    const float4 v = p[threadIdx.x];  // BUG
    x[4 * threadIdx.x] = v.w;
}

extern "C" __global__ void misaligned_vector_write(float* x) {
    reinterpret_cast<float2*>(x + 1)[threadIdx.x] = make_float2(1.f, 2.f);  // BUG
}

extern "C" __global__ void misaligned_vector_in_shared(float* x, int pitch) {  // right only for even pitches
    extern __shared__ __align__(16) float d[];
    d[threadIdx.x * pitch] = d[threadIdx.x * pitch + 1] = x[threadIdx.x];
    const float2 v = *reinterpret_cast<const float2*>(d + threadIdx.x * pitch);  // BUG
    x[threadIdx.x] = v.x + v.y;
}

extern "C" __global__ void misaligned_scalar(char* bytes) {
    *reinterpret_cast<int*>(bytes + 4 * threadIdx.x + 1) = 1;  // BUG
}

extern "C" __global__ void warp_sync_too_narrow(float* x) {  // __syncwarp does not order two warps
    __shared__ float s[64];
    s[threadIdx.x] = 0.f;
    __syncthreads();
    s[threadIdx.x] = x[threadIdx.x];  // BUG
    __syncwarp();
    x[threadIdx.x] = s[63 - threadIdx.x];  // BUG
}

extern "C" __global__ void warp_sync_partial(float* x) {  // the mask leaves out the lanes that are read
    __shared__ float s[32];
    s[threadIdx.x] = 0.f;
    __syncwarp();
    s[threadIdx.x] = x[threadIdx.x];  // BUG
    __syncwarp(threadIdx.x < 16 ? 0x0000ffffu : 0xffff0000u);
    x[threadIdx.x] = s[31 - threadIdx.x];  // BUG
}

extern "C" __global__ void shuffle_is_no_fence(float* x) {
    __shared__ float s[32];
    s[threadIdx.x] = x[threadIdx.x];
    const float v = __shfl_sync(ALL, x[threadIdx.x], 0);
    x[threadIdx.x] = v + s[31 - threadIdx.x];  // BUG
}

extern "C" __global__ void shuffle_mask_without_caller(float* x) {
    x[threadIdx.x] = __shfl_sync(0x0000ffffu, x[threadIdx.x], 0);  // BUG
}

extern "C" __global__ void shuffle_masks_differ(float* x) {
    x[threadIdx.x] = __shfl_sync(threadIdx.x < 16 ? ALL : 0xfffffff0u | 1u << threadIdx.x, x[threadIdx.x], 0);  // BUG
}

extern "C" __global__ void shuffle_from_absent_lane(float* x) {  // with 24 threads there is no lane 24
    x[threadIdx.x] = __shfl_xor_sync(ALL, x[threadIdx.x], 16);  // BUG
}

extern "C" __global__ void lanes_at_two_places(float* x) {
    float v = x[threadIdx.x];
    if (threadIdx.x < 16)
        v = __shfl_sync(ALL, v, 0);
    else
        v = __shfl_sync(ALL, v, 1);
    x[threadIdx.x] = v;
}

extern "C" __global__ void integer_overflow(float* x, int n) {
    x[threadIdx.x] = float(n * n);  // BUG
}

extern "C" __global__ void writes_read_only(const float* x) {
    const_cast<float*>(x)[threadIdx.x] = 1.f;  // BUG
}

extern "C" __global__ void waits_for_another_block(volatile int* flag, float* x) {
    if (blockIdx.x == 0)
        while (*flag == 0) {  // BUG
        }
    if (blockIdx.x == 1) *flag = 1;
    x[blockIdx.x] = 1.f;
}

extern "C" __global__ void writes_a_global_variable(float* x) {
    __constant__ float table[2] = {1.f, 2.f};
    const_cast<volatile float*>(table)[threadIdx.x % 2] = x[threadIdx.x];  // BUG
}

// ---- right ones ----------------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(64) right_reverse(float* x) {
    extern __shared__ float d[];
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    d[threadIdx.x] = x[i];
    __syncthreads();
    x[i] = d[blockDim.x - 1 - threadIdx.x];
}

extern "C" __global__ void right_matmul(const REAL* a, const REAL* b, REAL* c, int n) {
    __shared__ REAL left[8][8], right[8][8 + 1];
    const int row = blockIdx.y * 8 + threadIdx.y, column = blockIdx.x * 8 + threadIdx.x;
    REAL sum = 0;
    for (int t = 0; t < n; t += 8) {
        left[threadIdx.y][threadIdx.x] = row < n && t + threadIdx.x < n ? a[row * n + t + threadIdx.x] : REAL(0);
        right[threadIdx.y][threadIdx.x] = column < n && t + threadIdx.y < n ? b[(t + threadIdx.y) * n + column] : REAL(0);
        __syncthreads();
#pragma unroll
        for (int k = 0; k < 8; ++k) sum += left[threadIdx.y][k] * right[k][threadIdx.x];
        __syncthreads();
    }
    if (row < n && column < n) c[row * n + column] = sum;
}

__device__ __forceinline__ float sum_of_warp(float v) {
    for (int o = 16; o > 0; o >>= 1) v += __shfl_down_sync(ALL, v, o);
    return v;
}
extern "C" __global__ void right_row_sum(const float* x, float* out, float* total, int columns) {
    __shared__ float part[32];
    float v = 0.f;
    for (int i = threadIdx.x; i < columns; i += blockDim.x) v += x[blockIdx.x * columns + i];
    v = sum_of_warp(v);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    if (lane == 0) part[warp] = v;
    __syncthreads();
    if (warp > 0) return;  // legal: those that have exited are not waited for
    v = sum_of_warp(lane < blockDim.x / 32 ? part[lane] : 0.f);
    if (lane == 0) {
        out[blockIdx.x] = v;
        atomicAdd(total, v);
    }
    __syncwarp();
}

extern "C" __global__ void right_warp_sync(float* x) {
    __shared__ float s[64];
    for (int i = 0; i < 3; ++i) {
        s[threadIdx.x] = x[threadIdx.x];
        __syncwarp();
        x[threadIdx.x] = s[threadIdx.x ^ 31] + 1.f;
        __syncwarp();
    }
}

__constant__ float TABLE[4] = {1.f, 2.f, 3.f, 4.f};
extern "C" __global__ void right_constants(float* x) { x[threadIdx.x] = TABLE[threadIdx.x % 4]; }

extern "C" __global__ void right_half_warps(float* x, unsigned* votes) {  // two groups of one warp, each by itself
    const unsigned mask = threadIdx.x < 16 ? 0x0000ffffu : 0xffff0000u;
    float v = x[threadIdx.x];
    for (int i = 0; i <= int(threadIdx.x / 16); ++i) v = __shfl_xor_sync(mask, v, 1, 16) + i;
    votes[threadIdx.x] = __ballot_sync(mask, v > 3.f) | (__any_sync(mask, 0) ? 1u << 31 : 0u);
    x[threadIdx.x] = v;
}

extern "C" __global__ void right_vectors(const float* x, double* y, unsigned short* z) {
    const float4 v = reinterpret_cast<const float4*>(x)[threadIdx.x];
    reinterpret_cast<double2*>(y)[2 * threadIdx.x] = make_double2(v.x, v.y);
    reinterpret_cast<double2*>(y)[2 * threadIdx.x + 1] = make_double2(v.z, v.w);
    z[threadIdx.x] = static_cast<unsigned short>(threadIdx.x);
}
