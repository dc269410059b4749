// What can go wrong on the way from a plan to a finished command buffer: one exception type, thrown before anything is
// committed and handed over as a value afterwards. Knows neither Metal nor XLA.
#pragma once

#include <stdexcept>
#include <string>

namespace launcher {

enum class Cause {
  kInvalidPlan,  // the plan's text, or a buffer that is not what the plan says
  kUnavailable,  // no device, macOS too old, a forked child
  kCompilation,  // a library, function or pipeline that Metal refused
  kOutOfMemory,  // no buffer, or the command buffer ran out of memory
  kTimeout,      // the GPU took too long, or macOS stopped it for the screen's sake
  kIgnored,      // macOS takes no more work from this process
  kVictim,       // other work on the GPU failed, and took this with it
  kExecution,    // any other failure of a command buffer, queue or encoder
};

// What to do about an error that nobody but this package's authors can mend.
constexpr const char* kReport = "Please report it, with what `python -m jax_mfa check` prints";

class Error : public std::runtime_error {
 public:
  Error(Cause cause, const std::string& text) : std::runtime_error(text), cause(cause) {}
  Cause cause;
};

}  // namespace launcher
