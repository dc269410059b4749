// Threads with large stacks that tell callers about finished work, in place of Metal's own: a caller goes on with its program
// there, and may wait for other calls. Compilations run here too. Knows neither Metal nor XLA.
#pragma once

#include <functional>

namespace launcher {

// Runs `work` on a thread of this room, at once: a new one is made where all are busy. `work` must not throw.
void run_elsewhere(std::function<void()> work);

}  // namespace launcher
