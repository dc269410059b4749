// Runs committed command buffers: in commit order within a queue, one at a time over the whole device, on worker threads that
// also call the handlers. Everything here is leaked on purpose, and a forked child starts with an idle engine.
#include <time.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "metal.h"

namespace device::engine {
namespace {

constexpr int kMostWorkers = 64;      // each may be held up in a handler
constexpr int64_t kStandbyMs = 1;     // how often a worker on standby looks whether a handler holds up what it committed
constexpr int64_t kSpinNs = 30000;    // an idle worker or waiter looks this long before it sleeps

struct State {
  Lock lock{Rank::kQueues};
  pthread_cond_t work = PTHREAD_COND_INITIALIZER;
  pthread_cond_t done = PTHREAD_COND_INITIALIZER;
  std::vector<CommandQueue*> queues;  // with something enqueued
  std::atomic<int> ready{0};          // hint for spinning workers: something may be runnable
  std::atomic<uint64_t> progress{0};  // changes with every completion
  bool executing = false;
  int workers = 0, idle = 0, busy = 0;
  int looking = 0;  // workers that spin, and look once more with the lock held before they sleep
  bool standby = false;  // a worker that sleeps for short times only, while others are in handlers
};

// Whether this thread calls completed handlers now: it can itself run what they commit, and needs to wake nobody for it.
thread_local bool t_in_handlers = false;

State* g_state = nullptr;

State& state() {
  static State* made = g_state = new State;
  return *made;
}

__attribute__((constructor)) void at_load() {
  state();
  set_fork_child_hook([] {
    // the workers are gone: whatever they held will never finish
    State& all = *g_state;
    all.work = PTHREAD_COND_INITIALIZER;
    all.done = PTHREAD_COND_INITIALIZER;
    for (CommandQueue* queue : all.queues) {
      for (CommandBuffer* buffer : queue->enqueued) {
        buffer->status = MTL::CommandBufferStatusError;
        buffer->completion->scheduled = buffer->completion->finished = true;
      }
      queue->enqueued.clear();
      queue->listed = false;
      queue->open = 0;
    }
    all.queues.clear();
    all.executing = false;
    all.workers = all.idle = all.busy = all.looking = 0;
    all.standby = false;
    t_in_handlers = false;
  });
}

int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * int64_t{1000000000} + now.tv_nsec;
}

double seconds() { return static_cast<double>(now_ns()) * 1e-9; }

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  asm volatile("yield");
#endif
}

bool blocked(const CommandBuffer* buffer) {
  if (buffer->next >= buffer->commands.size()) return false;
  const Command& command = buffer->commands[buffer->next];
  return command.kind == Command::kWait && command.event->value < command.value;
}

// The next command buffer that can go on; with the lock held.
CommandBuffer* pick() {
  State& all = state();
  if (all.executing) return nullptr;
  for (CommandQueue* queue : all.queues) {
    CommandBuffer* head = queue->enqueued.empty() ? nullptr : queue->enqueued.front();
    if (head && head->status >= MTL::CommandBufferStatusCommitted && !blocked(head)) return head;
  }
  return nullptr;
}

void* worker(void*);

// With the lock held: makes sure that somebody looks at what became runnable.
void wake() {
  State& all = state();
  all.ready++;
  if (all.looking > 0) return;
  if (all.idle > 0) {
    pthread_cond_signal(&all.work);
  } else if (all.workers < kMostWorkers && all.workers == all.busy) {
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, static_cast<size_t>(option(METAL_OPTION_STACK_KIB)) * 1024);
    pthread_t thread;
    if (pthread_create(&thread, &attributes, worker, nullptr) == 0) all.workers++;
    pthread_attr_destroy(&attributes);
  }
}

void run_blit(const Command& command) {
  if (command.kind == Command::kFill)
    std::memset(command.target->memory + command.target_offset, static_cast<int>(command.value), command.size);
  else
    std::memmove(command.target->memory + command.target_offset, command.source->memory + command.source_offset, command.size);
}

struct Callback {
  void (^block)(Event*, uint64_t);
  Ref<Event> event;
  uint64_t value;
};

// With the lock held.
void set_value(Event* event, uint64_t value, std::vector<Callback>& callbacks) {
  event->value = std::max(event->value, value);
  auto due = [&](const Event::Listener& listener) {
    if (listener.value > event->value) return false;
    callbacks.push_back({listener.block, Ref<Event>(event), event->value});
    return true;
  };
  event->listeners.erase(std::remove_if(event->listeners.begin(), event->listeners.end(), due), event->listeners.end());
  pthread_cond_broadcast(&state().done);
  wake();
}

void call(std::vector<Callback>& callbacks) {
  for (Callback& callback : callbacks) {
    callback.block(callback.event.get(), callback.value);
    _Block_release(callback.block);
  }
  callbacks.clear();
}

struct NamedError {
  metal_device_fault fault;
  int64_t code;
  const char* text;
  int64_t underlying;  // of IOGPUCommandQueueErrorDomain, the number in the text; 0: none
};
// As public reports have them: texts and underlying codes of 3 and 4 (slicer.org's forum, flutter issue 146011), of 14 under code 1
// with the name (llama.cpp issue 22214) and without (tinygrad issue 9704), of 5 (omlx). That of a removed device is a guess.
constexpr NamedError kErrors[] = {
    {METAL_FAULT_GPU, MTL::CommandBufferErrorPageFault,
     "Caused GPU Address Fault Error (0000000b:kIOGPUCommandBufferCallbackErrorPageFault)", 11},
    {METAL_FAULT_TIMEOUT, MTL::CommandBufferErrorTimeout,
     "Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout)", 2},
    {METAL_FAULT_OUT_OF_MEMORY, MTL::CommandBufferErrorOutOfMemory,
     "Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)", 8},
    {METAL_FAULT_INTERACTIVITY, MTL::CommandBufferErrorInternal,
     "Impacting Interactivity (0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)", 14},
    {METAL_FAULT_IGNORED, MTL::CommandBufferErrorAccessRevoked,
     "Ignored (for causing prior/excessive GPU errors) (00000004:kIOGPUCommandBufferCallbackErrorSubmissionsIgnored)", 4},
    {METAL_FAULT_HANG, MTL::CommandBufferErrorTimeout, "Caused GPU Hang Error (00000003:kIOGPUCommandBufferCallbackErrorHang)", 3},
    {METAL_FAULT_UNNAMED, MTL::CommandBufferErrorInternal, "Internal Error (0000000e:Internal Error)", 14},
    {METAL_FAULT_VICTIM, MTL::CommandBufferErrorInternal,
     "Discarded (victim of GPU error/recovery) (00000005:kIOGPUCommandBufferCallbackErrorInnocentVictim)", 5},
    {METAL_FAULT_REMOVED, MTL::CommandBufferErrorDeviceRemoved, "The device has been removed", 0},
};

Error* named_error(metal_device_fault fault) {
  for (const NamedError& known : kErrors)
    if (known.fault == fault) {
      Error* made = retained(error("MTLCommandBufferErrorDomain", known.code, known.text));
      if (known.underlying) set_underlying(made, "IOGPUCommandQueueErrorDomain", known.underlying);
      return made;
    }
  return nullptr;
}

// What macOS does to a command buffer whose dispatches took so long.
Error* watchdog_error(double modelled) {
  const int64_t milliseconds = static_cast<int64_t>(modelled * 1e3);
  const int64_t timeout = option(METAL_OPTION_GPU_TIMEOUT_MS), interactivity = option(METAL_OPTION_INTERACTIVITY_MS);
  const bool late = timeout && milliseconds > timeout;
  if (!late && !(interactivity && milliseconds > interactivity)) return nullptr;
  count_kill();
  return named_error(late ? METAL_FAULT_TIMEOUT : METAL_FAULT_INTERACTIVITY);
}

enum class Outcome { kFinished, kParked };

// Runs commands until the end, an error, or a wait that is not satisfied. Without the lock.
Outcome execute(CommandBuffer* buffer) {
  State& all = state();
  while (buffer->next < buffer->commands.size()) {
    Command& command = buffer->commands[buffer->next];
    switch (command.kind) {
      case Command::kDispatch:
        {
          double seconds = 0;
          Error* error = run_dispatch(command, seconds);
          buffer->modelled += seconds;
          if (!error) error = watchdog_error(buffer->modelled);
          if (error) {
            buffer->error = Ref<Error>::adopt(error);
            return Outcome::kFinished;
          }
        }
        break;
      case Command::kFill:
      case Command::kCopy:
        run_blit(command);
        break;
      case Command::kSignal: {
        std::vector<Callback> callbacks;
        {
          Guard guard(all.lock);
          set_value(command.event, command.value, callbacks);
        }
        call(callbacks);
        break;
      }
      case Command::kWait: {
        Guard guard(all.lock);
        if (blocked(buffer)) return Outcome::kParked;
        break;
      }
    }
    buffer->next++;
  }
  return Outcome::kFinished;
}

Error* injected_error() {
  if (cut_off_by_fork())
    return retained(error("MTLCommandBufferErrorDomain", MTL::CommandBufferErrorNotPermitted,
                          "the GPU cannot be reached from a process forked after it was used"));
  if (submissions_ignored()) return named_error(METAL_FAULT_IGNORED);
  for (const NamedError& injected : kErrors)
    if (take_fault(injected.fault)) return named_error(injected.fault);
  return nullptr;
}

void call_handlers(CommandBuffer* buffer, std::vector<CommandBuffer::Handler>& handlers) {
  buffer->handler_thread = pthread_self();
  buffer->in_handler = true;
  for (CommandBuffer::Handler handler : handlers) {
    count(Total::kHandlers);
    handler(buffer);
    _Block_release(handler);
  }
  handlers.clear();
  buffer->in_handler = false;
}

// Takes the head of a queue as far as it goes. Entered and left with the lock held.
void run(CommandBuffer* buffer) {
  State& all = state();
  CommandQueue* queue = buffer->queue.get();
  all.executing = true;
  all.busy++;
  const bool fresh = buffer->status == MTL::CommandBufferStatusCommitted;
  if (fresh) {
    buffer->status = MTL::CommandBufferStatusScheduled;
    buffer->kernel_start = seconds();
  }
  all.lock.unlock();
  void* pool = pool_push();
  if (fresh) {
    call_handlers(buffer, buffer->scheduled_handlers);
    {
      Guard guard(all.lock);
      buffer->completion->scheduled = true;
      pthread_cond_broadcast(&all.done);
      all.progress++;
    }
    buffer->kernel_end = buffer->gpu_start = seconds();
    Error* error = buffer->victim ? named_error(METAL_FAULT_VICTIM) : injected_error();
    if (error) buffer->error = Ref<Error>::adopt(error);
  }
  const Outcome outcome = buffer->error ? Outcome::kFinished : execute(buffer);
  if (outcome == Outcome::kParked) {
    pool_pop(pool);
    all.lock.lock();
    all.executing = false;
    all.busy--;
    return;
  }
  buffer->gpu_end = seconds();
  all.lock.lock();
  all.executing = false;
  queue->enqueued.pop_front();
  if (queue->enqueued.empty()) {
    all.queues.erase(std::find(all.queues.begin(), all.queues.end(), queue));
    queue->listed = false;
  }
  queue->open--;
  buffer->counted = false;
  if (buffer->error && !buffer->victim && option(METAL_OPTION_VICTIMS))
    for (CommandQueue* other : all.queues)
      for (CommandBuffer* waiting : other->enqueued) waiting->victim |= waiting->status >= MTL::CommandBufferStatusCommitted;
  const uint64_t ticket = queue->next_ticket++;
  buffer->status = buffer->error ? MTL::CommandBufferStatusError : MTL::CommandBufferStatusCompleted;
  if (pick()) wake();
  while (queue->finished_tickets != ticket) pthread_cond_wait(&all.done, all.lock.native());
  all.lock.unlock();

  if (const int64_t delay = option(METAL_OPTION_HANDLER_DELAY_US)) {
    timespec wait{delay / 1000000, delay % 1000000 * 1000};
    nanosleep(&wait, nullptr);
  }
  t_in_handlers = true;
  call_handlers(buffer, buffer->completed_handlers);
  t_in_handlers = false;
  buffer->let_go();
  pool_pop(pool);
  std::shared_ptr<Completion> completion = buffer->completion;
  Ref<CommandQueue> keep_queue(queue);
  release(buffer);
  all.lock.lock();
  queue->finished_tickets++;
  completion->finished = true;
  all.progress++;
  pthread_cond_broadcast(&all.done);
  all.lock.unlock();
  keep_queue.reset();
  all.lock.lock();
  all.busy--;
  pthread_cond_broadcast(&all.done);
}

timespec deadline(int64_t milliseconds) {
  timespec until;
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_sec += milliseconds / 1000;
  until.tv_nsec += milliseconds % 1000 * 1000000;
  if (until.tv_nsec >= 1000000000) until.tv_sec++, until.tv_nsec -= 1000000000;
  return until;
}

void* worker(void*) {
  State& all = state();
  all.lock.lock();
  for (;;) {
    if (CommandBuffer* buffer = pick()) {
      run(buffer);
      continue;
    }
    // look again for a short while: waking a sleeping thread costs more than a small kernel
    const int seen = all.ready;
    all.looking++;
    all.lock.unlock();
    const int64_t until = now_ns() + kSpinNs;
    while (all.ready == seen && now_ns() < until)
      for (int i = 0; i < 32; ++i) pause();
    all.lock.lock();
    all.looking--;
    if (pick()) continue;
    if (all.ready != seen) continue;
    while (all.busy > 0 && !all.standby && all.ready == seen && !pick()) {
      all.standby = true;
      all.idle++;
      const timespec until = deadline(kStandbyMs);
      pthread_cond_timedwait(&all.work, all.lock.native(), &until);
      all.idle--;
      all.standby = false;
    }
    if (all.ready != seen || pick()) continue;
    all.idle++;
    pthread_cond_wait(&all.work, all.lock.native());
    all.idle--;
  }
  return nullptr;
}

}  // namespace

Lock& lock() { return state().lock; }

void enqueue(CommandBuffer* buffer) {
  State& all = state();
  Guard guard(all.lock);
  CommandQueue* queue = buffer->queue.get();
  queue->enqueued.push_back(buffer);
  if (!queue->listed) {
    queue->listed = true;
    all.queues.push_back(queue);
  }
  buffer->status = MTL::CommandBufferStatusEnqueued;
}

void commit(CommandBuffer* buffer) {
  State& all = state();
  if (buffer->status == MTL::CommandBufferStatusNotEnqueued) enqueue(buffer);
  retain(buffer);
  all.lock.lock();
  buffer->status = MTL::CommandBufferStatusCommitted;
  if (t_in_handlers && all.standby) {
    all.lock.unlock();
    return;
  }
  const bool asleep = all.looking == 0 && all.idle > 0;
  if (asleep) all.ready++;
  else wake();
  all.lock.unlock();
  if (asleep) pthread_cond_signal(&all.work);  // without the lock, which the woken thread wants
}

void wait(CommandBuffer* buffer, bool completed) {
  State& all = state();
  std::shared_ptr<Completion> completion = buffer->completion;
  auto reached = [&] { return completed ? completion->finished : completion->scheduled; };
  all.lock.lock();
  const int64_t until = now_ns() + kSpinNs;
  while (!reached() && now_ns() < until) {
    const uint64_t seen = all.progress;
    all.lock.unlock();
    while (all.progress == seen && now_ns() < until)
      for (int i = 0; i < 32; ++i) pause();
    all.lock.lock();
  }
  while (!reached()) pthread_cond_wait(&all.done, all.lock.native());
  all.lock.unlock();
}

void wait_for_slot(CommandQueue* queue) {
  State& all = state();
  all.lock.lock();
  const timespec until = deadline(10000);
  bool late = false;
  while (queue->open >= queue->limit && !late)
    late = pthread_cond_timedwait(&all.done, all.lock.native(), &until) == ETIMEDOUT;
  queue->open++;
  all.lock.unlock();
  if (late)
    report("command-buffer-limit", "waited 10 s for one of the queue's " + std::to_string(queue->limit) +
                                       " command buffers to finish: a Mac would wait for ever", queue);
}

void forget(CommandBuffer* buffer) {
  State& all = state();
  Guard guard(all.lock);
  CommandQueue* queue = buffer->queue.get();
  if (buffer->counted && queue->open) queue->open--;
  auto found = std::find(queue->enqueued.begin(), queue->enqueued.end(), buffer);
  if (found == queue->enqueued.end()) return;
  queue->enqueued.erase(found);
  if (queue->enqueued.empty()) {
    all.queues.erase(std::find(all.queues.begin(), all.queues.end(), queue));
    queue->listed = false;
  }
  wake();
}

void signal(Event* event, uint64_t value) {
  std::vector<Callback> callbacks;
  {
    Guard guard(state().lock);
    set_value(event, value, callbacks);
  }
  call(callbacks);
}

bool wait_for_value(Event* event, uint64_t value, uint64_t milliseconds) {
  State& all = state();
  const timespec until = deadline(static_cast<int64_t>(std::min<uint64_t>(milliseconds, 1000000000)));
  Guard guard(all.lock);
  while (event->value < value)
    if (pthread_cond_timedwait(&all.done, all.lock.native(), &until) == ETIMEDOUT) return event->value >= value;
  return true;
}

void notify(Event* event, uint64_t value, void (^block)(Event*, uint64_t)) {
  std::vector<Callback> callbacks;
  {
    Guard guard(state().lock);
    event->listeners.push_back({value, copied(block)});
    set_value(event, 0, callbacks);
  }
  call(callbacks);
}

bool wait_idle(int64_t milliseconds) {
  State& all = state();
  const timespec until = deadline(milliseconds);
  Guard guard(all.lock);
  auto active = [&] {
    if (all.busy) return true;
    for (CommandQueue* queue : all.queues)
      for (CommandBuffer* buffer : queue->enqueued)
        if (buffer->status >= MTL::CommandBufferStatusCommitted) return true;
    return false;
  };
  while (active())
    if (pthread_cond_timedwait(&all.done, all.lock.native(), &until) == ETIMEDOUT) return !active();
  return true;
}

}  // namespace device::engine

DEVICE_EXPORT int metal_device_wait_idle(int64_t milliseconds) { return device::engine::wait_idle(milliseconds); }
