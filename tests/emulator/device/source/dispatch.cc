// Hands one encoded dispatch to the emulator core and keeps what the core found: the last dispatches in full, all reports of the
// checker without repeats, and the counters' sums. Knows no Objective-C beyond the error it answers.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>

#include "metal.h"

namespace device {
namespace {

struct Finding {
  std::string kind, message, file, other_file, kernel;
  uint32_t line, other_line;
  bool error;
  int32_t buffer_index;
  uint64_t occurrences;
};

struct Record {
  std::string kernel, label;
  uint64_t grid[3], threads[3];
  bool in_threads, checked;
  int status;
  std::string message;
  double seconds;
  uint64_t threadgroup_memory;
  emu_counters counters;
  std::vector<Finding> findings;
};

constexpr size_t kMostFindings = 1000;

struct CounterName {
  const char* name;
  uint64_t emu_counters::*field;
};
constexpr CounterName kCounters[] = {
    {"matrix_multiply_accumulates", &emu_counters::matrix_multiply_accumulates},
    {"exponentials", &emu_counters::exponentials},
    {"device_bytes_loaded", &emu_counters::device_bytes_loaded},
    {"device_bytes_stored", &emu_counters::device_bytes_stored},
    {"threadgroup_bytes_loaded", &emu_counters::threadgroup_bytes_loaded},
    {"threadgroup_bytes_stored", &emu_counters::threadgroup_bytes_stored},
    {"atomics", &emu_counters::atomics},
    {"barriers", &emu_counters::barriers},
    {"simdgroup_barriers", &emu_counters::simdgroup_barriers},
    {"simdgroup_operations", &emu_counters::simdgroup_operations},
    {"divergences", &emu_counters::divergences},
    {"threads", &emu_counters::threads},
    {"threadgroups", &emu_counters::threadgroups},
};

struct Log {
  Lock lock{Rank::kOptions};
  std::deque<Record> records;
  std::vector<Finding> findings;
  emu_counters sums{};
  uint64_t dispatches = 0;
};

Log& log() {
  static Log* made = new Log;
  return *made;
}

// Where the core finds its compiler and headers when the environment does not say; the build writes the paths in.
__attribute__((constructor)) void at_load() {
  log();
#ifdef METAL_DEVICE_ZIG
  emu_configure(std::getenv("EMU_ZIG") ? nullptr : METAL_DEVICE_ZIG, std::getenv("EMU_INCLUDE_DIR") ? nullptr : METAL_DEVICE_INCLUDE,
                nullptr);
#endif
}

void append(std::string& out, const Finding& finding) {
  out += "{\"class\": ";
  append_json_string(out, finding.kind);
  out += ", \"message\": ";
  append_json_string(out, finding.message);
  out += ", \"kernel\": ";
  append_json_string(out, finding.kernel);
  out += ", \"file\": ";
  append_json_string(out, finding.file);
  out += ", \"line\": " + std::to_string(finding.line) + ", \"other_file\": ";
  append_json_string(out, finding.other_file);
  out += ", \"other_line\": " + std::to_string(finding.other_line) + ", \"is_error\": " + (finding.error ? "true" : "false") +
         ", \"buffer_index\": " + std::to_string(finding.buffer_index) + ", \"occurrences\": " + std::to_string(finding.occurrences) + "}";
}

void append(std::string& out, const std::vector<Finding>& findings) {
  out += "[";
  for (size_t i = 0; i < findings.size(); ++i) {
    if (i) out += ", ";
    append(out, findings[i]);
  }
  out += "]";
}

void append(std::string& out, const emu_counters& counters) {
  const char* separator = "{";
  for (const CounterName& counter : kCounters) {
    out += std::string(separator) + "\"" + counter.name + "\": " + std::to_string(counters.*counter.field);
    separator = ", ";
  }
  out += "}";
}

std::string list(const uint64_t size[3]) {
  return "[" + std::to_string(size[0]) + ", " + std::to_string(size[1]) + ", " + std::to_string(size[2]) + "]";
}

void file_record(Record&& record) {
  Log& all = log();
  Guard guard(all.lock);
  all.dispatches++;
  for (const CounterName& counter : kCounters) all.sums.*counter.field += record.counters.*counter.field;
  for (const Finding& finding : record.findings) {
    bool known = false;
    for (Finding& seen : all.findings)
      if (seen.kind == finding.kind && seen.line == finding.line && seen.other_line == finding.other_line &&
          seen.kernel == finding.kernel && seen.buffer_index == finding.buffer_index && (finding.line || seen.message == finding.message)) {
        seen.occurrences += finding.occurrences;
        known = true;
        break;
      }
    if (!known && all.findings.size() < kMostFindings) all.findings.push_back(finding);
  }
  const auto keep = static_cast<size_t>(option(METAL_OPTION_RECORD));
  if (keep) all.records.push_back(std::move(record));
  while (all.records.size() > keep) all.records.pop_front();
}

Error* failure(int64_t code, const char* apple, const std::string& message, const Command& command) {
  std::string text = apple;
  text += "; kernel " + command.pipeline->function_name + command.label + ": " + message;
  return retained(error("MTLCommandBufferErrorDomain", code, text));
}

}  // namespace

namespace {

// An 8×8×8 product is 512 multiply-accumulates. Kernels without products are judged by what they load: an operand of four bytes
// for each. Bytes are counted under the checker only.
double modelled_seconds(const emu_counters& counters) {
  const auto rate = static_cast<double>(option(METAL_OPTION_RATE));
  if (rate <= 0) return 0;
  const double products = 512.0 * static_cast<double>(counters.matrix_multiply_accumulates);
  return std::max(products, static_cast<double>(counters.device_bytes_loaded) / 4) / rate;
}

}  // namespace

namespace {

// What lies beside outputs in lines that they share with memory of the CPU.
class SharedLines {
 public:
  explicit SharedLines(const Command& command) {
    const auto line = static_cast<uint64_t>(option(METAL_OPTION_LINE_BYTES));
    if (!line) return;
    for (const Binding& binding : command.bindings) {
      const Buffer* buffer = binding.buffer;
      if (!buffer || !binding.writable || buffer->mapped || buffer->life != kAlive) continue;
      keep(buffer, binding.offset / line * line, binding.offset);
      keep(buffer, binding.end, std::min(buffer->length, (binding.end + line - 1) / line * line));
    }
  }
  void put_back() const {
    for (const auto& [at, bytes] : kept_) std::memcpy(at, bytes.data(), bytes.size());
  }

 private:
  void keep(const Buffer* buffer, uint64_t begin, uint64_t end) {
    if (begin < end)
      kept_.emplace_back(buffer->memory + begin, std::string(reinterpret_cast<const char*>(buffer->memory + begin), end - begin));
  }
  std::vector<std::pair<uint8_t*, std::string>> kept_;
};

}  // namespace

Error* run_dispatch(const Command& command, double& seconds) {
  const bool checked = option(METAL_OPTION_CHECKED);
  std::vector<emu_buffer> buffers;
  buffers.reserve(command.bindings.size());
  for (const Binding& binding : command.bindings) {
    emu_buffer bound{};
    bound.index = binding.index;
    if (binding.buffer) {
      if (binding.buffer->life != kAlive)
        return failure(MTL::CommandBufferErrorPageFault,
                       "Caused GPU Address Fault Error (0000000b:kIOGPUCommandBufferCallbackErrorPageFault)",
                       "buffer " + std::to_string(binding.index) + " was deallocated before the command buffer ran", command);
      bound.data = binding.buffer->memory;
      bound.length = binding.end;
      bound.offset = binding.offset;
      bound.flags = binding.output ? EMU_BUFFER_OUTPUT : 0;
    } else {
      bound.data = binding.bytes->data;
      bound.length = binding.bytes->size;
    }
    buffers.push_back(bound);
  }
  emu_dispatch_options options{};
  options.size = sizeof options;
  for (int i = 0; i < 3; ++i) {
    options.grid[i] = static_cast<uint32_t>(command.grid[i]);
    options.threads_per_threadgroup[i] = static_cast<uint32_t>(command.threads[i]);
  }
  options.grid_in_threads = command.in_threads;
  options.fast = !checked;
  options.buffers = buffers.data();
  options.buffer_count = buffers.size();
  options.threadgroup_memory = command.threadgroup_memory.data();
  options.threadgroup_memory_count = command.threadgroup_memory.size();
  options.seed = static_cast<uint64_t>(option(METAL_OPTION_SEED));
  options.time_limit = static_cast<double>(option(METAL_OPTION_TIMEOUT_MS)) * 1e-3;
  const SharedLines beside(command);
  emu_result* result = emu_dispatch(command.pipeline->compiled, &options);
  beside.put_back();
  count(Total::kDispatches);
  if (!result) return failure(MTL::CommandBufferErrorInternal, "Internal Error", "no memory for the dispatch", command);

  Record record{};
  record.kernel = command.pipeline->function_name;
  record.label = command.label;
  std::memcpy(record.grid, command.grid, sizeof record.grid);
  std::memcpy(record.threads, command.threads, sizeof record.threads);
  record.in_threads = command.in_threads;
  record.checked = checked;
  record.status = emu_result_status(result);
  record.message = emu_result_message(result);
  record.seconds = emu_result_seconds(result);
  record.threadgroup_memory = command.pipeline->info.static_threadgroup_memory_length;
  for (const emu_threadgroup_memory& memory : command.threadgroup_memory) record.threadgroup_memory += memory.length;
  record.counters = *emu_result_counters(result);
  seconds = modelled_seconds(record.counters);
  for (size_t i = 0; i < emu_result_report_count(result); ++i) {
    const emu_report* found = emu_result_report(result, i);
    record.findings.push_back({emu_report_class_name(found->report_class), found->message, found->file, found->other_file,
                               record.kernel, found->line, found->other_line, found->is_error != 0, found->buffer_index,
                               found->occurrences});
    if (!option(METAL_OPTION_QUIET)) std::fprintf(stderr, "metal device: kernel %s: %s\n", record.kernel.c_str(), found->message);
  }
  emu_result_free(result);
  const int status = record.status;
  const std::string message = record.message;
  file_record(std::move(record));
  switch (status) {
    case EMU_STATUS_OK:
      return nullptr;
    case EMU_STATUS_FAULT:
      return failure(MTL::CommandBufferErrorPageFault,
                     "Caused GPU Address Fault Error (0000000b:kIOGPUCommandBufferCallbackErrorPageFault)", message, command);
    case EMU_STATUS_TIMEOUT:
      return failure(MTL::CommandBufferErrorTimeout,
                     "Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout)", message, command);
    default:
      return failure(MTL::CommandBufferErrorInternal, "Internal Error (0000000e:kIOGPUCommandBufferCallbackErrorInternal)", message,
                     command);
  }
}

void reset_state();  // report.cc

void clear_log() {
  Log& all = log();
  Guard guard(all.lock);
  all.records.clear();
  all.findings.clear();
  all.sums = {};
  all.dispatches = 0;
}

}  // namespace device

using namespace device;

DEVICE_EXPORT char* metal_device_dispatches_json(int clear) {
  Log& all = log();
  std::string out = "[";
  Guard guard(all.lock);
  for (const Record& record : all.records) {
    if (out.size() > 1) out += ", ";
    out += "{\"kernel\": ";
    append_json_string(out, record.kernel);
    out += ", \"label\": ";
    append_json_string(out, record.label.empty() ? "" : record.label.substr(5));
    out += ", \"grid\": " + list(record.grid) + ", \"threads_per_threadgroup\": " + list(record.threads) +
           ", \"grid_in_threads\": " + (record.in_threads ? "true" : "false") + ", \"checked\": " + (record.checked ? "true" : "false") +
           ", \"threadgroup_memory\": " + std::to_string(record.threadgroup_memory) + ", \"status\": " + std::to_string(record.status) +
           ", \"message\": ";
    append_json_string(out, record.message);
    char seconds[32];
    std::snprintf(seconds, sizeof seconds, "%.9f", record.seconds);
    out += std::string(", \"seconds\": ") + seconds + ", \"counters\": ";
    append(out, record.counters);
    out += ", \"reports\": ";
    append(out, record.findings);
    out += "}";
  }
  if (clear) all.records.clear();
  return strdup((out + "]").c_str());
}

DEVICE_EXPORT char* metal_device_checker_json(int clear) {
  Log& all = log();
  std::string out = "{\"dispatches\": ";
  {
    Guard guard(all.lock);
    out += std::to_string(all.dispatches) + ", \"counters\": ";
    append(out, all.sums);
    out += ", \"reports\": ";
    append(out, all.findings);
    out += "}";
  }
  if (clear) clear_log();
  return strdup(out.c_str());
}

DEVICE_EXPORT void metal_device_reset() {
  reset_state();
  clear_log();
}
