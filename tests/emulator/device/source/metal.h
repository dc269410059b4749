// The Metal classes of the emulated device and the engine that runs their command buffers. Host code reaches them through
// metal-cpp's messages only; kernels run in the emulator core (runtime/emulator.h), which knows none of this.
#pragma once

#include <pthread.h>

#include <atomic>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include <Metal/Metal.hpp>  // Apple's, for structures passed by value and enumerators

#include "../../runtime/emulator.h"
#include "foundation.h"
#include "lock.h"
#include "report.h"

namespace device {

constexpr uint64_t kPage = 16384;  // Apple silicon's
constexpr uint64_t kGuard = 65536;  // on both sides of a buffer's memory
constexpr uint64_t kMaxInlineBytes = 4096;
constexpr uint64_t kMaxBuffers = EMU_MAX_BUFFERS;
constexpr uint64_t kMaxThreadgroupMemory = EMU_MAX_THREADGROUP_MEMORY;

struct CommandBuffer;
struct CommandQueue;

struct Device : Object {
  DEVICE_CLASS("MTLDevice")
  std::atomic<uint64_t> allocated{0};
};
// The one device, made at the first call and kept for the life of the process.
Device* the_device();
// Whether this process was forked from one that had already used the device: a Mac's GPU is out of reach then.
bool cut_off_by_fork();

struct Labelled : Object {
  DEVICE_CLASS("MTLObject")
  Ref<String> label;
  String* get_label() const { return label.get(); }
  void set_label(String* text) { label.set(text); }
  Device* get_device() const { return the_device(); }
};

// --- memory ----------------------------------------------------------------------------------------------------------------------

struct Marker {
  std::string text;
  uint64_t begin, end;
};

struct Buffer : Labelled {
  DEVICE_CLASS("MTLBuffer")
  uint8_t* memory = nullptr;
  uint64_t length = 0;
  uint64_t mapped = 0;  // bytes of the device's own; 0 for memory of the caller
  void* reservation = nullptr;  // what to unmap: `mapped` with guard pages around
  uint64_t reserved = 0;
  uint64_t options = 0;
  void (^deallocator)(void*, NS::UInteger) = nullptr;
  std::atomic<int> in_flight{0};
  std::vector<Marker> markers;
  ~Buffer();
};

struct Event : Labelled {
  DEVICE_CLASS("MTLEvent")
  struct Listener {
    uint64_t value;
    void (^block)(Event*, uint64_t);
  };
  uint64_t value = 0;  // guarded by the engine's lock
  std::vector<Listener> listeners;
};

struct SharedEvent : Event {
  DEVICE_CLASS("MTLSharedEvent")
};

struct Fence : Labelled {
  DEVICE_CLASS("MTLFence")
};

// --- code ------------------------------------------------------------------------------------------------------------------------

struct CompileOptions : Object {
  DEVICE_CLASS("MTLCompileOptions")
  bool fast_math = true;
  int64_t math_mode = MTL::MathModeFast;
  int64_t math_functions = MTL::MathFloatingPointFunctionsFast;
  uint64_t language_version = 0;  // 0: the newest that the emulated macOS has
  bool preserve_invariance = false;
  int64_t library_type = MTL::LibraryTypeExecutable;
  int64_t optimisation = MTL::LibraryOptimizationLevelDefault;
  Ref<Dictionary> macros;
  Ref<String> install_name;
  Ref<Array> libraries;
  bool logging = false;
  uint64_t max_threads = 0;
};

struct ConstantValue {
  std::string name;  // empty: by index
  uint64_t index = 0;
  uint64_t type = 0;
  std::string data;
};

struct ConstantValues : Object {
  DEVICE_CLASS("MTLFunctionConstantValues")
  std::vector<ConstantValue> values;
};

struct FunctionDescriptor : Object {
  DEVICE_CLASS("MTLFunctionDescriptor")
  Ref<String> name, specialized_name;
  Ref<ConstantValues> constants;
  Ref<Array> archives;
  uint64_t options = 0;
};

struct Library : Labelled {
  DEVICE_CLASS("MTLLibrary")
  emu_library* compiled = nullptr;
  std::string fingerprint;  // of its text and of how it was compiled
  ~Library() { emu_library_release(compiled); }
};

struct Function : Labelled {
  DEVICE_CLASS("MTLFunction")
  Ref<Library> library;
  std::string name, plain_name;  // `name` is the specialised name where one was asked for
  std::vector<ConstantValue> constants;
  bool specialised = false;
  emu_pipeline* compiled = nullptr;  // what specialising made, for pipelines with the same options
  int64_t compiled_width = 0, compiled_checked = 0;
  ~Function() { emu_pipeline_release(compiled); }
};

struct FunctionConstant : Object {
  DEVICE_CLASS("MTLFunctionConstant")
  Ref<String> name;
  uint64_t index = 0, type = 0;
  bool required = true;
};

struct PipelineDescriptor : Labelled {
  DEVICE_CLASS("MTLComputePipelineDescriptor")
  Ref<Function> function;
  Ref<Array> archives;
  bool multiple_of_width = false;
  uint64_t max_threads = 0;
  MTL::Size required{0, 0, 0};
  bool indirect = false, binary_functions = false;
  int64_t shader_validation = 0;
  uint64_t call_depth = 1;
};

struct ArchiveDescriptor : Object {
  DEVICE_CLASS("MTLBinaryArchiveDescriptor")
  Ref<Url> url;
};

struct BinaryArchive : Labelled {
  DEVICE_CLASS("MTLBinaryArchive")
  std::vector<std::string> entries;  // what was compiled, for which device and macOS
};
// Whether one of the descriptor's archives has its function.
bool in_archives(const PipelineDescriptor* descriptor);

struct Argument {
  std::string name;
  emu_argument what;
};

struct Pipeline : Labelled {
  DEVICE_CLASS("MTLComputePipelineState")
  emu_pipeline* compiled = nullptr;
  std::string function_name;
  emu_pipeline_info info{};
  std::vector<Argument> arguments;
  uint64_t max_threads = 1024, width = 32;
  bool multiple_of_width = false, indirect = false;
  MTL::Size required{0, 0, 0};
  ~Pipeline() { emu_pipeline_release(compiled); }
};

// --- commands --------------------------------------------------------------------------------------------------------------------

// What setBytes copied, aligned as a buffer would be.
struct InlineBytes {
  alignas(16) uint8_t data[kMaxInlineBytes];
  uint64_t size;
};

struct Binding {
  uint32_t index = 0;
  Buffer* buffer = nullptr;  // kept alive by the command buffer; nullptr: `bytes`
  uint64_t offset = 0, end = 0;
  bool writable = false, output = false;
  std::shared_ptr<InlineBytes> bytes;
};

struct Command {
  enum Kind { kDispatch, kFill, kCopy, kSignal, kWait } kind = kDispatch;
  Pipeline* pipeline = nullptr;
  std::vector<Binding> bindings;
  std::vector<emu_threadgroup_memory> threadgroup_memory;
  uint64_t grid[3]{}, threads[3]{};
  bool in_threads = false;
  std::string label;  // of the encoder and its debug groups
  Buffer *source = nullptr, *target = nullptr;
  uint64_t source_offset = 0, target_offset = 0, size = 0, value = 0;
  Event* event = nullptr;
};

// Outlives its command buffer, so that a waiter and the engine need not agree on who lets go first.
struct Completion {
  bool scheduled = false, finished = false;
};

struct Encoder;

struct CommandBuffer : Labelled {
  DEVICE_CLASS("MTLCommandBuffer")
  using Handler = void (^)(CommandBuffer*);
  Ref<CommandQueue> queue;
  std::atomic<uint64_t> status{MTL::CommandBufferStatusNotEnqueued};
  bool retains = true, counted = false;
  Encoder* encoder = nullptr;  // the open one
  std::vector<Ref<Object>> kept;
  std::vector<Buffer*> buffers;  // bound, each counted in Buffer::in_flight once
  std::vector<Command> commands;
  std::vector<std::string> groups;
  size_t next = 0;  // command to run
  std::vector<Handler> scheduled_handlers, completed_handlers;
  Ref<Error> error;
  double gpu_start = 0, gpu_end = 0, kernel_start = 0, kernel_end = 0;
  double modelled = 0;  // seconds of its dispatches so far
  bool victim = false;  // of another one's error; guarded by the engine's lock
  std::shared_ptr<Completion> completion = std::make_shared<Completion>();
  pthread_t handler_thread{};
  bool in_handler = false;
  ~CommandBuffer();
  void keep(Object* object);
  void use(Buffer* buffer);
  void let_go();
};

struct CommandQueue : Labelled {
  DEVICE_CLASS("MTLCommandQueue")
  uint64_t limit = 64;
  // guarded by the engine's lock
  uint64_t open = 0;                    // command buffers made and not finished
  std::deque<CommandBuffer*> enqueued;  // one reference each once committed
  uint64_t finished_tickets = 0, next_ticket = 0;
  bool listed = false;
};

struct Encoder : Labelled {
  DEVICE_CLASS("MTLCommandEncoder")
  Ref<CommandBuffer> buffer;
  bool ended = false;
  std::vector<std::string> groups;
  ~Encoder();
  // Reports the call where the encoder has ended.
  bool usable(const char* what);
  std::string where() const;
};

struct Span {
  const uint8_t *begin, *end;
  bool written;
  uint64_t dispatch;
  std::string kernel;
  uint32_t index;
};

struct ComputeEncoder : Encoder {
  DEVICE_CLASS("MTLComputeCommandEncoder")
  bool concurrent = false;
  Ref<Pipeline> pipeline;
  struct Slot {
    enum Kind { kEmpty, kBuffer, kBytes } kind = kEmpty;
    Buffer* buffer = nullptr;
    Ref<Buffer> held;
    uint64_t offset = 0;
    std::shared_ptr<InlineBytes> bytes;
  } slots[kMaxBuffers];
  uint64_t threadgroup_memory[kMaxBuffers]{};
  std::vector<Span> since_barrier;
  uint64_t dispatches = 0;
};

struct BlitEncoder : Encoder {
  DEVICE_CLASS("MTLBlitCommandEncoder")
};

// --- the engine: threads that run what is committed ------------------------------------------------------------------------------

namespace engine {
Lock& lock();
void enqueue(CommandBuffer* buffer);  // reserves its place
void commit(CommandBuffer* buffer);   // takes a reference
void wait(CommandBuffer* buffer, bool completed);
void wait_for_slot(CommandQueue* queue);
void forget(CommandBuffer* buffer);   // never committed
void signal(Event* event, uint64_t value);
bool wait_for_value(Event* event, uint64_t value, uint64_t milliseconds);
void notify(Event* event, uint64_t value, void (^block)(Event*, uint64_t));
bool wait_idle(int64_t milliseconds);
}  // namespace engine

// Runs one dispatch in the core and files its counters and reports; nullptr or the error that ends the command buffer (+1).
// `seconds` is the time that the GPU would take by the rate of METAL_OPTION_RATE.
Error* run_dispatch(const Command& command, double& seconds);

std::string size_text(const uint64_t size[3]);

void define_metal_device();
void define_metal_library();
void define_metal_archive();
void define_metal_commands();

}  // namespace device
