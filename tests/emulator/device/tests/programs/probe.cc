// Small host programs against metal-cpp, one per promise of the emulated device: correct uses, and each misuse on its own.
// Python calls them by name and then reads the device's reports; nothing here knows that the device is emulated.
#define NS_PRIVATE_IMPLEMENTATION
#define MTL_PRIVATE_IMPLEMENTATION
#include <Foundation/Foundation.hpp>
#include <Metal/Metal.hpp>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define PROBE extern "C" __attribute__((visibility("default")))
#define CHECK(condition)                                                     \
  do {                                                                       \
    if (!(condition)) {                                                      \
      std::fprintf(stderr, "%s:%d: %s\n", __func__, __LINE__, #condition);   \
      return __LINE__;                                                       \
    }                                                                        \
  } while (0)

namespace {

const char* kSource = R"(
#include <metal_stdlib>
using namespace metal;
constant float factor [[function_constant(0)]];
constant int shift [[function_constant(1)]];
constant bool has_shift = is_function_constant_defined(shift);
kernel void add(device const float* a [[buffer(0)]], device const float* b [[buffer(1)]], device float* out [[buffer(2)]],
                uint i [[thread_position_in_grid]]) {
  out[i] = a[i] + b[i];
}
kernel void twice(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) { x[i] *= 2.0f; }
kernel void offset_by(device float* x [[buffer(0)]], constant float& d [[buffer(1)]], uint i [[thread_position_in_grid]]) { x[i] += d; }
kernel void scaled(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  x[i] = x[i] * factor + (has_shift ? float(shift) : 0.0f);
}
template <typename T> kernel void fill(device T* x [[buffer(0)]], uint i [[thread_position_in_grid]]) { x[i] = T(i); }
template [[host_name("fill_float")]] kernel void fill<float>(device float*, uint);
template [[host_name("fill_int")]] kernel void fill<int>(device int*, uint);
kernel void reverse(device float* x [[buffer(0)]], threadgroup float* t [[threadgroup(0)]], uint i [[thread_position_in_threadgroup]],
                    uint n [[threads_per_threadgroup]]) {
  t[i] = x[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  x[i] = t[n - 1 - i];
}
kernel void beyond(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) { x[i + 1] = 1.0f; }
kernel void write_far(device float* x [[buffer(0)]], constant long& step [[buffer(1)]], uint i [[thread_position_in_grid]]) {
  x[long(i) + step] = -1.0f;
}
kernel void read_far(device float* x [[buffer(0)]], constant long& step [[buffer(1)]], uint i [[thread_position_in_grid]]) {
  x[i] = x[long(i) + step];
}
kernel void endless(device volatile int* x [[buffer(0)]]) { while (x[0] == 0) {} }
)";

struct Session {
  NS::AutoreleasePool* pool = NS::AutoreleasePool::alloc()->init();
  MTL::Device* device = MTL::CreateSystemDefaultDevice();
  NS::SharedPtr<MTL::Library> library;
  NS::SharedPtr<MTL::CommandQueue> queue;
  NS::Error* error = nullptr;

  Session() {
    auto options = NS::TransferPtr(MTL::CompileOptions::alloc()->init());
    options->setFastMathEnabled(false);
    library = NS::TransferPtr(device->newLibrary(NS::String::string(kSource, NS::UTF8StringEncoding), options.get(), &error));
    if (!library) std::fprintf(stderr, "%s\n", error->localizedDescription()->utf8String());
    queue = NS::TransferPtr(device->newCommandQueue());
  }
  ~Session() {
    library.reset();
    queue.reset();
    device->release();
    pool->release();
  }
  NS::SharedPtr<MTL::ComputePipelineState> pipeline(const char* name) {
    auto function = NS::TransferPtr(library->newFunction(NS::String::string(name, NS::UTF8StringEncoding)));
    if (!function) return {};
    return NS::TransferPtr(device->newComputePipelineState(function.get(), &error));
  }
  NS::SharedPtr<MTL::Buffer> floats(uint32_t n, float value = 0) {
    auto made = NS::TransferPtr(device->newBuffer(n * sizeof(float), MTL::ResourceStorageModeShared));
    auto* at = static_cast<float*>(made->contents());
    for (uint32_t i = 0; i < n; ++i) at[i] = value + static_cast<float>(i);
    return made;
  }
};

float* data(const NS::SharedPtr<MTL::Buffer>& buffer) { return static_cast<float*>(buffer->contents()); }

// An encoder with `twice` over 64 floats, one call short of correct.
struct Setting : Session {
  NS::SharedPtr<MTL::ComputePipelineState> twice = pipeline("twice");
  NS::SharedPtr<MTL::Buffer> x = floats(64);
  MTL::CommandBuffer* commands = queue->commandBuffer();
  MTL::ComputeCommandEncoder* encoder = commands->computeCommandEncoder();
  Setting() {
    encoder->setComputePipelineState(twice.get());
    encoder->setBuffer(x.get(), 0, 0);
  }
  void dispatch() { encoder->dispatchThreads(MTL::Size(64, 1, 1), MTL::Size(32, 1, 1)); }
  void finish() {
    encoder->endEncoding();
    commands->commit();
    commands->waitUntilCompleted();
  }
};

}  // namespace

// --- correct programs ----------------------------------------------------------------------------------------------------------

PROBE int device_facts() {
  Session s;
  CHECK(std::string(s.device->name()->utf8String()).rfind("Apple M", 0) == 0);
  CHECK(s.device->hasUnifiedMemory() && s.device->registryID() != 0);
  CHECK(s.device->supportsFamily(MTL::GPUFamilyApple7) && s.device->supportsFamily(MTL::GPUFamilyMetal3));
  const MTL::Size most = s.device->maxThreadsPerThreadgroup();
  CHECK(most.width == 1024 && most.height == 1024 && most.depth == 1024);
  CHECK(s.device->maxThreadgroupMemoryLength() == 32768);
  CHECK(s.device->maxBufferLength() > 0 && s.device->recommendedMaxWorkingSetSize() > 0);
  auto all = NS::TransferPtr(MTL::CopyAllDevices());
  CHECK(all->count() == 1 && all->object<MTL::Device>(0) == s.device);
  auto* info = NS::ProcessInfo::processInfo();
  CHECK(info->operatingSystemVersion().majorVersion >= 13);
  CHECK(info->isOperatingSystemAtLeastVersion({13, 0, 0}) && !info->isOperatingSystemAtLeastVersion({99, 0, 0}));
  auto pipeline = s.pipeline("twice");
  CHECK(pipeline->threadExecutionWidth() == 32 && pipeline->maxTotalThreadsPerThreadgroup() == 1024);
  CHECK(pipeline->staticThreadgroupMemoryLength() == 0);
  auto buffer = NS::TransferPtr(s.device->newBuffer(100, MTL::ResourceStorageModeShared));
  CHECK(buffer->length() == 100 && buffer->gpuAddress() != 0 && buffer->contents());
  buffer->setLabel(MTLSTR("hundred"));
  CHECK(buffer->label()->isEqualToString(NS::String::string("hundred", NS::UTF8StringEncoding)));
  return 0;
}

PROBE int foundation() {
  Session s;
  const float half = NS::Number::number(0.5f)->floatValue();
  CHECK(half == 0.5f && NS::Number::number(0.25)->doubleValue() == 0.25);
  CHECK(NS::Number::number(static_cast<unsigned long long>(UINT64_MAX))->unsignedLongLongValue() == UINT64_MAX);
  NS::String* text = (MTLSTR("abc"))->stringByAppendingString(MTLSTR("def"));
  CHECK(std::strcmp(text->utf8String(), "abcdef") == 0 && text->length() == 6);
  const NS::Range range = text->rangeOfString(MTLSTR("cd"), NS::LiteralSearch);
  CHECK(range.location == 2 && range.length == 2);
  const NS::Object* objects[] = {NS::Number::number(1), NS::Number::number(2)};
  const NS::Object* keys[] = {MTLSTR("one"), MTLSTR("two")};
  auto* dictionary = NS::Dictionary::dictionary(objects, keys, 2);
  CHECK(dictionary->count() == 2 && dictionary->object<NS::Number>(MTLSTR("two"))->intValue() == 2);
  auto* error = NS::Error::error(MTLSTR("here"), 7, NS::Dictionary::dictionary(MTLSTR("why"), NS::LocalizedDescriptionKey));
  CHECK(error->code() == 7 && std::strcmp(error->localizedDescription()->utf8String(), "why") == 0);
  CHECK(std::strcmp(error->domain()->utf8String(), "here") == 0);
  return 0;
}

PROBE int dependent_dispatches() {
  Session s;
  auto add = s.pipeline("add"), twice = s.pipeline("twice"), offset_by = s.pipeline("offset_by");
  auto a = s.floats(100), b = s.floats(100, 5), out = s.floats(100);
  auto* commands = s.queue->commandBuffer();
  auto* encoder = commands->computeCommandEncoder();
  encoder->setComputePipelineState(add.get());
  MTL::Buffer* buffers[] = {a.get(), b.get(), out.get()};
  const NS::UInteger offsets[] = {0, 0, 0};
  encoder->setBuffers(buffers, offsets, NS::Range(0, 3));
  encoder->dispatchThreads(MTL::Size(100, 1, 1), MTL::Size(32, 1, 1));
  encoder->setComputePipelineState(twice.get());
  encoder->setBuffer(out.get(), 0, 0);
  encoder->dispatchThreadgroups(MTL::Size(10, 1, 1), MTL::Size(10, 1, 1));
  encoder->endEncoding();
  auto* blit = commands->blitCommandEncoder();
  blit->copyFromBuffer(out.get(), 0, a.get(), 0, 400);
  blit->fillBuffer(b.get(), NS::Range(0, 400), 0);
  blit->endEncoding();
  encoder = commands->computeCommandEncoder();
  encoder->setComputePipelineState(offset_by.get());
  encoder->setBuffer(a.get(), 200, 0);
  const float d = 3;
  encoder->setBytes(&d, sizeof d, 1);
  encoder->dispatchThreads(MTL::Size(50, 1, 1), MTL::Size(50, 1, 1));
  encoder->endEncoding();
  commands->commit();
  commands->waitUntilCompleted();
  CHECK(commands->status() == MTL::CommandBufferStatusCompleted && !commands->error());
  CHECK(commands->GPUEndTime() >= commands->GPUStartTime() && commands->GPUStartTime() > 0);
  for (int i = 0; i < 100; ++i) {
    CHECK(data(out)[i] == 2.0f * static_cast<float>(2 * i + 5));
    CHECK(data(a)[i] == data(out)[i] + (i >= 50 ? 3.0f : 0.0f));
    CHECK(data(b)[i] == 0.0f);
  }
  return 0;
}

PROBE int specialised_functions() {
  Session s;
  CHECK(s.library->functionNames()->count() == 11);
  for (const char* way : {"index", "name", "range", "descriptor"}) {
    auto values = NS::TransferPtr(MTL::FunctionConstantValues::alloc()->init());
    const float factor = 3;
    const int shift = 4;
    const std::string how = way;
    if (how == "index" || how == "descriptor") {
      values->setConstantValue(&factor, MTL::DataTypeFloat, NS::UInteger(0));
      values->setConstantValue(&shift, MTL::DataTypeInt, NS::UInteger(1));
    } else if (how == "name") {
      values->setConstantValue(&factor, MTL::DataTypeFloat, MTLSTR("factor"));
    } else {
      values->setConstantValues(&factor, MTL::DataTypeFloat, NS::Range(0, 1));
    }
    NS::SharedPtr<MTL::Function> function;
    if (how == "descriptor") {
      auto* descriptor = MTL::FunctionDescriptor::functionDescriptor();
      descriptor->setName(MTLSTR("scaled"));
      descriptor->setSpecializedName(MTLSTR("scaled_by_three"));
      descriptor->setConstantValues(values.get());
      function = NS::TransferPtr(s.library->newFunction(descriptor, &s.error));
      CHECK(function && function->name()->isEqualToString(MTLSTR("scaled_by_three")));
    } else {
      function = NS::TransferPtr(s.library->newFunction(MTLSTR("scaled"), values.get(), &s.error));
    }
    CHECK(function);
    auto descriptor = NS::TransferPtr(MTL::ComputePipelineDescriptor::alloc()->init());
    descriptor->setComputeFunction(function.get());
    descriptor->setLabel(MTLSTR("pipeline"));
    descriptor->setThreadGroupSizeIsMultipleOfThreadExecutionWidth(true);
    auto pipeline = NS::TransferPtr(s.device->newComputePipelineState(descriptor.get(), MTL::PipelineOptionNone, nullptr, &s.error));
    CHECK(pipeline && pipeline->label()->isEqualToString(MTLSTR("pipeline")));
    auto x = s.floats(32);
    auto* commands = s.queue->commandBuffer();
    auto* encoder = commands->computeCommandEncoder();
    encoder->setComputePipelineState(pipeline.get());
    encoder->setBuffer(x.get(), 0, 0);
    encoder->dispatchThreads(MTL::Size(32, 1, 1), MTL::Size(32, 1, 1));
    encoder->endEncoding();
    commands->commit();
    commands->waitUntilCompleted();
    const float added = how == "index" || how == "descriptor" ? 4.0f : 0.0f;
    for (int i = 0; i < 32; ++i) CHECK(data(x)[i] == 3.0f * static_cast<float>(i) + added);
  }
  return 0;
}

PROBE int wrong_constants() {
  Session s;
  auto values = NS::TransferPtr(MTL::FunctionConstantValues::alloc()->init());
  CHECK(!s.library->newFunction(MTLSTR("scaled"), values.get(), &s.error));
  CHECK(s.error && s.error->localizedDescription()->length() > 0);
  const int wrong = 3;
  values->setConstantValue(&wrong, MTL::DataTypeInt, NS::UInteger(0));
  s.error = nullptr;
  CHECK(!s.library->newFunction(MTLSTR("scaled"), values.get(), &s.error));
  CHECK(s.error);
  return 0;
}

PROBE int host_names() {
  Session s;
  CHECK(s.pipeline("fill_int") && s.pipeline("fill_float") && !s.pipeline("fill"));
  return 0;
}

PROBE int threadgroup_memory() {
  Session s;
  auto reverse = s.pipeline("reverse");
  auto x = s.floats(64);
  auto* commands = s.queue->commandBuffer();
  auto* encoder = commands->computeCommandEncoder();
  encoder->setComputePipelineState(reverse.get());
  encoder->setBuffer(x.get(), 0, 0);
  encoder->setThreadgroupMemoryLength(256, 0);
  encoder->dispatchThreadgroups(MTL::Size(1, 1, 1), MTL::Size(64, 1, 1));
  encoder->endEncoding();
  commands->commit();
  commands->waitUntilCompleted();
  for (int i = 0; i < 64; ++i) CHECK(data(x)[i] == static_cast<float>(63 - i));
  return 0;
}

PROBE int handlers_and_states() {
  Session s;
  auto twice = s.pipeline("twice");
  auto x = s.floats(64);
  auto* commands = s.queue->commandBuffer();
  CHECK(commands->status() == MTL::CommandBufferStatusNotEnqueued);
  commands->enqueue();
  CHECK(commands->status() == MTL::CommandBufferStatusEnqueued);
  auto* encoder = commands->computeCommandEncoder();
  encoder->setComputePipelineState(twice.get());
  encoder->setBuffer(x.get(), 0, 0);
  encoder->dispatchThreads(MTL::Size(64, 1, 1), MTL::Size(32, 1, 1));
  encoder->endEncoding();
  std::atomic<int> order{0};
  std::atomic<bool> elsewhere{true};
  std::atomic<uint64_t> seen{0};
  const std::thread::id caller = std::this_thread::get_id();
  int scheduled = 0, completed = 0;
  commands->addScheduledHandler([&](MTL::CommandBuffer*) {
    scheduled = ++order;
    if (std::this_thread::get_id() == caller) elsewhere = false;
  });
  std::string captured = "a string long enough to live on the heap";
  commands->addCompletedHandler([&order, &completed, &elsewhere, &seen, caller, captured](MTL::CommandBuffer* done) {
    completed = captured.size() > 10 ? ++order : 0;
    seen = done->status();
    if (std::this_thread::get_id() == caller) elsewhere = false;
  });
  commands->commit();
  CHECK(commands->status() >= MTL::CommandBufferStatusCommitted);
  commands->waitUntilScheduled();
  CHECK(scheduled == 1);
  commands->waitUntilCompleted();
  CHECK(completed == 2 && elsewhere && seen == MTL::CommandBufferStatusCompleted);
  return 0;
}

PROBE int enqueue_keeps_order() {
  Session s;
  auto twice = s.pipeline("twice"), offset_by = s.pipeline("offset_by");
  auto x = s.floats(64, 1);
  auto* first = s.queue->commandBuffer();
  auto* second = s.queue->commandBuffer();
  first->enqueue();
  second->enqueue();
  auto* encoder = second->computeCommandEncoder();
  encoder->setComputePipelineState(offset_by.get());
  encoder->setBuffer(x.get(), 0, 0);
  const float d = 1;
  encoder->setBytes(&d, sizeof d, 1);
  encoder->dispatchThreads(MTL::Size(64, 1, 1), MTL::Size(32, 1, 1));
  encoder->endEncoding();
  second->commit();
  encoder = first->computeCommandEncoder();
  encoder->setComputePipelineState(twice.get());
  encoder->setBuffer(x.get(), 0, 0);
  encoder->dispatchThreads(MTL::Size(64, 1, 1), MTL::Size(32, 1, 1));
  encoder->endEncoding();
  CHECK(second->status() < MTL::CommandBufferStatusCompleted);
  first->commit();
  second->waitUntilCompleted();
  for (int i = 0; i < 64; ++i) CHECK(data(x)[i] == 2.0f * static_cast<float>(i + 1) + 1.0f);
  return 0;
}

PROBE int events() {
  Session s;
  auto shared = NS::TransferPtr(s.device->newSharedEvent());
  auto other = NS::TransferPtr(s.device->newCommandQueue());
  auto* waits = s.queue->commandBuffer();
  waits->encodeWait(shared.get(), 5);
  waits->commit();
  auto* signals = other->commandBuffer();
  signals->encodeSignalEvent(shared.get(), 5);
  CHECK(waits->status() != MTL::CommandBufferStatusCompleted);
  signals->commit();
  waits->waitUntilCompleted();
  CHECK(shared->signaledValue() == 5 && !shared->waitUntilSignaledValue(6, 10));
  return 0;
}

PROBE int no_copy_pages() {
  Session s;
  const size_t page = 16384;
  auto* raw = static_cast<char*>(mmap(nullptr, 4 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  auto* pages = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(raw) + page - 1) / page * page);
  std::atomic<int> freed{0};
  std::atomic<int>* freed_at = &freed;
  auto twice = s.pipeline("twice");
  {
    auto buffer = NS::TransferPtr(s.device->newBuffer(pages, 2 * page, MTL::ResourceStorageModeShared,
                                                      ^(void* at, NS::UInteger length) {
                                                        *freed_at = at == pages && length == 2 * page;
                                                      }));
    CHECK(buffer && buffer->contents() == pages && buffer->length() == 2 * page);
    float* x = reinterpret_cast<float*>(pages + 4096);
    for (int i = 0; i < 64; ++i) x[i] = 1;
    auto* commands = s.queue->commandBuffer();
    auto* encoder = commands->computeCommandEncoder();
    encoder->setComputePipelineState(twice.get());
    encoder->setBuffer(buffer.get(), 4096, 0);
    encoder->dispatchThreads(MTL::Size(64, 1, 1), MTL::Size(32, 1, 1));
    encoder->endEncoding();
    commands->commit();
    commands->waitUntilCompleted();
    for (int i = 0; i < 64; ++i) CHECK(x[i] == 2.0f);
    CHECK(freed == 0);
  }
  CHECK(freed == 1);
  munmap(raw, 4 * page);
  return 0;
}

PROBE int no_copy_misaligned() {
  Session s;
  const size_t page = 16384;
  auto* pages = static_cast<char*>(std::aligned_alloc(page, 4 * page));
  CHECK(!s.device->newBuffer(pages + 4096, page, MTL::ResourceStorageModeShared, nullptr));
  CHECK(!s.device->newBuffer(pages, page + 4096, MTL::ResourceStorageModeShared, nullptr));
  std::free(pages);
  return 0;
}

// Runs the same work again and again: nothing may grow.
PROBE int repeat(int times) {
  Session s;
  auto twice = s.pipeline("twice");
  auto x = s.floats(32);
  for (int i = 0; i < times; ++i) {
    auto* pool = NS::AutoreleasePool::alloc()->init();
    auto* commands = s.queue->commandBuffer();
    commands->addCompletedHandler([](MTL::CommandBuffer*) {});
    auto* encoder = commands->computeCommandEncoder();
    encoder->setComputePipelineState(twice.get());
    encoder->setBuffer(x.get(), 0, 0);
    encoder->dispatchThreads(MTL::Size(1, 1, 1), MTL::Size(1, 1, 1));
    encoder->endEncoding();
    commands->commit();
    commands->waitUntilCompleted();
    pool->release();
  }
  return 0;
}

// Command buffers that hold nothing: what the device itself costs.
PROBE int repeat_empty(int times) {
  Session s;
  for (int i = 0; i < times; ++i) {
    auto* pool = NS::AutoreleasePool::alloc()->init();
    auto* commands = s.queue->commandBuffer();
    commands->commit();
    commands->waitUntilCompleted();
    pool->release();
  }
  return 0;
}

PROBE int many_threads(int threads, int times) {
  Session s;
  auto add = s.pipeline("add");
  std::atomic<int> wrong{0};
  std::vector<std::thread> all;
  for (int t = 0; t < threads; ++t)
    all.emplace_back([&, t] {
      auto* pool = NS::AutoreleasePool::alloc()->init();
      for (int i = 0; i < times; ++i) {
        auto* inner = NS::AutoreleasePool::alloc()->init();
        auto a = s.floats(50, static_cast<float>(t)), b = s.floats(50, static_cast<float>(i)), out = s.floats(50);
        auto* commands = s.queue->commandBuffer();
        auto* encoder = commands->computeCommandEncoder();
        encoder->setComputePipelineState(add.get());
        encoder->setBuffer(a.get(), 0, 0);
        encoder->setBuffer(b.get(), 0, 1);
        encoder->setBuffer(out.get(), 0, 2);
        encoder->dispatchThreads(MTL::Size(50, 1, 1), MTL::Size(32, 1, 1));
        encoder->endEncoding();
        std::atomic<bool> called{false};
        commands->addCompletedHandler([&](MTL::CommandBuffer*) { called = true; });
        commands->commit();
        commands->waitUntilCompleted();
        if (!called || commands->status() != MTL::CommandBufferStatusCompleted) wrong++;
        for (int k = 0; k < 50; ++k)
          if (data(out)[k] != static_cast<float>(t + i + 2 * k)) wrong++;
        inner->release();
      }
      pool->release();
    });
  for (auto& thread : all) thread.join();
  return wrong;
}

PROBE int handler_waits_for_another() {
  Session s;
  auto twice = s.pipeline("twice");
  auto x = s.floats(64);
  auto second = NS::RetainPtr(s.queue->commandBuffer());
  auto* encoder = second->computeCommandEncoder();
  encoder->setComputePipelineState(twice.get());
  encoder->setBuffer(x.get(), 0, 0);
  encoder->dispatchThreads(MTL::Size(64, 1, 1), MTL::Size(32, 1, 1));
  encoder->endEncoding();
  auto other = NS::TransferPtr(s.device->newCommandQueue());
  auto* first = other->commandBuffer();
  first->addCompletedHandler([&](MTL::CommandBuffer*) {
    second->commit();
    second->waitUntilCompleted();
  });
  first->commit();
  first->waitUntilCompleted();
  CHECK(second->status() == MTL::CommandBufferStatusCompleted);
  return 0;
}

// The child of a process that used the GPU gets errors, no crash, and exits well.
PROBE int forked_child() {
  Session s;
  auto twice = s.pipeline("twice");
  auto x = s.floats(64);
  repeat(1);
  const pid_t child = fork();
  if (child == 0) {
    auto* commands = s.queue->commandBuffer();
    auto* encoder = commands->computeCommandEncoder();
    encoder->setComputePipelineState(twice.get());
    encoder->setBuffer(x.get(), 0, 0);
    encoder->dispatchThreads(MTL::Size(64, 1, 1), MTL::Size(32, 1, 1));
    encoder->endEncoding();
    commands->commit();
    commands->waitUntilCompleted();
    const bool refused = commands->status() == MTL::CommandBufferStatusError && commands->error() && data(x)[1] == 1.0f;
    NS::Error* error = nullptr;
    const bool no_compiler = !s.device->newLibrary(MTLSTR("kernel void k() {}"), nullptr, &error) && error;
    std::exit(refused && no_compiler ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  return repeat(1);
}

// --- faults: how a careful launcher sees each ----------------------------------------------------------------------------------

// What went wrong, as text in `message`: "" where the whole path worked.
PROBE void whole_path(char* message, size_t room) {
  auto* pool = NS::AutoreleasePool::alloc()->init();
  auto say = [&](const char* what, NS::Error* error) {
    std::snprintf(message, room, "%s: %s", what, error ? error->localizedDescription()->utf8String() : "nil");
  };
  message[0] = 0;
  NS::Error* error = nullptr;
  auto device = NS::TransferPtr(MTL::CreateSystemDefaultDevice());
  if (!device) {
    say("device", nullptr);
    pool->release();
    return;
  }
  [&] {
    auto options = NS::TransferPtr(MTL::CompileOptions::alloc()->init());
    options->setLanguageVersion(MTL::LanguageVersion3_1);
    auto library = NS::TransferPtr(device->newLibrary(NS::String::string(kSource, NS::UTF8StringEncoding), options.get(), &error));
    if (!library) return say("library", error);
    auto function = NS::TransferPtr(library->newFunction(MTLSTR("twice")));
    if (!function) return say("function", nullptr);
    auto pipeline = NS::TransferPtr(device->newComputePipelineState(function.get(), &error));
    if (!pipeline) return say("pipeline", error);
    if (pipeline->threadExecutionWidth() != 32) return say("simd width", nullptr);
    auto queue = NS::TransferPtr(device->newCommandQueue());
    if (!queue) return say("queue", nullptr);
    const size_t page = 16384;
    auto memory = static_cast<float*>(std::aligned_alloc(page, page));
    std::memset(memory, 0, page);
    auto x = NS::TransferPtr(device->newBuffer(memory, page, MTL::ResourceStorageModeShared, nullptr));
    const bool staged = !x;
    if (staged) x = NS::TransferPtr(device->newBuffer(page, MTL::ResourceStorageModeShared));
    if (!x) {
      std::free(memory);
      return say("buffer", nullptr);
    }
    auto* commands = queue->commandBuffer();
    auto* encoder = commands ? commands->computeCommandEncoder() : nullptr;
    if (!encoder) {
      x.reset();
      std::free(memory);
      return say(commands ? "encoder" : "command buffer", nullptr);
    }
    encoder->setComputePipelineState(pipeline.get());
    encoder->setBuffer(x.get(), 0, 0);
    encoder->dispatchThreads(MTL::Size(64, 1, 1), MTL::Size(32, 1, 1));
    encoder->endEncoding();
    commands->commit();
    commands->waitUntilCompleted();
    if (commands->status() == MTL::CommandBufferStatusError) {
      std::snprintf(message, room, "command buffer: code %ld: %s", static_cast<long>(commands->error()->code()),
                    commands->error()->localizedDescription()->utf8String());
    } else if (staged) {
      say("staged", nullptr);
    }
    x.reset();
    std::free(memory);
  }();
  device.reset();
  pool->release();
}

PROBE int compile_text(const char* source, char* message, size_t room) {
  Session s;
  auto library = NS::TransferPtr(s.device->newLibrary(NS::String::string(source, NS::UTF8StringEncoding), nullptr, &s.error));
  std::snprintf(message, room, "%s", s.error ? s.error->localizedDescription()->utf8String() : "");
  return library ? 0 : 1;
}

// --- misuse: each must be reported under its own name --------------------------------------------------------------------------

PROBE int correct() { Setting s; s.dispatch(); s.finish(); CHECK(data(s.x)[3] == 6.0f); return 0; }
PROBE int committed_twice() { Setting s; s.dispatch(); s.finish(); s.commands->commit(); return 0; }
PROBE int encode_after_end() { Setting s; s.encoder->endEncoding(); s.dispatch(); s.commands->commit(); s.commands->waitUntilCompleted(); return 0; }
PROBE int encoder_not_ended() { Setting s; s.dispatch(); s.commands->commit(); s.commands->waitUntilCompleted(); return 0; }
PROBE int two_encoders() { Setting s; s.commands->computeCommandEncoder(); s.finish(); return 0; }
PROBE int encode_after_commit() { Setting s; s.finish(); s.commands->computeCommandEncoder(); return 0; }
PROBE int handler_after_commit() { Setting s; s.finish(); s.commands->addCompletedHandler([](MTL::CommandBuffer*) {}); return 0; }
PROBE int wait_before_commit() { Setting s; s.encoder->endEncoding(); s.commands->waitUntilCompleted(); return 0; }
PROBE int wait_in_handler() {
  Setting s;
  s.commands->addCompletedHandler([](MTL::CommandBuffer* done) { done->waitUntilCompleted(); });
  s.finish();
  return 0;
}
PROBE int offset_beyond() { Setting s; s.encoder->setBuffer(s.x.get(), 256, 0); s.finish(); return 0; }
PROBE int offset_misaligned() { Setting s; s.encoder->setBuffer(s.x.get(), 2, 0); s.dispatch(); s.finish(); return 0; }
PROBE int index_and_offset_swapped() { Setting s; s.encoder->setBuffer(s.x.get(), 0, 64); s.finish(); return 0; }
PROBE int too_many_threads() { Setting s; s.encoder->dispatchThreads(MTL::Size(64, 1, 1), MTL::Size(1024, 2, 1)); s.finish(); return 0; }
PROBE int zero_grid() { Setting s; s.encoder->dispatchThreadgroups(MTL::Size(0, 1, 1), MTL::Size(32, 1, 1)); s.finish(); return 0; }
PROBE int no_pipeline() {
  Session s;
  auto* commands = s.queue->commandBuffer();
  auto* encoder = commands->computeCommandEncoder();
  encoder->dispatchThreads(MTL::Size(1, 1, 1), MTL::Size(1, 1, 1));
  encoder->endEncoding();
  return 0;
}
PROBE int unbound_buffer() { Setting s; s.encoder->setBuffer(nullptr, 0, 0); s.dispatch(); s.finish(); CHECK(data(s.x)[3] == 3.0f); return 0; }
PROBE int set_bytes_too_long() { Setting s; std::vector<char> many(5000); s.encoder->setBytes(many.data(), many.size(), 1); s.finish(); return 0; }
PROBE int constant_too_small() {
  Setting s;
  auto p = s.pipeline("offset_by");
  s.encoder->setComputePipelineState(p.get());
  const short little = 1;
  s.encoder->setBytes(&little, sizeof little, 1);
  s.dispatch();
  s.finish();
  return 0;
}
PROBE int threadgroup_memory_odd() { Setting s; s.encoder->setThreadgroupMemoryLength(100, 0); s.finish(); return 0; }
PROBE int threadgroup_memory_above() { Setting s; s.encoder->setThreadgroupMemoryLength(32768 + 16, 0); s.finish(); return 0; }
PROBE int threadgroup_memory_unset() {
  Setting s;
  auto p = s.pipeline("reverse");
  s.encoder->setComputePipelineState(p.get());
  s.dispatch();
  s.finish();
  return 0;
}
PROBE int released_in_flight() {
  Session s;
  auto twice = s.pipeline("twice");
  auto* x = s.device->newBuffer(256, MTL::ResourceStorageModeShared);
  auto gate = NS::TransferPtr(s.device->newSharedEvent());
  auto* commands = s.queue->commandBufferWithUnretainedReferences();
  commands->encodeWait(gate.get(), 1);
  auto* encoder = commands->computeCommandEncoder();
  encoder->setComputePipelineState(twice.get());
  encoder->setBuffer(x, 0, 0);
  encoder->dispatchThreads(MTL::Size(64, 1, 1), MTL::Size(32, 1, 1));
  encoder->endEncoding();
  commands->commit();
  x->release();
  gate->setSignaledValue(1);
  commands->waitUntilCompleted();
  CHECK(commands->status() == MTL::CommandBufferStatusError);
  return 0;
}
PROBE int kept_while_in_flight() {
  Session s;
  auto twice = s.pipeline("twice");
  auto* x = s.device->newBuffer(256, MTL::ResourceStorageModeShared);
  auto gate = NS::TransferPtr(s.device->newSharedEvent());
  auto* commands = s.queue->commandBuffer();
  commands->encodeWait(gate.get(), 1);
  auto* encoder = commands->computeCommandEncoder();
  encoder->setComputePipelineState(twice.get());
  encoder->setBuffer(x, 0, 0);
  encoder->dispatchThreads(MTL::Size(64, 1, 1), MTL::Size(32, 1, 1));
  encoder->endEncoding();
  commands->commit();
  x->release();
  gate->setSignaledValue(1);
  commands->waitUntilCompleted();
  CHECK(commands->status() == MTL::CommandBufferStatusCompleted);
  return 0;
}
PROBE int over_release() {
  Session s;
  auto* x = s.device->newBuffer(256, MTL::ResourceStorageModeShared);
  x->release();
  x->release();
  return 0;
}
PROBE int use_of_dead_object() {
  Session s;
  auto* x = s.device->newBuffer(256, MTL::ResourceStorageModeShared);
  x->release();
  return x->length() == 0 ? 0 : 1;
}
PROBE int leak() { Session s; s.device->newBuffer(256, MTL::ResourceStorageModeShared); return 0; }
PROBE int storage_mode_as_options() { Session s; CHECK(!s.device->newBuffer(256, static_cast<MTL::ResourceOptions>(MTL::StorageModePrivate))); return 0; }
PROBE int zero_bytes() { Session s; CHECK(!s.device->newBuffer(NS::UInteger(0), MTL::ResourceStorageModeShared)); return 0; }
PROBE int private_contents() {
  Session s;
  auto x = NS::TransferPtr(s.device->newBuffer(256, MTL::ResourceStorageModePrivate));
  CHECK(!x->contents());
  return 0;
}
PROBE int did_modify() { Session s; s.floats(4)->didModifyRange(NS::Range(0, 4)); return 0; }
PROBE int no_pool() {
  std::thread([] {
    auto device = NS::TransferPtr(MTL::CreateSystemDefaultDevice());
    device->name();
  }).join();
  return 0;
}
PROBE int message_to_nil() {
  Session s;
  MTL::Library* none = nullptr;
  CHECK(!none->label());
  return 0;
}

namespace {
int two_concurrent(bool barrier) {
  Session s;
  auto twice = s.pipeline("twice");
  auto x = s.floats(64);
  auto* commands = s.queue->commandBuffer();
  auto* encoder = commands->computeCommandEncoder(MTL::DispatchTypeConcurrent);
  encoder->setComputePipelineState(twice.get());
  encoder->setBuffer(x.get(), 0, 0);
  encoder->dispatchThreads(MTL::Size(64, 1, 1), MTL::Size(32, 1, 1));
  if (barrier) encoder->memoryBarrier(MTL::BarrierScopeBuffers);
  encoder->dispatchThreads(MTL::Size(64, 1, 1), MTL::Size(32, 1, 1));
  encoder->endEncoding();
  commands->commit();
  commands->waitUntilCompleted();
  CHECK(data(x)[3] == 12.0f);
  return 0;
}
}  // namespace
PROBE int concurrent_hazard() { return two_concurrent(false); }
PROBE int concurrent_barrier() { return two_concurrent(true); }

// --- what the checker and the clock find ---------------------------------------------------------------------------------------

PROBE int kernel_beyond() {
  Session s;
  auto beyond = s.pipeline("beyond");
  auto x = s.floats(64);
  auto* commands = s.queue->commandBuffer();
  auto* encoder = commands->computeCommandEncoder();
  encoder->setComputePipelineState(beyond.get());
  encoder->setBuffer(x.get(), 0, 0);
  encoder->dispatchThreads(MTL::Size(64, 1, 1), MTL::Size(32, 1, 1));
  encoder->endEncoding();
  commands->commit();
  commands->waitUntilCompleted();
  return 0;
}
// The same kernel in the middle of a larger buffer: only a debug marker can say where the binding ends.
PROBE int kernel_beyond_marker(int marked) {
  Session s;
  auto beyond = s.pipeline("beyond");
  auto x = s.floats(256);
  if (marked) x->addDebugMarker(MTLSTR("output x"), NS::Range(256, 256));
  auto* commands = s.queue->commandBuffer();
  auto* encoder = commands->computeCommandEncoder();
  encoder->setComputePipelineState(beyond.get());
  encoder->setBuffer(x.get(), 256, 0);
  encoder->dispatchThreads(MTL::Size(64, 1, 1), MTL::Size(32, 1, 1));
  encoder->endEncoding();
  commands->commit();
  commands->waitUntilCompleted();
  return 0;
}
// Writes (or reads) `step` floats further than each thread's own in the first of three buffers; how many values of the
// others it changed.
PROBE int kernel_far(int writes, int64_t step) {
  Session s;
  auto far = s.pipeline(writes ? "write_far" : "read_far");
  auto before = s.floats(4096), x = s.floats(4096), after = s.floats(4096);
  auto* commands = s.queue->commandBuffer();
  auto* encoder = commands->computeCommandEncoder();
  encoder->setComputePipelineState(far.get());
  encoder->setBuffer(x.get(), 0, 0);
  encoder->setBytes(&step, sizeof step, 1);
  encoder->dispatchThreads(MTL::Size(4096, 1, 1), MTL::Size(32, 1, 1));
  encoder->endEncoding();
  commands->commit();
  commands->waitUntilCompleted();
  int changed = 0;
  for (int i = 0; i < 4096; ++i) changed += (data(before)[i] != float(i)) + (data(after)[i] != float(i));
  return changed;
}
// A no-copy binding over the middle of two pages, `excess` floats longer than what the marker grants it.
PROBE int no_copy_excess(int marked, int excess) {
  Session s;
  const size_t page = 16384;
  auto* raw = static_cast<char*>(mmap(nullptr, 3 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  auto* pages = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(raw) + page - 1) / page * page);
  auto fill = s.pipeline("fill_float");
  {
    auto buffer = NS::TransferPtr(s.device->newBuffer(pages, 2 * page, MTL::ResourceStorageModeShared, nullptr));
    CHECK(buffer);
    if (marked) buffer->addDebugMarker(MTLSTR("input x"), NS::Range(4096, 256));
    auto* commands = s.queue->commandBuffer();
    auto* encoder = commands->computeCommandEncoder();
    encoder->setComputePipelineState(fill.get());
    encoder->setBuffer(buffer.get(), 4096, 0);
    encoder->dispatchThreads(MTL::Size(64 + excess, 1, 1), MTL::Size(32, 1, 1));
    encoder->endEncoding();
    commands->commit();
    commands->waitUntilCompleted();
  }
  munmap(raw, 3 * page);
  return 0;
}
// Writes the first half of what is marked as output.
PROBE int kernel_half() {
  Session s;
  auto fill = s.pipeline("fill_float");
  auto x = s.floats(64);
  x->addDebugMarker(MTLSTR("output x"), NS::Range(0, 256));
  auto* commands = s.queue->commandBuffer();
  auto* encoder = commands->computeCommandEncoder();
  encoder->setComputePipelineState(fill.get());
  encoder->setBuffer(x.get(), 0, 0);
  encoder->dispatchThreads(MTL::Size(32, 1, 1), MTL::Size(32, 1, 1));
  encoder->endEncoding();
  commands->commit();
  commands->waitUntilCompleted();
  return 0;
}
PROBE int kernel_endless() {
  Session s;
  auto endless = s.pipeline("endless");
  auto x = s.floats(1);
  auto* commands = s.queue->commandBuffer();
  auto* encoder = commands->computeCommandEncoder();
  encoder->setComputePipelineState(endless.get());
  encoder->setBuffer(x.get(), 0, 0);
  encoder->dispatchThreads(MTL::Size(1, 1, 1), MTL::Size(1, 1, 1));
  encoder->endEncoding();
  commands->commit();
  commands->waitUntilCompleted();
  CHECK(commands->status() == MTL::CommandBufferStatusError && commands->error()->code() == MTL::CommandBufferErrorTimeout);
  return 0;
}

// --- loud failures: these end the process --------------------------------------------------------------------------------------

PROBE int unknown_selector() { Session s; s.device->newSamplerState(static_cast<const MTL::SamplerDescriptor*>(nullptr)); return 0; }
PROBE int unknown_class() { Session s; MTL::TextureDescriptor::alloc(); return 0; }
PROBE int too_new_selector() {
  Session s;
  auto options = NS::TransferPtr(MTL::CompileOptions::alloc()->init());
  options->setMathMode(MTL::MathModeSafe);  // macOS 15
  return 0;
}
