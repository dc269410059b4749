// Objects, classes, selectors and reference counts: the Objective-C runtime that metal-cpp's messages meet on Linux.
// A class is a C++ struct derived from Object plus a table of (selector, member function). Knows nothing of Metal.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <Block.h>

#define DEVICE_EXPORT extern "C" __attribute__((visibility("default"), used))

namespace device {

struct Selector {
  const char* name;
};

struct Class;

// First bytes of every object. Constant strings laid out by the compiler share `isa` only (Class::constant).
struct Object {
  Class* isa;
  std::atomic<uint32_t> references;
  uint32_t life;

  static Class* cls();  // NSObject
};

constexpr uint32_t kAlive = 0xA11FE0B1;
constexpr uint32_t kDead = 0xDEADDEAD;

// macOS versions as 10000 major + 100 minor, the spelling of the availability macros.
constexpr int os_version(int major, int minor = 0) { return major * 10000 + minor * 100; }

struct Method {
  const char* selector;
  void (*imp)();
  int since = 0;  // first macOS version that has it
};

struct Class : Object {
  const char* name = nullptr;
  Class* super = nullptr;
  size_t size = 0;
  void (*construct)(void*) = nullptr;
  void (*destroy)(void*) = nullptr;
  bool modelled = false;
  bool constant = false;  // instances are never counted nor freed
  bool allocatable = false;
  std::atomic<int64_t> live{0};
  std::atomic<int64_t> created{0};

  struct Slot {
    const Selector* selector;
    void (*imp)();
    int since;
  };
  std::vector<Slot> slots;  // open addressing, a power of two
  void add(const Selector* selector, void (*imp)(), int since);
  const Slot* find(const Selector* selector) const;
};

const Selector* selector(const char* name);
// The class of that name; an empty, unmodelled one is made where there is none, so that its first message can fail loudly.
Class* class_named(const char* name);

void retain(Object* object);
void release(Object* object);
Object* autorelease(Object* object);
void* pool_push();
void pool_pop(void* token);

bool is_kind(const Object* object, const Class* cls);
// Reports an argument that is dead or of another class; false means: do not touch it.
bool check_argument(const Object* object, const Class* cls, const Selector* selector);

Object* allocate(Class* cls);

// Live objects per class name, blocks included, classes with none left out.
std::vector<std::pair<std::string, int64_t>> live_objects();

[[noreturn]] void fail(const std::string& message);

// --- typed sugar -------------------------------------------------------------------------------------------------------------

template <class T>
T* make() {
  return static_cast<T*>(allocate(T::cls()));
}

template <class T>
T* retained(T* object) {
  if (object) retain(object);
  return object;
}

template <class T>
T* autoreleased(T* object) {
  return static_cast<T*>(autorelease(object));
}

template <class T>
class Ref {
 public:
  Ref() = default;
  explicit Ref(T* object) : object_(object) {
    if (object_) retain(object_);
  }
  Ref(const Ref& other) : Ref(other.object_) {}
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  ~Ref() { reset(); }
  Ref& operator=(Ref other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  static Ref adopt(T* object) {
    Ref ref;
    ref.object_ = object;
    return ref;
  }
  void set(T* object) { *this = Ref(object); }
  void reset() {
    if (T* object = std::exchange(object_, nullptr)) release(object);
  }
  T* get() const { return object_; }
  T* operator->() const { return object_; }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  T* object_ = nullptr;
};

// A heap copy of a block, of the block's own type; _Block_release gives it back.
template <class B>
B copied(B block) {
  return (B)_Block_copy((const void*)block);
}

namespace detail {

template <class R>
inline R zero() {
  if constexpr (!std::is_void_v<R>) {
    alignas(R) static const unsigned char none[sizeof(R)] = {};
    return *reinterpret_cast<const R*>(none);
  }
}

template <class A>
inline bool argument_ok(A value, const Selector* selector) {
  if constexpr (std::is_pointer_v<A>) {
    using T = std::remove_cv_t<std::remove_pointer_t<A>>;
    if constexpr (std::is_base_of_v<Object, T>) return check_argument(value, T::cls(), selector);
  }
  return true;
}

template <auto F>
struct Imp;

template <class T, class R, class... A, R (T::*F)(A...)>
struct Imp<F> {
  static R call(T* self, const Selector* selector, A... arguments) {
    if (!(argument_ok(arguments, selector) && ...)) {
      return zero<R>();
    }
    return (self->*F)(arguments...);
  }
};

template <class T, class R, class... A, R (T::*F)(A...) const>
struct Imp<F> {
  static R call(const T* self, const Selector* selector, A... arguments) {
    if (!(argument_ok(arguments, selector) && ...)) {
      return zero<R>();
    }
    return (self->*F)(arguments...);
  }
};

template <class R, class... A, R (*F)(Class*, A...)>
struct Imp<F> {
  static R call(Class* cls, const Selector* selector, A... arguments) {
    if (!(argument_ok(arguments, selector) && ...)) {
      return zero<R>();
    }
    return F(cls, arguments...);
  }
};

}  // namespace detail

// A table row: m<&Buffer::length>("length"). The member function's own signature is the method's type.
template <auto F>
Method m(const char* selector, int since = 0) {
  return {selector, reinterpret_cast<void (*)()>(&detail::Imp<F>::call), since};
}

void define_class(Class* cls, Class* super, const std::vector<Method>& methods, const std::vector<Method>& class_methods);

template <class T>
void define(Class* super, const std::vector<Method>& methods, const std::vector<Method>& class_methods = {},
            bool allocatable = false) {
  Class* cls = T::cls();
  cls->size = sizeof(T);
  cls->construct = [](void* at) { new (at) T; };
  cls->destroy = [](void* at) { static_cast<T*>(at)->~T(); };
  cls->allocatable = allocatable;
  define_class(cls, super, methods, class_methods);
}

#define DEVICE_CLASS(objc_name)                                  \
  static ::device::Class* cls() {                                \
    static ::device::Class* known = ::device::class_named(objc_name); \
    return known;                                                \
  }

struct Root : Object {
  DEVICE_CLASS("NSObject")
};

}  // namespace device
