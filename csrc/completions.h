// Threads that tell callers about finished work, in place of Metal's own, where calls share a queue (see Lanes in device.h):
// a caller that goes on with its program holds up nobody here. Knows neither Metal nor XLA.
#pragma once

#include <functional>

namespace launcher {

// Runs `work` on a thread of this room, at once: a new one is made where all are busy. `work` must not throw.
void run_elsewhere(std::function<void()> work);

}  // namespace launcher
