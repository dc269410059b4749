#include "machine.h"

#include <sys/mman.h>

#include <algorithm>

namespace emu {

__thread Machine *machine = nullptr;

// Saves what the C ABI lets a callee keep, swaps stacks and jumps: the target is a saved return address or a fiber's start.
#if defined(__x86_64__)
asm(R"(
.text
.globl emu_switch
.type emu_switch,@function
emu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  popq %rcx
  jmpq *%rcx
.size emu_switch, .-emu_switch
)");
#elif defined(__aarch64__)
asm(R"(
.text
.globl emu_switch
.type emu_switch,%function
emu_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  br x30
.size emu_switch, .-emu_switch
)");
#endif

static void fiber_start() {
  Machine *m = machine;
  m->image->entry(&m->current->frame);
  m->finish_fiber();
}

static void prepare(Thread *t, unsigned char *stack_top) {
#if defined(__x86_64__)
  void **sp = (void **)stack_top;
  *--sp = nullptr;  // the return address fiber_start would have: keeps the stack aligned as after a call
  *--sp = (void *)fiber_start;
  for (int i = 0; i < 6; i++) *--sp = nullptr;
#else
  void **sp = (void **)(stack_top - 160);
  for (int i = 0; i < 20; i++) sp[i] = nullptr;
  sp[11] = (void *)fiber_start;
#endif
  t->sp = sp;
}

Machine::Machine() {
  size_t total = kStackSize * kMaxThreads;
  stacks = (unsigned char *)mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stacks == MAP_FAILED) stacks = nullptr;
  else
    for (unsigned i = 0; i < kMaxThreads; i++) mprotect(stacks + i * kStackSize, 4096, PROT_NONE);
  stack_shadow = (unsigned char *)mmap(nullptr, total / 8, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stack_shadow == MAP_FAILED) stack_shadow = nullptr;
}

Machine::~Machine() {
  if (stacks) munmap(stacks, kStackSize * kMaxThreads);
  if (stack_shadow) munmap(stack_shadow, kStackSize * kMaxThreads / 8);
  free(shared_write);
  free(shared_read);
  free(shared_write_pc);
}

// ---- waiting --------------------------------------------------------------------------------------------------------

// Called when no thread of the group can run. `self` is the thread on whose stack this runs; it may have ended.
void Machine::resolve(Simdgroup &g, Thread *self) {
  uint64_t mask = g.waiting;
  if (EMU_UNLIKELY(d->stop.load(std::memory_order_relaxed) == 1 || d->stop.load(std::memory_order_relaxed) == 2)) {
    interrupt = 1;
    emu_switch(&self->sp, main_sp);
  }
  if (mask) {
    Thread &first = threads[g.first + __builtin_ctzl(mask)];
    if (!g.mixed && first.op.wait != Wait::kThreadgroupBarrier) {
      g.ready = mask;
      g.waiting = 0;
      execute(g, mask, false);
    } else if (g.mixed) {
      // Threads that skipped a function wait further on: the earliest call site among those that need no barrier goes first.
      Thread *chosen = nullptr;
      for (uint64_t m = mask; m; m &= m - 1) {
        Thread &t = threads[g.first + __builtin_ctzl(m)];
        if (t.op.wait == Wait::kThreadgroupBarrier) continue;
        if (!chosen || t.pc < chosen->pc || (t.pc == chosen->pc && t.site < chosen->site)) chosen = &t;
      }
      if (chosen) {
        uint64_t subset = 0;
        const Thread *other = nullptr;
        for (uint64_t m = mask; m; m &= m - 1) {
          Thread &t = threads[g.first + __builtin_ctzl(m)];
          if (t.site == chosen->site) subset |= 1ull << t.lane;
          else if (!other) other = &t;
        }
        counters.divergences++;
        bool votes = chosen->op.wait == Wait::kSimd && (chosen->op.code & 63) >= EMU_BALLOT && (chosen->op.code & 63) <= EMU_BROADCAST_FIRST;
        // A quad function is together once its quads are.
        bool quad_complete = chosen->op.wait == Wait::kSimd && (chosen->op.code & EMU_QUAD);
        for (int q = 0; quad_complete && q < 16; q++) {
          uint64_t quad = 15ull << (q * 4);
          if ((subset & quad) && (subset & quad) != (g.alive & quad)) quad_complete = false;
        }
        if (checked && !votes && !quad_complete) {
          // Reductions are defined over the threads that take part; a shuffle or a matrix function needs all.
          bool reduction = chosen->op.wait == Wait::kSimd && (chosen->op.code & 63) < EMU_BALLOT;
          std::string file;
          uint32_t line = 0;
          std::vector<uint32_t> list;
          for (uint64_t m = subset; m; m &= m - 1) list.push_back(g.first + (uint32_t)__builtin_ctzl(m));
          report(EMU_REPORT_DIVERGENT_SIMDGROUP, chosen->pc,
                 std::to_string(__builtin_popcountl(subset)) + " of " + std::to_string(__builtin_popcountl(g.alive)) + " threads of simdgroup " +
                     std::to_string(g.index) + " reach this function, the others are at " + place(other->pc, &file, &line),
                 !reduction, list, nullptr, nullptr, 0, 0, false, other->pc, (uint64_t)__builtin_popcountl(subset), nullptr, (int)other->index);
        }
        g.ready = subset;
        g.waiting = mask & ~subset;
        g.mixed = false;
        if (g.waiting) {
          g.site = threads[g.first + __builtin_ctzl(g.waiting)].site;
          for (uint64_t m = g.waiting; m; m &= m - 1)
            if (threads[g.first + __builtin_ctzl(m)].site != g.site) g.mixed = true;
        }
        execute(g, subset, true);
      }
    }
  }
  if (g.ready) {
    if (!self->done && (g.ready >> self->lane & 1)) return;
    Thread *next = &threads[g.first + pick(g.ready)];
    current = next;
    emu_switch(&self->sp, next->sp);
    return;
  }
  current = nullptr;
  emu_switch(&self->sp, main_sp);
}

void Machine::finish_fiber() {
  if (pending.set) settle();
  Thread *t = current;
  Simdgroup &g = *t->group;
  t->done = true;
  uint64_t bit = 1ull << t->lane;
  g.alive &= ~bit;
  g.ready &= ~bit;
  if (g.ready) {
    Thread *next = &threads[g.first + pick(g.ready)];
    current = next;
    emu_switch(&t->sp, next->sp);
  } else {
    resolve(g, t);
  }
  __builtin_trap();
}

void Machine::abandon() {
  abandoned_ = true;
  void *unused;
  pending.set = false;
  current = nullptr;
  emu_switch(&unused, main_sp);
  __builtin_trap();
}

void Machine::execute(Simdgroup &g, uint64_t mask, bool divergent) {
  Thread &first = threads[g.first + __builtin_ctzl(mask)];
  switch (first.op.wait) {
    case Wait::kSimd:
      counters.simdgroup_operations++;
      simd(g, mask, divergent);
      break;
    case Wait::kMatrixLoad: matrix_load(g, mask); break;
    case Wait::kMatrixStore: matrix_store(g, mask); break;
    case Wait::kMatrixMultiply: matrix_multiply(g, mask); break;
    case Wait::kSimdgroupBarrier:
      counters.simdgroup_barriers++;
      bump_simdgroup_epoch(g, first.op.code);
      break;
    default: break;
  }
}

void Machine::bump_simdgroup_epoch(Simdgroup &g, uint32_t flags) {
  if ((flags & 2) && ++g.epoch_shared >= 511) purge_shared(g.index), g.epoch_shared = 0;
  if ((flags & 1) && g.epoch_device < 1023) g.epoch_device++;
}

bool Machine::resolve_threadgroup_barrier() {
  Thread *first = nullptr, *other = nullptr, *gone = nullptr;
  uint64_t waiting = 0, flags = 3;
  for (uint32_t i = 0; i < thread_count; i++) {
    Thread &t = threads[i];
    if (t.done) {
      gone = &t;
      continue;
    }
    waiting++;
    flags &= t.op.code;
    if (!first) first = &t;
    else if (t.site != first->site && !other) other = &t;
  }
  if (!first) return false;
  if (checked && (other || gone)) {
    std::vector<uint32_t> list;
    for (uint32_t i = 0; i < thread_count && list.size() < 8; i++)
      if (!threads[i].done && threads[i].site == first->site) list.push_back(i);
    std::string file, detail = std::to_string(waiting) + " of " + std::to_string(thread_count) + " threads wait at a threadgroup barrier";
    uint32_t line = 0;
    if (other) detail += ", some of them at another one: " + place(other->pc, &file, &line);
    if (gone) detail += ", while " + thread_text(*d, gone->index) + " has already returned";
    report(EMU_REPORT_DIVERGENT_BARRIER, first->pc, detail, true, list, nullptr, nullptr, 0, 0, false, other ? other->pc : nullptr, waiting, nullptr,
           other ? (int)other->index : (int)gone->index);
  }
  counters.barriers++;
  if (flags & 2) {
    if (++epoch_shared >= 1023) purge_shared(), epoch_shared = 1;
  }
  if (flags & 1) epoch_device = epoch_device < 65535 ? epoch_device + 1 : epoch_device;
  for (uint32_t i = 0; i < group_count; i++) {
    Simdgroup &g = groups[i];
    g.ready = g.waiting;
    g.waiting = 0;
    if (flags & 2) g.epoch_shared = 0;
    if (flags & 1) g.epoch_device = 0;
  }
  return true;
}

// ---- a threadgroup --------------------------------------------------------------------------------------------------

void Machine::run_threadgroup(uint64_t index) {
  threadgroup_index = index;
  uint32_t at[3] = {(uint32_t)(index % d->grid[0]), (uint32_t)(index / d->grid[0] % d->grid[1]), (uint32_t)(index / d->grid[0] / d->grid[1])};
  uint32_t size[3];
  for (int a = 0; a < 3; a++) {
    threadgroup_position[a] = at[a];
    size[a] = std::min(d->size[a], d->grid_threads[a] - at[a] * d->size[a]);
  }
  thread_count = size[0] * size[1] * size[2];
  uint32_t width = d->simd_width;
  group_count = (thread_count + width - 1) / width;
  uint32_t full_groups = (d->size[0] * d->size[1] * d->size[2] + width - 1) / width;
  void *shared[EMU_MAX_THREADGROUP_ARGUMENTS + 1];
  for (unsigned i = 0; i <= EMU_MAX_THREADGROUP_ARGUMENTS; i++) shared[i] = arena + d->shared_offset[i];
  static thread_local void *shared_pointers[EMU_MAX_THREADGROUP_ARGUMENTS + 1];
  memcpy(shared_pointers, shared, sizeof shared);
  for (uint32_t i = 0; i < group_count; i++) {
    Simdgroup &g = groups[i];
    uint32_t n = std::min(width, thread_count - i * width);
    g = Simdgroup();
    g.existing = g.alive = g.ready = n == 64 ? ~0ull : (1ull << n) - 1;
    g.index = i;
    g.first = i * width;
  }
  for (uint32_t i = 0; i < thread_count; i++) {
    Thread &t = threads[i];
    t.group = &groups[i / width];
    t.index = i;
    t.lane = i % width;
    t.started = t.done = false;
    t.pc = nullptr;
    t.op.wait = Wait::kNone;
    uint32_t p[3] = {i % size[0], i / size[0] % size[1], i / size[0] / size[1]};
    emu_frame &f = t.frame;
    f.buffers = d->buffers;
    f.shared = shared_pointers;
    for (int a = 0; a < 3; a++) {
      t.position[a] = p[a];
      f.attributes[EMU_THREAD_POSITION_IN_GRID][a] = at[a] * d->size[a] + p[a];
      f.attributes[EMU_THREAD_POSITION_IN_THREADGROUP][a] = p[a];
      f.attributes[EMU_THREADGROUP_POSITION_IN_GRID][a] = at[a];
      f.attributes[EMU_THREADS_PER_GRID][a] = d->grid_threads[a];
      f.attributes[EMU_THREADS_PER_THREADGROUP][a] = size[a];
      f.attributes[EMU_THREADGROUPS_PER_GRID][a] = d->grid[a];
      f.attributes[EMU_DISPATCH_THREADS_PER_THREADGROUP][a] = d->size[a];
      f.attributes[EMU_GRID_ORIGIN][a] = 0;
      f.attributes[EMU_GRID_SIZE][a] = d->grid_threads[a];
    }
    f.attributes[EMU_THREAD_INDEX_IN_THREADGROUP][0] = i;
    f.attributes[EMU_THREAD_INDEX_IN_SIMDGROUP][0] = t.lane;
    f.attributes[EMU_SIMDGROUP_INDEX_IN_THREADGROUP][0] = i / width;
    f.attributes[EMU_THREADS_PER_SIMDGROUP][0] = width;
    f.attributes[EMU_THREAD_EXECUTION_WIDTH][0] = width;
    f.attributes[EMU_SIMDGROUPS_PER_THREADGROUP][0] = group_count;
    f.attributes[EMU_DISPATCH_SIMDGROUPS_PER_THREADGROUP][0] = full_groups;
    f.attributes[EMU_DISPATCH_QUADGROUPS_PER_THREADGROUP][0] = (d->size[0] * d->size[1] * d->size[2] + 3) / 4;
    f.attributes[EMU_QUADGROUPS_PER_THREADGROUP][0] = (thread_count + 3) / 4;
    f.attributes[EMU_THREAD_INDEX_IN_QUADGROUP][0] = i % 4;
    f.attributes[EMU_QUADGROUP_INDEX_IN_THREADGROUP][0] = i / 4;
    prepare(&t, stack_top(i));
  }
  epoch_shared = epoch_device = 1;
  abandoned_ = false;
  pending.set = false;
  if (EMU_UNLIKELY(stack_shadow_dirty_)) {  // threads that never returned left their frames' zones behind
    madvise(stack_shadow, kStackSize * kMaxThreads / 8, MADV_DONTNEED);
    stack_shadow_dirty_ = false;
  }
  if (checked) {
    // What a GPU would hold here is whatever the last threadgroup left: nothing to rely on.
    memset(arena, 0xe5, d->shared_used);
    memset(shared_write, 0, d->shared_used * 4);
    memset(shared_read, 0, d->shared_used * 4);
  }
  for (uint32_t i = 0; i < group_count; i++) order_[i] = i;
  while (true) {
    if (random)
      for (uint32_t i = group_count; i > 1; i--) {
        random ^= random << 13, random ^= random >> 7, random ^= random << 17;
        std::swap(order_[i - 1], order_[random % i]);
      }
    bool ran = false;
    for (uint32_t k = 0; k < group_count; k++) {
      Simdgroup &g = groups[order_[k]];
      if (!g.ready) continue;
      ran = true;
      current = &threads[g.first + pick(g.ready)];
      emu_switch(&main_sp, current->sp);
      if (abandoned_ || EMU_UNLIKELY(interrupt)) {
        stack_shadow_dirty_ = true;
        return;
      }
    }
    if (ran) continue;
    if (!resolve_threadgroup_barrier()) break;
  }
}

void Machine::run(Dispatch *dispatch, Image *im) {
  d = dispatch;
  image = im;
  arena = im->arena;
  checked = d->checked;
  counters = emu_counters();
  seen_.clear();
  interrupt = 0;
  interrupted_pc = nullptr;
  faults_ = 0;
  if (checked && shadow_size_ < im->arena_size) {
    shadow_size_ = im->arena_size;
    free(shared_write), free(shared_read), free(shared_write_pc);
    shared_write = (uint32_t *)aligned_alloc(64, (im->arena_size * 4 + 63) & ~63ull);
    shared_read = (uint32_t *)aligned_alloc(64, (im->arena_size * 4 + 63) & ~63ull);
    shared_write_pc = (uint32_t *)calloc(im->arena_size / 16 + 1, 4);
  }
  arena_size = im->arena_size;
  lines_.clear();
  if (checked && d->options->count_lines)
    for (const Binding &b : d->bindings) lines_.emplace_back(((size_t)(b.end - b.begin) + kLine - 1) / kLine);
  Machine *outer = machine;
  machine = this;
  uint64_t n = d->threadgroups, seed = d->options->seed;
  while (!d->stop.load(std::memory_order_relaxed)) {
    uint64_t i = d->next.fetch_add(1);
    if (i >= n) break;
    uint64_t index = i;
    random = 0;
    if (seed) {
      // An odd multiplier on a power of two, skipping what lies beyond, permutes 0 … n-1.
      uint64_t bits = 1;
      while (bits < n) bits <<= 1;
      do index = (index * (2 * (seed * 0x9e3779b97f4a7c15ull >> 33) + 1) + (seed >> 3)) & (bits - 1);
      while (index >= n);
      random = (seed + 1) * 0x9e3779b97f4a7c15ull ^ (index + 1) * 0xd1342543de82ef95ull;
      if (!random) random = 1;
    }
    run_threadgroup(index);
    counters.threads += thread_count;
    counters.threadgroups++;
    if (interrupt == 2) {  // a signal: memory that no one has, or the stack's end
      interrupt = 0;
      size_t into = (size_t)((const unsigned char *)fault_address - stacks);
      bool stack = into < kStackSize * kMaxThreads;
      report(EMU_REPORT_OUT_OF_BOUNDS, (const char *)interrupted_pc + 1,
             stack ? "private memory of one thread exceeds " + std::to_string(kStackSize >> 10) + " KiB" : "access to memory that is not there", true, {current ? current->index : 0});
      d->faulted = true;
      current = nullptr;
      if (++faults_ >= 8) break;
    } else if (interrupt) {
      endless(d->stop.load());
      break;
    } else if (abandoned_ && ++faults_ >= 8) {
      d->stop.store(3);
      break;
    }
  }
  machine = outer;
  flush_seen();
  std::lock_guard<std::mutex> lock(d->mutex);
  const uint64_t *from = (const uint64_t *)&counters;
  uint64_t *to = (uint64_t *)&d->counters;
  for (size_t i = 0; i < sizeof counters / 8; i++) to[i] += from[i];
}

// ---- reports --------------------------------------------------------------------------------------------------------

std::string thread_text(const Dispatch &d, uint32_t index) {
  return "thread (" + std::to_string(index % d.size[0]) + ", " + std::to_string(index / d.size[0] % d.size[1]) + ", " +
         std::to_string(index / d.size[0] / d.size[1]) + ")";
}

std::string Machine::place(const void *pc, std::string *file, uint32_t *line) const {
  const unsigned char *p = (const unsigned char *)pc;
  if (!p || p < image->base || p >= image->base + image->size || !d->info->find((uint64_t)(p - image->base) - 1, file, line)) {
    *file = "", *line = 0;
    return "an unknown line";
  }
  return *file + ":" + std::to_string(*line);
}

void Machine::report(uint32_t report_class, const void *pc, const std::string &detail, bool error, std::vector<uint32_t> list, const Binding *binding,
                     const SharedRange *range, uint64_t offset, uint64_t size, bool write, const void *other_pc, uint64_t involved,
                     const uint32_t *other_threadgroup, int other_thread) {
  uint64_t place_key = (uint64_t)pc - (uint64_t)image->base;
  uint64_t key = place_key * 31 + report_class;
  uint64_t &count = seen_[key];
  if (count++) return;
  std::unique_ptr<ReportData> r(new ReportData);
  r->report.report_class = report_class;
  r->report.is_error = error;
  uint32_t line = 0, other_line = 0;
  std::string where = place(pc, &r->file, &line);
  if (other_pc) place(other_pc, &r->other_file, &other_line);
  r->report.line = line;
  r->report.other_line = other_line;
  uint32_t width[3];
  for (int a = 0; a < 3; a++) width[a] = std::min(d->size[a], d->grid_threads[a] - threadgroup_position[a] * d->size[a]);
  auto put = [&](uint32_t index, const uint32_t *group) {
    if (r->report.thread_count >= 8) return;
    emu_thread_position &p = r->report.threads[r->report.thread_count++];
    for (int a = 0; a < 3; a++) p.threadgroup[a] = group[a];
    p.thread[0] = index % width[0], p.thread[1] = index / width[0] % width[1], p.thread[2] = index / width[0] / width[1];
  };
  for (uint32_t i : list)
    if (r->report.thread_count < (other_thread >= 0 ? 7u : 8u)) put(i, threadgroup_position);
  if (other_thread >= 0) put((uint32_t)other_thread, other_threadgroup ? other_threadgroup : threadgroup_position);
  r->report.involved = involved ? involved : r->report.thread_count;
  r->report.buffer_index = binding ? (int32_t)binding->index : -1;
  r->report.threadgroup_index = range ? range->argument : -1;
  r->report.offset = offset;
  r->report.access_size = size;
  r->report.is_write = write;
  std::string m = std::string(emu_report_class_name(report_class)) + " at " + where + ": " + detail;
  if (r->report.thread_count) {
    const emu_thread_position &p = r->report.threads[0];
    auto triple = [](const uint32_t *v) { return "(" + std::to_string(v[0]) + ", " + std::to_string(v[1]) + ", " + std::to_string(v[2]) + ")"; };
    m += "; thread " + triple(p.thread) + " of threadgroup " + triple(p.threadgroup);
    if (other_thread >= 0) {
      const emu_thread_position &q = r->report.threads[r->report.thread_count - 1];
      m += " and thread " + triple(q.thread);
      if (other_threadgroup) m += " of threadgroup " + triple(q.threadgroup);
    }
    if (other_line) m += " (" + r->other_file + ":" + std::to_string(other_line) + ")";
  }
  r->message = m;
  std::lock_guard<std::mutex> lock(d->mutex);
  auto known = d->known.find({report_class, place_key});
  if (known != d->known.end()) return;
  if (d->reports.size() >= d->max_reports) return;
  d->known[{report_class, place_key}] = d->reports.size();
  d->reports.push_back(std::move(r));
}

void Machine::flush_seen() {
  std::lock_guard<std::mutex> lock(d->mutex);
  for (auto &k : d->known) {
    auto it = seen_.find(k.first.second * 31 + k.first.first);
    if (it != seen_.end()) d->reports[k.second]->report.occurrences += it->second;
  }
}

// Says where each thread is: those that wait, the one that ran, and those that never did.
void Machine::endless(int reason) {
  std::map<const void *, std::vector<uint32_t>> places;
  for (uint32_t i = 0; i < thread_count; i++) {
    Thread &t = threads[i];
    if (t.done) continue;
    const void *pc = current == &t && interrupted_pc ? (const void *)((const char *)interrupted_pc + 1) : t.pc;
    places[pc].push_back(i);
  }
  for (auto &p : places) {
    bool running = current && std::find(p.second.begin(), p.second.end(), current->index) != p.second.end();
    std::string detail = std::to_string(p.second.size()) + (p.second.size() == 1 ? " thread" : " threads");
    detail += !p.first ? " had not started" : running ? " still running" : " waiting here";
    detail += reason == 2 ? " when the dispatch was cancelled" : " when the time limit was reached";
    report(EMU_REPORT_ENDLESS, p.first, detail, true, p.second, nullptr, nullptr, 0, 0, false, nullptr, p.second.size());
  }
}

void Machine::purge_shared() {
  for (size_t i = 0; i < d->shared_used; i++) shared_write[i] = shared_write[i] ? 4 : 0, shared_read[i] = 0;
}

void Machine::purge_shared(uint32_t group) {
  if (!checked) return;
  uint32_t shift = 3 + d->lane_bits;
  uint32_t mask = (1023u << 3 >> shift) << shift;
  mask &= 1023u << 3;
  for (size_t i = 0; i < d->shared_used; i++) {
    if ((shared_write[i] & mask) == group << shift && shared_write[i]) shared_write[i] = 4;
    if ((shared_read[i] & mask) == group << shift && !(shared_read[i] & 2)) shared_read[i] = 0;
  }
}

}  // namespace emu
