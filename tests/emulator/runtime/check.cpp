// The checker: every load and store of a checked kernel comes here (clang's outlined KernelASan callbacks), and the matrix
// functions come with whole rows. Decides which memory is meant, whether it may be touched, and what it races with.
#include <algorithm>

#include "machine.h"

namespace emu {
namespace {

// A shadow cell of a threadgroup byte: [barrier epoch 10][simdgroup epoch 9][thread 10][flags 3].
constexpr uint32_t kAtomic = 1;                        // of the last write; a cell of 4 alone: written long ago
constexpr uint32_t kManyLanes = 1, kManyGroups = 2;     // of the reads
constexpr uint32_t kThreadField = 1023u << 3, kSimdField = 511u << 13, kEpochField = ~0u << 22;

// A cell of device memory: [threadgroup + 1 24][barrier epoch 16][simdgroup epoch 10][thread 10][flags 4].
constexpr uint64_t kDeviceThread = 1023ull << 4, kDeviceSimd = 1023ull << 14, kDeviceEpoch = 65535ull << 24;
constexpr uint64_t kManyThreadgroups = 4;

typedef uint32_t Cells4 __attribute__((ext_vector_type(4)));
typedef uint32_t Cells8 __attribute__((ext_vector_type(8)));

uint32_t thread_field(const Machine &m, const Thread *t) { return t->group->index << m.d->lane_bits | t->lane; }
uint32_t thread_index(const Machine &m, uint32_t field) {
  return (field >> m.d->lane_bits) * m.d->simd_width + (field & ((1u << m.d->lane_bits) - 1));
}

std::string plural(uint64_t n, const char *what) { return std::to_string(n) + " " + what + (n == 1 ? "" : "s"); }

}  // namespace

struct MachineAccess {
  static const SharedRange *shared_range(const Dispatch &d, uint32_t offset, uint32_t size) {
    for (const SharedRange &r : d.shared)
      if (offset >= r.begin && offset + size <= r.end) return &r;
    return nullptr;
  }
  static const SharedRange *nearest_range(const Dispatch &d, uint32_t offset) {
    const SharedRange *best = nullptr;
    for (const SharedRange &r : d.shared)
      if (r.begin <= offset && (!best || r.begin > best->begin)) best = &r;
    return best ? best : d.shared.empty() ? nullptr : &d.shared[0];
  }
  static std::string range_name(const SharedRange *r) {
    if (!r) return "threadgroup memory";
    return r->argument >= 0 ? "threadgroup(" + std::to_string(r->argument) + ") '" + r->name + "'" : "threadgroup variable '" + r->name + "'";
  }
  static std::string binding_name(const Binding *b) { return "buffer(" + std::to_string(b->index) + ")" + (b->name && *b->name ? " '" + std::string(b->name) + "'" : ""); }

  // ---- threadgroup memory ----

  static void race(Machine &m, Thread *t, const void *pc, uint32_t offset, uint32_t size, bool write, bool other_write, uint32_t other_field) {
    const SharedRange *r = shared_range(*m.d, offset, 1);
    int other = (int)thread_index(m, other_field);
    const void *other_pc = m.shared_write_pc[offset / 16] && other_write ? m.image->base + m.shared_write_pc[offset / 16] : nullptr;
    m.report(EMU_REPORT_RACE, pc,
             std::string(write ? "write" : "read") + " of " + plural(size, "byte") + " in " + range_name(r) + " at byte " +
                 std::to_string(r ? offset - r->begin : offset) + " is not ordered with a " + (other_write ? "write" : "read") + " by another thread",
             true, {t->index}, nullptr, r, r ? offset - r->begin : offset, size, write, other_pc, 2, nullptr, other == (int)t->index ? -1 : other);
  }

  // One byte, exactly. Returns false if it was reported.
  static bool read_one(Machine &m, Thread *t, const void *pc, uint32_t offset, uint32_t size, uint32_t mine, bool atomic) {
    uint32_t w = m.shared_write[offset], r = m.shared_read[offset];
    bool ok = true;
    if (EMU_UNLIKELY(w == 0)) {
      const SharedRange *range = shared_range(*m.d, offset, 1);
      m.report(EMU_REPORT_UNINITIALISED_THREADGROUP, pc,
               "read of " + plural(size, "byte") + " in " + range_name(range) + " at byte " + std::to_string(range ? offset - range->begin : offset) + ", which no thread has written",
               true, {t->index}, nullptr, range, range ? offset - range->begin : offset, size, false);
      ok = false;
    } else {
      uint32_t x = w ^ mine;
      if (!(x & kEpochField) && (x & kThreadField) && !(atomic && (w & kAtomic)) && (other_group(m, x) || !(x & kSimdField))) {
        race(m, t, pc, offset, size, false, true, (w & kThreadField) >> 3);
        ok = false;
      }
    }
    if (!atomic) m.shared_read[offset] = merge(m, r, mine);
    return ok;
  }
  static bool other_group(const Machine &m, uint32_t x) { return (x & kThreadField) >> (3 + m.d->lane_bits); }
  static uint32_t merge(const Machine &m, uint32_t r, uint32_t mine) {
    uint32_t x = r ^ mine;
    if (x & kEpochField) return mine;
    uint32_t out = mine | (r & kManyGroups);
    if (other_group(m, x)) out |= kManyGroups;
    else if (!(x & kSimdField)) out |= (r & kManyLanes) | (x & kThreadField ? kManyLanes : 0);
    return out;
  }
  static bool write_one(Machine &m, Thread *t, const void *pc, uint32_t offset, uint32_t size, uint32_t mine, bool atomic, bool *equal_candidate, uint32_t *other) {
    uint32_t w = m.shared_write[offset], r = m.shared_read[offset];
    bool ok = true;
    uint32_t x = w ^ mine;
    if (w && !(x & kEpochField) && (x & kThreadField) && !(atomic && (w & kAtomic)) && (other_group(m, x) || !(x & kSimdField))) {
      if (!atomic && !(w & kAtomic)) *equal_candidate = true, *other = (w & kThreadField) >> 3;
      else race(m, t, pc, offset, size, true, true, (w & kThreadField) >> 3);
      ok = false;
    }
    x = r ^ mine;
    if (r && !(x & kEpochField)) {
      bool conflict = (r & kManyGroups) || other_group(m, x) || (!(x & kSimdField) && ((r & kManyLanes) || (x & kThreadField)));
      if (conflict) race(m, t, pc, offset, size, true, false, (r & kThreadField) >> 3), ok = false;
    }
    m.shared_write[offset] = mine | (atomic ? kAtomic : 0);
    return ok;
  }
  template <class V> static bool read_quick(Machine &m, uint32_t offset, uint32_t mine, uint32_t group_mask) {
    V w, r;
    memcpy(&w, m.shared_write + offset, sizeof w);
    memcpy(&r, m.shared_read + offset, sizeof r);
    uint32_t limit = (mine & kEpochField) - 1;
    if (EMU_UNLIKELY(__builtin_reduce_or(w - 1 >= (V)limit) != 0)) return false;
    V x = r ^ mine;
    V same = (V)((x & kEpochField) == 0);
    V group = (V)((x & group_mask) != 0);
    V simd = (V)((x & kSimdField) == 0);
    V lane = (V)((x & kThreadField) != 0);
    V flags = (r & kManyGroups) | (group & kManyGroups) | (~group & simd & ((r & kManyLanes) | (lane & kManyLanes)));
    r = (V)mine | (same & flags);
    memcpy(m.shared_read + offset, &r, sizeof r);
    return true;
  }
  template <class V> static bool write_quick(Machine &m, uint32_t offset, uint32_t mine) {
    V w, r;
    memcpy(&w, m.shared_write + offset, sizeof w);
    memcpy(&r, m.shared_read + offset, sizeof r);
    uint32_t limit = mine & kEpochField;
    if (EMU_UNLIKELY(__builtin_reduce_or((w >= (V)limit) | (r >= (V)limit)) != 0)) return false;
    w = (V)mine;
    memcpy(m.shared_write + offset, &w, sizeof w);
    return true;
  }
};

void Machine::shared_cells(uint32_t offset, uint32_t size, bool write, bool atomic, Thread *t, const void *pc) {
  using A = MachineAccess;
  uint32_t mine = epoch_shared << 22 | t->group->epoch_shared << 13 | thread_field(*this, t) << 3;
  uint32_t group_mask = kThreadField & (~0u << (3 + d->lane_bits));
  uint32_t i = 0;
  bool candidate = false, clean = true;
  uint32_t other = 0;
  if (!atomic && !write) {
    for (; i + 8 <= size; i += 8)
      if (!A::read_quick<Cells8>(*this, offset + i, mine, group_mask))
        for (uint32_t k = 0; k < 8 && clean; k++) clean = A::read_one(*this, t, pc, offset + i + k, size, mine, false);
    for (; i + 4 <= size; i += 4)
      if (!A::read_quick<Cells4>(*this, offset + i, mine, group_mask))
        for (uint32_t k = 0; k < 4 && clean; k++) clean = A::read_one(*this, t, pc, offset + i + k, size, mine, false);
    for (; i < size && clean; i++) clean = A::read_one(*this, t, pc, offset + i, size, mine, false);
  } else if (!atomic) {
    for (; i + 8 <= size; i += 8)
      if (!A::write_quick<Cells8>(*this, offset + i, mine))
        for (uint32_t k = 0; k < 8; k++) A::write_one(*this, t, pc, offset + i + k, size, mine, false, &candidate, &other);
    for (; i + 4 <= size; i += 4)
      if (!A::write_quick<Cells4>(*this, offset + i, mine))
        for (uint32_t k = 0; k < 4; k++) A::write_one(*this, t, pc, offset + i + k, size, mine, false, &candidate, &other);
    for (; i < size; i++) A::write_one(*this, t, pc, offset + i, size, mine, false, &candidate, &other);
  } else {
    for (; i < size && clean; i++) {
      if (!write) clean = A::read_one(*this, t, pc, offset + i, size, mine, true);
      else clean = A::write_one(*this, t, pc, offset + i, size, mine, true, &candidate, &other);
    }
  }
  uint32_t at = (uint32_t)((const unsigned char *)pc - image->base);
  if (candidate) {
    pending.set = true;
    pending.address = arena + offset;
    pending.size = std::min<uint32_t>(size, sizeof pending.before);
    memcpy(pending.before, arena + offset, pending.size);
    pending.other = thread_index(*this, other);
    pending.pc = pc;
    pending.between = false;
  }
  if (write) shared_write_pc[offset / 16] = at;
}

// ---- device memory --------------------------------------------------------------------------------------------------

void Machine::device_cells(Region *region, unsigned char *p, size_t size, bool write, bool atomic, Thread *t, const void *pc, const Binding *b) {
  uint64_t group = t->group->index;
  (void)group;
  uint64_t mine = (threadgroup_index + 1) << 40 | (uint64_t)epoch_device << 24 | (uint64_t)t->group->epoch_device << 14 | (uint64_t)thread_field(*this, t) << 4;
  size_t first = (size_t)(p - region->begin) >> region->shift, last = (size_t)(p + size - 1 - region->begin) >> region->shift;
  uint64_t group_mask = (1023ull << d->lane_bits & 1023) << 4;
  bool saturated = t->group->epoch_device >= 1023 || epoch_device >= 65535;
  for (size_t i = first; i <= last; i++) {
    Cell &c = region->cells[i];
    uint64_t w = c.write, r = c.read;
    auto ordered = [&](uint64_t x) {  // by a barrier between two accesses of one threadgroup
      return (x & kDeviceEpoch) || !(x & kDeviceThread) || (!(x & group_mask) && ((x & kDeviceSimd) || saturated));
    };
    int conflict = 0;  // 1 within, 2 between threadgroups
    bool other_write = false;
    uint64_t other = 0;
    if (w && !(atomic && (w & 1))) {
      uint64_t x = w ^ mine;
      if (x >> 40) conflict = 2, other_write = true, other = w;
      else if (!ordered(x)) conflict = 1, other_write = true, other = w;
    }
    if (write && !conflict && r) {
      uint64_t x = r ^ mine;
      if (x >> 40 || (r & kManyThreadgroups)) conflict = 2, other = r;
      else if (!(x & kDeviceEpoch) && ((r & kManyGroups) || (x & group_mask) || (!(x & kDeviceSimd) && ((r & kManyLanes) || (x & kDeviceThread)))) && !saturated)
        conflict = 1, other = r;
    }
    if (EMU_UNLIKELY(!write && !w && region->uninitialised))
      report(EMU_REPORT_UNINITIALISED_DEVICE, pc, "read of " + plural(size, "byte") + " of " + MachineAccess::binding_name(b) + " at byte " + std::to_string(p - b->begin) + ", which nothing has written",
             true, {t->index}, b, nullptr, (uint64_t)(p - b->begin), size, false);
    // A device-wide fence on both sides may order threadgroups; which accesses it orders is beyond this checker.
    if (conflict == 2 && d->device_fences.load(std::memory_order_relaxed)) conflict = 0;
    if (EMU_UNLIKELY(conflict)) {
      uint64_t id = (other >> 40) - 1;
      uint32_t position[3] = {(uint32_t)(id % d->grid[0]), (uint32_t)(id / d->grid[0] % d->grid[1]), (uint32_t)(id / d->grid[0] / d->grid[1])};
      uint32_t thread = thread_index(*this, (uint32_t)((other & kDeviceThread) >> 4));
      if (write && other_write && !atomic && !(w & 1)) {
        if (!pending.set) {
          pending.set = true;
          pending.address = p;
          pending.size = (uint32_t)std::min<size_t>(size, sizeof pending.before);
          memcpy(pending.before, p, pending.size);
          pending.other = thread;
          pending.pc = pc;
          pending.between = conflict == 2;
          pending.other_threadgroup = id;
        }
      } else {
        report(conflict == 2 ? EMU_REPORT_RACE_BETWEEN_THREADGROUPS : EMU_REPORT_RACE, pc,
               std::string(write ? "write" : "read") + " of " + plural(size, "byte") + " of " + MachineAccess::binding_name(b) + " at byte " + std::to_string(p - b->begin) +
                   " is not ordered with a " + (other_write ? "write" : "read") + " by another thread",
               true, {t->index}, b, nullptr, (uint64_t)(p - b->begin), size, write, nullptr, 2, position, (int)thread);
      }
    }
    if (write) {
      c.write = mine | (atomic ? 1 : 0);
    } else if (!atomic) {
      uint64_t out = mine;
      if (r) {
        uint64_t x = r ^ mine;
        out |= r & kManyThreadgroups;
        if (x >> 40) out |= kManyThreadgroups;
        else if (!(x & kDeviceEpoch)) {
          out |= r & kManyGroups;
          if (x & group_mask) out |= kManyGroups;
          else if (!(x & kDeviceSimd)) out |= (r & kManyLanes) | (x & kDeviceThread ? kManyLanes : 0);
        }
      }
      c.read = out;
    }
  }
}

void Machine::count_lines(const Binding &b, const unsigned char *p, size_t size) {
  std::vector<uint64_t> &last = lines_[(size_t)(&b - d->bindings.data())];
  for (size_t i = (size_t)(p - b.begin) / kLine; i <= (size_t)(p + size - 1 - b.begin) / kLine; i++)
    if (last[i] != threadgroup_index + 1) last[i] = threadgroup_index + 1, counters.device_lines_loaded++;
}

// The second of two unordered writes has happened by now: did it change anything?
void Machine::settle() {
  pending.set = false;
  Pending p = pending;
  bool equal = memcmp(p.before, p.address, p.size) == 0;
  bool in_arena = (size_t)(p.address - arena) < arena_size;
  const SharedRange *range = nullptr;
  const Binding *binding = nullptr;
  uint64_t offset = 0;
  std::string what;
  if (in_arena) {
    range = MachineAccess::shared_range(*d, (uint32_t)(p.address - arena), 1);
    offset = range ? p.address - arena - range->begin : 0;
    what = MachineAccess::range_name(range);
  } else {
    for (const Binding &b : d->bindings)
      if (p.address >= b.begin && p.address < b.end && (!binding || b.writable)) binding = &b;
    offset = binding ? p.address - binding->begin : 0;
    what = binding ? MachineAccess::binding_name(binding) : "device memory";
  }
  uint32_t position[3] = {(uint32_t)(p.other_threadgroup % d->grid[0]), (uint32_t)(p.other_threadgroup / d->grid[0] % d->grid[1]),
                          (uint32_t)(p.other_threadgroup / d->grid[0] / d->grid[1])};
  uint32_t self = current ? current->index : 0;
  report(equal ? EMU_REPORT_RACE_EQUAL_VALUE : p.between ? EMU_REPORT_RACE_BETWEEN_THREADGROUPS : EMU_REPORT_RACE, p.pc,
         "write of " + plural(p.size, "byte") + " in " + what + " at byte " + std::to_string(offset) + " is not ordered with a write " + (equal ? "of the same value " : "") + "by another thread",
         !equal, {self}, binding, range, offset, p.size, true, nullptr, 2, p.between ? position : nullptr, p.other == self && !p.between ? -1 : (int)p.other);
}

void Machine::access(uintptr_t address, size_t size, bool write, bool atomic, const void *pc) {
  if (EMU_UNLIKELY(pending.set)) settle();
  if (EMU_UNLIKELY(size == 0)) return;
  if (address - (uintptr_t)stacks < kStackSize * kMaxThreads) return private_access(address, size, write, pc);  // a thread's own memory
  Thread *t = current;
  unsigned char *p = (unsigned char *)address;
  size_t offset = address - (uintptr_t)arena;
  if (offset < arena_size) {
    if (!atomic || write) (write ? counters.threadgroup_bytes_stored : counters.threadgroup_bytes_loaded) += size;
    if (EMU_UNLIKELY(!MachineAccess::shared_range(*d, (uint32_t)offset, (uint32_t)size))) {
      const SharedRange *r = MachineAccess::nearest_range(*d, (uint32_t)offset);
      report(EMU_REPORT_OUT_OF_BOUNDS, pc,
             std::string(write ? "write" : "read") + " of " + plural(size, "byte") + " at byte " + std::to_string((int64_t)offset - (r ? r->begin : 0)) + " of " +
                 MachineAccess::range_name(r) + ", which has " + plural(r ? r->end - r->begin : 0, "byte"),
             true, {t->index}, nullptr, r, (uint64_t)((int64_t)offset - (r ? r->begin : 0)), size, write);
      if (offset + size > arena_size - 64) d->faulted = true, abandon();
      return;
    }
    shared_cells((uint32_t)offset, (uint32_t)size, write, atomic, t, pc);
    return;
  }
  const Binding *b = nullptr;
  for (const Binding &c : d->bindings)
    if (p >= c.begin && p + size <= c.end && (!b || c.writable > b->writable)) {
      b = &c;
      if (c.writable || !write) break;
    }
  if (EMU_LIKELY(b != nullptr)) {
    (write ? counters.device_bytes_stored : counters.device_bytes_loaded) += size;
    if (!write) loaded_lines(*b, p, size);
    if (b->region) device_cells(b->region, p, size, write, atomic, t, pc, b);
    return;
  }
  if (p >= image->base && p + size <= arena) return;  // program-scope constants
  const Binding *nearest = nullptr;
  uint64_t best = ~0ull;
  for (const Binding &c : d->bindings) {
    uint64_t distance = p < c.begin ? (uint64_t)(c.begin - p) : p >= c.end ? (uint64_t)(p - c.end) : 0;
    if (distance < best) best = distance, nearest = &c;
  }
  bool far = !nearest || best > (1ull << 32);
  std::string detail = std::string(write ? "write" : "read") + " of " + plural(size, "byte") + " at ";
  if (address < 65536) detail += "byte " + std::to_string(address) + " of a buffer that is not bound";
  else if (far) detail += "an address in no bound buffer";
  else detail += "byte " + std::to_string((int64_t)(p - nearest->begin)) + " of " + MachineAccess::binding_name(nearest) + ", which has " + plural((uint64_t)(nearest->end - nearest->begin), "byte");
  report(EMU_REPORT_OUT_OF_BOUNDS, pc, detail, true, {t->index}, far ? nullptr : nearest, nullptr, far ? 0 : (uint64_t)(p - nearest->begin), size, write);
  d->faulted = true;
  abandon();
}

// Memory of one thread. Clang lays unreadable zones around the arrays whose accesses it could not prove good.
void Machine::private_access(uintptr_t address, size_t size, bool write, const void *pc) {
  uintptr_t first = address - (uintptr_t)stacks, last = first + size - 1;
  for (uintptr_t at = first & ~7ull; at <= last; at += 8) {
    unsigned shadow = at / 8 < kStackSize * kMaxThreads / 8 ? stack_shadow[at / 8] : 0;
    if (EMU_LIKELY(!shadow) || (shadow < 8 && (last < at + 8 ? last - at + 1 : 8) <= shadow)) continue;
    report(EMU_REPORT_OUT_OF_BOUNDS, pc, std::string(write ? "write" : "read") + " of " + plural(size, "byte") + " outside a private variable or array", true,
           {current->index}, nullptr, nullptr, 0, size, write);
    if (!write) return;
    d->faulted = true;  // it would hit the thread's own variables or its way back
    abandon();
  }
}

}  // namespace emu

// ---- what checked kernels call --------------------------------------------------------------------------------------

using emu::machine;
#define EMU_HOOK extern "C" EMU_API

// Most accesses are to a thread's own memory, and end here.
static inline bool private_access(uintptr_t a) { return a - (uintptr_t)machine->stacks < emu::kStackSize * emu::kMaxThreads; }
static inline void unaligned_access(uintptr_t a, size_t n, bool write, const void *pc) {
  machine->access(a, n, write, false, pc);
}
static inline void aligned_access(uintptr_t a, size_t n, bool write, const void *pc) {
  if (EMU_LIKELY(private_access(a))) {
    const unsigned char *shadow = machine->stack_shadow + (a - (uintptr_t)machine->stacks) / 8;
    if (EMU_UNLIKELY(shadow[0] | (n > 8 ? shadow[1] : 0))) machine->private_access(a, n, write, pc);
    return;
  }
  size_t natural = n > 8 ? 8 : n;
  if (EMU_UNLIKELY(a & (natural - 1)) && machine && machine->current) {
    emu::Machine &m = *machine;
    m.report(EMU_REPORT_MISALIGNED, pc, std::string(write ? "write" : "read") + " of " + std::to_string(n) + " bytes at an address that is not a multiple of " + std::to_string(natural), true,
             {m.current->index}, nullptr, nullptr, 0, n, write);
  }
  machine->access(a, n, write, false, pc);
}
#define EMU_ACCESS(n)                                                                                                                    \
  EMU_HOOK void __asan_load##n(uintptr_t a) { aligned_access(a, n, false, __builtin_return_address(0)); }                                \
  EMU_HOOK void __asan_store##n(uintptr_t a) { aligned_access(a, n, true, __builtin_return_address(0)); }                                \
  EMU_HOOK void __asan_load##n##_noabort(uintptr_t a) { aligned_access(a, n, false, __builtin_return_address(0)); }                      \
  EMU_HOOK void __asan_store##n##_noabort(uintptr_t a) { aligned_access(a, n, true, __builtin_return_address(0)); }
EMU_ACCESS(1) EMU_ACCESS(2) EMU_ACCESS(4) EMU_ACCESS(8) EMU_ACCESS(16)
EMU_HOOK void __asan_loadN(uintptr_t a, size_t n) { unaligned_access(a, n, false, __builtin_return_address(0)); }
EMU_HOOK void __asan_storeN(uintptr_t a, size_t n) { unaligned_access(a, n, true, __builtin_return_address(0)); }
EMU_HOOK void __asan_loadN_noabort(uintptr_t a, size_t n) { unaligned_access(a, n, false, __builtin_return_address(0)); }
EMU_HOOK void __asan_storeN_noabort(uintptr_t a, size_t n) { unaligned_access(a, n, true, __builtin_return_address(0)); }
EMU_HOOK void __asan_handle_no_return() {}
// Clang marks the memory of its frames: the shadow's address and size come as it computes them.
#define EMU_SHADOW(value)                                                                                                  \
  EMU_HOOK void __asan_set_shadow_##value(uintptr_t shadow, size_t n) {                                                    \
    size_t at = shadow - emu::kStackShadow - (uintptr_t)machine->stacks / 8;                                               \
    if (at < emu::kStackSize * emu::kMaxThreads / 8) memset(machine->stack_shadow + at, 0x##value, n);                     \
  }
EMU_SHADOW(00) EMU_SHADOW(01) EMU_SHADOW(02) EMU_SHADOW(03) EMU_SHADOW(04) EMU_SHADOW(05) EMU_SHADOW(06) EMU_SHADOW(07)
EMU_SHADOW(f1) EMU_SHADOW(f2) EMU_SHADOW(f3) EMU_SHADOW(f5) EMU_SHADOW(f8)
EMU_HOOK void *__asan_memcpy(void *to, const void *from, size_t n) {
  const void *pc = __builtin_return_address(0);
  machine->access((uintptr_t)from, n, false, false, pc);
  machine->access((uintptr_t)to, n, true, false, pc);
  return memcpy(to, from, n);
}
EMU_HOOK void *__asan_memmove(void *to, const void *from, size_t n) {
  const void *pc = __builtin_return_address(0);
  machine->access((uintptr_t)from, n, false, false, pc);
  machine->access((uintptr_t)to, n, true, false, pc);
  return memmove(to, from, n);
}
EMU_HOOK void *__asan_memset(void *to, int v, size_t n) {
  machine->access((uintptr_t)to, n, true, false, __builtin_return_address(0));
  return memset(to, v, n);
}

// clang's array-bounds check: an index beyond an array's declared length.
struct UbsanPlace {
  const char *file;
  uint32_t line, column;
};
struct UbsanOutOfBounds {
  UbsanPlace place;
  const void *array_type, *index_type;
};
EMU_HOOK void __ubsan_handle_out_of_bounds(UbsanOutOfBounds *data, uintptr_t index) {
  (void)data;
  emu::Machine &m = *machine;
  m.report(EMU_REPORT_OUT_OF_BOUNDS, __builtin_return_address(0), "index " + std::to_string((int64_t)index) + " lies outside the array's declared length", true, {m.current->index}, nullptr,
           nullptr, (uint64_t)index, 0, false);
}
