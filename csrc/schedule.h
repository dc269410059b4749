// Which parts of a plan's grids go into which command buffer. macOS kills a command buffer that keeps the GPU for seconds, so a
// call becomes as many as its work takes, in order. Knows neither Metal nor XLA.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "plan.h"

namespace launcher {

// A box of a dispatch's threadgroups.
struct Piece {
  uint32_t dispatch = 0;  // position in Plan::dispatches
  std::array<uint64_t, 3> origin{}, groups{};
  bool barrier = false;  // it reads or writes what earlier pieces of its command buffer wrote, or writes what they read
};

// One list for each command buffer. No buffer holds more than `most` estimated multiply-accumulates, unless a single threadgroup
// does, or a dispatch that cannot be split. Dispatches without threadgroups are left out.
std::vector<std::vector<Piece>> schedule(const Plan& plan, double most);

}  // namespace launcher
