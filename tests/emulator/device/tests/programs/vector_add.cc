// A correct host program against metal-cpp: library from source, pipeline, three buffers, one dispatch, a completed handler.
// What a launcher does, in one page; it must run unchanged on a Mac.
#define NS_PRIVATE_IMPLEMENTATION
#define MTL_PRIVATE_IMPLEMENTATION
#include <Foundation/Foundation.hpp>
#include <Metal/Metal.hpp>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <thread>

namespace {

const char* kSource = R"(
#include <metal_stdlib>
using namespace metal;
kernel void add(device const float* a [[buffer(0)]],
                device const float* b [[buffer(1)]],
                device float* out [[buffer(2)]],
                constant uint& n [[buffer(3)]],
                uint i [[thread_position_in_grid]]) {
  if (i < n) out[i] = a[i] + b[i];
}
)";

int failed(const char* what, NS::Error* error) {
  std::fprintf(stderr, "%s: %s\n", what, error ? error->localizedDescription()->utf8String() : "nil");
  return 1;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int vector_add(const float* a, const float* b, float* out, unsigned n) {
  NS::AutoreleasePool* pool = NS::AutoreleasePool::alloc()->init();
  int status = 0;
  NS::Error* error = nullptr;
  MTL::Device* device = MTL::CreateSystemDefaultDevice();
  if (!device) {
    pool->release();
    return 2;
  }
  auto* options = MTL::CompileOptions::alloc()->init();
  options->setFastMathEnabled(false);
  options->setLanguageVersion(MTL::LanguageVersion3_1);
  auto* library = device->newLibrary(NS::String::string(kSource, NS::UTF8StringEncoding), options, &error);
  options->release();
  if (!library) {
    status = failed("library", error);
  } else {
    auto* function = library->newFunction(MTLSTR("add"));
    auto* pipeline = device->newComputePipelineState(function, &error);
    if (!pipeline) {
      status = failed("pipeline", error);
    } else {
      auto* queue = device->newCommandQueue();
      auto* left = device->newBuffer(a, n * sizeof(float), MTL::ResourceStorageModeShared);
      auto* right = device->newBuffer(b, n * sizeof(float), MTL::ResourceStorageModeShared);
      auto* result = device->newBuffer(n * sizeof(float), MTL::ResourceStorageModeShared);
      auto* commands = queue->commandBuffer();
      std::atomic<bool> elsewhere{false};
      const std::thread::id caller = std::this_thread::get_id();
      commands->addCompletedHandler([&](MTL::CommandBuffer*) { elsewhere = std::this_thread::get_id() != caller; });
      auto* encoder = commands->computeCommandEncoder();
      encoder->setComputePipelineState(pipeline);
      encoder->setBuffer(left, 0, 0);
      encoder->setBuffer(right, 0, 1);
      encoder->setBuffer(result, 0, 2);
      encoder->setBytes(&n, sizeof n, 3);
      encoder->dispatchThreads(MTL::Size(n, 1, 1), MTL::Size(64, 1, 1));
      encoder->endEncoding();
      commands->commit();
      commands->waitUntilCompleted();
      if (commands->status() != MTL::CommandBufferStatusCompleted) {
        status = failed("command buffer", commands->error());
      } else {
        std::memcpy(out, result->contents(), n * sizeof(float));
        if (!elsewhere) status = 3;
      }
      left->release();
      right->release();
      result->release();
      queue->release();
      pipeline->release();
    }
    function->release();
    library->release();
  }
  device->release();
  pool->release();
  return status;
}
