// One host thread's share of a dispatch: it runs threadgroups one after the other, each GPU thread as a fiber.
//
// A fiber gives up the processor only when it waits for others. The last thread of a simdgroup to arrive at a function
// runs it for all; a simdgroup whose living threads all wait at a threadgroup barrier yields to the next simdgroup.
#pragma once
#include <atomic>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "emulator.h"
#include "image.h"

namespace emu {

constexpr unsigned kMaxThreads = EMU_MAX_THREADS_PER_THREADGROUP;
constexpr size_t kStackSize = 256 << 10;
constexpr size_t kLine = 128;  // bytes of a cache line
constexpr uintptr_t kStackShadow = 1ull << 44;  // what clang adds to address / 8 for a shadow byte's; see compile.cpp

#define EMU_ALWAYS_INLINE inline __attribute__((always_inline))
#define EMU_LIKELY(x) __builtin_expect(!!(x), 1)
#define EMU_UNLIKELY(x) __builtin_expect(!!(x), 0)

enum class Wait : uint8_t { kNone, kSimd, kMatrixLoad, kMatrixStore, kMatrixMultiply, kSimdgroupBarrier, kThreadgroupBarrier };

struct Operation {  // what a waiting thread asked for
  Wait wait = Wait::kNone;
  uint32_t code = 0, type = 0, count = 0, parameter = 0;
  const void *in[3] = {};
  void *out = nullptr;
  uint64_t stride = 0, x = 0, y = 0;
};

struct Simdgroup;
struct alignas(64) Thread {  // what each wait touches comes first: two lines of the cache
  void *sp;
  Simdgroup *group;
  uint32_t index, lane;
  uint64_t site;       // where it waits: call site and stack depth
  const void *pc;      // the call's return address
  Operation op;
  bool started, done;
  uint32_t position[3];
  emu_frame frame;
};

struct Simdgroup {
  uint64_t existing = 0, alive = 0, ready = 0, waiting = 0;
  uint64_t site = 0;     // of the first waiting thread
  bool mixed = false;    // threads wait at different places
  uint32_t index = 0, first = 0;
  uint32_t epoch_shared = 0, epoch_device = 0;  // simdgroup barriers since the last threadgroup barrier
};

// Device memory that the dispatch may write, with shadow cells to find races and unwritten bytes.
struct Cell {
  uint64_t write, read;
};
struct Region {
  unsigned char *begin, *end;
  uint32_t shift;  // log2 of a granule's bytes
  bool uninitialised;
  Cell *cells;
  size_t cell_bytes;
};
struct Binding {
  unsigned char *begin, *end;   // what the kernel may touch
  uint32_t index;
  uint32_t flags;
  bool writable;
  Region *region;
  const char *name;
  uint32_t float_bytes;  // of the declared element's components, 0 if they are no floats
};

struct SharedRange {  // one threadgroup variable or [[threadgroup(n)]] argument within the arena
  uint32_t begin, end;
  int32_t argument;   // -1: a variable
  std::string name;
};

struct ReportData {
  emu_report report{};
  std::string message, file, other_file;
};

struct Dispatch {
  const emu_dispatch_options *options;
  const ObjectInfo *info;
  uint32_t simd_width = 32, lane_bits = 5;
  uint32_t size[3], grid[3], grid_threads[3];  // threads per threadgroup, threadgroups, threads
  uint64_t threadgroups;
  bool checked;
  std::vector<Binding> bindings;      // sorted by begin
  std::vector<Region> regions;
  std::vector<SharedRange> shared;    // sorted by begin
  void *buffers[EMU_MAX_BUFFERS + 1];
  uint32_t shared_offset[EMU_MAX_THREADGROUP_ARGUMENTS + 1];  // into the arena
  uint32_t shared_used = 0;
  std::atomic<uint64_t> next{0};
  std::atomic<int> stop{0};           // 1 time, 2 cancelled, 3 enough faults
  std::atomic<bool> faulted{false};
  std::mutex mutex;                   // of what follows
  std::vector<std::unique_ptr<ReportData>> reports;
  std::map<std::pair<uint32_t, uint64_t>, size_t> known;
  emu_counters counters{};
  uint32_t max_reports = 64;
  std::atomic<uint32_t> device_fences{0};
};

struct Pending {  // a second write to a place, judged once it has happened
  bool set = false;
  unsigned char *address;
  uint32_t size;
  unsigned char before[64];
  uint32_t other;
  const void *pc;
  bool between;
  uint64_t other_threadgroup;
};

class Machine {
 public:
  Machine();
  ~Machine();
  void run(Dispatch *d, Image *image);

  // Entry points from kernels; the pc is the call's return address.
  void arrive(Thread *t, Wait wait, const void *pc, const void *frame);
  void access(uintptr_t address, size_t size, bool write, bool atomic, const void *pc);
  void private_access(uintptr_t address, size_t size, bool write, const void *pc);
  void private_operand(const void *p, size_t size, bool write, const void *pc) {  // of a function that threads perform together
    if (checked && (uintptr_t)p - (uintptr_t)stacks < kStackSize * kMaxThreads) private_access((uintptr_t)p, size, write, pc);
  }
  void settle();
  [[noreturn]] void abandon();
  void report(uint32_t report_class, const void *pc, const std::string &detail, bool error = true, std::vector<uint32_t> threads = {},
              const Binding *binding = nullptr, const SharedRange *range = nullptr, uint64_t offset = 0, uint64_t size = 0, bool write = false,
              const void *other_pc = nullptr, uint64_t involved = 0, const uint32_t *other_threadgroup = nullptr, int other_thread = -1);

  Dispatch *d = nullptr;
  Image *image = nullptr;
  Thread *current = nullptr;
  unsigned char *arena = nullptr;
  size_t arena_size = 0;
  unsigned char *stacks = nullptr;
  // A byte for each 8 of the stacks: 0 all may be touched, 1 … 7 that many, else a zone between private arrays.
  unsigned char *stack_shadow = nullptr;
  emu_counters counters{};
  bool checked = false;

  // Staggered, or the same variable of 32 fibers would compete for one set of the cache.
  unsigned char *stack_top(uint32_t index) const { return stacks + (index + 1) * kStackSize - (index & 127) * 448; }

  Thread threads[kMaxThreads];
  Simdgroup groups[kMaxThreads / 32 + 1];
  uint32_t thread_count = 0, group_count = 0;
  uint32_t threadgroup_position[3];
  uint64_t threadgroup_index = 0;
  void *main_sp = nullptr;
  volatile int interrupt = 0;   // set by the watchdog's signal
  const void *interrupted_pc = nullptr;
  const void *fault_address = nullptr;
  uint64_t random = 0;

  // Shadow of the arena: one cell per byte for the last write and for reads.
  uint32_t *shared_write = nullptr, *shared_read = nullptr;
  uint32_t *shared_write_pc = nullptr;
  uint32_t epoch_shared = 1, epoch_device = 1;
  Pending pending;

  void matrix_load(Simdgroup &g, uint64_t mask);
  void matrix_store(Simdgroup &g, uint64_t mask);
  void matrix_multiply(Simdgroup &g, uint64_t mask);
  void simd(Simdgroup &g, uint64_t mask, bool divergent);
  void shared_cells(uint32_t offset, uint32_t size, bool write, bool atomic, Thread *t, const void *pc);
  void loaded_lines(const Binding &b, const unsigned char *p, size_t size) {
    if (EMU_UNLIKELY(!lines_.empty())) count_lines(b, p, size);
  }
  void device_cells(Region *r, unsigned char *p, size_t size, bool write, bool atomic, Thread *t, const void *pc, const Binding *b);
  void endless(int reason);
  [[noreturn]] void finish_fiber();
  std::string place(const void *pc, std::string *file, uint32_t *line) const;

 private:
  void run_threadgroup(uint64_t index);
  void resolve(Simdgroup &g, Thread *self);
  bool resolve_threadgroup_barrier();
  void execute(Simdgroup &g, uint64_t mask, bool divergent);
  inline unsigned pick(uint64_t ready);
  void purge_shared();
  void purge_shared(uint32_t group);
  void bump_simdgroup_epoch(Simdgroup &g, uint32_t flags);
  void count_lines(const Binding &b, const unsigned char *p, size_t size);
  std::vector<std::vector<uint64_t>> lines_;  // by binding, of each line the last threadgroup to load it; empty: not asked for
  std::unordered_map<uint64_t, uint64_t> seen_;  // (class, pc) → occurrences not yet added up
  void flush_seen();
  bool abandoned_ = false, stack_shadow_dirty_ = false;
  int faults_ = 0;
  size_t shadow_size_ = 0;
  uint32_t order_[kMaxThreads / 32 + 1];
  friend struct MachineAccess;
};

extern __thread Machine *machine __attribute__((tls_model("initial-exec")));

extern "C" void emu_switch(void **save, void *to);

inline unsigned Machine::pick(uint64_t ready) {
  if (EMU_LIKELY(!random)) return (unsigned)__builtin_ctzl(ready);
  random ^= random << 13, random ^= random >> 7, random ^= random << 17;
  unsigned k = random & 63;
  uint64_t rotated = k ? ready >> k | ready << (64 - k) : ready;
  return ((unsigned)__builtin_ctzl(rotated) + k) & 63;
}

// Runs for every thread at every function of a simdgroup, so it is inlined into each.
EMU_ALWAYS_INLINE void Machine::arrive(Thread *t, Wait wait, const void *pc, const void *frame) {
  if (EMU_UNLIKELY(pending.set)) settle();
  Simdgroup &g = *t->group;
  t->op.wait = wait;
  t->pc = pc;
  // Call site and stack depth: the same code reached through two calls that were not inlined is two places.
  uint64_t depth = (uint64_t)(stack_top(t->index) - (const unsigned char *)frame);
  uint64_t site = (uint64_t)pc ^ depth << 44, bit = 1ull << t->lane, waiting = g.waiting, ready = g.ready & ~bit;
  t->site = site;
  if (!waiting) g.site = site, g.mixed = false;
  else if (EMU_UNLIKELY(g.site != site)) g.mixed = true;
  g.ready = ready;
  g.waiting = waiting | bit;
  if (EMU_LIKELY(ready != 0)) {
    Thread *next = &threads[g.first + pick(ready)];
    current = next;
    emu_switch(&t->sp, next->sp);
    return;
  }
  resolve(g, t);
}

std::string thread_text(const Dispatch &d, uint32_t index);

}  // namespace emu
