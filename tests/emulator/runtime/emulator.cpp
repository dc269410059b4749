// The C interface: libraries, pipelines, dispatches. Turns exceptions into strings and owns what is shared between calls.
#include "emulator.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>
#include <pthread.h>

#include <algorithm>
#include <stdexcept>
#include <thread>

#include "compile.h"
#include "hosts.h"
#include "machine.h"

using namespace emu;

struct emu_library {
  std::atomic<int> references{1};
  Source source;
  Checked checked;
};

namespace {

struct Variant {  // a kernel compiled with checks, or without
  std::mutex mutex;                // while it is compiled
  std::atomic<bool> ready{false};  // then a forked child needs no mutex that another thread may have held
  std::string object, warnings;
  ObjectInfo info;
  std::vector<std::unique_ptr<Image>> images;  // idle copies, under `images_lock`
};
ForkSafeLock &images_lock = *new ForkSafeLock;

struct Argument {
  std::string name;
  uint32_t index, kind;
  emu_argument_form form;
};

}  // namespace

struct emu_pipeline {
  std::atomic<int> references{1};
  emu_library *library;
  int kernel;
  std::map<std::string, ConstantValue> values;
  uint32_t simd_width, max_threads;
  Variant variants[kVariants];
  std::vector<Argument> arguments;
  uint32_t static_size = 0, uses = 0;
};

struct emu_result {
  int status = EMU_STATUS_OK;
  std::string message;
  std::vector<std::unique_ptr<ReportData>> reports;
  emu_counters counters{};
  double seconds = 0;
};

namespace {

void set_error(char **error, const std::string &text) {
  if (error) *error = text.empty() ? nullptr : strdup(text.c_str());
}

const Kernel &kernel_of(const emu_pipeline *p) { return p->library->checked.rewritten.kernels[p->kernel]; }

// Compiles a variant on first use and explains what is missing from it.
int variant_of(int32_t fast) { return fast == 2 ? kCheckedZeros : fast ? kFast : kChecked; }

void give_image(Variant &v, std::unique_ptr<Image> i) {
  std::lock_guard<ForkSafeLock> guard(images_lock);
  if (v.images.size() < 64) v.images.push_back(std::move(i));
}

void prepare(emu_pipeline *p, int variant) {
  Variant &v = p->variants[variant];
  if (v.ready) return;
  std::lock_guard<std::mutex> lock(v.mutex);
  if (v.ready) return;
  v.object = compile_kernel(p->library->source, p->library->checked.preprocessed, p->kernel, p->values, variant, &v.warnings);
  std::vector<std::string> undefined;
  v.info = ObjectInfo();
  std::unique_ptr<Image> image(new Image(v.object, &v.info, &undefined));
  std::string missing;
  for (const std::string &name : undefined) {
    const char *prefix = "emu_function_constant_";
    if (name.compare(0, strlen(prefix), prefix) == 0) {
      uint32_t index = (uint32_t)atoi(name.c_str() + strlen(prefix));
      for (const Constant &c : p->library->checked.rewritten.constants)
        if (c.index == index)
          missing += "function constant '" + c.name + "' (index " + std::to_string(index) + ") is used by '" + kernel_of(p).host_name + "' but has no value\n";
    } else {
      missing += "'" + name + "' is declared but defined nowhere, or is not in the emulator\n";
    }
  }
  if (!missing.empty()) throw std::runtime_error(missing);
  const Kernel &k = kernel_of(p);
  std::vector<emu_argument_form> forms(k.parameters.size() + 1);
  image->describe(forms.data());
  p->arguments.clear();
  for (size_t i = 0; i < k.parameters.size(); i++) {
    const Parameter &q = k.parameters[i];
    if (q.attribute != "buffer" && q.attribute != "threadgroup") continue;
    uint32_t kind = q.attribute == "threadgroup" ? EMU_ARGUMENT_THREADGROUP : EMU_ARGUMENT_DEVICE;
    if (kind == EMU_ARGUMENT_DEVICE && !forms[i].is_writable && forms[i].is_constant) kind = EMU_ARGUMENT_CONSTANT;
    p->arguments.push_back({q.name, q.index, kind, forms[i]});
  }
  p->static_size = v.info.static_size;
  p->uses = v.info.uses;
  give_image(v, std::move(image));
  v.ready = true;
}

std::unique_ptr<Image> take_image(Variant &v) {
  {
    std::lock_guard<ForkSafeLock> guard(images_lock);
    if (!v.images.empty()) {
      std::unique_ptr<Image> i = std::move(v.images.back());
      v.images.pop_back();
      return i;
    }
  }
  return std::unique_ptr<Image>(new Image(v.object, nullptr, nullptr));
}

// Machines hold 256 MiB of address space for stacks each, so they are kept and used again.
struct Machines {
  ForkSafeLock lock;
  std::vector<Machine *> idle;
};
Machines *const machines = new Machines;
std::unique_ptr<Machine> take_machine() {
  {
    std::lock_guard<ForkSafeLock> guard(machines->lock);
    if (!machines->idle.empty()) {
      std::unique_ptr<Machine> m(machines->idle.back());
      machines->idle.pop_back();
      return m;
    }
  }
  return std::unique_ptr<Machine>(new Machine);
}
void give_machine(std::unique_ptr<Machine> m) {
  std::lock_guard<ForkSafeLock> guard(machines->lock);
  if (machines->idle.size() < 16) machines->idle.push_back(m.release());
}

constexpr uint64_t kFewThreads = 256;  // not worth waking another host thread

// ---- stopping a kernel from outside ---------------------------------------------------------------------------------

struct sigaction previous_fault[2];

void leave_kernel() {  // runs on the fiber's stack, or what is left of it
  void *unused;
  emu_switch(&unused, machine->main_sp);
  __builtin_trap();
}

void divert(ucontext_t *u, Machine *m) {
#if defined(__x86_64__)
  uint64_t top = (uint64_t)m->stack_top(m->current->index);
  u->uc_mcontext.gregs[REG_RSP] = (greg_t)((top - 4096) & ~15ull) - 8;
  u->uc_mcontext.gregs[REG_RIP] = (greg_t)(uint64_t)leave_kernel;
#else
  uint64_t top = (uint64_t)m->stack_top(m->current->index);
  u->uc_mcontext.sp = (top - 4096) & ~15ull;
  u->uc_mcontext.pc = (uint64_t)leave_kernel;
#endif
}

uint64_t program_counter(ucontext_t *u) {
#if defined(__x86_64__)
  return (uint64_t)u->uc_mcontext.gregs[REG_RIP];
#else
  return u->uc_mcontext.pc;
#endif
}

void on_stop(int, siginfo_t *, void *context) {
  Machine *m = machine;
  if (!m || !m->current || !m->d || !m->d->stop.load()) return;
  uint64_t pc = program_counter((ucontext_t *)context);
  if (pc < (uint64_t)m->image->base || pc >= (uint64_t)m->image->arena) return;  // inside the runtime: it looks by itself
  m->interrupted_pc = (const void *)pc;
  m->interrupt = 1;
  divert((ucontext_t *)context, m);
}

void on_fault(int signal, siginfo_t *info, void *context) {
  Machine *m = machine;
  uint64_t pc = program_counter((ucontext_t *)context);
  if (m && m->current && m->image && pc >= (uint64_t)m->image->base && pc < (uint64_t)m->image->base + m->image->size) {
    m->interrupted_pc = (const void *)pc;
    m->fault_address = info->si_addr;
    m->interrupt = 2;
    divert((ucontext_t *)context, m);
    return;
  }
  struct sigaction &old = previous_fault[signal == SIGBUS];
  if (old.sa_flags & SA_SIGINFO) {
    if (old.sa_sigaction) return old.sa_sigaction(signal, info, context);
  } else if (old.sa_handler != SIG_DFL && old.sa_handler != SIG_IGN) {
    return old.sa_handler(signal);
  }
  sigaction(signal, &old, nullptr);  // the instruction runs again and faults for good
}

void install_signals() {
  static std::once_flag once;
  std::call_once(once, [] {
    struct sigaction a;
    memset(&a, 0, sizeof a);
    a.sa_sigaction = on_stop;
    a.sa_flags = SA_SIGINFO | SA_RESTART | SA_ONSTACK;
    sigemptyset(&a.sa_mask);
    sigaction(stop_signal(), &a, nullptr);
    a.sa_sigaction = on_fault;
    a.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigaction(SIGSEGV, &a, &previous_fault[0]);
    sigaction(SIGBUS, &a, &previous_fault[1]);
  });
}

// ---- a dispatch -----------------------------------------------------------------------------------------------------

void simple_report(Dispatch &d, uint32_t report_class, const std::string &message, int buffer, uint64_t offset, const std::string &file = "", uint32_t line = 0) {
  if (d.reports.size() >= d.max_reports) return;
  std::unique_ptr<ReportData> r(new ReportData);
  r->report.report_class = report_class;
  r->report.is_error = 1;
  r->report.buffer_index = buffer;
  r->report.threadgroup_index = -1;
  r->report.offset = offset;
  r->report.occurrences = 1;
  r->report.line = line;
  r->file = file;
  r->message = std::string(emu_report_class_name(report_class)) + (line ? " at " + file + ":" + std::to_string(line) : "") + ": " + message;
  d.reports.push_back(std::move(r));
}

void unwritten_outputs(Dispatch &d) {
  for (const Binding &b : d.bindings) {
    if (!(b.flags & EMU_BUFFER_OUTPUT) || !b.region) continue;
    uint64_t granule = 1ull << b.region->shift, missing = 0, first = 0;
    for (uint64_t o = 0; o < (uint64_t)(b.end - b.begin); o += granule) {
      size_t i = (size_t)(b.begin + o - b.region->begin) >> b.region->shift;
      if (b.region->cells[i].write == 0) {
        if (!missing) first = o;
        missing += granule;
      }
    }
    if (missing)
      simple_report(d, EMU_REPORT_UNWRITTEN_OUTPUT,
                    std::to_string(missing) + " bytes of output buffer(" + std::to_string(b.index) + ")" + (b.name && *b.name ? " '" + std::string(b.name) + "'" : "") +
                        " were never written, the first at byte " + std::to_string(first),
                    (int)b.index, first);
  }
}

// Checked kernels fill variables with all ones before their first assignment. Such a NaN survives arithmetic, which makes
// none of its own like it; so one in an output came from a variable that was read too early.
void uninitialised_results(Dispatch &d) {
  for (const Binding &b : d.bindings) {
    if (!b.float_bytes || !b.writable || !b.region || (uintptr_t)b.begin % b.float_bytes) continue;
    uint64_t count = 0, first = 0, cell = 0;
    for (uint64_t o = 0; o + b.float_bytes <= (uint64_t)(b.end - b.begin); o += b.float_bytes) {
      bool ones = true;
      for (uint32_t k = 0; k < b.float_bytes; k++) ones &= b.begin[o + k] == 0xff;
      if (!ones) continue;
      const Cell &c = b.region->cells[(size_t)(b.begin + o - b.region->begin) >> b.region->shift];
      if (!c.write) continue;
      if (!count++) first = o, cell = c.write;
    }
    if (!count) continue;
    uint64_t group = (cell >> 40) - 1, field = cell >> 4 & 1023;
    uint32_t thread = (uint32_t)((field >> d.lane_bits) * d.simd_width + (field & ((1u << d.lane_bits) - 1)));
    simple_report(d, EMU_REPORT_UNINITIALISED_PRIVATE,
                  std::to_string(count) + " values in buffer(" + std::to_string(b.index) + ")" + (b.name && *b.name ? " '" + std::string(b.name) + "'" : "") +
                      " come from private memory that was never given a value, the first at byte " + std::to_string(first) + ", written by " + thread_text(d, thread) + " of threadgroup " + std::to_string(group),
                  (int)b.index, first);
    emu_report &r = d.reports.back()->report;
    if (r.report_class != EMU_REPORT_UNINITIALISED_PRIVATE) continue;
    r.thread_count = 1, r.involved = 1;
    r.threads[0] = {{(uint32_t)(group % d.grid[0]), (uint32_t)(group / d.grid[0] % d.grid[1]), (uint32_t)(group / d.grid[0] / d.grid[1])},
                    {thread % d.size[0], thread / d.size[0] % d.size[1], thread / d.size[0] / d.size[1]}};
  }
}

// clang's own findings about variables used before they have a value, where the kernel has code for that line.
void static_findings(Dispatch &d, const Variant &v) {
  size_t b = 0;
  const std::string &w = v.warnings;
  while (b < w.size()) {
    size_t e = w.find('\n', b);
    if (e == std::string::npos) e = w.size();
    std::string line = w.substr(b, e - b);
    b = e + 1;
    size_t at = line.find(": warning: ");
    if (at == std::string::npos || line.find("uninitialized") == std::string::npos) continue;
    size_t column = line.rfind(':', at - 1), row = column == std::string::npos ? column : line.rfind(':', column - 1);
    if (row == std::string::npos) continue;
    std::string file = line.substr(0, row);
    uint32_t number = (uint32_t)atoi(line.c_str() + row + 1);
    bool present = false;
    for (const LineRow &r : v.info.rows) present |= r.line == number && r.file < v.info.files.size() && v.info.files[r.file] == file;
    if (!present) continue;
    size_t flag = line.rfind(" [-W");
    simple_report(d, EMU_REPORT_UNINITIALISED_PRIVATE, line.substr(at + 11, flag == std::string::npos ? flag : flag - at - 11), -1, 0, file, number);
  }
}

void refuse(emu_result *r, const std::string &message) {
  r->status = EMU_STATUS_INVALID;
  r->message = message;
}

void dispatch(emu_pipeline *p, const emu_dispatch_options &o, emu_result *result) {
  int variant = variant_of(o.fast);
  bool checked = variant != kFast;
  prepare(p, variant);
  Variant &v = p->variants[variant];
  Dispatch d;
  d.options = &o;
  d.info = &v.info;
  d.checked = checked;
  d.simd_width = p->simd_width;
  d.lane_bits = p->simd_width == 64 ? 6 : 5;
  d.max_reports = o.max_reports ? o.max_reports : 64;
  uint64_t threads = 1, groups = 1;
  for (int a = 0; a < 3; a++) {
    d.size[a] = o.threads_per_threadgroup[a];
    if (d.size[a] == 0) return refuse(result, "a dimension of threadsPerThreadgroup is 0");
    threads *= d.size[a];
    if (o.grid_in_threads) d.grid_threads[a] = o.grid[a], d.grid[a] = (uint32_t)(((uint64_t)o.grid[a] + d.size[a] - 1) / d.size[a]);
    else d.grid[a] = o.grid[a], d.grid_threads[a] = o.grid[a] * d.size[a];
    groups *= d.grid[a];
  }
  if (threads > p->max_threads)
    return refuse(result, "threads per threadgroup (" + std::to_string(threads) + ") exceed the pipeline's maxTotalThreadsPerThreadgroup (" + std::to_string(p->max_threads) + ")");
  d.threadgroups = groups;

  // Threadgroup memory: the kernel's variables, then the dynamic arguments with gaps between.
  std::unique_ptr<Image> image = take_image(v);
  uint32_t total = p->static_size;
  for (const SharedVariable &s : v.info.variables) d.shared.push_back({s.offset, s.offset + s.size, -1, s.name});
  uint32_t at = (uint32_t)image->arena_static + 256;
  for (uint32_t &s : d.shared_offset) s = (uint32_t)image->arena_size - 64;
  for (size_t i = 0; i < o.threadgroup_memory_count; i++) {
    const emu_threadgroup_memory &t = o.threadgroup_memory[i];
    if (t.index >= EMU_MAX_THREADGROUP_ARGUMENTS) return refuse(result, "threadgroup memory index " + std::to_string(t.index) + " is out of range");
    if (t.length % 16) return refuse(result, "threadgroup memory length " + std::to_string(t.length) + " is not a multiple of 16");
    std::string name;
    for (const Argument &a : p->arguments)
      if (a.kind == EMU_ARGUMENT_THREADGROUP && a.index == t.index) name = a.name;
    total += t.length;
    if (total > EMU_MAX_THREADGROUP_MEMORY || at + t.length + 1024 > image->arena_size) continue;
    d.shared_offset[t.index] = at;
    d.shared.push_back({at, at + t.length, (int32_t)t.index, name});
    at += t.length + 1024;
    at = (at + 63) & ~63u;
  }
  d.shared_used = at;
  std::sort(d.shared.begin(), d.shared.end(), [](const SharedRange &a, const SharedRange &b) { return a.begin < b.begin; });
  if (total > EMU_MAX_THREADGROUP_MEMORY) {
    simple_report(d, EMU_REPORT_THREADGROUP_MEMORY, "'" + kernel_of(p).host_name + "' needs " + std::to_string(total) + " bytes of threadgroup memory, of which " +
                                                        std::to_string(p->static_size) + " are static; the limit is " + std::to_string(EMU_MAX_THREADGROUP_MEMORY),
                  -1, 0);
    result->reports = std::move(d.reports);
    return refuse(result, result->reports[0]->message);
  }

  static unsigned char *const unbound = (unsigned char *)mmap(nullptr, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  for (void *&b : d.buffers) b = checked ? nullptr : unbound;
  for (size_t i = 0; i < o.buffer_count; i++) {
    const emu_buffer &b = o.buffers[i];
    if (b.index >= EMU_MAX_BUFFERS) return refuse(result, "buffer index " + std::to_string(b.index) + " is out of range");
    if (b.offset > b.length) return refuse(result, "the offset of buffer " + std::to_string(b.index) + " lies beyond its length");
    d.buffers[b.index] = (unsigned char *)b.data + b.offset;
    Binding n{};
    n.begin = (unsigned char *)b.data + b.offset;
    n.end = (unsigned char *)b.data + b.length;
    n.index = b.index;
    n.flags = b.flags;
    n.name = "";
    uint32_t align = 4;
    bool used = false;
    for (const Argument &a : p->arguments)
      if (a.kind != EMU_ARGUMENT_THREADGROUP && a.index == b.index && a.form.size) {
        used = true;
        n.name = a.name.c_str();
        n.writable = a.kind == EMU_ARGUMENT_DEVICE && a.form.is_writable;
        align = a.form.align;
        n.float_bytes = a.form.float_bytes;
        if (a.form.is_reference && b.length - b.offset < a.form.size)
          return refuse(result, "buffer(" + std::to_string(a.index) + ") '" + a.name + "' has " + std::to_string(b.length - b.offset) + " bytes; its type needs " + std::to_string(a.form.size));
        if (checked && (uintptr_t)n.begin % a.form.align)
          simple_report(d, EMU_REPORT_MISALIGNED, "buffer(" + std::to_string(a.index) + ") '" + a.name + "' starts at an address that is not a multiple of " + std::to_string(a.form.align), (int)a.index, 0);
      }
    if (!used) continue;
    d.bindings.push_back(n);
    if (checked && n.writable && n.end > n.begin) {
      Region r{n.begin, n.end, align >= 4 ? 2u : align == 2 ? 1u : 0u, (b.flags & EMU_BUFFER_UNINITIALISED) != 0, nullptr, 0};
      for (size_t k = 0; k < d.regions.size();)  // overlapping bindings share their cells
        if (d.regions[k].begin < r.end && r.begin < d.regions[k].end) {
          r.begin = std::min(r.begin, d.regions[k].begin), r.end = std::max(r.end, d.regions[k].end);
          r.shift = std::min(r.shift, d.regions[k].shift);
          d.regions.erase(d.regions.begin() + (long)k);
        } else {
          k++;
        }
      d.regions.push_back(r);
    }
  }
  std::sort(d.bindings.begin(), d.bindings.end(), [](const Binding &a, const Binding &b) { return a.begin < b.begin; });
  struct Cleanup {
    Dispatch *d;
    ~Cleanup() {
      for (Region &r : d->regions)
        if (r.cells) munmap(r.cells, r.cell_bytes);
    }
  } cleanup{&d};
  for (Region &r : d.regions) {
    r.cell_bytes = (((size_t)(r.end - r.begin) >> r.shift) + 2) * sizeof(Cell);
    r.cells = (Cell *)mmap(nullptr, r.cell_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (r.cells == MAP_FAILED) {
      r.cells = nullptr;
      return refuse(result, "no memory for the checker's shadow");
    }
  }
  for (Binding &b : d.bindings)
    for (Region &r : d.regions)
      if (b.begin < r.end && r.begin < b.end) {
        // A read-only binding may stick out of the region it overlaps; only whole cover gets cells.
        if (b.begin >= r.begin && b.end <= r.end) b.region = &r;
      }

  install_signals();
  static const uint32_t processors = std::max(1u, std::thread::hardware_concurrency());  // reads a file of the system's
  uint32_t hosts = o.host_threads ? o.host_threads : checked ? 1 : processors;
  hosts = (uint32_t)std::min<uint64_t>(hosts, std::max<uint64_t>(1, groups));
  if (threads * groups <= kFewThreads && !o.host_threads) hosts = 1;
  double start = monotonic_seconds();
  if (groups) {
    if (checked) static_findings(d, v);
    Watch watch(&d.stop, o.time_limit > 0 ? o.time_limit : 60, o.cancel);
    std::atomic<Image *> first{image.release()};
    run_on_hosts(hosts - 1, [&] {
      try {
        std::unique_ptr<Image> own(first.exchange(nullptr));  // one of the threads gets it, the others load copies
        if (!own) own = take_image(v);
        std::unique_ptr<Machine> m = take_machine();
        need_signal_stack();
        watch.add(pthread_self());
        m->run(&d, own.get());
        watch.remove(pthread_self());
        give_machine(std::move(m));
        give_image(v, std::move(own));
      } catch (...) {
        // no memory for another copy: the others do its share
      }
    });
    if (d.next.load() < groups && !d.stop) throw std::runtime_error("no memory to run the kernel");
  } else {
    give_image(v, std::move(image));
  }
  result->seconds = monotonic_seconds() - start;
  int stop = d.stop.load();
  if (checked && !stop && !d.faulted) unwritten_outputs(d), uninitialised_results(d);
  result->reports = std::move(d.reports);
  result->counters = d.counters;
  if (stop == 1) result->status = EMU_STATUS_TIMEOUT, result->message = "the kernel did not end within the time limit";
  else if (stop == 2) result->status = EMU_STATUS_CANCELLED, result->message = "the dispatch was cancelled";
  else if (d.faulted) result->status = EMU_STATUS_FAULT;
  for (auto &r : result->reports) {
    r->report.message = r->message.c_str();
    r->report.file = r->file.c_str();
    r->report.other_file = r->other_file.c_str();
  }
  if (result->status != EMU_STATUS_OK)
    for (auto &r : result->reports)
      if (r->report.is_error && (result->status != EMU_STATUS_FAULT || r->report.report_class == EMU_REPORT_OUT_OF_BOUNDS)) {
        result->message += (result->message.empty() ? "" : ": ") + r->message;
        break;
      }
}

}  // namespace

// ---- the interface --------------------------------------------------------------------------------------------------

const char *emu_version(void) { return "1"; }
void emu_string_free(char *s) { free(s); }
void emu_configure(const char *zig, const char *include_dir, const char *cache_dir) { configure(zig, include_dir, cache_dir); }

static Source source_of(const char *text, const emu_compile_options *options) {
  Source s;
  s.text = text ? text : "";
  s.file_name = options && options->file_name && *options->file_name ? options->file_name : "program_source";
  if (!options) return s;
  if (options->language_version) s.language_version = options->language_version;
  s.fast_math = options->fast_math >= 0;
  for (size_t i = 0; i < options->macro_count; i++) s.macros.push_back({options->macros[i].name, options->macros[i].value ? options->macros[i].value : "1"});
  for (size_t i = 0; i < options->include_path_count; i++) s.include_paths.push_back(options->include_paths[i]);
  return s;
}

int emu_strict_check(const char *source, const emu_compile_options *options, char **error) {
  set_error(error, "");
  try {
    std::string found = strict_check(source_of(source, options));
    set_error(error, found);
    return found.empty() ? 0 : 1;
  } catch (const std::exception &e) {
    set_error(error, e.what());
  } catch (...) {
    set_error(error, "unknown failure");
  }
  return 1;
}

emu_library *emu_library_create(const char *source, const emu_compile_options *options, char **error) {
  set_error(error, "");
  try {
    std::unique_ptr<emu_library> l(new emu_library);
    l->source = source_of(source, options);
    std::string warnings;
    l->checked = check_source(l->source, &warnings);
    set_error(error, warnings);
    return l.release();
  } catch (const std::exception &e) {
    set_error(error, e.what());
  } catch (...) {
    set_error(error, "unknown failure");
  }
  return nullptr;
}

emu_library *emu_library_retain(emu_library *l) {
  l->references++;
  return l;
}
void emu_library_release(emu_library *l) {
  if (l && --l->references == 0) delete l;
}
size_t emu_library_function_count(const emu_library *l) { return l->checked.rewritten.kernels.size(); }
const char *emu_library_function_name(const emu_library *l, size_t i) { return i < emu_library_function_count(l) ? l->checked.rewritten.kernels[i].host_name.c_str() : nullptr; }
int64_t emu_library_find_function(const emu_library *l, const char *name) {
  const auto &k = l->checked.rewritten.kernels;
  for (size_t i = 0; i < k.size(); i++)
    if (name && k[i].host_name == name) return (int64_t)i;
  return -1;
}
uint32_t emu_library_language_version(const emu_library *l) { return l->source.language_version; }
size_t emu_library_constant_count(const emu_library *l) { return l->checked.rewritten.constants.size(); }
int emu_library_constant(const emu_library *l, size_t i, emu_function_constant *out) {
  if (i >= emu_library_constant_count(l)) return -1;
  const Constant &c = l->checked.rewritten.constants[i];
  *out = {c.name.c_str(), c.index, c.type, c.size, c.required};
  return 0;
}

emu_pipeline *emu_pipeline_create(emu_library *l, const emu_pipeline_options *o, char **error) {
  set_error(error, "");
  try {
    std::unique_ptr<emu_pipeline> p(new emu_pipeline);
    int64_t k = emu_library_find_function(l, o->function);
    if (k < 0) throw std::runtime_error(std::string("no function named '") + (o->function ? o->function : "") + "' in the library");
    p->library = l;
    p->kernel = (int)k;
    p->simd_width = o->simd_width ? o->simd_width : 32;
    if (p->simd_width != 32 && p->simd_width != 64) throw std::runtime_error("the simdgroup width is 32 or 64");
    uint32_t declared = l->checked.rewritten.kernels[k].max_total_threads;
    p->max_threads = o->max_total_threads ? o->max_total_threads : declared ? declared : EMU_MAX_THREADS_PER_THREADGROUP;
    p->max_threads = std::min<uint32_t>(p->max_threads, EMU_MAX_THREADS_PER_THREADGROUP);
    for (size_t i = 0; i < o->constant_count; i++) {
      const emu_constant_value &v = o->constants[i];
      const Constant *c = nullptr;
      for (const Constant &q : l->checked.rewritten.constants)
        if (v.name ? q.name == v.name : q.index == v.index) c = &q;
      if (!c) continue;  // as on Metal: values for constants that the library lacks are ignored
      if (v.type && v.type != c->type) throw std::runtime_error("function constant '" + c->name + "' is of another type (" + c->type_text + ") than the value given");
      p->values[c->name] = {c->type, std::string((const char *)v.data, c->size)};
    }
    prepare(p.get(), variant_of(o->fast));
    emu_library_retain(l);
    return p.release();
  } catch (const std::exception &e) {
    set_error(error, e.what());
  } catch (...) {
    set_error(error, "unknown failure");
  }
  return nullptr;
}

emu_pipeline *emu_pipeline_retain(emu_pipeline *p) {
  p->references++;
  return p;
}
void emu_pipeline_release(emu_pipeline *p) {
  if (!p || --p->references) return;
  emu_library_release(p->library);
  delete p;
}
int emu_pipeline_get_info(const emu_pipeline *p, emu_pipeline_info *out) {
  *out = {p->simd_width, p->max_threads, p->static_size, (uint32_t)p->arguments.size()};
  return 0;
}
uint32_t emu_pipeline_uses(const emu_pipeline *p) { return p->uses; }
const char *emu_pipeline_function_name(const emu_pipeline *p) { return kernel_of(p).host_name.c_str(); }
int emu_pipeline_argument(const emu_pipeline *p, size_t i, emu_argument *out) {
  if (i >= p->arguments.size()) return -1;
  const Argument &a = p->arguments[i];
  *out = {a.name.c_str(), a.index, a.kind, a.form.size, a.form.align, (int32_t)a.form.is_reference, (int32_t)(a.kind == EMU_ARGUMENT_THREADGROUP || a.form.is_writable), a.form.size != 0};
  return 0;
}

emu_result *emu_dispatch(emu_pipeline *p, const emu_dispatch_options *o) {
  emu_result *r = new (std::nothrow) emu_result;
  if (!r) return nullptr;
  try {
    dispatch(p, *o, r);
  } catch (const std::exception &e) {
    refuse(r, e.what());
  } catch (...) {
    refuse(r, "unknown failure");
  }
  for (auto &q : r->reports) q->report.message = q->message.c_str(), q->report.file = q->file.c_str(), q->report.other_file = q->other_file.c_str();
  return r;
}
void emu_result_free(emu_result *r) { delete r; }
int emu_result_status(const emu_result *r) { return r->status; }
const char *emu_result_message(const emu_result *r) { return r->message.c_str(); }
size_t emu_result_report_count(const emu_result *r) { return r->reports.size(); }
const emu_report *emu_result_report(const emu_result *r, size_t i) { return i < r->reports.size() ? &r->reports[i]->report : nullptr; }
const emu_counters *emu_result_counters(const emu_result *r) { return &r->counters; }
double emu_result_seconds(const emu_result *r) { return r->seconds; }

const char *emu_report_class_name(uint32_t c) {
  static const char *const names[] = {"", "out of bounds", "race", "race between threadgroups", "equal-value race", "uninitialised threadgroup memory", "uninitialised private memory",
                                      "uninitialised device memory", "divergent barrier", "divergent simdgroup function", "threadgroup memory", "unwritten output", "misaligned access",
                                      "endless kernel", "invalid value"};
  return c < sizeof names / sizeof *names ? names[c] : "";
}
