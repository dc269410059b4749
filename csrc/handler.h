// The XLA FFI handler: one function for every target name, with the plan as its string attribute `plan`, operands in the order
// of the plan's inputs and results in that of its outputs and scratch. Knows XLA and the launcher, and no Metal.
#pragma once

#include <utility>

namespace launcher {

void* handler();
// Major and minor FFI API version that this was built against.
std::pair<int, int> api_version();

}  // namespace launcher
