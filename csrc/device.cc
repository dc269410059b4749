// Finding the device and compiling for it.
#include "device.h"

#include <pthread.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <future>
#include <map>
#include <mutex>

#include "archives.h"
#include "completions.h"
#include "error.h"
#include "statistics.h"

namespace launcher {
namespace {

constexpr int64_t kOldestMacOS = 14;  // bfloat needs MSL 3.1

// Multiply-accumulates a second to count with, by the newest family that a chip has: half of the peak of its smallest member,
// cores × 128 lanes × clock (7 × 128 × 1.28 GHz for family 7), so that larger chips get shorter command buffers than meant.
// What has no family of Apple silicon is a guess.
struct Rate {
  MTL::GPUFamily family;
  double multiply_accumulates;
};
constexpr Rate kRates[] = {
    {MTL::GPUFamilyApple10, 8e11}, {MTL::GPUFamilyApple9, 7e11}, {MTL::GPUFamilyApple8, 6e11}, {MTL::GPUFamilyApple7, 5e11}};
constexpr double kOtherRate = 5e10;

// macOS kills command buffers that take seconds; it does not say from when on.
constexpr double kCommandBufferMs = 100;
constexpr const char* kCommandBufferVariable = "JAX_MFA_COMMAND_BUFFER_MS";

// Leaked on purpose: calls may be in flight while the process ends.
struct Globals {
  std::mutex mutex;
  std::shared_ptr<Device> device;
  std::map<std::string, std::string> sources;
  std::atomic<bool> used{false}, forked{false};
};

Globals& globals() {
  static auto* made = [] {
    auto* fresh = new Globals;
    static Globals* known;
    known = fresh;
    // a child inherits neither the GPU nor, perhaps, unlocked mutexes: it learns so before it touches either
    pthread_atfork(nullptr, nullptr, [] { known->forked = known->used.load(); });
    return fresh;
  }();
  return *made;
}

void refuse_forked() {
  if (globals().forked)
    throw Error(Cause::kUnavailable,
                "this process was forked from one that had used the Metal device, which a child cannot use: start worker "
                "processes with the method \"spawn\" or \"forkserver\"");
}

MTL::DataType metal_type(ConstantType type) {
  switch (type) {
    case ConstantType::kBool: return MTL::DataTypeBool;
    case ConstantType::kShort: return MTL::DataTypeShort;
    case ConstantType::kUShort: return MTL::DataTypeUShort;
    case ConstantType::kInt: return MTL::DataTypeInt;
    case ConstantType::kUInt: return MTL::DataTypeUInt;
    case ConstantType::kFloat: return MTL::DataTypeFloat;
  }
  return MTL::DataTypeNone;
}

NS::String* string(const std::string& text) { return NS::String::string(text.c_str(), NS::UTF8StringEncoding); }

std::string text_of(const NS::String* text) { return text && text->utf8String() ? text->utf8String() : ""; }

bool at_least(int64_t major) {
  return NS::ProcessInfo::processInfo()->isOperatingSystemAtLeastVersion(NS::OperatingSystemVersion{major, 0, 0});
}

// A command-line process may be told of no default device, and a sandboxed one of no devices at all, while the other way finds
// one (ds4 pull request 92, iree issue 24834).
NS::SharedPtr<MTL::Device> find_device() {
  if (auto found = NS::TransferPtr(MTL::CreateSystemDefaultDevice())) return found;
  auto all = NS::TransferPtr(MTL::CopyAllDevices());
  MTL::Device* best = nullptr;
  for (NS::UInteger i = 0; all && i < all->count(); ++i) {
    auto* device = all->object<MTL::Device>(i);
    if (!best || (device->supportsFamily(MTL::GPUFamilyApple7) && !best->supportsFamily(MTL::GPUFamilyApple7))) best = device;
  }
  if (!best)
    throw Error(Cause::kUnavailable,
                "no Metal device was found: MTLCreateSystemDefaultDevice answers nil, and the list of MTLCopyAllDevices is empty "
                "(as in a sandbox, or a virtual machine without a GPU)");
  return NS::RetainPtr(best);
}

double rate_of(MTL::Device* device) {
  for (const Rate& known : kRates)
    if (device->supportsFamily(known.family)) return known.multiply_accumulates;
  return kOtherRate;
}

double wanted_command_buffer_ms() {
  const char* given = std::getenv(kCommandBufferVariable);  // NOLINT(concurrency-mt-unsafe): nothing here sets one
  if (!given || !*given) return kCommandBufferMs;
  char* end = nullptr;
  const double value = std::strtod(given, &end);
  if (*end || !(value > 0) || std::isinf(value))
    throw Error(Cause::kUnavailable,
                std::string(kCommandBufferVariable) + " must be a positive number of milliseconds, got " + given);
  return value;
}

template <class T>
void append(std::string& key, const T& value) {
  key.append(reinterpret_cast<const char*>(&value), sizeof value);
}

}  // namespace

std::string text_of(const NS::Error* error) { return error ? text_of(error->localizedDescription()) : "Metal gave no reason"; }

Device::Device() : device_(find_device()) {
  if (!at_least(kOldestMacOS))
    throw Error(Cause::kUnavailable, "macOS " + std::to_string(kOldestMacOS) + " or newer is needed, this is " +
                                         text_of(NS::ProcessInfo::processInfo()->operatingSystemVersionString()));
  math_modes_ = at_least(15);
  known_as_ = text_of(device_->name()) + ", " + text_of(NS::ProcessInfo::processInfo()->operatingSystemVersionString());
  queue_ = NS::TransferPtr(device_->newCommandQueue());
  if (!queue_) throw Error(Cause::kUnavailable, "the Metal device gave no command queue: start the process again");
  command_buffer_ms_ = wanted_command_buffer_ms();
  most_work_ = rate_of(device_.get()) * command_buffer_ms_ * 1e-3;
}

std::shared_ptr<Device> Device::get() {
  refuse_forked();
  Globals& all = globals();
  std::scoped_lock guard(all.mutex);
  if (!all.device) {
    all.used = true;
    all.device = std::make_shared<Device>();
  }
  return all.device;
}

void Device::reset() {
  refuse_forked();
  std::shared_ptr<Device> last;
  std::scoped_lock guard(globals().mutex);
  last.swap(globals().device);
}

void Device::add_source(const std::string& hash, std::string text) {
  Globals& all = globals();
  if (all.forked) return;  // nothing can run here, and the mutex may never open again
  std::scoped_lock guard(all.mutex);
  all.sources.insert_or_assign(hash, std::move(text));
}

Facts Device::facts() const {
  Facts out;
  out.name = text_of(device_->name());
  out.os = text_of(NS::ProcessInfo::processInfo()->operatingSystemVersionString());
  for (int generation = 1; generation <= 10; ++generation)
    if (device_->supportsFamily(static_cast<MTL::GPUFamily>(MTL::GPUFamilyApple1 + generation - 1)))
      out.families.push_back("apple" + std::to_string(generation));
  if (device_->supportsFamily(MTL::GPUFamilyMetal3)) out.families.emplace_back("metal3");
  if (device_->supportsFamily(MTL::GPUFamilyMetal4)) out.families.emplace_back("metal4");
  out.max_threadgroup_memory = device_->maxThreadgroupMemoryLength();
  out.unified_memory = device_->hasUnifiedMemory();
  return out;
}

Library Device::make_library(const Plan& plan, const DispatchPlan& dispatch) {
  std::string text;
  {
    std::scoped_lock guard(globals().mutex);
    auto found = globals().sources.find(plan.source);
    if (found == globals().sources.end())
      throw Error(Cause::kInvalidPlan, "plan " + plan.name + ": no source is registered under " + plan.source +
                                           "; was the program compiled by another version of the package?");
    text = found->second + "\n" + dispatch.instantiation;
  }
  auto options = NS::TransferPtr(MTL::CompileOptions::alloc()->init());
  options->setLanguageVersion(static_cast<MTL::LanguageVersion>(plan.language[0] << 16 | plan.language[1]));
  if (math_modes_) options->setMathMode(MTL::MathModeSafe);
  else options->setFastMathEnabled(false);
  NS::Error* error = nullptr;
  auto library = NS::TransferPtr(device_->newLibrary(string(text), options.get(), &error));
  if (!library)
    throw Error(Cause::kCompilation,
                "plan " + plan.name + ": Metal could not compile its library: " + text_of(error) + "\n" + kReport);
  count(statistics().libraries);
  return {library, digest(text + "\n" + std::to_string(plan.language[0]) + "." + std::to_string(plan.language[1]))};
}

std::shared_ptr<const Pipeline> Device::pipeline(const Plan& plan, const DispatchPlan& dispatch) {
  std::string library_key;
  append(library_key, plan.language);
  library_key += plan.source + '\n' + dispatch.instantiation;
  std::string specialised;
  for (const ConstantPlan& constant : dispatch.constants) {
    append(specialised, constant.index);
    append(specialised, constant.type);
    append(specialised, constant.value);
  }
  specialised += '\0' + dispatch.kernel;
  const std::string key = specialised + '\0' + library_key;

  return pipelines_.get(key, [&]() -> std::shared_ptr<const Pipeline> {
    auto library = libraries_.get(library_key, [&] { return std::make_shared<const Library>(make_library(plan, dispatch)); });
    auto constants = NS::TransferPtr(MTL::FunctionConstantValues::alloc()->init());
    for (const ConstantPlan& constant : dispatch.constants)
      constants->setConstantValue(constant.value.data(), metal_type(constant.type), NS::UInteger{constant.index});
    NS::Error* error = nullptr;
    const std::string place = "plan " + plan.name + ", kernel " + dispatch.kernel + ": ";
    auto function = NS::TransferPtr(library->metal->newFunction(string(dispatch.kernel), constants.get(), &error));
    if (!function)
      throw Error(Cause::kCompilation, place + "Metal could not make the function: " + text_of(error) + ". " + kReport);
    auto made = std::make_shared<Pipeline>();
    const std::string made_of = known_as_ + '\0' + library->made_of + '\0' + specialised;
    made->state = NS::TransferPtr(make_pipeline(device_.get(), function.get(), made_of, &error));
    if (!made->state)
      throw Error(Cause::kCompilation, place + "Metal could not make the pipeline: " + text_of(error) + ". " + kReport);
    made->static_threadgroup_memory = made->state->staticThreadgroupMemoryLength();
    made->max_threads = made->state->maxTotalThreadsPerThreadgroup();
    made->simd_width = made->state->threadExecutionWidth();
    return made;
  });
}

std::vector<std::shared_ptr<const Pipeline>> Device::compile(const Plan& plan) {
  using Made = std::shared_ptr<const Pipeline>;
  std::vector<std::future<Made>> coming;
  for (size_t i = 0; i < plan.dispatches.size(); ++i) {
    auto task = std::make_shared<std::packaged_task<Made()>>([this, &plan, i] {
      Pool pool;
      return pipeline(plan, plan.dispatches[i]);
    });
    coming.push_back(task->get_future());
    if (i + 1 == plan.dispatches.size()) (*task)();
    else run_elsewhere([task] { (*task)(); });
  }
  for (const std::future<Made>& each : coming) each.wait();  // they look at the plan, whatever fails
  std::vector<Made> out;
  out.reserve(coming.size());
  for (std::future<Made>& each : coming) out.push_back(each.get());
  return out;
}

std::shared_ptr<const Prepared> Device::make_prepared(std::string_view text) {
  auto made = std::make_shared<Prepared>();
  made->plan = parse_plan(text);
  const Plan& plan = made->plan;
  const uint64_t memory_limit = device_->maxThreadgroupMemoryLength();
  made->pipelines = compile(plan);
  for (size_t i = 0; i < plan.dispatches.size(); ++i) {
    const DispatchPlan& dispatch = plan.dispatches[i];
    const std::shared_ptr<const Pipeline>& compiled = made->pipelines[i];
    const std::string place = "plan " + plan.name + ", kernel " + dispatch.kernel + ": ";
    const uint64_t threads = dispatch.threads[0] * dispatch.threads[1] * dispatch.threads[2];
    if (threads > compiled->max_threads)
      throw Error(Cause::kInvalidPlan, place + std::to_string(threads) + " threads per threadgroup are asked for, the pipeline " +
                                           "takes at most " + std::to_string(compiled->max_threads) + ". " + kReport);
    uint64_t memory = compiled->static_threadgroup_memory;
    for (uint32_t length : dispatch.threadgroup_memory) memory += length;
    if (memory > memory_limit)
      throw Error(Cause::kInvalidPlan, place + std::to_string(memory) + " bytes of threadgroup memory are asked for, the device " +
                                           "has " + std::to_string(memory_limit));
  }
  made->command_buffers = split(plan);
  std::vector<int> writers(plan.buffers.size());
  for (const auto& pieces : made->command_buffers)
    for (const Piece& piece : pieces)
      for (const ArgumentPlan& argument : plan.dispatches[piece.dispatch].arguments)
        if (argument.buffer != ArgumentPlan::kBytes) ++writers[argument.buffer];
  for (size_t i = 0; i < plan.buffers.size(); ++i) {
    made->whole.push_back(plan.buffers[i].role == Role::kOutput && writers[i] == 1);
    made->markers.push_back(NS::RetainPtr(string((made->whole[i] ? "output " : "range of ") + plan.buffers[i].name)));
  }
  made->label = NS::RetainPtr(string("jax_mfa " + plan.name));
  for (const DispatchPlan& dispatch : plan.dispatches) made->kernels.push_back(NS::RetainPtr(string(dispatch.kernel)));
  count(statistics().plans);
  return made;
}

std::shared_ptr<const Prepared> Device::prepare(std::string_view plan) {
  return plans_.get(plan, [&] { return make_prepared(plan); });
}

}  // namespace launcher
