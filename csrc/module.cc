// The Python face: the handler as a capsule, sources in, facts and counters out. Long calls let other Python threads run.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include "archives.h"
#include "buffers.h"
#include "device.h"
#include "error.h"
#include "handler.h"
#include "recorder.h"
#include "statistics.h"

namespace nb = nanobind;
using launcher::Device;

namespace {

nb::dict device() {
  launcher::Facts facts;
  {
    nb::gil_scoped_release unlocked;
    launcher::Pool pool;
    facts = Device::get()->facts();
  }
  nb::dict out;
  out["name"] = facts.name;
  out["os"] = facts.os;
  out["families"] = facts.families;
  out["max_threadgroup_memory"] = facts.max_threadgroup_memory;
  out["unified_memory"] = facts.unified_memory;
  return out;
}

nb::dict prepare(const std::string& plan) {
  std::shared_ptr<const launcher::Prepared> prepared;
  {
    nb::gil_scoped_release unlocked;
    launcher::Pool pool;
    prepared = Device::get()->prepare(plan);
  }
  nb::dict out;
  for (size_t i = 0; i < prepared->pipelines.size(); ++i) {
    const launcher::Pipeline& pipeline = *prepared->pipelines[i];
    nb::dict limits;
    limits["static_threadgroup_memory"] = pipeline.static_threadgroup_memory;
    limits["max_threads"] = pipeline.max_threads;
    limits["simd_width"] = pipeline.simd_width;
    out[prepared->plan.dispatches[i].kernel.c_str()] = limits;
  }
  return out;
}

nb::list split(const std::string& text) {
  launcher::Plan plan;
  std::vector<std::vector<launcher::Piece>> buffers;
  {
    nb::gil_scoped_release unlocked;
    launcher::Pool pool;
    plan = launcher::parse_plan(text);
    buffers = Device::get()->split(plan);
  }
  nb::list out;
  for (const auto& pieces : buffers) {
    nb::list inner;
    for (const launcher::Piece& piece : pieces) {
      const launcher::DispatchPlan& dispatch = plan.dispatches[piece.dispatch];
      const auto whole = static_cast<double>(dispatch.threadgroups[0] * dispatch.threadgroups[1] * dispatch.threadgroups[2]);
      const auto part = static_cast<double>(piece.groups[0] * piece.groups[1] * piece.groups[2]);
      nb::dict entry;
      entry["kernel"] = dispatch.kernel;
      entry["origin"] = nb::make_tuple(piece.origin[0], piece.origin[1], piece.origin[2]);
      entry["threadgroups"] = nb::make_tuple(piece.groups[0], piece.groups[1], piece.groups[2]);
      entry["multiply_accumulates"] = dispatch.multiply_accumulates * part / whole;
      entry["barrier"] = piece.barrier;
      inner.append(entry);
    }
    out.append(inner);
  }
  return out;
}

struct Row {
  const char* name;
  std::atomic<int64_t> launcher::Statistics::* counter;
  bool cleared;
};
constexpr Row kRows[] = {
    {"calls", &launcher::Statistics::calls, true},
    {"failures", &launcher::Statistics::failures, true},
    {"command_buffers", &launcher::Statistics::command_buffers, true},
    {"dispatches", &launcher::Statistics::dispatches, true},
    {"barriers", &launcher::Statistics::barriers, true},
    {"buffers_no_copy", &launcher::Statistics::buffers_no_copy, true},
    {"buffers_staged", &launcher::Statistics::buffers_staged, true},
    {"bytes_no_copy", &launcher::Statistics::bytes_no_copy, true},
    {"bytes_staged", &launcher::Statistics::bytes_staged, true},
    {"libraries", &launcher::Statistics::libraries, true},
    {"pipelines", &launcher::Statistics::pipelines, true},
    {"pipelines_loaded", &launcher::Statistics::pipelines_loaded, true},
    {"pipelines_kept", &launcher::Statistics::pipelines_kept, true},
    {"plans", &launcher::Statistics::plans, true},
    {"retries", &launcher::Statistics::retries, true},
    {"in_flight", &launcher::Statistics::in_flight, false},
    {"staging_bytes", &launcher::Statistics::staging_bytes, false},
};

nb::dict statistics() {
  nb::dict out;
  for (const Row& row : kRows) out[row.name] = (launcher::statistics().*row.counter).load();
  return out;
}

nb::dict recorded() {
  const auto found = launcher::Recorder::get().read();
  nb::dict plans, kernels, out;
  for (const auto& [name, series] : found.first) {
    nb::dict entry;
    entry["calls"] = series.calls;
    entry["seconds"] = series.seconds;
    entry["buckets"] = std::vector<int64_t>(series.buckets.begin(), series.buckets.end());
    plans[name.c_str()] = entry;
  }
  for (const auto& [name, launches] : found.second) kernels[name.c_str()] = launches;
  out["bounds"] = std::vector<double>(launcher::kBounds.begin(), launcher::kBounds.end());
  out["plans"] = plans;
  out["kernels"] = kernels;
  return out;
}

void reset() {
  nb::gil_scoped_release unlocked;
  launcher::Pool pool;
  Device::reset();
  for (const Row& row : kRows)
    if (row.cleared) launcher::statistics().*row.counter = 0;
}

}  // namespace

NB_MODULE(_metal, m) {
  m.doc() = "Launches plans of Metal kernels from XLA programs.";
  m.def(
      "handler", [] { return nb::capsule(launcher::handler(), "xla._CUSTOM_CALL_TARGET"); },
      "The XLA FFI handler, to be registered for platform cpu under any number of names.");
  m.def("api_version", &launcher::api_version, "XLA FFI API (major, minor) that the handler was built against.");
  m.def("add_source", &Device::add_source, nb::arg("hash"), nb::arg("text"), "Makes MSL text known to plans under its hash.");
  m.def("device", &device, "Facts about the device; RuntimeError with the reason where it cannot be used.");
  m.def("prepare", &prepare, nb::arg("plan"),
        "Checks a plan and compiles its pipelines: {kernel: limits}; RuntimeError with Metal's text where that fails.");
  m.def("stage_shared_lines", &launcher::stage_shared_lines, nb::arg("below"),
        "Stages what kernels write where it shares a cache line with other memory and has fewer bytes; answers the last setting.");
  m.def("keep_pipelines", &launcher::keep_pipelines, nb::arg("folder"), nb::arg("version"),
        "Keeps compiled pipelines in a folder, where this version of the package finds them again; \"\": nowhere.");
  m.def("split", &split, nb::arg("plan"),
        "How a plan becomes command buffers on this device: for each the pieces of grids in it, with their estimated work.");
  m.def("statistics", &statistics, "Counters since the module was loaded or reset.");
  m.def(
      "record", [](bool on) { launcher::Recorder::get().record(on); }, nb::arg("on"),
      "Counts what `recorded` tells from now on, or no more.");
  m.def("recorded", &recorded,
        "Calls of each plan with a histogram of seconds, and launches of each kernel, while they were counted.");
  m.def("reset", &reset, "Lets the device, compiled pipelines and staging buffers go, and clears the counters.");
}
