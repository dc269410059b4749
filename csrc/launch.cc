// From checked buffers to a committed command buffer, and from its end to the caller.
#include "launch.h"

#include <cstring>
#include <memory>

#include "completions.h"
#include "device.h"
#include "statistics.h"

namespace launcher {
namespace {

// What a call in flight keeps alive. However it ends, staging buffers go back to the pool first, and the lane last.
struct Flight {
  std::shared_ptr<Device> device;
  std::shared_ptr<const Prepared> prepared;
  std::vector<Binding> bindings;
  MTL::CommandQueue* lane = nullptr;
  Done done;

  void land() {
    for (const Binding& binding : bindings) unbind(device->staging(), binding);
    bindings.clear();
  }
  ~Flight() {
    land();
    if (lane) device->lanes().give(lane);
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
    throw Error(Cause::kInvalidPlan, "plan " + plan.name + ": " + what + " " + std::to_string(i) + " (" + buffer.name +
                                         ") is " +
                                         text_of_shape(memory.dtype, memory.shape, memory.rank) + ", the plan says " +
                                         text_of_shape(buffer.dtype, buffer.shape.data(), buffer.shape.size()));
  }
}

void bind_all(Flight& flight, const std::vector<Memory>& operands, const std::vector<Memory>& results) {
  const Plan& plan = flight.prepared->plan;
  flight.bindings.reserve(plan.buffers.size());
  size_t operand = 0, result = 0;
  for (size_t i = 0; i < plan.buffers.size(); ++i) {
    const BufferPlan& buffer = plan.buffers[i];
    const Memory& memory = buffer.role == Role::kInput ? operands[operand++] : results[result++];
    const Use use = buffer.role == Role::kInput ? Use::kRead : buffer.role == Role::kOutput ? Use::kWritten : Use::kScratch;
    flight.bindings.push_back(bind(flight.device->metal(), flight.device->staging(), memory.data, buffer.bytes, use,
                                   flight.prepared->markers[i].get(), buffer.whole));
  }
}

void encode(const Flight& flight, MTL::ComputeCommandEncoder* encoder) {
  const Prepared& prepared = *flight.prepared;
  for (size_t i = 0; i < prepared.plan.dispatches.size(); ++i) {
    const DispatchPlan& dispatch = prepared.plan.dispatches[i];
    if (dispatch.empty()) continue;
    encoder->setComputePipelineState(prepared.pipelines[i]->state.get());
    for (const ArgumentPlan& argument : dispatch.arguments) {
      if (argument.buffer == ArgumentPlan::kBytes) {
        encoder->setBytes(argument.bytes.data(), argument.bytes.size(), argument.index);
      } else {
        const Binding& binding = flight.bindings[argument.buffer];
        encoder->setBuffer(binding.buffer, binding.offset, argument.index);
      }
    }
    for (size_t at = 0; at < dispatch.threadgroup_memory.size(); ++at)
      if (dispatch.threadgroup_memory[at]) encoder->setThreadgroupMemoryLength(dispatch.threadgroup_memory[at], at);
    const auto &groups = dispatch.threadgroups, &threads = dispatch.threads;
    encoder->dispatchThreadgroups(MTL::Size(groups[0], groups[1], groups[2]), MTL::Size(threads[0], threads[1], threads[2]));
    count(statistics().dispatches);
  }
  encoder->endEncoding();
}

Error failure(const Flight& flight, MTL::CommandBuffer* commands) {
  const NS::Error* error = commands->error();
  Cause cause = Cause::kExecution;
  if (error && error->code() == MTL::CommandBufferErrorTimeout) cause = Cause::kTimeout;
  if (error && error->code() == MTL::CommandBufferErrorOutOfMemory) cause = Cause::kOutOfMemory;
  return Error(cause, "plan " + flight.prepared->plan.name + ": the GPU stopped: " + text_of(error));
}

// Tells the caller, who may go on with its program from here. On a lane nobody else waits for this thread.
void tell(std::unique_ptr<Flight> flight, const Error* error) noexcept {
  count(statistics().in_flight, -1);
  flight->done(error);
}

void finish(std::unique_ptr<Flight> flight, MTL::CommandBuffer* commands) noexcept {
  Pool pool;
  std::shared_ptr<Error> error;
  if (commands->status() != MTL::CommandBufferStatusCompleted) {
    error = std::make_shared<Error>(failure(*flight, commands));
    count(statistics().failures);
  } else {
    for (const Binding& binding : flight->bindings)
      if (binding.copy_to) std::memcpy(binding.copy_to, binding.buffer->contents(), binding.bytes);
  }
  flight->land();
  if (flight->lane) tell(std::move(flight), error.get());
  else
    run_elsewhere([raw = flight.release(), error] {
      Pool pool;
      tell(std::unique_ptr<Flight>(raw), error.get());
    });
}

void start(std::string_view text, const std::vector<Memory>& operands, const std::vector<Memory>& results, Done&& done) {
  Pool pool;
  auto flight = std::make_unique<Flight>();
  flight->device = Device::get();
  flight->prepared = flight->device->prepare(text);
  const Plan& plan = flight->prepared->plan;
  check(plan, plan.operands, operands, "operand");
  check(plan, plan.results, results, "result");
  bind_all(*flight, operands, results);
  flight->lane = flight->device->lanes().take(flight->device->metal());
  MTL::CommandBuffer* commands = (flight->lane ? flight->lane : flight->device->shared_queue())->commandBuffer();
  if (!commands) throw Error(Cause::kExecution, "plan " + plan.name + ": the Metal queue gave no command buffer");
  MTL::ComputeCommandEncoder* encoder = commands->computeCommandEncoder();
  if (!encoder) throw Error(Cause::kExecution, "plan " + plan.name + ": the Metal command buffer gave no encoder");
  encode(*flight, encoder);
  flight->done = std::move(done);
  Flight* raw = flight.release();
  count(statistics().in_flight);
  commands->addCompletedHandler(^(MTL::CommandBuffer* finished) { finish(std::unique_ptr<Flight>(raw), finished); });
  commands->commit();
}

}  // namespace

void launch(std::string_view plan, const std::vector<Memory>& operands, const std::vector<Memory>& results, Done done) {
  count(statistics().calls);
  try {
    start(plan, operands, results, std::move(done));
  } catch (...) {
    count(statistics().failures);
    throw;
  }
}

}  // namespace launcher
