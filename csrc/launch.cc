// From checked buffers to committed command buffers, and from their end to the caller.
#include "launch.h"

#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>

#include "completions.h"
#include "device.h"
#include "encode.h"
#include "gpu_error.h"
#include "recorder.h"
#include "statistics.h"

namespace launcher {
namespace {

constexpr int kMostRetries = 3;  // of a call whose work was lost by no fault of its own

// What a call in flight keeps alive: shared by its command buffers and the thread that commits them.
struct Flight {
  std::shared_ptr<Device> device;
  std::shared_ptr<const Prepared> prepared;
  std::vector<Binding> bindings;
  std::vector<Place> places;  // of the bindings
  Done done;
  Recorder::Clock::time_point start = Recorder::Clock::now();

  std::atomic<int> holders{1};
  std::mutex mutex;
  size_t failed_at = SIZE_MAX;  // the first command buffer that failed, with its error
  std::unique_ptr<Error> error;
  int retries = 0;

  void fail(size_t at, Error&& reason) {
    std::scoped_lock guard(mutex);
    if (at >= failed_at) return;
    failed_at = at;
    error = std::make_unique<Error>(std::move(reason));
  }
  // Staging buffers go back to the pool before anybody is told.
  ~Flight() {
    for (const Binding& binding : bindings) unbind(device->staging(), binding);
  }
};

std::string text_of_shape(DType dtype, const int64_t* shape, size_t rank) {
  std::string out = std::string(name_of(dtype)) + "[";
  for (size_t i = 0; i < rank; ++i) out += (i ? ", " : "") + std::to_string(shape[i]);
  return out + "]";
}

void check(const Plan& plan, const std::vector<uint32_t>& wanted, const std::vector<Memory>& received, const char* what) {
  if (wanted.size() != received.size())
    throw Error(Cause::kInvalidPlan, "plan " + plan.name + " has " + std::to_string(wanted.size()) + " " + what +
                                         "s, the call has " + std::to_string(received.size()));
  for (size_t i = 0; i < wanted.size(); ++i) {
    const BufferPlan& buffer = plan.buffers[wanted[i]];
    const Memory& memory = received[i];
    if (memory.dtype == buffer.dtype && memory.rank == buffer.shape.size() &&
        std::equal(buffer.shape.begin(), buffer.shape.end(), memory.shape))
      continue;
    throw Error(Cause::kInvalidPlan, "plan " + plan.name + ": " + what + " " + std::to_string(i) + " (" + buffer.name + ") is " +
                                         text_of_shape(memory.dtype, memory.shape, memory.rank) + ", the plan says " +
                                         text_of_shape(buffer.dtype, buffer.shape.data(), buffer.shape.size()));
  }
}

Use use_of(Role role) {
  switch (role) {
    case Role::kInput: return Use::kRead;
    case Role::kOutput: return Use::kWritten;
    case Role::kUpdated: return Use::kUpdated;
    case Role::kScratch: break;
  }
  return Use::kScratch;
}

void bind_all(Flight& flight, const std::vector<Memory>& operands, const std::vector<Memory>& results) {
  const Plan& plan = flight.prepared->plan;
  flight.bindings.reserve(plan.buffers.size());
  size_t operand = 0, result = 0;
  for (size_t i = 0; i < plan.buffers.size(); ++i) {
    const BufferPlan& buffer = plan.buffers[i];
    const Memory& memory = buffer.role == Role::kInput ? operands[operand++] : results[result++];
    if (buffer.role == Role::kUpdated && operands[operand++].data != memory.data && buffer.bytes)
      throw Error(Cause::kInvalidPlan, "plan " + plan.name + ": " + buffer.name +
                                           " is updated in place, and the call has another " +
                                           "place for the result (input_output_aliases)");
    const Use use = use_of(buffer.role);
    const bool whole = flight.prepared->whole[i];
    flight.bindings.push_back(bind(flight.device->metal(), flight.device->staging(), memory.data, buffer.bytes, use,
                                   flight.prepared->markers[i].get(), whole));
    flight.places.push_back({flight.bindings.back().buffer, flight.bindings.back().offset});
  }
}

// Whether a result lies where an operand does, which is then no longer what it was.
bool in_place(const Flight& flight) {
  const Plan& plan = flight.prepared->plan;
  auto start = [&](uint32_t at) {
    return static_cast<const char*>(flight.bindings[at].buffer->contents()) + flight.bindings[at].offset;
  };
  for (uint32_t operand : plan.operands)
    for (uint32_t result : plan.results)
      if (start(operand) < start(result) + flight.bindings[result].bytes &&
          start(result) < start(operand) + flight.bindings[operand].bytes)
        return true;
  return false;
}

void commit_all(Flight* flight);
void let_go(Flight* flight);

// Tells the caller, who may go on with its program from here, when nothing is left of the call. Work that was lost because other
// work failed is done again: everything that a plan reads is an operand, or written by itself before.
void finish(std::unique_ptr<Flight> flight) noexcept {
  if (flight->error && flight->error->cause == Cause::kVictim && flight->retries < kMostRetries) {
    Pool pool;
    if (!in_place(*flight)) {
      ++flight->retries;
      count(statistics().retries);
      flight->error.reset();
      flight->failed_at = SIZE_MAX;
      flight->holders = 1;
      try {
        commit_all(flight.get());
      } catch (Error& error) {
        flight->fail(0, std::move(error));
      }
      return let_go(flight.release());
    }
  }
  Done done = std::move(flight->done);
  std::unique_ptr<Error> error = std::move(flight->error);
  {
    Pool pool;
    if (error) {
      count(statistics().failures);
    } else {
      for (const Binding& binding : flight->bindings)
        if (binding.copy_to) std::memcpy(binding.copy_to, binding.buffer->contents(), binding.bytes);
      if (Recorder::get().on()) Recorder::get().add(flight->prepared->plan, flight->start);
    }
    flight.reset();
  }
  count(statistics().in_flight, -1);
  done(error.get());
}

// The last holder hands over, so that Metal's thread is free at once: its stack is small, and others wait for it.
void let_go(Flight* flight) {
  if (--flight->holders == 0) run_elsewhere([flight] { finish(std::unique_ptr<Flight>(flight)); });
}

// Encodes and commits one command buffer. Throws Error where Metal has none.
void commit(Flight* flight, size_t at) {
  Pool pool;
  const std::string place = "plan " + flight->prepared->plan.name + ": ";
  MTL::CommandBuffer* commands = flight->device->queue()->commandBuffer();
  if (!commands) throw Error(Cause::kExecution, place + "the Metal queue gave no command buffer. " + kReport);
  commands->setLabel(flight->prepared->label.get());
  // independent dispatches may run side by side
  MTL::ComputeCommandEncoder* encoder = commands->computeCommandEncoder(MTL::DispatchTypeConcurrent);
  if (!encoder) throw Error(Cause::kExecution, place + "the Metal command buffer gave no encoder. " + kReport);
  encode(*flight->prepared, at, flight->places, encoder);
  encoder->endEncoding();
  ++flight->holders;
  commands->addCompletedHandler(^(MTL::CommandBuffer* finished) {
    Pool pool;
    if (finished->status() != MTL::CommandBufferStatusCompleted)
      flight->fail(at,
                   gpu_error("plan " + flight->prepared->plan.name + ": ", finished->error(), flight->device->command_buffer_ms()));
    let_go(flight);
  });
  commands->commit();
  count(statistics().command_buffers);
}

// All of them in order. Throws Error where nothing was committed.
void commit_all(Flight* flight) {
  const size_t buffers = flight->prepared->command_buffers.size();
  for (size_t at = 0; at < buffers; ++at) {
    try {
      commit(flight, at);
    } catch (Error& error) {
      if (at == 0) throw;
      flight->fail(at, std::move(error));
      break;
    }
  }
}

// Commits all command buffers. What it answers is held for the caller; temporaries are gone before that lets go.
std::unique_ptr<Flight> take_off(std::string_view text, const std::vector<Memory>& operands, const std::vector<Memory>& results,
                                 Done&& done) {
  Pool pool;
  auto flight = std::make_unique<Flight>();
  flight->device = Device::get();
  flight->prepared = flight->device->prepare(text);
  const Plan& plan = flight->prepared->plan;
  check(plan, plan.operands, operands, "operand");
  check(plan, plan.results, results, "result");
  bind_all(*flight, operands, results);
  flight->done = std::move(done);
  commit_all(flight.get());
  return flight;
}

}  // namespace

void launch(std::string_view plan, const std::vector<Memory>& operands, const std::vector<Memory>& results, Done done) {
  count(statistics().calls);
  try {
    std::unique_ptr<Flight> flight = take_off(plan, operands, results, std::move(done));
    count(statistics().in_flight);
    let_go(flight.release());
  } catch (...) {
    count(statistics().failures);
    throw;
  }
}

}  // namespace launcher
