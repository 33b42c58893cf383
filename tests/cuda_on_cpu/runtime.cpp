// Runs one block at a time, each CUDA thread as a fiber: a fiber runs until a barrier or a warp operation makes it wait.
#include "runtime.h"

#include <sys/mman.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <vector>

#include "cuda_subset.h"
#include "fiber.h"

#define API extern "C" __attribute__((visibility("default")))

namespace emulator {
namespace {

constexpr size_t STACK = 128 << 10;
constexpr unsigned MAX_THREADS = 1024;
constexpr unsigned LANES = 32;

enum class State : uint8_t { ready, at_barrier, in_warp, done };

struct Fiber {
    Context context;
    State state;
    uint3 index;       // threadIdx
    const char* file;  // where it waits
    int line;
    uint64_t result;  // of the warp operation that it waited for
};

// A warp operation under way: lanes named by the same mask gather here until all that have not exited have come.
struct Meeting {
    unsigned mask, arrived;
    int operation, line;
    const char* file;
    uint64_t values[LANES];
    unsigned sources[LANES];
};

struct Warp {
    unsigned alive, waiting;
    uint32_t tick;
    uint32_t ordered[LANES][LANES];  // [b][a]: tick of the last __syncwarp after which b knows all that a did before it
    Meeting meetings[LANES];         // disjoint masks may be under way together; found by the mask's lowest lane
};

struct Launch {
    void (*entry)(void**);
    void** arguments;
    uint3 grid, block;
    unsigned threads;
};

Launch launch;
std::vector<Fiber> fibers;
std::vector<Warp> warps;
Context scheduler;
char* stacks;
unsigned current;
uint3 block_index;
bool progress, failed;
char message[2048];
void* dynamic_shared;
uint64_t launch_number;
struct SharedPiece {
    void* address;
    size_t size;
};
std::vector<SharedPiece> shared_pieces;

uint3 unravel(unsigned linear, uint3 size) {
    return {linear % size.x, linear / size.x % size.y, linear / size.x / size.y};
}

void leave_fiber() {
    now.running = false;
    emulator_switch(&fibers[current].context, &scheduler);
    now.running = true;
}

void meet_again(Warp& warp, unsigned base);

void fiber_main() {
    now.running = true;
    launch.entry(launch.arguments);
    fibers[current].state = State::done;
    Warp& warp = warps[current / LANES];
    warp.alive &= ~(1u << current % LANES);
    progress = true;
    if (warp.waiting) meet_again(warp, current / LANES * LANES);
    leave_fiber();
    __builtin_unreachable();
}

void enter_fiber(unsigned index) {
    current = index;
    now.thread = index;
    now.tick = warps[index / LANES].tick;
    now.stack_low = stacks + index * STACK;
    now.stack_high = now.stack_low + STACK;
    progress = true;
    emulator_switch(&scheduler, &fibers[index].context);
}

// Finishes a meeting if every lane that its mask names has come or exited.
bool complete(Warp& warp, unsigned base, Meeting& meeting) {
    if (!meeting.arrived || (meeting.mask & warp.alive & ~meeting.arrived)) return false;
    const unsigned arrived = meeting.arrived;
    meeting.arrived = 0;
    warp.waiting &= ~arrived;
    if (meeting.operation == WARP_SYNC) {
        ++warp.tick;
        uint32_t joined[LANES];
        for (unsigned a = 0; a < LANES; ++a) {
            joined[a] = (arrived >> a & 1) ? warp.tick : 0;
            for (unsigned b = 0; b < LANES; ++b)
                if ((arrived >> b & 1) && warp.ordered[b][a] > joined[a]) joined[a] = warp.ordered[b][a];
        }
        for (unsigned b = 0; b < LANES; ++b)
            if (arrived >> b & 1) memcpy(warp.ordered[b], joined, sizeof joined);
    }
    unsigned ballot = 0;
    for (unsigned lane = 0; lane < LANES; ++lane)
        if ((arrived >> lane & 1) && meeting.values[lane]) ballot |= 1u << lane;
    for (unsigned lane = 0; lane < LANES; ++lane) {
        if (!(arrived >> lane & 1)) continue;
        Fiber& fiber = fibers[base + lane];
        const unsigned source = meeting.sources[lane];
        if (meeting.operation == WARP_SHUFFLE && !(source < LANES && (arrived >> source & 1))) {
            fail("%s:%d: shuffle reads an absent lane: %s reads lane %u, which takes no part (mask 0x%08x)", meeting.file,
                 meeting.line, other_thread(base + lane).value, source, meeting.mask);
            return true;
        }
        fiber.result = meeting.operation == WARP_SHUFFLE ? meeting.values[source] : ballot;
        fiber.state = State::ready;
    }
    progress = true;
    return true;
}

void meet_again(Warp& warp, unsigned base) {
    for (Meeting& meeting : warp.meetings) complete(warp, base, meeting);
}

void start_block(unsigned linear) {
    block_index = unravel(linear, launch.grid);
    now.block_start = ++now.epoch;
    for (SharedPiece& piece : shared_pieces) memset(piece.address, 0xff, piece.size);
    for (unsigned w = 0; w < warps.size(); ++w) {
        Warp& warp = warps[w];
        const unsigned lanes = launch.threads - w * LANES;
        warp.alive = lanes >= LANES ? ~0u : (1u << lanes) - 1;
        warp.waiting = warp.tick = 0;
        memset(warp.ordered, 0, sizeof warp.ordered);
        for (Meeting& meeting : warp.meetings) meeting.arrived = 0;
    }
    for (unsigned t = 0; t < launch.threads; ++t) {
        fibers[t].state = State::ready;
        fibers[t].index = unravel(t, launch.block);
        prepare(fibers[t].context, stacks + t * STACK, STACK - 64 * (t % 16), fiber_main);  // spread over cache sets
    }
}

// All that have not exited wait at a barrier: let them go on, if it is the same one.
void release_barrier() {
    const Fiber* first = nullptr;
    for (unsigned t = 0; t < launch.threads; ++t) {
        Fiber& fiber = fibers[t];
        if (fiber.state != State::at_barrier) continue;
        if (!first) first = &fiber;
        if (first->line != fiber.line || strcmp(first->file, fiber.file) != 0)
            return fail("%s:%d: divergent barrier: some threads wait here, others at %s:%d, block (%u, %u, %u)",
                        first->file, first->line, fiber.file, fiber.line, block_index.x, block_index.y, block_index.z);
        fiber.state = State::ready;
    }
    ++now.epoch;
}

void report_deadlock() {
    const Fiber* at[2] = {nullptr, nullptr};
    unsigned count[2] = {0, 0};
    for (unsigned t = 0; t < launch.threads; ++t) {
        const State state = fibers[t].state;
        if (state == State::done) continue;
        const int which = state == State::at_barrier ? 0 : 1;
        if (!count[which]++) at[which] = &fibers[t];
    }
    const Fiber* site = at[1] ? at[1] : at[0];
    fail("%s:%d: deadlock: %u threads wait in a warp operation for lanes that never come, %u at __syncthreads%s%s, "
         "block (%u, %u, %u)",
         site->file, site->line, count[1], count[0], at[0] ? " in " : "", at[0] ? at[0]->file : "", block_index.x,
         block_index.y, block_index.z);
}

enum class Order : int { forward, reverse, random };

struct Shuffler {
    Order order;
    uint32_t state;
    uint32_t next() {  // xorshift: the same sequence for the same seed everywhere
        state ^= state << 13;
        state ^= state >> 17;
        return state ^= state << 5;
    }
    void shuffle(std::vector<unsigned>& items) {
        if (order != Order::random) return;
        for (size_t i = items.size(); i-- > 1;) std::swap(items[i], items[next() % (i + 1)]);
    }
    std::vector<unsigned> sequence(unsigned count) {
        std::vector<unsigned> items(count);
        std::iota(items.begin(), items.end(), 0u);
        if (order == Order::reverse)
            for (unsigned i = 0; i < count; ++i) items[i] = count - 1 - i;
        shuffle(items);
        return items;
    }
};

void run_block(unsigned linear, Shuffler& shuffler) {
    start_block(linear);
    std::vector<unsigned> sequence = shuffler.sequence(launch.threads);
    while (!failed) {
        progress = false;
        unsigned waiting = 0, done = 0;
        for (unsigned t : sequence) {
            if (fibers[t].state == State::ready) enter_fiber(t);
            if (failed) return;
            waiting += fibers[t].state == State::at_barrier;
            done += fibers[t].state == State::done;
        }
        if (done == launch.threads) return;
        if (waiting + done == launch.threads)
            release_barrier();
        else if (!progress)
            report_deadlock();
        shuffler.shuffle(sequence);
    }
}

}  // namespace

Now now;

bool ordered_in_warp(unsigned earlier, uint32_t tick) {
    return warps[now.thread / LANES].ordered[now.thread % LANES][earlier] > tick;
}

void fail(const char* format, ...) {
    if (!failed) {
        va_list values;
        va_start(values, format);
        vsnprintf(message, sizeof message, format, values);
        va_end(values);
        failed = true;
    }
    if (now.running) leave_fiber();  // never resumed
}

Text other_thread(unsigned linear) {
    const uint3 t = unravel(linear, launch.block);
    Text text;
    snprintf(text.value, sizeof text.value, "thread (%u, %u, %u)", t.x, t.y, t.z);
    return text;
}

Text running_thread() {
    Text text = other_thread(now.thread);
    const size_t used = strlen(text.value);
    snprintf(text.value + used, sizeof text.value - used, " of block (%u, %u, %u)", block_index.x, block_index.y,
             block_index.z);
    return text;
}

}  // namespace emulator

using namespace emulator;

// ---- called by kernels ---------------------------------------------------------------------------------------------

API uint3 emulator_thread_index() { return fibers[current].index; }
API uint3 emulator_block_index() { return block_index; }
API uint3 emulator_block_size() { return launch.block; }
API uint3 emulator_grid_size() { return launch.grid; }
API unsigned emulator_lane() { return current % LANES; }
API void* emulator_dynamic_shared() { return dynamic_shared; }

API void* emulator_static_shared(EmulatorSharedKey* key, size_t size, size_t align, size_t item, const char* name) {
    (void)align;  // pieces are aligned to 512 bytes
    if (key->launch != launch_number) {
        *key = {launch_number, place(size, 0, item, true, false, name)};
        memset(key->address, 0xff, size);
        shared_pieces.push_back({key->address, size});
    }
    return key->address;
}

API void emulator_barrier(const char* file, int line) {
    Fiber& fiber = fibers[current];
    fiber.state = State::at_barrier;
    fiber.file = file;
    fiber.line = line;
    leave_fiber();
}

API uint64_t emulator_warp(int operation, unsigned mask, uint64_t value, unsigned source, const char* file, int line) {
    const unsigned lane = current % LANES, base = current - lane;
    Warp& warp = warps[current / LANES];
    if (!(mask >> lane & 1))
        fail("%s:%d: warp operation without its caller: %s is lane %u, which mask 0x%08x does not name", file, line,
             running_thread().value, lane, mask);
    for (Meeting& other : warp.meetings)
        if (other.arrived && (other.mask & mask) &&
            (other.mask != mask || other.operation != operation || other.line != line || strcmp(other.file, file)))
            fail("%s:%d: lanes of one warp disagree: %s comes with mask 0x%08x while others wait at %s:%d with mask "
                 "0x%08x",
                 file, line, running_thread().value, mask, other.file, other.line, other.mask);
    Meeting& meeting = warp.meetings[__builtin_ctz(mask)];
    meeting.mask = mask;
    meeting.operation = operation;
    meeting.file = file;
    meeting.line = line;
    meeting.values[lane] = value;
    meeting.sources[lane] = source;
    meeting.arrived |= 1u << lane;
    warp.waiting |= 1u << lane;
    Fiber& fiber = fibers[current];
    fiber.state = State::in_warp;
    fiber.file = file;
    fiber.line = line;
    if (!complete(warp, base, meeting)) leave_fiber();
    now.tick = warp.tick;
    return fiber.result;
}

API void emulator_atomic(void* address, size_t size, const void* code) {
    if (now.checking) check_access(address, size, Kind::atomic, true, code);
}

// ---- called by executor.py -----------------------------------------------------------------------------------------

// Before the arrays of a launch are placed. `module_code`: any address in the kernel's library.
API void emulator_reset(const void* module_code) {
    reset_memory(module_code);
    shared_pieces.clear();
    failed = false;
    message[0] = 0;
}

// Returns an empty string, or what is wrong.
API const char* emulator_run(
    void (*entry)(void**), void** arguments, const unsigned* grid, const unsigned* block, size_t shared, int order,
    unsigned seed, int checking) {
    launch = {entry, arguments, {grid[0], grid[1], grid[2]}, {block[0], block[1], block[2]}, 0};
    launch.threads = block[0] * block[1] * block[2];
    ++launch_number;
    if (!stacks) {
        stacks = static_cast<char*>(mmap(nullptr, STACK * MAX_THREADS, PROT_READ | PROT_WRITE,
                                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
        if (stacks == MAP_FAILED) {
            stacks = nullptr;
            return "no memory for the fibers' stacks";
        }
    }
    if (fibers.size() < launch.threads) fibers.resize(launch.threads);
    warps.resize((launch.threads + LANES - 1) / LANES);
    now = {};
    now.checking = checking != 0;
    dynamic_shared = place(shared, 0, 4, true, false, "dynamic shared memory");
    if (failed) return message;
    shared_pieces.push_back({dynamic_shared, shared});
    Shuffler shuffler{static_cast<Order>(order), seed * 2654435761u | 1u};
    for (unsigned linear : shuffler.sequence(grid[0] * grid[1] * grid[2])) {
        run_block(linear, shuffler);
        if (failed) break;
    }
    return message;
}
