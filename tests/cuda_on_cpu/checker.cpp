// Judges every access of a kernel to memory: bounds, alignment, reads of what nobody wrote, and races.
//
// In check mode g++ compiles kernels with -fsanitize=thread, which puts a call like __tsan_read4(address) before each
// access that can reach other threads, and with -fsanitize=alignment,bounds,..., which calls __ubsan_handle_... where an
// expression breaks the language's rules. The sanitizers' own libraries are not linked: those calls end here.
//
// A race is two accesses of different threads to one item, at least one a write, with no barrier between: none of
// __syncthreads (threads of one block) and __syncwarp (lanes of one warp). Nothing orders different blocks. It is found
// whatever the order in which the fibers ran.
#include <dlfcn.h>
#include <link.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "runtime.h"

#define API extern "C" __attribute__((visibility("default")))
#define CALLER __builtin_extract_return_addr(__builtin_return_address(0))

namespace emulator {
namespace {

constexpr size_t PAGE = 4096, ARENA = size_t(2) << 30;
constexpr unsigned LANES = 32;
constexpr uint64_t ACCESS_LIMIT = 200'000'000;  // some seconds
constexpr uint32_t UNWRITTEN_4 = 0x7FC5BEAD;             // as in memory.py
constexpr uint64_t UNWRITTEN_8 = 0x7FFC5BEADFEEDFAC;

struct Write {
    uint32_t epoch, tick;
    const void* code;
    uint16_t thread;
    bool atomic;
};
struct Reads {  // of one warp, since the last barrier
    uint32_t epoch, tick, lanes;
    uint16_t warp;
    const void* code;
};
// Epoch 0: never. Two warps are enough: whoever writes differs from one of the two. Reads of one warp that are ordered
// before a later one of them by __syncwarp are forgotten: who is ordered after the later is ordered after those too.
struct Cell {
    Write write;
    Reads reads[2];
    bool read_by_earlier_block;
};

struct FreeDeleter {
    void operator()(Cell* cells) const { free(cells); }
};
struct Region {
    const char *begin, *end;
    size_t item;
    bool shared, read_only;
    char label[64];
    std::unique_ptr<Cell, FreeDeleter> cells;  // from calloc: pages that nobody touches cost nothing
};

char* arena;
size_t arena_used;
std::vector<Region> regions;
std::vector<uint16_t> owners;  // of each page of the arena: index of its region + 1, or 0
const char *module_low, *module_high;
uint64_t accesses;

std::unique_ptr<Cell, FreeDeleter> new_cells(size_t bytes, size_t item) {
    return std::unique_ptr<Cell, FreeDeleter>(static_cast<Cell*>(calloc(bytes / item + 1, sizeof(Cell))));
}

// An access smaller than the items that the shadow was made for: split each into smaller ones with the same history.
void refine(Region& region, size_t item) {
    const size_t bytes = region.end - region.begin, ratio = region.item / item;
    auto cells = new_cells(bytes, item);
    for (size_t i = 0; i < bytes / item; ++i) cells.get()[i] = region.cells.get()[i / ratio];
    region.cells = std::move(cells);
    region.item = item;
}

// Of an instruction in the kernel's library, as addr2line takes it.
size_t offset(const void* code) { return static_cast<const char*>(code) - module_low; }

const char* verb(Kind kind) { return kind == Kind::read ? "reads" : kind == Kind::write ? "writes" : "updates"; }

void out_of_bounds(const char* address, size_t size, Kind kind, const void* code) {
    const Region* nearest = nullptr;
    size_t distance = ~size_t(0);
    for (const Region& region : regions) {
        const size_t away = address < region.begin ? region.begin - address : address - region.end;
        if (away < distance) nearest = &region, distance = away;
    }
    if (nearest && distance < PAGE)
        fail("@{%zx}: out of bounds: %s %s %zu bytes at byte %td of %s, which has %td bytes", offset(code),
             running_thread().value, verb(kind), size, address - nearest->begin, nearest->label,
             nearest->end - nearest->begin);
    else
        fail("@{%zx}: out of bounds: %s %s %zu bytes at %p, outside every array of this launch", offset(code),
             running_thread().value, verb(kind), size, static_cast<const void*>(address));
}

void race(Kind kind, const Region& region, size_t index, const char* other, const char* did, const void* other_code,
          const void* code) {
    fail("@{%zx}: race: %s %s item %zu of %s, which %s %s at @{%zx}, with no barrier between", offset(code),
         running_thread().value, verb(kind), index, region.label, other, did, offset(other_code));
}

void check_against_write(const Region& region, size_t index, const Write& write, Kind kind, const void* code) {
    if (write.epoch == 0 || (write.atomic && kind == Kind::atomic)) return;
    if (write.epoch < now.block_start) {
        if (!region.shared) race(kind, region, index, "another block", "wrote", write.code, code);
        return;
    }
    if (write.epoch != now.epoch || write.thread == now.thread) return;
    if (write.thread / LANES == now.thread / LANES && ordered_in_warp(write.thread % LANES, write.tick)) return;
    race(kind, region, index, other_thread(write.thread).value, "wrote", write.code, code);
}

void check_against_reads(const Region& region, size_t index, const Cell& cell, Kind kind, const void* code) {
    if (cell.read_by_earlier_block && !region.shared)
        return race(kind, region, index, "another block", "read", cell.reads[0].code, code);
    for (const Reads& reads : cell.reads) {
        if (reads.epoch == 0) continue;
        if (reads.epoch < now.block_start) {
            if (!region.shared) race(kind, region, index, "another block", "read", reads.code, code);
            continue;
        }
        if (reads.epoch != now.epoch) continue;
        for (unsigned lane = 0; lane < LANES; ++lane) {
            const unsigned thread = reads.warp * LANES + lane;
            if (!(reads.lanes >> lane & 1) || thread == now.thread) continue;
            if (reads.warp == now.thread / LANES && ordered_in_warp(lane, reads.tick)) continue;
            race(kind, region, index, other_thread(thread).value, "read", reads.code, code);
        }
    }
}

void remember_read(const Region& region, Cell& cell, const void* code) {
    const uint16_t warp = now.thread / LANES;
    const uint32_t me = 1u << now.thread % LANES;
    Reads* free_entry = nullptr;
    for (Reads& reads : cell.reads) {
        if (reads.epoch == now.epoch && reads.warp == warp) {
            if (reads.tick != now.tick)
                for (unsigned lane = 0; lane < LANES; ++lane)
                    if ((reads.lanes >> lane & 1) && ordered_in_warp(lane, reads.tick)) reads.lanes &= ~(1u << lane);
            reads = {now.epoch, now.tick, reads.lanes | me, warp, code};
            return;
        }
        if (reads.epoch != now.epoch && !free_entry) free_entry = &reads;
    }
    if (!free_entry) return;
    if (!region.shared && free_entry->epoch && free_entry->epoch < now.block_start) cell.read_by_earlier_block = true;
    *free_entry = {now.epoch, now.tick, me, warp, code};
}

bool holds_unwritten_pattern(const char* item, size_t size) {
    return (size == 4 && memcmp(item, &UNWRITTEN_4, 4) == 0) || (size == 8 && memcmp(item, &UNWRITTEN_8, 8) == 0);
}

void check_item(Region& region, size_t index, Kind kind, const void* code) {
    Cell& cell = region.cells.get()[index];
    if (kind != Kind::write) {
        const bool unwritten = region.shared ? cell.write.epoch < now.block_start
                                             : cell.write.epoch == 0 && holds_unwritten_pattern(
                                                                            region.begin + index * region.item, region.item);
        if (unwritten)
            fail("@{%zx}: uninitialised read: %s %s item %zu of %s, which nobody has written", offset(code),
                 running_thread().value, verb(kind), index, region.label);
    }
    check_against_write(region, index, cell.write, kind, code);
    if (kind == Kind::read) {
        remember_read(region, cell, code);
    } else {
        check_against_reads(region, index, cell, kind, code);
        cell.write = {now.epoch, now.tick, code, uint16_t(now.thread), kind == Kind::atomic};
    }
}

// Addresses of the library that holds `code`, so that its constants may be read.
struct ModuleSearch {
    const char *code, *low, *high;
};
int find_module(dl_phdr_info* info, size_t, void* data) {
    auto* search = static_cast<ModuleSearch*>(data);
    const char *low = nullptr, *high = nullptr;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
        const auto& header = info->dlpi_phdr[i];
        if (header.p_type != PT_LOAD) continue;
        const char* begin = reinterpret_cast<const char*>(info->dlpi_addr + header.p_vaddr);
        if (!low || begin < low) low = begin;
        if (begin + header.p_memsz > high) high = begin + header.p_memsz;
    }
    if (search->code < low || search->code >= high) return 0;
    search->low = low, search->high = high;
    return 1;
}

}  // namespace

void reset_memory(const void* module_code) {
    if (!arena) {
        void* memory = mmap(nullptr, ARENA, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        arena = memory == MAP_FAILED ? nullptr : static_cast<char*>(memory);
        owners.resize(ARENA / PAGE);
    }
    std::fill(owners.begin(), owners.begin() + arena_used / PAGE, 0);
    regions.clear();
    arena_used = PAGE;
    accesses = 0;
    if (module_code < module_low || module_code >= module_high) {
        ModuleSearch search{static_cast<const char*>(module_code), nullptr, nullptr};
        dl_iterate_phdr(find_module, &search);
        module_low = search.low, module_high = search.high;
    }
}

// Pieces lie a page apart at least, so that an index slightly off never lands in another one. `offset`: of the address
// to a multiple of 512 bytes, which is how the device's allocator aligns.
void* place(size_t size, size_t offset, size_t item, bool shared, bool read_only, const char* label) {
    const size_t pages = (offset + size) / PAGE + 2;
    if (!arena || arena_used + pages * PAGE > ARENA || regions.size() > 65000) {
        fail("the arrays of this launch do not fit into the executor's memory");
        return nullptr;
    }
    char* begin = arena + arena_used + offset;
    Region region{begin, begin + size, item, shared, read_only, {}, new_cells(size, item)};
    strncpy(region.label, label, sizeof region.label - 1);
    regions.push_back(std::move(region));
    std::fill_n(owners.begin() + arena_used / PAGE, pages - 1, uint16_t(regions.size()));
    arena_used += pages * PAGE;
    return begin;
}

void check_access(const void* address, size_t size, Kind kind, bool aligned, const void* code) {
    const char* p = static_cast<const char*>(address);
    if (!now.running || !now.checking) return;
    if (p >= now.stack_low && p + size <= now.stack_high) return;
    if (++accesses > ACCESS_LIMIT)
        return fail("@{%zx}: no end in sight: more than %llu accesses in one launch", offset(code),
                    static_cast<unsigned long long>(ACCESS_LIMIT));
    if (p < arena || p >= arena + ARENA) {
        if (p >= module_low && p < module_high) {
            if (kind != Kind::read) fail("@{%zx}: a kernel writes to a global variable", offset(code));
            return;
        }
        return out_of_bounds(p, size, kind, code);
    }
    const unsigned owner = owners[(p - arena) / PAGE];
    if (!owner) return out_of_bounds(p, size, kind, code);
    Region& region = regions[owner - 1];
    if (p < region.begin || p + size > region.end) return out_of_bounds(p, size, kind, code);
    if (aligned && (size_t(p) & (size - 1)))
        return fail("@{%zx}: misaligned access: %s %s %zu bytes at byte %td of %s, not a multiple of %zu", offset(code),
                    running_thread().value, verb(kind), size, p - region.begin, region.label, size);
    if (region.read_only && kind != Kind::read)
        return fail("@{%zx}: %s writes to %s, which is read-only", offset(code), running_thread().value, region.label);
    if (size < region.item) refine(region, size);
    const size_t last = (p + size - 1 - region.begin) / region.item;
    for (size_t i = (p - region.begin) / region.item; i <= last; ++i) check_item(region, i, kind, code);
}

}  // namespace emulator

using emulator::check_access;
using emulator::fail;
using emulator::Kind;

API void* emulator_place(size_t size, size_t offset, size_t item, int read_only, const char* label) {
    return emulator::place(size, offset, item, false, read_only != 0, label);
}

// ---- the calls that -fsanitize=thread puts in ----------------------------------------------------------------------

#define ACCESS(SIZE)                                                                                               \
    API void __tsan_read##SIZE(void* p) { check_access(p, SIZE, Kind::read, true, CALLER); }                       \
    API void __tsan_write##SIZE(void* p) { check_access(p, SIZE, Kind::write, true, CALLER); }                     \
    API void __tsan_unaligned_read##SIZE(void* p) { check_access(p, SIZE, Kind::read, false, CALLER); }            \
    API void __tsan_unaligned_write##SIZE(void* p) { check_access(p, SIZE, Kind::write, false, CALLER); }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
API void __tsan_read_range(void* p, size_t size) { check_access(p, size, Kind::read, false, CALLER); }
API void __tsan_write_range(void* p, size_t size) { check_access(p, size, Kind::write, false, CALLER); }
API void __tsan_func_entry(void*) {}
API void __tsan_func_exit() {}
API void __tsan_init() {}

// ---- the calls that -fsanitize=alignment,bounds,... puts in; each begins with the place in the source ---------------

struct Site {
    const char* file;
    unsigned line, column;
};
struct TypeName {
    uint16_t kind, info;
    char name[1];
};
struct TypeMismatch {
    Site site;
    const TypeName* type;
    unsigned char log_alignment, access;
};
struct OutOfBounds {
    Site site;
    const TypeName *array, *index;
};

#define AT "%s:%u: "
#define FAIL_AT(SITE, FORMAT, ...) \
    fail(AT FORMAT ": %s", (SITE).file, (SITE).line, __VA_ARGS__, emulator::running_thread().value)

API void __ubsan_handle_type_mismatch_v1(const TypeMismatch* data, size_t address) {
    if (emulator::now.running)
        FAIL_AT(data->site, "misaligned access to %s at %zx, not a multiple of %u bytes", data->type->name, address,
                1u << data->log_alignment);
}
API void __ubsan_handle_out_of_bounds(const OutOfBounds* data, size_t index) {
    FAIL_AT(data->site, "out of bounds: index %td of %s", ptrdiff_t(index), data->array->name);
}
API void __ubsan_handle_shift_out_of_bounds(const Site* site, size_t, size_t by) {
    FAIL_AT(*site, "shift by %td", ptrdiff_t(by));
}
#define OVERFLOW(NAME, WHAT) \
    API void __ubsan_handle_##NAME(const Site* site, size_t, size_t) { FAIL_AT(*site, "%s", WHAT); }
OVERFLOW(add_overflow, "signed integer overflow in an addition")
OVERFLOW(sub_overflow, "signed integer overflow in a subtraction")
OVERFLOW(mul_overflow, "signed integer overflow in a multiplication")
OVERFLOW(divrem_overflow, "integer division by zero or overflow")
API void __ubsan_handle_negate_overflow(const Site* site, size_t) {
    FAIL_AT(*site, "%s", "signed integer overflow in a negation");
}
