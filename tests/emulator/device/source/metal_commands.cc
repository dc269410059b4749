// Command queues, command buffers and the compute and blit encoders, as strict as Metal's API validation: a misuse is reported
// by name and the call has no effect. Running what was encoded is engine.cc's part.
#include <algorithm>
#include <cstring>

#include "metal.h"

namespace device {
namespace {

std::string text(uint64_t value) { return std::to_string(value); }

struct CommandBufferDescriptor : Object {
  DEVICE_CLASS("MTLCommandBufferDescriptor")
  uint64_t error_options = 0;
  bool retained_references = true;
  uint64_t get_options() const { return error_options; }
  void set_options(uint64_t value) { error_options = value; }
  bool get_retained() const { return retained_references; }
  void set_retained(bool value) { retained_references = value; }
};

struct PassDescriptor : Object {
  DEVICE_CLASS("MTLComputePassDescriptor")
  uint64_t type = MTL::DispatchTypeSerial;
  uint64_t get_type() const { return type; }
  void set_type(uint64_t value) { type = value; }
  static Object* made(Class*) { return autoreleased(static_cast<Object*>(make<PassDescriptor>())); }
};

struct QueueMethods : CommandQueue {
  Object* buffer_with(bool retains) {
    if (take_fault(METAL_FAULT_COMMAND_BUFFER)) return nullptr;
    engine::wait_for_slot(this);
    auto* made = make<CommandBuffer>();
    made->queue.set(this);
    made->retains = retains;
    made->counted = true;
    count(Total::kCommandBuffers);
    return autoreleased(static_cast<Object*>(made));
  }
  Object* buffer() { return buffer_with(true); }
  Object* buffer_unretained() { return buffer_with(false); }
  Object* buffer_described(CommandBufferDescriptor* descriptor) { return buffer_with(!descriptor || descriptor->retained_references); }
};

struct BufferCalls : CommandBuffer {
  bool committed() const { return status >= MTL::CommandBufferStatusCommitted; }
  uint64_t get_status() const { return status; }
  Error* get_error() const { return error.get(); }
  Object* get_queue() const { return queue.get(); }
  bool get_retains() const { return retains; }
  uint64_t get_options() const { return 0; }
  double get_gpu_start() const { return gpu_start; }
  double get_gpu_end() const { return gpu_end; }
  double get_kernel_start() const { return kernel_start; }
  double get_kernel_end() const { return kernel_end; }

  void do_enqueue() {
    if (status != MTL::CommandBufferStatusNotEnqueued) {
      report("enqueued-twice", "enqueue of a command buffer that already has its place", this);
      return;
    }
    engine::enqueue(this);
  }
  void do_commit() {
    if (committed()) {
      report("committed-twice", "commit of a command buffer that was committed before", this);
      return;
    }
    if (encoder) {
      report("encoder-not-ended", "commit of a command buffer whose encoder was not ended", this);
      encoder->ended = true;
      encoder = nullptr;
    }
    engine::commit(this);
  }
  void wait(bool completed) {
    const char* what = completed ? "waitUntilCompleted" : "waitUntilScheduled";
    if (!committed()) {
      report("wait-before-commit", std::string(what) + " on a command buffer that was never committed would not return", this);
      return;
    }
    if (in_handler && pthread_equal(handler_thread, pthread_self())) {
      report("wait-in-handler", std::string(what) + " in the command buffer's own handler would not return", this);
      return;
    }
    engine::wait(this, completed);
  }
  void wait_completed() { wait(true); }
  void wait_scheduled() { wait(false); }
  void add_handler(std::vector<Handler>& handlers, Handler block, const char* what) {
    if (committed()) {
      report("handler-after-commit", std::string(what) + " after commit", this);
      return;
    }
    if (!block) {
      report("null-argument", std::string(what) + " was given no block", this);
      return;
    }
    handlers.push_back(copied(block));
  }
  void add_completed(Handler block) { add_handler(completed_handlers, block, "addCompletedHandler:"); }
  void add_scheduled(Handler block) { add_handler(scheduled_handlers, block, "addScheduledHandler:"); }

  // Whether another encoder, event or debug group may be encoded now.
  bool open(const char* what) {
    if (committed()) {
      report("encode-after-commit", std::string(what) + " on a command buffer that was committed", this);
      return false;
    }
    if (encoder) {
      report("encoder-not-ended", std::string(what) + " while another encoder of the command buffer is open", this);
      return false;
    }
    return true;
  }
  template <class T>
  T* begin(const char* what) {
    if (!open(what) || take_fault(METAL_FAULT_ENCODER)) return nullptr;
    T* made = make<T>();
    made->buffer.set(this);
    encoder = made;
    count(Total::kEncoders);
    return autoreleased(made);
  }
  Object* compute_typed(uint64_t type) {
    auto* made = begin<ComputeEncoder>("computeCommandEncoder");
    if (made) made->concurrent = type == MTL::DispatchTypeConcurrent;
    return made;
  }
  Object* compute() { return compute_typed(MTL::DispatchTypeSerial); }
  Object* compute_described(PassDescriptor* descriptor) { return compute_typed(descriptor ? descriptor->type : MTL::DispatchTypeSerial); }
  Object* blit() { return begin<BlitEncoder>("blitCommandEncoder"); }

  void signal_event(Event* event, uint64_t value) { add_event(Command::kSignal, event, value, "encodeSignalEvent:value:"); }
  void wait_event(Event* event, uint64_t value) { add_event(Command::kWait, event, value, "encodeWaitForEvent:value:"); }
  void add_event(Command::Kind kind, Event* event, uint64_t value, const char* what) {
    if (!open(what)) return;
    if (!event) {
      report("null-argument", std::string(what) + " was given no event", this);
      return;
    }
    kept.emplace_back(event);
    Command command;
    command.kind = kind;
    command.event = event;
    command.value = value;
    commands.push_back(std::move(command));
  }
  void push_group(String* name) { groups.push_back(str(name)); }
  void pop_group() {
    if (groups.empty()) report("debug-group", "popDebugGroup without a group", this);
    else groups.pop_back();
  }
};

struct EncoderMethods : Encoder {
  void end() {
    if (!usable("endEncoding")) return;
    if (!groups.empty()) report("debug-group", "endEncoding with a debug group still open", this);
    ended = true;
    buffer->encoder = nullptr;
    if (!is_kind(this, ComputeEncoder::cls())) return;
    // what it bound belongs to the command buffer from here on
    auto* compute = static_cast<ComputeEncoder*>(static_cast<Encoder*>(this));
    for (ComputeEncoder::Slot& slot : compute->slots) slot = ComputeEncoder::Slot();
    compute->pipeline.reset();
  }
  void push_group(String* name) {
    if (usable("pushDebugGroup:")) groups.push_back(str(name));
  }
  void pop_group() {
    if (!usable("popDebugGroup")) return;
    if (groups.empty()) report("debug-group", "popDebugGroup without a group", this);
    else groups.pop_back();
  }
  void signpost(String*) { usable("insertDebugSignpost:"); }
  void fence_call(Fence*) { usable("updateFence: or waitForFence:"); }
};

struct ComputeMethods : ComputeEncoder {
  bool index_ok(uint64_t index, const char* what) {
    if (index < kMaxBuffers) return true;
    report("buffer-index", std::string(what) + ": index " + text(index) + " is not below 31", this);
    return false;
  }
  void set_pipeline(Pipeline* wanted) {
    if (!usable("setComputePipelineState:")) return;
    if (!wanted) {
      report("null-argument", "setComputePipelineState: was given nil", this);
      return;
    }
    pipeline.set(wanted);
    buffer->keep(wanted);
  }
  void set_buffer(Buffer* wanted, uint64_t offset, uint64_t index) {
    constexpr const char* what = "setBuffer:offset:atIndex:";
    if (!usable(what) || !index_ok(index, what)) return;
    Slot& slot = slots[index];
    if (!wanted) {
      slot = Slot();
      return;
    }
    if (!offset_ok(wanted, offset, what, index)) return;
    slot = Slot();
    slot.kind = Slot::kBuffer;
    slot.buffer = wanted;
    if (buffer->retains) slot.held.set(wanted);
    slot.offset = offset;
  }
  bool offset_ok(const Buffer* wanted, uint64_t offset, const char* what, uint64_t index) {
    if (offset < wanted->length) return true;
    report("buffer-offset",
           std::string(what) + ": offset " + text(offset) + " at index " + text(index) + " is not below the buffer's length " +
               text(wanted->length),
           this);
    return false;
  }
  void set_offset(uint64_t offset, uint64_t index) {
    constexpr const char* what = "setBufferOffset:atIndex:";
    if (!usable(what) || !index_ok(index, what)) return;
    if (slots[index].kind != Slot::kBuffer) {
      report("unbound-buffer", std::string(what) + ": no buffer was set at index " + text(index), this);
      return;
    }
    if (offset_ok(slots[index].buffer, offset, what, index)) slots[index].offset = offset;
  }
  void set_buffers(Buffer* const* buffers, const uint64_t* offsets, NS::Range range) {
    for (uint64_t i = 0; i < range.length; ++i) {
      if (buffers[i] && !check_argument(buffers[i], Buffer::cls(), selector("setBuffers:offsets:withRange:"))) continue;
      set_buffer(buffers[i], offsets[i], range.location + i);
    }
  }
  void set_bytes(const void* bytes, uint64_t length, uint64_t index) {
    constexpr const char* what = "setBytes:length:atIndex:";
    if (!usable(what) || !index_ok(index, what)) return;
    if (!bytes || length == 0 || length > kMaxInlineBytes) {
      report("set-bytes", std::string(what) + ": wants 1 to 4096 bytes, was given " + (bytes ? text(length) : "a null pointer"), this);
      return;
    }
    Slot& slot = slots[index];
    slot = Slot();
    slot.kind = Slot::kBytes;
    slot.bytes = std::shared_ptr<InlineBytes>(new InlineBytes);
    std::memcpy(slot.bytes->data, bytes, length);
    slot.bytes->size = length;
  }
  void set_threadgroup_memory(uint64_t length, uint64_t index) {
    constexpr const char* what = "setThreadgroupMemoryLength:atIndex:";
    if (!usable(what) || !index_ok(index, what)) return;
    if (length % 16) {
      report("threadgroup-memory", std::string(what) + ": length " + text(length) + " is not a multiple of 16", this);
      return;
    }
    if (length > kMaxThreadgroupMemory) {
      report("threadgroup-memory", std::string(what) + ": length " + text(length) + " is above 32768", this);
      return;
    }
    threadgroup_memory[index] = length;
  }
  void barrier_scope(uint64_t) {
    if (usable("memoryBarrierWithScope:")) since_barrier.clear();
  }
  void barrier_resources(Object* const* resources, uint64_t amount) {
    if (!usable("memoryBarrierWithResources:count:")) return;
    for (uint64_t i = 0; i < amount; ++i) {
      if (!resources[i] || !is_kind(resources[i], Buffer::cls())) continue;
      auto* named = static_cast<Buffer*>(resources[i]);
      const uint8_t *begin = named->memory, *end = begin + named->length;
      since_barrier.erase(std::remove_if(since_barrier.begin(), since_barrier.end(),
                                         [&](const Span& span) { return span.begin < end && begin < span.end; }),
                          since_barrier.end());
    }
  }
  uint64_t dispatch_type() const { return concurrent ? MTL::DispatchTypeConcurrent : MTL::DispatchTypeSerial; }
  void use_resource(Object* resource, uint64_t) {
    if (usable("useResource:usage:") && resource) buffer->keep(resource);
  }
  void use_resources(Object* const* resources, uint64_t amount, uint64_t usage) {
    for (uint64_t i = 0; i < amount; ++i) use_resource(resources[i], usage);
  }
  void threads(MTL::Size grid, MTL::Size group) { dispatch("dispatchThreads:threadsPerThreadgroup:", grid, group, true); }
  void threadgroups(MTL::Size grid, MTL::Size group) { dispatch("dispatchThreadgroups:threadsPerThreadgroup:", grid, group, false); }

  void complain(const char* kind, const std::string& what) {
    report(kind, what + (pipeline ? ", kernel " + pipeline->function_name : std::string()) + where(), this);
  }

  bool sizes_ok(const char* what, const Command& command) {
    uint64_t total = 1;
    for (uint64_t side : command.threads) {
      if (side == 0 || side > 1024) {
        complain("threads-per-threadgroup", std::string(what) + ": threads per threadgroup " + size_text(command.threads) +
                                                ", each side must be 1 to 1024");
        return false;
      }
      total *= side;
    }
    if (total > pipeline->max_threads) {
      complain("threads-per-threadgroup", std::string(what) + ": threads per threadgroup " + size_text(command.threads) + " are " +
                                              text(total) + ", the pipeline's maximum is " + text(pipeline->max_threads));
      return false;
    }
    if (pipeline->multiple_of_width && total % pipeline->width) {
      complain("threads-per-threadgroup", std::string(what) + ": " + text(total) + " threads are no multiple of the execution width, "
                                              "which the pipeline's descriptor promised");
      return false;
    }
    const MTL::Size need = pipeline->required;
    if (need.width * need.height * need.depth &&
        (need.width != command.threads[0] || need.height != command.threads[1] || need.depth != command.threads[2])) {
      complain("threads-per-threadgroup", std::string(what) + ": threads per threadgroup " + size_text(command.threads) +
                                              " are not those that the pipeline's descriptor required");
      return false;
    }
    for (uint64_t side : command.grid)
      if (side == 0 || side > UINT32_MAX) {
        complain("grid-size", std::string(what) + ": grid " + size_text(command.grid) + ", each side must be 1 to 2^32 - 1");
        return false;
      }
    return true;
  }

  // The part of a buffer that a binding may touch: where debug markers name ranges, the one that the offset lies in.
  static uint64_t window_end(const Buffer* bound, uint64_t offset, bool& output) {
    output = false;
    for (const Marker& marker : bound->markers)
      if (offset >= marker.begin && offset < marker.end) {
        output = marker.text.compare(0, 6, "output") == 0;
        return marker.end;
      }
    return bound->length;
  }

  bool bind(Command& command) {
    bool good = true;
    uint64_t memory = pipeline->info.static_threadgroup_memory_length;
    for (const Argument& argument : pipeline->arguments) {
      if (!argument.what.is_active) continue;
      const uint32_t index = argument.what.index;
      const std::string name = " \"" + argument.name + "\" at index " + text(index);
      if (argument.what.kind == EMU_ARGUMENT_THREADGROUP) {
        const uint64_t length = index < kMaxBuffers ? threadgroup_memory[index] : 0;
        if (length == 0) {
          complain("unbound-threadgroup-memory", "no threadgroup memory was set for" + name);
          good = false;
        }
        memory += length;
        command.threadgroup_memory.push_back({index, static_cast<uint32_t>(length)});
        continue;
      }
      Slot& slot = slots[index];
      if (slot.kind == Slot::kEmpty) {
        complain("unbound-buffer", "no buffer was set for" + name);
        good = false;
        continue;
      }
      Binding binding;
      binding.index = index;
      binding.writable = argument.what.is_writable;
      if (slot.kind == Slot::kBytes) {
        if (binding.writable) {
          complain("set-bytes", "setBytes data is bound to the writable argument" + name);
          good = false;
        }
        binding.bytes = slot.bytes;
        binding.end = slot.bytes->size;
      } else {
        if (!check_argument(slot.buffer, Buffer::cls(), selector("setBuffer:offset:atIndex:"))) {
          good = false;
          continue;
        }
        binding.buffer = slot.buffer;
        binding.offset = slot.offset;
        binding.end = window_end(slot.buffer, slot.offset, binding.output);
      }
      const uint64_t align = argument.what.kind == EMU_ARGUMENT_CONSTANT ? std::max<uint64_t>(4, argument.what.element_align)
                                                                          : argument.what.element_align;
      if (align && binding.offset % std::min<uint64_t>(align, 16)) {
        complain("buffer-alignment", "offset " + text(binding.offset) + " of" + name + " is not a multiple of " +
                                         text(std::min<uint64_t>(align, 16)));
        good = false;
      }
      if (argument.what.is_reference && binding.end - binding.offset < argument.what.element_size) {
        complain("buffer-too-small", text(binding.end - binding.offset) + " bytes are bound for" + name + ", which reads " +
                                         text(argument.what.element_size));
        good = false;
      }
      command.bindings.push_back(std::move(binding));
    }
    for (uint32_t i = 0; i < kMaxBuffers; ++i) {
      const bool taken = std::any_of(pipeline->arguments.begin(), pipeline->arguments.end(), [&](const Argument& argument) {
        return argument.what.kind == EMU_ARGUMENT_THREADGROUP && argument.what.index == i;
      });
      if (!taken) memory += threadgroup_memory[i];
    }
    if (memory > kMaxThreadgroupMemory) {
      complain("threadgroup-memory", "threadgroup memory of " + text(memory) + " bytes is above 32768");
      good = false;
    }
    return good;
  }

  // Dispatches of a concurrent encoder run in any order until a barrier: overlapping uses, one of them a write, are reported.
  void check_order(const Command& command) {
    std::vector<Span> mine;
    for (const Binding& binding : command.bindings) {
      if (!binding.buffer) continue;
      Span span{binding.buffer->memory + binding.offset, binding.buffer->memory + binding.end, binding.writable, dispatches,
                pipeline->function_name, binding.index};
      for (const Span& other : since_barrier)
        if (span.begin < other.end && other.begin < span.end && (span.written || other.written)) {
          complain("concurrent-hazard", "argument " + text(span.index) + " of dispatch " + text(dispatches) +
                                            " overlaps argument " + text(other.index) + " of dispatch " + text(other.dispatch) + " (" +
                                            other.kernel + ") of the same concurrent encoder with no barrier between, and one may write");
          break;
        }
      mine.push_back(std::move(span));
    }
    since_barrier.insert(since_barrier.end(), mine.begin(), mine.end());
  }

  void dispatch(const char* what, MTL::Size grid, MTL::Size group, bool in_threads) {
    if (!usable(what)) return;
    if (!pipeline) {
      report("no-pipeline", std::string(what) + " without a pipeline state", this);
      return;
    }
    Command command;
    command.grid[0] = grid.width, command.grid[1] = grid.height, command.grid[2] = grid.depth;
    command.threads[0] = group.width, command.threads[1] = group.height, command.threads[2] = group.depth;
    command.in_threads = in_threads;
    command.pipeline = pipeline.get();
    if (!sizes_ok(what, command) || !bind(command)) return;
    if (concurrent) check_order(command);
    command.label = where();
    for (const Binding& binding : command.bindings)
      if (binding.buffer) buffer->use(binding.buffer);
    dispatches++;
    buffer->commands.push_back(std::move(command));
  }
};

struct BlitMethods : BlitEncoder {
  bool range_ok(const Buffer* bound, uint64_t offset, uint64_t size, const char* what) {
    if (bound && size && offset <= bound->length && size <= bound->length - offset) return true;
    report("blit-range", std::string(what) + ": " + text(size) + " bytes at " + text(offset) + " of a buffer of " +
                             text(bound ? bound->length : 0), this);
    return false;
  }
  void fill(Buffer* target, NS::Range range, uint8_t value) {
    constexpr const char* what = "fillBuffer:range:value:";
    if (!usable(what) || !range_ok(target, range.location, range.length, what)) return;
    Command command;
    command.kind = Command::kFill;
    command.target = target;
    command.target_offset = range.location;
    command.size = range.length;
    command.value = value;
    buffer->use(target);
    count(Total::kBlits);
    buffer->commands.push_back(std::move(command));
  }
  void copy(Buffer* source, uint64_t source_offset, Buffer* target, uint64_t target_offset, uint64_t size) {
    constexpr const char* what = "copyFromBuffer:sourceOffset:toBuffer:destinationOffset:size:";
    if (!usable(what) || !range_ok(source, source_offset, size, what) || !range_ok(target, target_offset, size, what)) return;
    if (source == target && source_offset < target_offset + size && target_offset < source_offset + size) {
      report("blit-range", std::string(what) + ": source and destination overlap", this);
      return;
    }
    if (source_offset % 4 || target_offset % 4 || size % 4) {
      report("blit-alignment", std::string(what) + ": offsets and size must be multiples of 4 on macOS", this);
      return;
    }
    Command command;
    command.kind = Command::kCopy;
    command.source = source;
    command.source_offset = source_offset;
    command.target = target;
    command.target_offset = target_offset;
    command.size = size;
    buffer->use(source);
    buffer->use(target);
    count(Total::kBlits);
    buffer->commands.push_back(std::move(command));
  }
  void synchronise(Object*) {
    report("synchronize-resource", "synchronizeResource: applies to managed storage only, which Apple silicon does not have", this);
  }
};

}  // namespace

std::string size_text(const uint64_t size[3]) {
  return "(" + text(size[0]) + ", " + text(size[1]) + ", " + text(size[2]) + ")";
}

void CommandBuffer::keep(Object* object) {
  if (!retains) return;
  for (auto it = kept.rbegin(); it != kept.rend() && it != kept.rbegin() + 8; ++it)
    if (it->get() == object) return;
  kept.emplace_back(object);
}

void CommandBuffer::use(Buffer* used) {
  if (std::find(buffers.begin(), buffers.end(), used) != buffers.end()) return;
  buffers.push_back(used);
  used->in_flight++;
  if (retains) kept.emplace_back(used);
}

void CommandBuffer::let_go() {
  for (Buffer* used : buffers)
    if (used->life == kAlive) used->in_flight--;
  buffers.clear();
  commands.clear();
  kept.clear();
}

CommandBuffer::~CommandBuffer() {
  if (queue) engine::forget(this);
  let_go();
  for (Handler handler : scheduled_handlers) _Block_release(reinterpret_cast<const void*>(handler));
  for (Handler handler : completed_handlers) _Block_release(reinterpret_cast<const void*>(handler));
}

Encoder::~Encoder() {
  if (ended) return;
  report("encoder-not-ended", "an encoder was deallocated before endEncoding" + where(), this);
  if (buffer) buffer->encoder = nullptr;
}

bool Encoder::usable(const char* what) {
  if (!ended) return true;
  report("encode-after-end", std::string(what) + " after endEncoding", this);
  return false;
}

std::string Encoder::where() const {
  std::string out;
  auto add = [&](const std::string& part) {
    if (!part.empty()) out += (out.empty() ? ", in " : " / ") + part;
  };
  if (buffer) {
    add(str(buffer->label.get()));
    for (const std::string& group : buffer->groups) add(group);
  }
  add(str(label.get()));
  for (const std::string& group : groups) add(group);
  return out;
}

Object* new_queue(uint64_t limit) {
  if (take_fault(METAL_FAULT_QUEUE)) return nullptr;
  if (limit == 0) {
    report("queue-limit", "a command queue for no command buffers at all");
    return nullptr;
  }
  auto* made = make<CommandQueue>();
  made->limit = limit;
  return made;
}

void define_metal_commands() {
  Class* root = Root::cls();
  Class* labelled = Labelled::cls();
  define<CommandBufferDescriptor>(root,
                                  {m<&CommandBufferDescriptor::get_options>("errorOptions"),
                                   m<&CommandBufferDescriptor::set_options>("setErrorOptions:"),
                                   m<&CommandBufferDescriptor::get_retained>("retainedReferences"),
                                   m<&CommandBufferDescriptor::set_retained>("setRetainedReferences:")},
                                  {}, true);
  define<PassDescriptor>(root, {m<&PassDescriptor::get_type>("dispatchType"), m<&PassDescriptor::set_type>("setDispatchType:")},
                         {m<&PassDescriptor::made>("computePassDescriptor")}, true);
  using Q = QueueMethods;
  define<CommandQueue>(labelled,
                       {m<&Q::buffer>("commandBuffer"),
                        m<&Q::buffer_unretained>("commandBufferWithUnretainedReferences"),
                        m<&Q::buffer_described>("commandBufferWithDescriptor:")});
  using B = BufferCalls;
  define<CommandBuffer>(labelled,
                        {m<&B::get_status>("status"),
                         m<&B::get_error>("error"),
                         m<&B::get_queue>("commandQueue"),
                         m<&B::get_retains>("retainedReferences"),
                         m<&B::get_options>("errorOptions"),
                         m<&B::get_gpu_start>("GPUStartTime"),
                         m<&B::get_gpu_end>("GPUEndTime"),
                         m<&B::get_kernel_start>("kernelStartTime"),
                         m<&B::get_kernel_end>("kernelEndTime"),
                         m<&B::do_enqueue>("enqueue"),
                         m<&B::do_commit>("commit"),
                         m<&B::wait_completed>("waitUntilCompleted"),
                         m<&B::wait_scheduled>("waitUntilScheduled"),
                         m<&B::add_completed>("addCompletedHandler:"),
                         m<&B::add_scheduled>("addScheduledHandler:"),
                         m<&B::compute>("computeCommandEncoder"),
                         m<&B::compute_typed>("computeCommandEncoderWithDispatchType:"),
                         m<&B::compute_described>("computeCommandEncoderWithDescriptor:"),
                         m<&B::blit>("blitCommandEncoder"),
                         m<&B::signal_event>("encodeSignalEvent:value:"),
                         m<&B::wait_event>("encodeWaitForEvent:value:"),
                         m<&B::push_group>("pushDebugGroup:"),
                         m<&B::pop_group>("popDebugGroup")});
  using E = EncoderMethods;
  define<Encoder>(labelled,
                  {m<&E::end>("endEncoding"),
                   m<&E::push_group>("pushDebugGroup:"),
                   m<&E::pop_group>("popDebugGroup"),
                   m<&E::signpost>("insertDebugSignpost:"),
                   m<&E::fence_call>("updateFence:"),
                   m<&E::fence_call>("waitForFence:")});
  using C = ComputeMethods;
  define<ComputeEncoder>(Encoder::cls(),
                         {m<&C::set_pipeline>("setComputePipelineState:"),
                          m<&C::set_buffer>("setBuffer:offset:atIndex:"),
                          m<&C::set_offset>("setBufferOffset:atIndex:"),
                          m<&C::set_buffers>("setBuffers:offsets:withRange:"),
                          m<&C::set_bytes>("setBytes:length:atIndex:"),
                          m<&C::set_threadgroup_memory>("setThreadgroupMemoryLength:atIndex:"),
                          m<&C::threads>("dispatchThreads:threadsPerThreadgroup:"),
                          m<&C::threadgroups>("dispatchThreadgroups:threadsPerThreadgroup:"),
                          m<&C::barrier_scope>("memoryBarrierWithScope:"),
                          m<&C::barrier_resources>("memoryBarrierWithResources:count:"),
                          m<&C::dispatch_type>("dispatchType"),
                          m<&C::use_resource>("useResource:usage:"),
                          m<&C::use_resources>("useResources:count:usage:")});
  using T = BlitMethods;
  define<BlitEncoder>(Encoder::cls(),
                      {m<&T::fill>("fillBuffer:range:value:"),
                       m<&T::copy>("copyFromBuffer:sourceOffset:toBuffer:destinationOffset:size:"),
                       m<&T::synchronise>("synchronizeResource:")});
}

}  // namespace device
