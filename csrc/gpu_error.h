// What the error of a command buffer means, and what a reader can do about it.
#pragma once

#include <Metal/Metal.hpp>

#include <string>

#include "error.h"

namespace launcher {

// `place` begins the text; `command_buffer_ms` is how long command buffers are meant to take.
Error gpu_error(const std::string& place, const NS::Error* error, double command_buffer_ms);

}  // namespace launcher
