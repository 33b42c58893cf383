// What runtime.cpp (who runs, and in which order) and checker.cpp (what they touch) share.
#pragma once
#include <cstddef>
#include <cstdint>

// Sites in kernel code are written into messages as `@{hexadecimal offset in the kernel's library}`; executor.py turns them
// into file and line.
namespace emulator {

// Position of the running CUDA thread in time and space; kept by runtime.cpp, read at every access by checker.cpp.
struct Now {
    bool running;          // a kernel's code is running, rather than the scheduler
    bool checking;         // the launch wants its accesses checked
    unsigned thread;       // linear index in the block; warp = thread / 32, lane = thread % 32
    uint32_t epoch;        // grows at every __syncthreads and every block: equal epochs lie between the same barriers
    uint32_t block_start;  // the epoch with which the running block began
    uint32_t tick;         // grows at every __syncwarp of the running warp
    const char *stack_low, *stack_high;
};
extern Now now;

// Has lane `earlier`, with all it did up to `tick`, been ordered before the running thread by __syncwarp?
bool ordered_in_warp(unsigned earlier, uint32_t tick);

// Stops the launch with a message; does not return when a kernel is running.
void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// "thread (x, y, z) of block (x, y, z)" of the running thread; "thread (x, y, z)" of another one of its block.
struct Text {
    char value[112];
};
Text running_thread();
Text other_thread(unsigned linear);

// A piece of memory with a shadow: bounds, and who touched each item last.
void* place(size_t size, size_t offset, size_t item, bool shared, bool read_only, const char* label);
void reset_memory(const void* module_code);

enum class Kind { read, write, atomic };
void check_access(const void* address, size_t size, Kind kind, bool aligned, const void* code);

}  // namespace emulator
