// Runs a plan: its command buffers in order, completion told once. Knows Metal and plans, neither XLA nor what
// the kernels compute.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include "error.h"
#include "plan.h"

namespace launcher {

// Memory that a caller hands in for one buffer of the plan.
struct Memory {
  void* data = nullptr;
  DType dtype = DType::kOther;
  const int64_t* shape = nullptr;
  size_t rank = 0;
};

// Called once, from any thread, with the error or nullptr; must not throw.
using Done = std::function<void(const Error*)>;

// Throws Error where nothing was committed, in which case `done` is never called. The memory must stay until `done` is called;
// `operands` and `results` themselves may go before.
void launch(std::string_view plan, const std::vector<Memory>& operands, const std::vector<Memory>& results, Done done);

}  // namespace launcher
