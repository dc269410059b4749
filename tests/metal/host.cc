// A host as a plugin might be one: with a queue of its own, it finds `csrc/host.h` in the module that Python has loaded, and puts
// two attentions between its own dispatches in one command buffer. Knows Metal and that header, nothing of the launcher.
#define NS_PRIVATE_IMPLEMENTATION
#define MTL_PRIVATE_IMPLEMENTATION
#include <Foundation/Foundation.hpp>
#include <Metal/Metal.hpp>

#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "host.h"

namespace {

const char* kSource = R"(
#include <metal_stdlib>
using namespace metal;
kernel void combine(device const float* a [[buffer(0)]], device const float* b [[buffer(1)]], device float* out [[buffer(2)]],
                constant float& factor [[buffer(3)]], uint i [[thread_position_in_grid]]) {
  out[i] = factor * a[i] + b[i];
}
)";

#define FROM_MODULE(name) decltype(&::name) name = reinterpret_cast<decltype(&::name)>(dlsym(module, #name))
struct Attention {
  void* module;
  FROM_MODULE(jax_mfa_host_api);
  FROM_MODULE(jax_mfa_prepare);
  FROM_MODULE(jax_mfa_release);
  FROM_MODULE(jax_mfa_buffers);
  FROM_MODULE(jax_mfa_buffer_at);
  FROM_MODULE(jax_mfa_parts);
  FROM_MODULE(jax_mfa_encode);
};

template <typename T>
using Owned = NS::SharedPtr<T>;

struct Host {
  Attention attention;
  Owned<MTL::Device> device = NS::TransferPtr(MTL::CreateSystemDefaultDevice());
  Owned<MTL::CommandQueue> queue = NS::TransferPtr(device->newCommandQueue());
  Owned<MTL::ComputePipelineState> combine;
  std::vector<Owned<MTL::Buffer>> owned;
  MTL::CommandBuffer* commands = nullptr;
  MTL::ComputeCommandEncoder* encoder = nullptr;
  bool barriers = true;
  char error[512] = "";

  explicit Host(void* module) : attention{module} {
    NS::Error* why = nullptr;
    auto library = NS::TransferPtr(device->newLibrary(NS::String::string(kSource, NS::UTF8StringEncoding), nullptr, &why));
    auto function = NS::TransferPtr(library->newFunction(NS::String::string("combine", NS::UTF8StringEncoding)));
    combine = NS::TransferPtr(device->newComputePipelineState(function.get(), &why));
    if (why) std::abort();
  }

  // Of a host's own memory, at an offset as an allocator might give it.
  jax_mfa_place room(uint64_t bytes, const void* data = nullptr) {
    constexpr uint64_t offset = 64;
    owned.push_back(NS::TransferPtr(device->newBuffer(offset + bytes + 16, MTL::ResourceStorageModeShared)));
    char* at = static_cast<char*>(owned.back()->contents()) + offset;
    if (data) std::memcpy(at, data, bytes);
    return {owned.back().get(), offset};
  }

  void barrier() {
    if (barriers) encoder->memoryBarrier(MTL::BarrierScopeBuffers);
  }

  void combined(jax_mfa_place a, jax_mfa_place b, jax_mfa_place out, float factor, uint64_t count) {
    encoder->setComputePipelineState(combine.get());
    uint64_t index = 0;
    for (const jax_mfa_place& place : {a, b, out}) encoder->setBuffer(static_cast<MTL::Buffer*>(place.buffer), place.offset, index++);
    encoder->setBytes(&factor, sizeof factor, 3);
    encoder->dispatchThreads(MTL::Size(count, 1, 1), MTL::Size(64, 1, 1));
  }

  // The output of a plan over these inputs; its other buffers are made as it says.
  jax_mfa_place attend(const jax_mfa_plan* plan, const std::map<std::string, jax_mfa_place>& inputs) {
    std::vector<jax_mfa_place> places;
    jax_mfa_place out{};
    for (size_t at = 0; at < attention.jax_mfa_buffers(plan); ++at) {
      const jax_mfa_buffer buffer = attention.jax_mfa_buffer_at(plan, at);
      places.push_back(buffer.role == JAX_MFA_INPUT ? inputs.at(buffer.name) : room(buffer.bytes));
      if (buffer.role == JAX_MFA_OUTPUT && std::strcmp(buffer.name, "out") == 0) out = places.back();
    }
    for (size_t part = 0; part < attention.jax_mfa_parts(plan); ++part) {
      if (part) barrier();
      if (attention.jax_mfa_encode(plan, part, encoder, places.data(), places.size(), error, sizeof error)) return {};
    }
    return out;
  }
};

}  // namespace

// q, k, v: float32 arrays of a plan without other inputs; result: attend(attend(2q) + q) - attend(2q), of the output's shape, which is
// the query's. Returns the number of plans' parts, or -1 with a text in `error`.
extern "C" __attribute__((visibility("default"))) int run_host(const char* module_path, const char* text, const float* q,
                                                               const float* k, const float* v, uint64_t queries, uint64_t keys,
                                                               int concurrent, int barriers, float* result, char* error) {
  NS::AutoreleasePool* pool = NS::AutoreleasePool::alloc()->init();
  int answer = -1;
  {
    Host host(dlopen(module_path, RTLD_NOW | RTLD_NOLOAD));
    const Attention& attention = host.attention;
    jax_mfa_plan* plan = attention.jax_mfa_prepare(text, std::strlen(text), host.error, sizeof host.error);
    if (plan && attention.jax_mfa_host_api() == JAX_MFA_HOST_API) {
      answer = static_cast<int>(attention.jax_mfa_parts(plan));
      host.barriers = barriers;
      host.commands = host.queue->commandBuffer();
      host.encoder = host.commands->computeCommandEncoder(concurrent ? MTL::DispatchTypeConcurrent : MTL::DispatchTypeSerial);
      const uint64_t bytes = 4 * queries;
      const jax_mfa_place query = host.room(bytes, q), doubled = host.room(bytes), second = host.room(bytes), last = host.room(bytes);
      std::map<std::string, jax_mfa_place> inputs = {{"key", host.room(4 * keys, k)}, {"value", host.room(4 * keys, v)}};
      host.combined(query, query, doubled, 1.0f, queries);
      host.barrier();
      inputs["query"] = doubled;
      const jax_mfa_place first = host.attend(plan, inputs);
      host.barrier();
      if (first.buffer) {
        host.combined(first, query, second, 1.0f, queries);
        host.barrier();
        inputs["query"] = second;
        const jax_mfa_place again = host.attend(plan, inputs);
        host.barrier();
        host.combined(first, again, last, -1.0f, queries);
      } else {
        answer = -1;
      }
      host.encoder->endEncoding();
      attention.jax_mfa_release(plan);  // before its work has begun
      host.commands->commit();
      host.commands->waitUntilCompleted();
      std::memcpy(result, static_cast<char*>(static_cast<MTL::Buffer*>(last.buffer)->contents()) + last.offset, bytes);
    }
    std::strcpy(error, host.error);
  }
  pool->release();
  return answer;
}
