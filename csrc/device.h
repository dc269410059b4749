// The Metal device, its queue, and what is compiled once: libraries by their text, pipelines by everything that specialises
// them, plans with their pipelines by their JSON. Knows nothing of XLA, and launches nothing.
#pragma once

#include <Foundation/Foundation.hpp>
#include <Metal/Metal.hpp>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "buffers.h"
#include "once.h"
#include "plan.h"
#include "schedule.h"

namespace launcher {

// Memory of a thread's Objective-C temporaries; every entry into this module opens one.
class Pool {
 public:
  Pool() : pool_(NS::AutoreleasePool::alloc()->init()) {}
  ~Pool() { pool_->release(); }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

 private:
  NS::AutoreleasePool* pool_;
};

// Text of an NSError in Metal's own words.
std::string text_of(const NS::Error* error);

struct Library {
  NS::SharedPtr<MTL::Library> metal;
  std::string made_of;  // text and options, as a digest
};

struct Pipeline {
  NS::SharedPtr<MTL::ComputePipelineState> state;
  uint64_t static_threadgroup_memory = 0, max_threads = 0, simd_width = 0;
};

// A plan that can run: every pipeline compiled, every size checked against the device.
struct Prepared {
  Plan plan;
  std::vector<std::vector<Piece>> command_buffers;
  std::vector<std::shared_ptr<const Pipeline>> pipelines;  // one per dispatch
  std::vector<bool> whole;                                 // per buffer: an output that one piece writes, hence in full
  std::vector<NS::SharedPtr<NS::String>> markers;          // per buffer, see buffers.h
  NS::SharedPtr<NS::String> label;                         // what Xcode's capture shows of its command buffers
  std::vector<NS::SharedPtr<NS::String>> kernels;          // per dispatch, likewise
};

struct Facts {
  std::string name, os;
  std::vector<std::string> families;
  uint64_t max_threadgroup_memory = 0;
  bool unified_memory = false;
};

class Device {
 public:
  // The process's device, made at first use; what could not be made is tried again by the next call.
  // Throws Error(kUnavailable): no device, macOS too old, no queue, or a child of a process that had used the device.
  static std::shared_ptr<Device> get();
  // Lets the device and all that is cached go; calls in flight keep theirs until they end.
  static void reset();
  // Base text of libraries, kept for the life of the process.
  static void add_source(const std::string& hash, std::string text);

  Facts facts() const;
  // Throws Error with Metal's text where the plan is wrong or something does not compile.
  std::shared_ptr<const Prepared> prepare(std::string_view plan);
  MTL::Device* metal() const { return device_.get(); }
  // Completions come in order, so nobody may run callers' code in one: a caller may wait there for another call.
  MTL::CommandQueue* queue() const { return queue_.get(); }
  // How a plan's work would be split, for explanations and tests; compiles nothing.
  std::vector<std::vector<Piece>> split(const Plan& plan) const { return schedule(plan, most_work_); }
  double command_buffer_ms() const { return command_buffer_ms_; }
  StagingPool& staging() { return staging_; }

  Device();

 private:
  std::shared_ptr<const Prepared> make_prepared(std::string_view text);
  Library make_library(const Plan& plan, const DispatchPlan& dispatch);
  std::shared_ptr<const Pipeline> pipeline(const Plan& plan, const DispatchPlan& dispatch);
  // Of all dispatches, compiled side by side; the first that fails throws.
  std::vector<std::shared_ptr<const Pipeline>> compile(const Plan& plan);

  NS::SharedPtr<MTL::Device> device_;
  NS::SharedPtr<MTL::CommandQueue> queue_;
  std::string known_as_;     // its name and macOS, with build: what is compiled is for these
  bool math_modes_ = false;  // macOS 15's setMathMode: exists
  double command_buffer_ms_ = 0;
  double most_work_ = 0;  // multiply-accumulates of a command buffer
  StagingPool staging_;
  OnceCache<Library> libraries_;
  OnceCache<Pipeline> pipelines_;
  OnceCache<Prepared> plans_;
};

}  // namespace launcher
