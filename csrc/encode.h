// A part of a plan into a command encoder, with given buffers. Knows neither queues nor completion; `launch` and `host` call it.
#pragma once

#include <Metal/Metal.hpp>

#include <vector>

#include "device.h"

namespace launcher {

// Where the array of one of the plan's buffers begins.
struct Place {
  MTL::Buffer* buffer = nullptr;
  uint64_t offset = 0;
};

// Encodes the dispatches of the plan's command buffer `at`; `places` are those of Plan::buffers. Within it, they are in order
// in a concurrent encoder too.
void encode(const Prepared& prepared, size_t at, const std::vector<Place>& places, MTL::ComputeCommandEncoder* encoder);

}  // namespace launcher
