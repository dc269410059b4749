// What the device has to say and what tests may ask of it: validation reports, injected faults, options, totals.
// Every other file writes here; this one knows no Metal class.
#pragma once

#include <cstdint>
#include <string>

#include "../device.h"

namespace device {

struct Object;

// Records a misuse of the API; prints it, and aborts where that is asked for. `kind` is the stable name that tests match.
void report(const char* kind, const std::string& message, const Object* object = nullptr);

// One use of the fault of that kind, if one is armed.
bool take_fault(metal_device_fault fault);

int64_t option(metal_device_option option);
std::string device_name();  // given by metal_device_set_name; may be empty

// Command buffers that the watchdog killed; after METAL_OPTION_IGNORED_AFTER of them no other is taken.
void count_kill();
bool submissions_ignored();

enum class Total {
  kBuffersAllocated,
  kBuffersFromBytes,
  kBuffersNoCopy,
  kBuffersRefused,
  kBytesAllocated,
  kBytesNoCopy,
  kCommandBuffers,
  kEncoders,
  kDispatches,
  kBlits,
  kLibraries,
  kPipelines,
  kCompilations,  // of a function for the GPU, be it for a pipeline or an archive
  kArchiveHits,
  kHandlers,
  kCount
};
void count(Total total, int64_t by = 1);

void append_json_string(std::string& out, const std::string& text);

}  // namespace device
