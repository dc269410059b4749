// Storage behind device.h: reports, faults, options and totals. Everything here is leaked on purpose, since worker threads
// may report while the process exits.
#include "report.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "lock.h"
#include "objc_runtime.h"

namespace device {

std::string label_of(const Object* object);  // metal_objects.cc

namespace {

constexpr size_t kMaxReports = 10000;

struct Report {
  std::string kind, message, cls, label;
};

struct Fault {
  std::atomic<int64_t> skip{0}, times{0}, hits{0};
};

struct State {
  Lock lock{Rank::kReports};
  std::vector<Report> reports;
  int64_t dropped = 0;
  Fault faults[METAL_FAULT_COUNT];
  std::atomic<int64_t> options[METAL_OPTION_COUNT];
  std::atomic<int64_t> totals[static_cast<int>(Total::kCount)];
  std::atomic<int64_t> kills{0};
  std::string name;
  State() { defaults(); }
  void defaults() {
    const char* abort_wanted = std::getenv("METAL_DEVICE_ABORT");
    for (auto& value : options) value = 0;
    options[METAL_OPTION_CHECKED] = 1;
    options[METAL_OPTION_ABORT] = abort_wanted && std::strcmp(abort_wanted, "1") == 0;
    options[METAL_OPTION_OS_VERSION] = os_version(14);
    options[METAL_OPTION_GPU_FAMILY] = 1007;
    options[METAL_OPTION_SIMD_WIDTH] = 32;
    options[METAL_OPTION_MAX_THREADS] = options[METAL_OPTION_MATRIX_THREADS] = 1024;
    options[METAL_OPTION_MEMORY_LIMIT] = int64_t{8} << 30;
    options[METAL_OPTION_TIMEOUT_MS] = 60000;
    options[METAL_OPTION_RECORD] = 256;
    options[METAL_OPTION_DEFAULT_DEVICE] = options[METAL_OPTION_LISTED] = options[METAL_OPTION_UNIFIED_MEMORY] = 1;
    options[METAL_OPTION_PAGE_SIZE] = 16384;
    options[METAL_OPTION_THREADGROUP_MEMORY] = 32768;
    options[METAL_OPTION_STACK_KIB] = 512;
    kills = 0;
  }
};

State& state() {
  static State* state = new State;
  return *state;
}

constexpr const char* kTotalNames[] = {"buffers_allocated", "buffers_from_bytes", "buffers_no_copy", "buffers_refused",
                                       "bytes_allocated",   "bytes_no_copy",      "command_buffers", "encoders",
                                       "dispatches",        "blits",              "libraries",       "pipelines",
                                       "compilations",      "archive_hits",       "handlers"};
static_assert(sizeof(kTotalNames) / sizeof(char*) == static_cast<int>(Total::kCount));

__attribute__((constructor)) void at_load() { state(); }

}  // namespace

void report(const char* kind, const std::string& message, const Object* object) {
  State& all = state();
  Report made{kind, message, object ? object->isa->name : "", object ? label_of(object) : ""};
  if (!all.options[METAL_OPTION_QUIET])
    std::fprintf(stderr, "metal device: %s: %s%s%s\n", kind, message.c_str(), made.label.empty() ? "" : ", label ",
                 made.label.c_str());
  {
    Guard guard(all.lock);
    if (all.reports.size() < kMaxReports) all.reports.push_back(std::move(made));
    else all.dropped++;
  }
  if (all.options[METAL_OPTION_ABORT]) {
    std::fflush(stderr);
    std::abort();
  }
}

bool take_fault(metal_device_fault fault) {
  Fault& armed = state().faults[fault];
  if (armed.times.load(std::memory_order_relaxed) == 0) return false;
  State& all = state();
  Guard guard(all.lock);
  if (armed.times == 0) return false;
  if (armed.skip > 0) {
    armed.skip--;
    return false;
  }
  if (armed.times > 0) armed.times--;
  armed.hits++;
  return true;
}

std::string device_name() {
  Guard guard(state().lock);
  return state().name;
}

void count_kill() { state().kills++; }

bool submissions_ignored() {
  const int64_t most = option(METAL_OPTION_IGNORED_AFTER);
  return most > 0 && state().kills >= most;
}

int64_t option(metal_device_option option) { return state().options[option].load(std::memory_order_relaxed); }

void count(Total total, int64_t by) { state().totals[static_cast<int>(total)].fetch_add(by, std::memory_order_relaxed); }

void append_json_string(std::string& out, const std::string& text) {
  out += '"';
  for (unsigned char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += static_cast<char>(c);
    } else if (c == '\n') {
      out += "\\n";
    } else if (c < 0x20) {
      char escaped[8];
      std::snprintf(escaped, sizeof escaped, "\\u%04x", c);
      out += escaped;
    } else {
      out += static_cast<char>(c);
    }
  }
  out += '"';
}

void clear_reports() {
  State& all = state();
  Guard guard(all.lock);
  all.reports.clear();
  all.dropped = 0;
}

}  // namespace device

using namespace device;

DEVICE_EXPORT void metal_device_inject(metal_device_fault fault, int64_t skip, int64_t times) {
  Fault& armed = state().faults[fault];
  Guard guard(state().lock);
  armed.skip = skip;
  armed.times = times;
}

DEVICE_EXPORT int64_t metal_device_fault_hits(metal_device_fault fault) { return state().faults[fault].hits; }

DEVICE_EXPORT void metal_device_clear_faults() {
  for (Fault& fault : state().faults) fault.times = 0, fault.skip = 0, fault.hits = 0;
}

DEVICE_EXPORT void metal_device_set_name(const char* name) {
  Guard guard(state().lock);
  state().name = name ? name : "";
}

DEVICE_EXPORT void metal_device_set_option(metal_device_option option, int64_t value) { state().options[option] = value; }
DEVICE_EXPORT int64_t metal_device_get_option(metal_device_option option) { return state().options[option]; }

DEVICE_EXPORT char* metal_device_reports_json(int clear) {
  State& all = state();
  std::string out = "[";
  {
    Guard guard(all.lock);
    for (const Report& report : all.reports) {
      out += out.size() > 1 ? ", {\"kind\": " : "{\"kind\": ";
      append_json_string(out, report.kind);
      out += ", \"message\": ";
      append_json_string(out, report.message);
      out += ", \"class\": ";
      append_json_string(out, report.cls);
      out += ", \"label\": ";
      append_json_string(out, report.label);
      out += "}";
    }
    if (all.dropped)
      out += ", {\"kind\": \"dropped\", \"message\": \"" + std::to_string(all.dropped) +
             " more reports\", \"class\": \"\", \"label\": \"\"}";
  }
  if (clear) clear_reports();
  return strdup((out + "]").c_str());
}

DEVICE_EXPORT char* metal_device_totals_json(int clear) {
  std::string out = "{";
  for (int i = 0; i < static_cast<int>(Total::kCount); ++i) {
    const int64_t value = clear ? state().totals[i].exchange(0) : state().totals[i].load();
    out += (i ? ", \"" : "\"") + std::string(kTotalNames[i]) + "\": " + std::to_string(value);
  }
  return strdup((out + "}").c_str());
}

DEVICE_EXPORT char* metal_device_live_objects_json() {
  std::string out = "{";
  for (const auto& [name, count] : live_objects()) {
    if (out.size() > 1) out += ", ";
    append_json_string(out, name);
    out += ": " + std::to_string(count);
  }
  return strdup((out + "}").c_str());
}

DEVICE_EXPORT void metal_device_free(char* text) { std::free(text); }

namespace device {
void reset_state() {
  metal_device_clear_faults();
  clear_reports();
  state().defaults();
  metal_device_set_name(nullptr);
  for (auto& total : state().totals) total = 0;
}
}  // namespace device
