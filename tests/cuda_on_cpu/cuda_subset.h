// What the kernels see of CUDA when g++ compiles them for the CPU. Put in front of the kernel source by compiler.py.
//
// Offered: the qualifiers, threadIdx and its kin, __syncthreads, __syncwarp, shuffles, votes, atomics, the small vector
// types, and the intrinsics at the end. Not offered, so that using one fails to compile: inline PTX, wmma, asynchronous
// copies, cooperative groups, __activemask. Code that needs those goes behind `#ifndef SPARSEBP_ON_CPU` with a twin.
//
// Two forms cannot be spelled as macros and are rewritten by compiler.py, on their own line: `extern __shared__ T x[];`
// and `__shared__ T x[...], y;`.
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#include <type_traits>
#include <utility>

// SPARSEBP_ON_CPU and __CUDA_ARCH__ are defined by compiler.py.
#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

// ---- what runtime.cpp offers ---------------------------------------------------------------------------------------

enum WarpOperation : int { WARP_SYNC, WARP_SHUFFLE, WARP_BALLOT };

extern "C" {
// const: the answer never changes within one CUDA thread, so the compiler may keep it.
uint3 emulator_thread_index() __attribute__((const));
uint3 emulator_block_index() __attribute__((const));
uint3 emulator_block_size() __attribute__((const));
uint3 emulator_grid_size() __attribute__((const));
unsigned emulator_lane() __attribute__((const));
void emulator_barrier(const char* file, int line);
uint64_t emulator_warp(int operation, unsigned mask, uint64_t value, unsigned source, const char* file, int line);
void emulator_atomic(void* address, size_t size, const void* code);
void* emulator_dynamic_shared();
struct EmulatorSharedKey {
    uint64_t launch;
    void* address;
};
void* emulator_static_shared(EmulatorSharedKey* key, size_t size, size_t align, size_t item, const char* name);
}

#define threadIdx emulator_thread_index()
#define blockIdx emulator_block_index()
#define blockDim emulator_block_size()
#define gridDim emulator_grid_size()
#define warpSize 32

// Code of the harness itself: not instrumented, so the checker sees the kernel's accesses only.
#define EMULATOR_CODE __attribute__((no_sanitize("thread", "undefined")))
#define CALL_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define HERE file, line

// A static shared variable; T may be an array type. One EmulatorSharedKey stands for one declaration.
template <class T>
EMULATOR_CODE static T& emulator_shared(EmulatorSharedKey* key, size_t align, const char* name) {
    return *static_cast<T*>(
        emulator_static_shared(key, sizeof(T), align, sizeof(std::remove_all_extents_t<T>), name));
}

// ---- barriers and warps --------------------------------------------------------------------------------------------

inline void __syncthreads(CALL_SITE) { emulator_barrier(HERE); }
inline void __syncwarp(unsigned mask = 0xffffffffu, CALL_SITE) { emulator_warp(WARP_SYNC, mask, 0, 0, HERE); }
inline void __threadfence() {}  // one thread runs at a time: always in order. A race needs a barrier, not a fence
inline void __threadfence_block() {}

template <class T>
EMULATOR_CODE static T emulator_shuffle(unsigned mask, T value, unsigned source, CALL_SITE) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles move 4 or 8 bytes");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    bits = emulator_warp(WARP_SHUFFLE, mask, bits, source, HERE);
    memcpy(&value, &bits, sizeof value);
    return value;
}
template <class T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = 32, CALL_SITE) {
    const unsigned group = emulator_lane() & ~(width - 1);
    return emulator_shuffle(mask, value, group | (source & (width - 1)), HERE);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, CALL_SITE) {
    const unsigned lane = emulator_lane(), position = lane & (width - 1);
    return emulator_shuffle(mask, value, position >= delta ? lane - delta : lane, HERE);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, CALL_SITE) {
    const unsigned lane = emulator_lane(), position = lane & (width - 1);
    return emulator_shuffle(mask, value, position + delta < unsigned(width) ? lane + delta : lane, HERE);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, CALL_SITE) {
    const unsigned lane = emulator_lane(), source = lane ^ lane_mask, past = (lane & ~(width - 1)) + width;
    return emulator_shuffle(mask, value, source < past ? source : lane, HERE);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, CALL_SITE) {
    return unsigned(emulator_warp(WARP_BALLOT, mask, predicate != 0, 0, HERE));
}
inline int __any_sync(unsigned mask, int predicate, CALL_SITE) { return __ballot_sync(mask, predicate, HERE) != 0; }
inline int __all_sync(unsigned mask, int predicate, CALL_SITE) { return __ballot_sync(mask, !predicate, HERE) == 0; }

// ---- atomics -------------------------------------------------------------------------------------------------------

#define EMULATOR_ATOMIC(NAME, RESULT)                                        \
    template <class T>                                                       \
    EMULATOR_CODE __noinline__ T NAME(T* address, std::common_type_t<T> v) { \
        emulator_atomic(address, sizeof(T), __builtin_return_address(0));    \
        const T old = *address;                                              \
        *address = RESULT;                                                   \
        return old;                                                          \
    }
EMULATOR_ATOMIC(atomicAdd, old + v)
EMULATOR_ATOMIC(atomicSub, old - v)
EMULATOR_ATOMIC(atomicExch, v)
EMULATOR_ATOMIC(atomicMin, v < old ? v : old)
EMULATOR_ATOMIC(atomicMax, v > old ? v : old)
EMULATOR_ATOMIC(atomicOr, old | v)
EMULATOR_ATOMIC(atomicAnd, old & v)
template <class T>
EMULATOR_CODE __noinline__ T atomicCAS(T* address, std::common_type_t<T> expected, std::common_type_t<T> v) {
    emulator_atomic(address, sizeof(T), __builtin_return_address(0));
    const T old = *address;
    if (old == expected) *address = v;
    return old;
}

// ---- vector types, with CUDA's sizes and alignments ----------------------------------------------------------------

#define EMULATOR_VECTORS(T, NAME)                                                       \
    struct alignas(2 * sizeof(T)) NAME##2 {                                             \
        T x, y;                                                                         \
    };                                                                                  \
    struct NAME##3 {                                                                    \
        T x, y, z;                                                                      \
    };                                                                                  \
    struct alignas(sizeof(T) > 4 ? 16 : 4 * sizeof(T)) NAME##4 {                        \
        T x, y, z, w;                                                                   \
    };                                                                                  \
    inline NAME##2 make_##NAME##2(T x, T y) { return {x, y}; }                          \
    inline NAME##3 make_##NAME##3(T x, T y, T z) { return {x, y, z}; }                  \
    inline NAME##4 make_##NAME##4(T x, T y, T z, T w) { return {x, y, z, w}; }
EMULATOR_VECTORS(float, float)
EMULATOR_VECTORS(double, double)
EMULATOR_VECTORS(int, int)
EMULATOR_VECTORS(long long, longlong)
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(4) ushort2 {
    unsigned short x, y;
};
struct alignas(8) ushort4 {
    unsigned short x, y, z, w;
};

// ---- intrinsics ----------------------------------------------------------------------------------------------------

template <class T>
inline T __ldg(const T* p) {
    return *p;
}
template <class T>
inline T __ldcs(const T* p) {
    return *p;
}
template <class T>
inline T __ldcg(const T* p) {
    return *p;
}
template <class T>
inline void __stcs(T* p, T value) {
    *p = value;
}
template <class A, class B>
constexpr std::common_type_t<A, B> min(A a, B b) {
    return b < a ? b : a;
}
template <class A, class B>
constexpr std::common_type_t<A, B> max(A a, B b) {
    return a < b ? b : a;
}
inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
inline double rsqrt(double x) { return 1. / sqrt(x); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
template <class To, class From>
EMULATOR_CODE static To emulator_bits(From value) {
    To result;
    static_assert(sizeof(To) == sizeof(From));
    memcpy(&result, &value, sizeof result);
    return result;
}
inline int __float_as_int(float x) { return emulator_bits<int>(x); }
inline float __int_as_float(int x) { return emulator_bits<float>(x); }
inline unsigned __float_as_uint(float x) { return emulator_bits<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return emulator_bits<float>(x); }
inline long long __double_as_longlong(double x) { return emulator_bits<long long>(x); }
inline double __longlong_as_double(long long x) { return emulator_bits<double>(x); }

// A clock of one cycle a nanosecond, for kernels that wait.
EMULATOR_CODE inline long long clock64() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

// ---- how executor.py finds and calls a kernel ----------------------------------------------------------------------

struct EmulatorParameter {
    char kind;  // i: signed, u: unsigned, f: real, b: bool, P: pointer, S: anything else
    char pointee_kind;
    bool pointee_const;
    int size, pointee_size;
};
struct EmulatorKernel {
    void (*entry)(void**);
    const EmulatorParameter* parameters;
    int count, max_threads;
};

template <class T>
constexpr char emulator_kind() {
    return std::is_same_v<T, bool> ? 'b'
           : std::is_floating_point_v<T> ? 'f'
           : std::is_pointer_v<T> ? 'P'
           : !std::is_integral_v<T> ? 'S'
           : std::is_signed_v<T> ? 'i' : 'u';
}
template <class T>
constexpr EmulatorParameter emulator_parameter() {
    using Pointee = std::remove_pointer_t<T>;
    if constexpr (std::is_pointer_v<T> && !std::is_void_v<Pointee>)
        return {'P', emulator_kind<std::remove_cv_t<Pointee>>(), std::is_const_v<Pointee>, sizeof(T), sizeof(Pointee)};
    else
        return {emulator_kind<T>(), 'S', std::is_const_v<Pointee>, sizeof(T), 0};
}
template <auto kernel, class Signature = decltype(kernel)>
struct EmulatorEntry;
template <auto kernel, class... A>
struct EmulatorEntry<kernel, void (*)(A...)> {
    static constexpr EmulatorParameter parameters[sizeof...(A) + 1] = {emulator_parameter<std::remove_cv_t<A>>()...};
    static constexpr int count = sizeof...(A);
    template <size_t... I>
    EMULATOR_CODE static void call(void** arguments, std::index_sequence<I...>) {
        kernel(*static_cast<std::remove_cv_t<A>*>(arguments[I])...);
    }
    EMULATOR_CODE static void run(void** arguments) { call(arguments, std::index_sequence_for<A...>{}); }
};
// The launch bounds are the most threads of a block and, maybe, the fewest blocks of a multiprocessor.
constexpr int emulator_most_threads(int most, int = 1) { return most; }
#define EMULATOR_EXPORT(NAME, ...)                                                                    \
    extern "C" __attribute__((visibility("default"))) const EmulatorKernel emulator_kernel_##NAME = { \
        EmulatorEntry<&NAME>::run, EmulatorEntry<&NAME>::parameters, EmulatorEntry<&NAME>::count,     \
        emulator_most_threads(__VA_ARGS__)};
