// The Blocks runtime: copies stack blocks and __block variables to the heap and counts them. Written to clang's block ABI
// (layouts and flag bits of its "Block Implementation Specification"); knows nothing of Metal.
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "objc_runtime.h"

namespace device {
namespace {

constexpr int32_t kCountMask = 0xfffe;
constexpr int32_t kNeedsFree = 1 << 24;
constexpr int32_t kHasCopyDispose = 1 << 25;
constexpr int32_t kGlobal = 1 << 28;

constexpr int kFieldObject = 3;
constexpr int kFieldBlock = 7;
constexpr int kFieldByref = 8;
constexpr int kFieldWeak = 16;
constexpr int kFieldCaller = 128;

struct Descriptor {
  unsigned long reserved;
  unsigned long size;
  void (*copy)(void* to, const void* from);  // these two only with kHasCopyDispose
  void (*dispose)(const void* block);
};

struct Block {
  void* isa;
  int32_t flags;
  int32_t reserved;
  void (*invoke)();
  Descriptor* descriptor;
};

struct Byref {
  void* isa;
  Byref* forwarding;
  int32_t flags;
  uint32_t size;
};

struct ByrefHelpers {
  void (*keep)(Byref* to, Byref* from);
  void (*destroy)(Byref* byref);
};

std::atomic<int64_t> g_live_blocks{0};

void add_reference(int32_t* flags) { __atomic_fetch_add(flags, 2, __ATOMIC_RELAXED); }

bool drop_reference(int32_t* flags, const char* what) {
  const int32_t before = __atomic_fetch_sub(flags, 2, __ATOMIC_ACQ_REL);
  if ((before & kCountMask) == 0) fail(std::string("over-release of a ") + what);
  return (before & kCountMask) == 2;
}

}  // namespace

int64_t live_blocks() { return g_live_blocks; }

}  // namespace device

using namespace device;

extern "C" {

__attribute__((visibility("default"))) void* _NSConcreteStackBlock[32];
__attribute__((visibility("default"))) void* _NSConcreteGlobalBlock[32];
__attribute__((visibility("default"))) void* _NSConcreteMallocBlock[32];

__attribute__((visibility("default"))) void* _Block_copy(const void* argument) {
  auto* block = static_cast<Block*>(const_cast<void*>(argument));
  if (!block) return nullptr;
  if (block->flags & kNeedsFree) {
    add_reference(&block->flags);
    return block;
  }
  if (block->flags & kGlobal) return block;
  auto* copy = static_cast<Block*>(std::malloc(block->descriptor->size));
  std::memcpy(copy, block, block->descriptor->size);
  copy->flags = (block->flags & ~(kCountMask | 1)) | kNeedsFree | 2;
  copy->isa = _NSConcreteMallocBlock;
  g_live_blocks++;
  if (copy->flags & kHasCopyDispose) copy->descriptor->copy(copy, block);
  return copy;
}

__attribute__((visibility("default"))) void _Block_release(const void* argument) {
  auto* block = static_cast<Block*>(const_cast<void*>(argument));
  if (!block || (block->flags & kGlobal)) return;
  if (!(block->flags & kNeedsFree)) return;
  if (!drop_reference(&block->flags, "block")) return;
  if (block->flags & kHasCopyDispose) block->descriptor->dispose(block);
  std::free(block);
  g_live_blocks--;
}

__attribute__((visibility("default"))) void _Block_object_assign(void* to, const void* from, const int flags) {
  auto** slot = static_cast<const void**>(to);
  if (flags & kFieldCaller) {
    *slot = from;  // the owner of a __block variable keeps its content as it is
    return;
  }
  switch (flags & ~kFieldWeak) {
    case kFieldObject:
      *slot = retained(static_cast<Object*>(const_cast<void*>(from)));
      return;
    case kFieldBlock:
      *slot = _Block_copy(from);
      return;
    case kFieldByref: {
      Byref* source = static_cast<Byref*>(const_cast<void*>(from))->forwarding;
      if (source->flags & kNeedsFree) {
        add_reference(&source->flags);
        *slot = source;
        return;
      }
      auto* copy = static_cast<Byref*>(std::malloc(source->size));
      std::memcpy(copy, source, source->size);
      copy->isa = nullptr;
      // one reference for the block that captures it, one for the frame that declared it
      copy->flags = (source->flags & ~kCountMask) | kNeedsFree | 4;
      copy->forwarding = copy;
      source->forwarding = copy;
      if (source->flags & kHasCopyDispose) {
        auto* helpers = reinterpret_cast<ByrefHelpers*>(source + 1);
        helpers->keep(copy, source);
      }
      *slot = copy;
      return;
    }
    default:
      fail("a block captured a field of unknown kind " + std::to_string(flags));
  }
}

__attribute__((visibility("default"))) void _Block_object_dispose(const void* object, const int flags) {
  if (flags & kFieldCaller) return;
  switch (flags & ~kFieldWeak) {
    case kFieldObject:
      if (object) release(static_cast<Object*>(const_cast<void*>(object)));
      return;
    case kFieldBlock:
      _Block_release(object);
      return;
    case kFieldByref: {
      Byref* byref = static_cast<Byref*>(const_cast<void*>(object))->forwarding;
      if (!(byref->flags & kNeedsFree)) return;
      if (!drop_reference(&byref->flags, "__block variable")) return;
      if (byref->flags & kHasCopyDispose) reinterpret_cast<ByrefHelpers*>(byref + 1)->destroy(byref);
      std::free(byref);
      return;
    }
    default:
      fail("a block disposed of a field of unknown kind " + std::to_string(flags));
  }
}

}  // extern "C"
