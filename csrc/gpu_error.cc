// Metal's own codes tell little: what macOS does to a process that holds up the GPU comes as "internal". The number that tells is
// that of the driver's error beneath it, which its text repeats in hexadecimal, most often with a name: "Impacting Interactivity
// (0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)" (llama.cpp issue 22214), "Internal Error (0000000e:Internal
// Error)" (tinygrad issue 9704), both with code 14 of IOGPUCommandQueueErrorDomain.
#include "gpu_error.h"

#include <cstdio>
#include <cstdlib>

#include "device.h"

namespace launcher {
namespace {

constexpr const char* kDriverDomain = "IOGPUCommandQueueErrorDomain";

enum class What { kOther, kSlow, kScreen, kIgnored, kVictim, kMemory, kFault, kRemoved };

struct Known {
  long driver;       // the driver's code, 0 for none
  long metal;        // MTLCommandBufferError, 0 for none that says enough
  const char* name;  // in the text, nullptr for none
  What what;
};
constexpr Known kKnown[] = {
    {14, 0, "ImpactingInteractivity", What::kScreen},
    {4, MTL::CommandBufferErrorAccessRevoked, "SubmissionsIgnored", What::kIgnored},
    {5, 0, "InnocentVictim", What::kVictim},
    {2, MTL::CommandBufferErrorTimeout, "CallbackErrorTimeout", What::kSlow},
    {3, 0, "CallbackErrorHang", What::kSlow},
    {8, MTL::CommandBufferErrorOutOfMemory, "CallbackErrorOutOfMemory", What::kMemory},
    {11, MTL::CommandBufferErrorPageFault, "CallbackErrorPageFault", What::kFault},
    {0, MTL::CommandBufferErrorDeviceRemoved, nullptr, What::kRemoved},
};

// The code of the driver's error; 0 where there is none.
long driver_code(const NS::Error* error, const std::string& text) {
  if (const NS::Dictionary* info = error->userInfo())
    if (const auto* beneath = static_cast<const NS::Error*>(info->object(NS::UnderlyingErrorKey));
        beneath && beneath->domain() && std::string(beneath->domain()->utf8String()) == kDriverDomain)
      return beneath->code();
  // "(0000000e:"
  for (size_t open = text.find('('); open != std::string::npos; open = text.find('(', open + 1)) {
    char* end = nullptr;
    const unsigned long code = std::strtoul(text.c_str() + open + 1, &end, 16);
    if (end == text.c_str() + open + 9 && *end == ':') return static_cast<long>(code);
  }
  return 0;
}

What meaning(const NS::Error* error, const std::string& text) {
  if (!error) return What::kOther;
  if (const long driver = driver_code(error, text))
    for (const Known& known : kKnown)
      if (known.driver == driver) return known.what;
  for (const Known& known : kKnown)
    if (known.name && text.find(known.name) != std::string::npos) return known.what;
  for (const Known& known : kKnown)
    if (known.metal && known.metal == error->code()) return known.what;
  return What::kOther;
}

std::string number_text(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", value);
  return text;
}

}  // namespace

Error gpu_error(const std::string& place, const NS::Error* error, double command_buffer_ms) {
  const std::string metal = text_of(error), text = place + "the GPU stopped: " + metal + ". ";
  const std::string less = "set JAX_MFA_COMMAND_BUFFER_MS to less than " + number_text(command_buffer_ms);
  switch (meaning(error, metal)) {
    case What::kSlow: return {Cause::kTimeout, text + "A command buffer took longer than macOS allows: " + less};
    case What::kScreen: return {Cause::kTimeout, text + "A command buffer kept the GPU from drawing the screen: " + less};
    case What::kIgnored:
      return {Cause::kIgnored, text +
                                   "macOS takes no more GPU work from this process because of earlier errors: start it again, "
                                   "and look for its first GPU error"};
    case What::kVictim:
      return {Cause::kVictim, text +
                                  "Other GPU work failed and took this with it, more than once: run it again, or look for the "
                                  "program that fails"};
    case What::kMemory:
      return {Cause::kOutOfMemory, text + "The GPU shares the memory of the machine: let arrays go, or divide the batch"};
    case What::kRemoved: return {Cause::kIgnored, text + "The GPU is gone: start the process again"};
    case What::kFault:
    case What::kOther: break;
  }
  return {Cause::kExecution, text + kReport};
}

}  // namespace launcher
