// MTLDevice, buffers, events and fences. Buffers follow Apple silicon's rules: 16 KiB pages, one memory for CPU and GPU.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "metal.h"

namespace device {

Object* new_library(String* source, CompileOptions* options, Error** out);                       // metal_library.cc
Object* new_pipeline(Function* function, PipelineDescriptor* descriptor, Error** out);           // metal_library.cc
Object* new_archive(ArchiveDescriptor* descriptor, Error** out);                                 // metal_archive.cc
Object* new_queue(uint64_t limit);                                                               // metal_commands.cc
void on_new_thread(void (*work)(void*), void* argument);

namespace {

std::atomic<int> g_owner{0};  // the process that used the device first

struct Architecture : Object {
  DEVICE_CLASS("MTLArchitecture")
  std::string name;
  String* get_name() const { return temporary(name); }
};

struct QueueDescriptor : Object {
  DEVICE_CLASS("MTLCommandQueueDescriptor")
  uint64_t limit = 64;
  uint64_t get_limit() const { return limit; }
  void set_limit(uint64_t wanted) { limit = wanted; }
};

constexpr uint64_t kKnownOptions = MTL::ResourceCPUCacheModeWriteCombined | MTL::ResourceStorageModeManaged |
                                   MTL::ResourceStorageModePrivate | MTL::ResourceHazardTrackingModeUntracked |
                                   MTL::ResourceHazardTrackingModeTracked;

bool options_ok(uint64_t options, const char* what) {
  if (options & ~kKnownOptions) {
    report("resource-options", std::string(what) + ": options " + std::to_string(options) +
                                   " has bits that MTLResourceOptions lacks (a storage mode in place of options?)");
    return false;
  }
  if (options & MTL::ResourceStorageModeManaged) {
    report("resource-options", std::string(what) + ": managed storage does not exist on Apple silicon");
    return false;
  }
  return true;
}

uint64_t round_up(uint64_t value) { return (value + kPage - 1) / kPage * kPage; }

bool length_ok(uint64_t length, const char* what) {
  if (length == 0) {
    report("buffer-length", std::string(what) + ": a buffer of zero bytes cannot be made");
    return false;
  }
  return length <= static_cast<uint64_t>(option(METAL_OPTION_MEMORY_LIMIT));
}

Buffer* allocate_buffer(uint64_t length, uint64_t options, const char* what) {
  if (!options_ok(options, what) || !length_ok(length, what)) return nullptr;
  Device* device = the_device();
  const uint64_t bytes = round_up(length);
  if (take_fault(METAL_FAULT_BUFFER)) {
    count(Total::kBuffersRefused);
    return nullptr;
  }
  if (device->allocated.fetch_add(bytes) + bytes > round_up(static_cast<uint64_t>(option(METAL_OPTION_MEMORY_LIMIT)))) {
    device->allocated -= bytes;
    count(Total::kBuffersRefused);
    return nullptr;
  }
  // unreadable pages on both sides, so that an overrun lands in no other buffer; one page more to start on a 16 KiB boundary
  void* raw = mmap(nullptr, bytes + 2 * kGuard + kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) {
    device->allocated -= bytes;
    return nullptr;
  }
  const uint64_t reserved = bytes + 2 * kGuard + kPage;
  auto* start = reinterpret_cast<uint8_t*>(round_up(reinterpret_cast<uintptr_t>(raw) + kGuard));
  if (mprotect(start, bytes, PROT_READ | PROT_WRITE) != 0) {
    munmap(raw, reserved);
    device->allocated -= bytes;
    count(Total::kBuffersRefused);
    return nullptr;
  }
  auto* buffer = make<Buffer>();
  buffer->memory = start;
  buffer->length = length;
  buffer->mapped = bytes;
  buffer->reservation = raw;
  buffer->reserved = reserved;
  buffer->options = options;
  count(Total::kBytesAllocated, static_cast<int64_t>(length));
  return buffer;
}

struct DeviceMethods : Device {
  String* name() const {
    const int64_t family = option(METAL_OPTION_GPU_FAMILY);
    const std::string given = device_name();
    if (!given.empty()) return temporary(given + " (emulated)");
    const char* chip = family >= 1010 ? "Apple M5" : family == 1009 ? "Apple M3" : family == 1008 ? "Apple M2" : "Apple M1";
    return temporary(std::string(chip) + " (emulated)");
  }
  Object* architecture() const {
    auto* made = make<Architecture>();
    const int64_t family = option(METAL_OPTION_GPU_FAMILY);
    made->name = "applegpu_g" + std::to_string(family >= 1010 ? 17 : family == 1009 ? 15 : family == 1008 ? 14 : 13) + "g";
    return autoreleased(static_cast<Object*>(made));
  }
  uint64_t registry_id() const { return 0x100000001; }
  bool supports_family(int64_t family) const {
    const int64_t newest = option(METAL_OPTION_GPU_FAMILY), os = option(METAL_OPTION_OS_VERSION);
    if (family >= MTL::GPUFamilyApple1 && family < MTL::GPUFamilyMac1) return family <= newest;
    switch (family) {
      case MTL::GPUFamilyMac1:
      case MTL::GPUFamilyMac2:
      case MTL::GPUFamilyCommon1:
      case MTL::GPUFamilyCommon2:
      case MTL::GPUFamilyCommon3:
        return true;
      case MTL::GPUFamilyMetal3:
        return os >= os_version(13) && newest >= MTL::GPUFamilyApple7;
      case MTL::GPUFamilyMetal4:
        return os >= os_version(26) && newest >= MTL::GPUFamilyApple7;
      default:
        return false;
    }
  }
  MTL::Size max_threads() const { return MTL::Size(1024, 1024, 1024); }
  uint64_t max_threadgroup_memory() const { return static_cast<uint64_t>(option(METAL_OPTION_THREADGROUP_MEMORY)); }
  uint64_t working_set() const { return static_cast<uint64_t>(option(METAL_OPTION_MEMORY_LIMIT)); }
  uint64_t max_buffer() const { return static_cast<uint64_t>(option(METAL_OPTION_MEMORY_LIMIT)); }
  uint64_t current() const { return allocated; }
  bool unified() const { return option(METAL_OPTION_UNIFIED_MEMORY); }
  bool yes() const { return true; }
  bool no() const { return false; }
  uint64_t tier2() const { return MTL::ArgumentBuffersTier2; }
  uint64_t location() const { return MTL::DeviceLocationBuiltIn; }

  Buffer* new_buffer(uint64_t length, uint64_t options) {
    Buffer* made = allocate_buffer(length, options, "newBufferWithLength:options:");
    if (made) count(Total::kBuffersAllocated);
    return made;
  }
  Buffer* new_buffer_bytes(const void* bytes, uint64_t length, uint64_t options) {
    if (!bytes) {
      report("null-argument", "newBufferWithBytes:length:options: was given a null pointer");
      return nullptr;
    }
    if (options & MTL::ResourceStorageModePrivate) {
      report("resource-options", "newBufferWithBytes:length:options: cannot fill private storage");
      return nullptr;
    }
    Buffer* made = allocate_buffer(length, options, "newBufferWithBytes:length:options:");
    if (!made) return nullptr;
    std::memcpy(made->memory, bytes, length);
    count(Total::kBuffersFromBytes);
    return made;
  }
  Buffer* new_buffer_no_copy(void* bytes, uint64_t length, uint64_t options, void (^deallocator)(void*, NS::UInteger)) {
    constexpr const char* what = "newBufferWithBytesNoCopy:length:options:deallocator:";
    if (!options_ok(options, what) || !length_ok(length, what)) return nullptr;
    if (options & MTL::ResourceStorageModePrivate) {
      report("resource-options", std::string(what) + " cannot wrap memory as private storage");
      return nullptr;
    }
    const auto address = reinterpret_cast<uintptr_t>(bytes);
    const auto page = static_cast<uint64_t>(option(METAL_OPTION_PAGE_SIZE));
    if (!bytes || address % page || length % page) {
      report("no-copy-alignment", std::string(what) + ": pointer and length must be multiples of " + std::to_string(page) +
                                      ", the pointer is " + std::to_string(address % page) + " and the length " +
                                      std::to_string(length % page) + " beyond one");
      return nullptr;
    }
    if (take_fault(METAL_FAULT_BUFFER_NO_COPY)) {
      count(Total::kBuffersRefused);
      return nullptr;
    }
    auto* made = make<Buffer>();
    made->memory = static_cast<uint8_t*>(bytes);
    made->length = length;
    made->options = options;
    if (deallocator) made->deallocator = copied(deallocator);
    count(Total::kBuffersNoCopy);
    count(Total::kBytesNoCopy, static_cast<int64_t>(length));
    return made;
  }

  Object* archive(ArchiveDescriptor* descriptor, Error** out) { return new_archive(descriptor, out); }

  Object* queue() { return new_queue(64); }
  Object* queue_limited(uint64_t limit) { return new_queue(limit); }
  Object* queue_described(QueueDescriptor* descriptor) { return new_queue(descriptor->limit); }

  Object* library(String* source, CompileOptions* options, Error** out) { return new_library(source, options, out); }
  void library_later(String* source, CompileOptions* options, void (^handler)(Object*, Error*)) {
    struct Job {
      Ref<String> source;
      Ref<CompileOptions> options;
      void (^handler)(Object*, Error*);
    };
    auto* job = new Job{Ref<String>(source), Ref<CompileOptions>(options), copied(handler)};
    on_new_thread(
        [](void* at) {
          auto* job = static_cast<Job*>(at);
          Error* error = nullptr;
          Object* made = new_library(job->source.get(), job->options.get(), &error);
          job->handler(made, error);
          _Block_release(job->handler);
          if (made) release(made);
          delete job;
        },
        job);
  }
  Object* library_file(String* path, Error** out) {
    set_error(out, "MTLLibraryErrorDomain", MTL::LibraryErrorFileNotFound,
              "no compiled library at \"" + str(path) + "\": newLibraryWithFile: takes a path, not source text, and the emulated "
              "device reads no .metallib files");
    return nullptr;
  }
  Object* library_url(Url* url, Error** out) {
    Ref<String> path = Ref<String>::adopt(String::with(url ? url->path : ""));
    return library_file(path.get(), out);
  }
  Object* default_library() { return nullptr; }

  // Counts a pipeline, and the compilation that it took where no archive has its function.
  static Object* counted(Function* function, PipelineDescriptor* descriptor, Error** out) {
    Object* made = new_pipeline(function, descriptor, out);
    if (!made) return nullptr;
    count(Total::kPipelines);
    count(descriptor && in_archives(descriptor) ? Total::kArchiveHits : Total::kCompilations);
    return made;
  }
  Object* pipeline(Function* function, Error** out) { return counted(function, nullptr, out); }
  Object* pipeline_options(Function* function, uint64_t options, void* reflection, Error** out) {
    if (reflection || options) fail("pipeline reflection is not modelled");
    return counted(function, nullptr, out);
  }
  Object* pipeline_described(PipelineDescriptor* descriptor, uint64_t options, void* reflection, Error** out) {
    if (reflection || options & ~static_cast<uint64_t>(MTL::PipelineOptionFailOnBinaryArchiveMiss))
      fail("pipeline reflection is not modelled");
    if (options && descriptor->function && !in_archives(descriptor)) {
      set_error(out, "MTLBinaryArchiveDomain", MTL::BinaryArchiveErrorUnexpectedElement, "the function is in no binary archive");
      return nullptr;
    }
    return counted(descriptor->function.get(), descriptor, out);
  }
  void pipeline_later(Function* function, void (^handler)(Object*, Error*)) {
    struct Job {
      Ref<Function> function;
      void (^handler)(Object*, Error*);
    };
    auto* job = new Job{Ref<Function>(function), copied(handler)};
    on_new_thread(
        [](void* at) {
          auto* job = static_cast<Job*>(at);
          Error* error = nullptr;
          Object* made = counted(job->function.get(), nullptr, &error);
          job->handler(made, error);
          _Block_release(job->handler);
          if (made) release(made);
          delete job;
        },
        job);
  }

  Event* event() { return make<Event>(); }
  SharedEvent* shared_event() { return make<SharedEvent>(); }
  Fence* fence() { return make<Fence>(); }
  void timestamps(uint64_t* cpu, uint64_t* gpu) {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    *cpu = *gpu = static_cast<uint64_t>(now.tv_sec) * 1000000000 + static_cast<uint64_t>(now.tv_nsec);
  }
};

struct BufferMethods : Buffer {
  void* contents() {
    if (options & MTL::ResourceStorageModePrivate) {
      report("private-contents", "contents of a buffer in private storage", this);
      return nullptr;
    }
    return memory;
  }
  uint64_t get_length() const { return length; }
  uint64_t allocated_size() const { return round_up(length); }
  uint64_t gpu_address() const { return reinterpret_cast<uintptr_t>(memory); }
  uint64_t get_options() const { return options; }
  uint64_t storage_mode() const { return options >> 4 & 0xF; }
  uint64_t cache_mode() const { return options & 0xF; }
  uint64_t hazard_mode() const { return options >> 8 & 0x3; }
  void did_modify(NS::Range) {
    report("did-modify-range", "didModifyRange: applies to managed storage only, which Apple silicon does not have", this);
  }
  void add_marker(String* text, NS::Range range) {
    if (range.location + range.length > length || range.location + range.length < range.location) {
      report("marker-range", "addDebugMarker:range: beyond the buffer's end", this);
      return;
    }
    markers.push_back({str(text), range.location, range.location + range.length});
  }
  void remove_markers() { markers.clear(); }
  uint64_t set_purgeable(uint64_t) { return MTL::PurgeableStateNonVolatile; }
  Object* heap() const { return nullptr; }
};

struct EventMethods : SharedEvent {
  uint64_t get_value() const {
    Guard guard(engine::lock());
    return value;
  }
  void set_value(uint64_t wanted) { engine::signal(this, wanted); }
  bool wait_value(uint64_t wanted, uint64_t milliseconds) { return engine::wait_for_value(this, wanted, milliseconds); }
  void notify(Object*, uint64_t wanted, void (^block)(Event*, uint64_t)) { engine::notify(this, wanted, block); }
};

struct Listener : Object {
  DEVICE_CLASS("MTLSharedEventListener")
};

}  // namespace

Buffer::~Buffer() {
  if (in_flight > 0)
    report("released-in-flight", "a buffer of " + std::to_string(length) +
                                     " bytes was deallocated while a command buffer that uses it is unfinished", this);
  if (mapped) {
    munmap(reservation, reserved);
    the_device()->allocated -= mapped;
  }
  if (deallocator) {
    deallocator(memory, length);
    _Block_release(deallocator);
  }
  memory = nullptr;
}

std::string label_of(const Object* object) {
  if (object->isa->constant || object->life != kAlive || !is_kind(object, Labelled::cls())) return "";
  return str(static_cast<const Labelled*>(object)->label.get());
}

Device* the_device() {
  static Device* device = [] {
    auto* made = make<Device>();
    Device::cls()->live--;  // lives as long as the process, so it is no leak
    return made;
  }();
  return device;
}

bool cut_off_by_fork() {
  const int owner = g_owner;
  return owner != 0 && owner != getpid();
}

void on_new_thread(void (*work)(void*), void* argument) {
  struct Job {
    void (*work)(void*);
    void* argument;
  };
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, static_cast<size_t>(option(METAL_OPTION_STACK_KIB)) * 1024);
  pthread_t thread;
  pthread_create(
      &thread, &attributes,
      [](void* at) -> void* {
        Job job = *static_cast<Job*>(at);
        delete static_cast<Job*>(at);
        void* pool = pool_push();
        job.work(job.argument);
        pool_pop(pool);
        return nullptr;
      },
      new Job{work, argument});
  pthread_attr_destroy(&attributes);
  pthread_detach(thread);
}

void define_metal_device() {
  Class* root = Root::cls();
  define<Labelled>(root, {m<&Labelled::get_label>("label"), m<&Labelled::set_label>("setLabel:"), m<&Labelled::get_device>("device")});
  define<Architecture>(root, {m<&Architecture::get_name>("name")});
  define<QueueDescriptor>(root,
                          {m<&QueueDescriptor::get_limit>("maxCommandBufferCount"),
                           m<&QueueDescriptor::set_limit>("setMaxCommandBufferCount:")},
                          {}, true);
  using D = DeviceMethods;
  define<Device>(
      root,
      {m<&D::name>("name"),
       m<&D::architecture>("architecture", os_version(14)),
       m<&D::registry_id>("registryID"),
       m<&D::supports_family>("supportsFamily:"),
       m<&D::max_threads>("maxThreadsPerThreadgroup"),
       m<&D::max_threadgroup_memory>("maxThreadgroupMemoryLength"),
       m<&D::working_set>("recommendedMaxWorkingSetSize"),
       m<&D::max_buffer>("maxBufferLength"),
       m<&D::current>("currentAllocatedSize"),
       m<&D::unified>("hasUnifiedMemory"),
       m<&D::no>("isLowPower"),
       m<&D::no>("isHeadless"),
       m<&D::no>("isRemovable"),
       m<&D::no>("supportsRaytracing"),
       m<&D::yes>("supportsDynamicLibraries"),
       m<&D::yes>("supportsFunctionPointers"),
       m<&D::tier2>("argumentBuffersSupport"),
       m<&D::location>("location"),
       m<&D::new_buffer>("newBufferWithLength:options:"),
       m<&D::new_buffer_bytes>("newBufferWithBytes:length:options:"),
       m<&D::new_buffer_no_copy>("newBufferWithBytesNoCopy:length:options:deallocator:"),
       m<&D::queue>("newCommandQueue"),
       m<&D::queue_limited>("newCommandQueueWithMaxCommandBufferCount:"),
       m<&D::queue_described>("newCommandQueueWithDescriptor:", os_version(15)),
       m<&D::library>("newLibraryWithSource:options:error:"),
       m<&D::library_later>("newLibraryWithSource:options:completionHandler:"),
       m<&D::library_file>("newLibraryWithFile:error:"),
       m<&D::library_url>("newLibraryWithURL:error:"),
       m<&D::default_library>("newDefaultLibrary"),
       m<&D::archive>("newBinaryArchiveWithDescriptor:error:"),
       m<&D::pipeline>("newComputePipelineStateWithFunction:error:"),
       m<&D::pipeline_options>("newComputePipelineStateWithFunction:options:reflection:error:"),
       m<&D::pipeline_described>("newComputePipelineStateWithDescriptor:options:reflection:error:"),
       m<&D::pipeline_later>("newComputePipelineStateWithFunction:completionHandler:"),
       m<&D::event>("newEvent"),
       m<&D::shared_event>("newSharedEvent"),
       m<&D::fence>("newFence"),
       m<&D::timestamps>("sampleTimestamps:gpuTimestamp:")});
  using B = BufferMethods;
  define<Buffer>(Labelled::cls(),
                 {m<&B::contents>("contents"),
                  m<&B::get_length>("length"),
                  m<&B::allocated_size>("allocatedSize"),
                  m<&B::gpu_address>("gpuAddress", os_version(13)),
                  m<&B::get_options>("resourceOptions"),
                  m<&B::storage_mode>("storageMode"),
                  m<&B::cache_mode>("cpuCacheMode"),
                  m<&B::hazard_mode>("hazardTrackingMode"),
                  m<&B::did_modify>("didModifyRange:"),
                  m<&B::add_marker>("addDebugMarker:range:"),
                  m<&B::remove_markers>("removeAllDebugMarkers"),
                  m<&B::set_purgeable>("setPurgeableState:"),
                  m<&B::heap>("heap")});
  define<Event>(Labelled::cls(), {});
  define<SharedEvent>(Event::cls(),
                      {m<&EventMethods::get_value>("signaledValue"),
                       m<&EventMethods::set_value>("setSignaledValue:"),
                       m<&EventMethods::wait_value>("waitUntilSignaledValue:timeoutMS:", os_version(12)),
                       m<&EventMethods::notify>("notifyListener:atValue:block:")});
  define<Fence>(Labelled::cls(), {});
  define<Listener>(root, {}, {}, true);
}

}  // namespace device

using namespace device;

static Device* found_device() {
  int nobody = 0;
  g_owner.compare_exchange_strong(nobody, getpid());
  return retained(the_device());
}

// Answers a new reference, as the Create rule has it.
DEVICE_EXPORT Device* MTLCreateSystemDefaultDevice() {
  if (take_fault(METAL_FAULT_NO_DEVICE) || !option(METAL_OPTION_DEFAULT_DEVICE)) return nullptr;
  return found_device();
}

DEVICE_EXPORT Array* MTLCopyAllDevices() {
  std::vector<Ref<Object>> devices;
  if (!take_fault(METAL_FAULT_NO_DEVICE) && option(METAL_OPTION_LISTED)) devices.push_back(Ref<Object>::adopt(found_device()));
  return Array::with(std::move(devices));
}

DEVICE_EXPORT Array* MTLCopyAllDevicesWithObserver(Object** observer, void*) {
  if (observer) *observer = nullptr;
  return MTLCopyAllDevices();
}

DEVICE_EXPORT void MTLRemoveDeviceObserver(Object*) {}
