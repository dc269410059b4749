// The C interface for hosts: checks what they hand in, and lets no exception through.
#include "host.h"

#include <cstring>
#include <memory>

#include "encode.h"
#include "error.h"

struct jax_mfa_plan {
  std::shared_ptr<const launcher::Prepared> prepared;
};

namespace {

using launcher::Cause;
using launcher::Error;

// What `work` returns, or `failed` and a text.
template <typename Result, typename Work>
Result guarded(Result failed, char* error, size_t size, Work work) noexcept {
  auto say = [&](const char* text) {
    if (size) std::strncpy(error, text, size - 1)[size - 1] = '\0';
  };
  try {
    launcher::Pool pool;
    return work();
  } catch (const std::exception& reason) {
    say(reason.what());
  } catch (...) {
    say("an unknown exception");
  }
  return failed;
}

[[noreturn]] void refuse(const launcher::Plan& plan, const std::string& why) {
  throw Error(Cause::kInvalidPlan, "plan " + plan.name + why);
}

int role_of(launcher::Role role) {
  switch (role) {
    case launcher::Role::kInput: return JAX_MFA_INPUT;
    case launcher::Role::kOutput: return JAX_MFA_OUTPUT;
    case launcher::Role::kUpdated: return JAX_MFA_UPDATED;
    case launcher::Role::kScratch: break;
  }
  return JAX_MFA_SCRATCH;
}

launcher::Place checked(const launcher::Plan& plan, size_t at, const jax_mfa_place& given) {
  const launcher::BufferPlan& wanted = plan.buffers[at];
  auto* buffer = static_cast<MTL::Buffer*>(given.buffer);
  if (!buffer) refuse(plan, ": " + wanted.name + " has no buffer");
  if (given.offset % 16) refuse(plan, ": " + wanted.name + " begins at " + std::to_string(given.offset) + ", no multiple of 16");
  if (given.offset > buffer->length() || buffer->length() - given.offset < wanted.bytes)
    refuse(plan, ": " + wanted.name + " has " + std::to_string(wanted.bytes) + " bytes, and its buffer " +
                     std::to_string(buffer->length()) + " from " + std::to_string(given.offset) + " on");
  return {buffer, given.offset};
}

}  // namespace

extern "C" {

int jax_mfa_host_api(void) { return JAX_MFA_HOST_API; }

void jax_mfa_add_source(const char* hash, const char* text) { launcher::Device::add_source(hash, text); }

jax_mfa_plan* jax_mfa_prepare(const char* plan, size_t length, char* error, size_t size) {
  return guarded<jax_mfa_plan*>(nullptr, error, size,
                                [&] { return new jax_mfa_plan{launcher::Device::get()->prepare(std::string_view(plan, length))}; });
}

void jax_mfa_release(jax_mfa_plan* plan) {
  launcher::Pool pool;
  delete plan;
}

size_t jax_mfa_buffers(const jax_mfa_plan* plan) { return plan->prepared->plan.buffers.size(); }

jax_mfa_buffer jax_mfa_buffer_at(const jax_mfa_plan* plan, size_t at) {
  const launcher::BufferPlan& buffer = plan->prepared->plan.buffers[at];
  return {buffer.name.c_str(), role_of(buffer.role), buffer.bytes};
}

size_t jax_mfa_parts(const jax_mfa_plan* plan) { return plan->prepared->command_buffers.size(); }

int jax_mfa_encode(const jax_mfa_plan* plan, size_t part, void* encoder, const jax_mfa_place* places, size_t count, char* error,
                   size_t size) {
  return guarded<int>(1, error, size, [&] {
    const launcher::Prepared& prepared = *plan->prepared;
    const size_t buffers = prepared.plan.buffers.size(), parts = prepared.command_buffers.size();
    if (count != buffers) refuse(prepared.plan, " has " + std::to_string(buffers) + " buffers, got " + std::to_string(count));
    if (part >= parts) refuse(prepared.plan, " has " + std::to_string(parts) + " parts, got part " + std::to_string(part));
    if (!encoder) throw Error(Cause::kInvalidPlan, "the encoder is null");
    std::vector<launcher::Place> checked_places;
    checked_places.reserve(count);
    for (size_t at = 0; at < count; ++at) checked_places.push_back(checked(prepared.plan, at, places[at]));
    launcher::encode(prepared, part, checked_places, static_cast<MTL::ComputeCommandEncoder*>(encoder));
    return 0;
  });
}

}  // extern "C"
