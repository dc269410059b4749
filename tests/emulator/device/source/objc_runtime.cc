// Classes, selectors, reference counts and autorelease pools; see objc_runtime.h. Dead objects stay recognisable: their memory
// goes through a first-in first-out list per class before it is used again, so a message to one is reported by name.
#include "objc_runtime.h"

#include <pthread.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <string_view>
#include <unordered_map>

#include "lock.h"
#include "report.h"

namespace device {

void define_all_classes();  // classes.cc
int64_t live_blocks();      // blocks.cc

namespace {

constexpr size_t kQuarantine = 1024;  // dead objects per class that are certainly still recognised

struct Tables {
  Lock lock{Rank::kClasses};
  std::unordered_map<std::string_view, Selector*> selectors;
  std::unordered_map<std::string_view, Class*> classes;
  Lock objects{Rank::kObjects};
  std::unordered_map<Class*, std::deque<void*>> dead;
};

Tables& tables() {
  static Tables* tables = new Tables;  // leaked: threads may outlive static destructors
  return *tables;
}

pthread_once_t g_once = PTHREAD_ONCE_INIT;
thread_local bool g_defining = false;

void define_once() {
  g_defining = true;
  define_all_classes();
  g_defining = false;
}

void ensure_classes() {
  if (!g_defining) pthread_once(&g_once, define_once);
}

__attribute__((constructor)) void at_load() { ensure_classes(); }

std::string_view keep(const char* name) { return strdup(name); }

Class* root() {
  static Class* cls = class_named("NSObject");
  return cls;
}

Class* meta_root() {
  static Class* cls = class_named("meta NSObject");
  return cls;
}

bool harmless_to_nil(const Selector* s) {
  static const Selector* known[] = {selector("release"), selector("retain"), selector("autorelease"), selector("drain")};
  for (const Selector* other : known)
    if (s == other) return true;
  return false;
}

std::string quoted(const Object* receiver, const char* name) {
  const bool is_class = receiver->isa->name[0] == 'm' && std::strncmp(receiver->isa->name, "meta ", 5) == 0;
  const char* cls = is_class ? static_cast<const Class*>(receiver)->name : receiver->isa->name;
  return std::string(is_class ? "+[" : "-[") + cls + " " + name + "]";
}

[[noreturn]] void unknown(const Object* receiver, const Selector* s) {
  fail(quoted(receiver, s->name) + " is not modelled by the emulated device (device/README.md says how to add it)");
}

// --- autorelease pools ---------------------------------------------------------------------------------------------------------

struct Pools {
  std::vector<Object*> objects;  // nullptr marks where a pool begins
  size_t depth = 0;
};

pthread_key_t g_pools_key;
pthread_once_t g_pools_once = PTHREAD_ONCE_INIT;
thread_local Pools* g_pools = nullptr;

void drain_to(Pools* pools, size_t size) {
  while (pools->objects.size() > size) {
    Object* object = pools->objects.back();
    pools->objects.pop_back();
    if (object) release(object);
    else pools->depth--;
  }
}

Pools* pools() {
  pthread_once(&g_pools_once, [] {
    pthread_key_create(&g_pools_key, [](void* at) {
      auto* pools = static_cast<Pools*>(at);
      g_pools = pools;
      drain_to(pools, 0);
      g_pools = nullptr;
      delete pools;
    });
  });
  if (!g_pools) {
    g_pools = new Pools;
    pthread_setspecific(g_pools_key, g_pools);
  }
  return g_pools;
}

// --- methods of every object ---------------------------------------------------------------------------------------------------

struct RootMethods : Object {
  DEVICE_CLASS("NSObject")
  Object* retain_() { return retained(static_cast<Object*>(this)); }
  void release_() { release(this); }
  Object* autorelease_() { return autorelease(this); }
  uint64_t retain_count() const { return references; }
  uint64_t hash() const { return reinterpret_cast<uintptr_t>(this) >> 4; }
  bool is_equal(const Object* other) const { return this == other; }
  Object* self() { return this; }
  Class* class_of() const { return isa; }
  bool responds(const Selector* s) {
    const Class::Slot* slot = isa->find(s);
    if (!slot) unknown(this, s);  // a question about an unmodelled method must not be answered "no"
    return slot->since <= option(METAL_OPTION_OS_VERSION);
  }
  Object* signature(const Selector*) { return nullptr; }
  Object* init() { return this; }
};

Object* alloc(Class* cls) {
  if (!cls->allocatable)
    fail(std::string("+[") + cls->name + " alloc]: " +
         (cls->modelled ? "this class is not created by alloc" : "the class is not modelled by the emulated device"));
  return allocate(cls);
}

}  // namespace

void define_root_classes() {
  Class* base = root();
  Class* meta = meta_root();
  base->isa = meta;
  meta->isa = meta;
  define_class(base, nullptr,
               {m<&RootMethods::retain_>("retain"), m<&RootMethods::release_>("release"),
                m<&RootMethods::autorelease_>("autorelease"), m<&RootMethods::retain_count>("retainCount"),
                m<&RootMethods::hash>("hash"), m<&RootMethods::is_equal>("isEqual:"), m<&RootMethods::self>("self"),
                m<&RootMethods::class_of>("class"), m<&RootMethods::responds>("respondsToSelector:"),
                m<&RootMethods::signature>("methodSignatureForSelector:"), m<&RootMethods::init>("init")},
               {m<&alloc>("alloc")});
}

void fail(const std::string& message) {
  report("not-modelled", message);
  std::fprintf(stderr, "metal device: fatal: %s\n", message.c_str());
  std::fflush(stderr);
  std::abort();
}

// --- selectors and classes -----------------------------------------------------------------------------------------------------

Class* Object::cls() { return root(); }

const Selector* selector(const char* name) {
  Tables& all = tables();
  Guard guard(all.lock);
  auto found = all.selectors.find(name);
  if (found != all.selectors.end()) return found->second;
  std::string_view kept = keep(name);
  return all.selectors[kept] = new Selector{kept.data()};
}

Class* class_named(const char* name) {
  Tables& all = tables();
  Guard guard(all.lock);
  auto found = all.classes.find(name);
  if (found != all.classes.end()) return found->second;
  auto* cls = new Class;
  std::string_view kept = keep(name);
  cls->name = kept.data();
  cls->references = 1;
  cls->life = kAlive;
  all.classes[kept] = cls;
  if (std::strncmp(name, "meta ", 5) != 0 && std::strcmp(name, "NSObject") != 0) {
    // until it is defined: no methods at all, so that any message names it and stops
    auto* meta = new Class;
    meta->name = keep(("meta " + std::string(name)).c_str()).data();
    meta->references = 1;
    meta->life = kAlive;
    meta->isa = meta;
    all.classes[meta->name] = meta;
    cls->isa = meta;
  }
  return cls;
}

void adopt_class(Class* cls, const char* name) {
  Class* made = class_named(name);
  cls->isa = made->isa;
  cls->name = made->name;
  cls->references = 1;
  cls->life = kAlive;
  Tables& all = tables();
  Guard guard(all.lock);
  all.classes[cls->name] = cls;
}

void Class::add(const Selector* s, void (*imp)(), int since) {
  size_t used = 0;
  for (const Slot& slot : slots) used += slot.selector != nullptr;
  if (slots.empty() || 2 * (used + 1) > slots.size()) {
    std::vector<Slot> old = std::move(slots);
    slots.assign(old.empty() ? 16 : old.size() * 2, Slot{nullptr, nullptr, 0});
    for (const Slot& slot : old)
      if (slot.selector) add(slot.selector, slot.imp, slot.since);
  }
  const size_t mask = slots.size() - 1;
  size_t at = (reinterpret_cast<uintptr_t>(s) >> 4) & mask;
  while (slots[at].selector && slots[at].selector != s) at = (at + 1) & mask;
  slots[at] = Slot{s, imp, since};
}

const Class::Slot* Class::find(const Selector* s) const {
  if (slots.empty()) return nullptr;
  const size_t mask = slots.size() - 1;
  size_t at = (reinterpret_cast<uintptr_t>(s) >> 4) & mask;
  while (slots[at].selector) {
    if (slots[at].selector == s) return &slots[at];
    at = (at + 1) & mask;
  }
  return nullptr;
}

void define_class(Class* cls, Class* super, const std::vector<Method>& methods, const std::vector<Method>& class_methods) {
  cls->modelled = true;
  cls->super = super;
  Class* meta = cls->isa;
  meta->super = super ? super->isa : nullptr;
  auto inherit = [](Class* to, Class* from) {
    if (!from) return;
    for (const Class::Slot& slot : from->slots)
      if (slot.selector) to->add(slot.selector, slot.imp, slot.since);
  };
  inherit(cls, super);
  inherit(meta, super ? super->isa : nullptr);
  for (const Method& method : methods) cls->add(selector(method.selector), method.imp, method.since);
  for (const Method& method : class_methods) meta->add(selector(method.selector), method.imp, method.since);
}

bool is_kind(const Object* object, const Class* cls) {
  for (const Class* at = object->isa; at; at = at->super)
    if (at == cls) return true;
  return false;
}

// --- objects -------------------------------------------------------------------------------------------------------------------

Object* allocate(Class* cls) {
  void* memory = nullptr;
  Tables& all = tables();
  {
    Guard guard(all.objects);
    std::deque<void*>& dead = all.dead[cls];
    if (dead.size() > kQuarantine) {
      memory = dead.front();
      dead.pop_front();
    }
  }
  if (!memory) memory = std::malloc(cls->size);
  cls->construct(memory);
  auto* object = static_cast<Object*>(memory);
  object->isa = cls;
  object->references = 1;
  object->life = kAlive;
  cls->live++;
  cls->created++;
  return object;
}

void retain(Object* object) {
  if (object->isa->constant) return;
  if (object->life != kAlive) {
    report("dead-object", quoted(object, "retain") + ": the object was already deallocated", object);
    return;
  }
  object->references.fetch_add(1, std::memory_order_relaxed);
}

void release(Object* object) {
  Class* cls = object->isa;
  if (cls->constant || !cls->destroy) return;  // classes are never freed
  if (object->life != kAlive) {
    report("dead-object", quoted(object, "release") + ": the object was already deallocated (over-release)", object);
    return;
  }
  if (object->references.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  object->life = kDead;
  cls->destroy(object);
  object->isa = cls;
  object->life = kDead;
  object->references = 0;
  cls->live--;
  Tables& all = tables();
  Guard guard(all.objects);
  all.dead[cls].push_back(object);
}

Object* autorelease(Object* object) {
  if (!object) return nullptr;
  Pools* mine = pools();
  if (mine->depth == 0)
    report("no-autorelease-pool",
           std::string(object->isa->name) + " was autoreleased on a thread without a pool: it lives until the thread ends", object);
  mine->objects.push_back(object);
  return object;
}

void* pool_push() {
  Pools* mine = pools();
  mine->objects.push_back(nullptr);
  mine->depth++;
  return reinterpret_cast<void*>(mine->objects.size());
}

void pool_pop(void* token) {
  Pools* mine = pools();
  const size_t size = reinterpret_cast<uintptr_t>(token);
  if (size == 0 || size > mine->objects.size() || mine->objects[size - 1] != nullptr) {
    report("autorelease-pool", "a pool was drained that is not on this thread's stack of pools");
    return;
  }
  drain_to(mine, size - 1);
}

bool check_argument(const Object* object, const Class* cls, const Selector* s) {
  if (!object) return true;
  if (object->isa->constant) return is_kind(object, cls);
  if (object->life != kAlive) {
    const bool dead = object->life == kDead;
    report("dead-object",
           std::string("argument of ") + s->name + " is " +
               (dead ? std::string("a deallocated ") + object->isa->name : std::string("not an object")),
           dead ? object : nullptr);
    return false;
  }
  if (!is_kind(object, cls)) {
    report("wrong-class", std::string("argument of ") + s->name + " is a " + object->isa->name + ", wanted a " + cls->name, object);
    return false;
  }
  return true;
}

std::vector<std::pair<std::string, int64_t>> live_objects() {
  std::vector<std::pair<std::string, int64_t>> out;
  Tables& all = tables();
  Guard guard(all.lock);
  for (auto& [name, cls] : all.classes)
    if (cls->live > 0) out.emplace_back(cls->name, cls->live.load());
  if (int64_t blocks = live_blocks(); blocks > 0) out.emplace_back("NSBlock", blocks);
  return out;
}

}  // namespace device

// --- the C functions -----------------------------------------------------------------------------------------------------------

using device::Class;
using device::Object;
using device::Selector;

// Called by objc_msgSend; nullptr stands for a message to nil.
extern "C" __attribute__((visibility("hidden"))) void (*device_find_method(Object* receiver, const Selector* s))() {
  if (!receiver) {
    if (!device::harmless_to_nil(s)) device::report("message-to-nil", std::string("-[nil ") + s->name + "] answers zero");
    return nullptr;
  }
  Class* cls = receiver->isa;
  if (!cls->constant && receiver->life != device::kAlive) {
    if (receiver->life != device::kDead)
      device::fail(std::string(s->name) + " was sent to something that is not an object");
    const bool over = s == device::selector("release");
    device::report("dead-object",
                   device::quoted(receiver, s->name) + ": the object was already deallocated" + (over ? " (over-release)" : ""), receiver);
    return nullptr;
  }
  const Class::Slot* slot = cls->find(s);
  if (!slot) device::unknown(receiver, s);
  if (slot->since > device::option(METAL_OPTION_OS_VERSION)) {
    const int since = slot->since;
    device::fail(device::quoted(receiver, s->name) + " needs macOS " + std::to_string(since / 10000) + "." +
                 std::to_string(since / 100 % 100) + ", the emulated one is older (unrecognised selector)");
  }
  return slot->imp;
}

DEVICE_EXPORT const Selector* sel_registerName(const char* name) {
  device::ensure_classes();
  return device::selector(name);
}

DEVICE_EXPORT const char* sel_getName(const Selector* s) { return s->name; }

DEVICE_EXPORT Class* objc_lookUpClass(const char* name) {
  device::ensure_classes();
  return device::class_named(name);
}

DEVICE_EXPORT Class* objc_getClass(const char* name) { return objc_lookUpClass(name); }
DEVICE_EXPORT Class* objc_getRequiredClass(const char* name) { return objc_lookUpClass(name); }

DEVICE_EXPORT void* objc_getProtocol(const char* name) {
  return const_cast<Selector*>(device::selector((std::string("protocol ") + name).c_str()));
}

DEVICE_EXPORT Class* object_getClass(Object* object) { return object ? object->isa : nullptr; }
DEVICE_EXPORT const char* object_getClassName(Object* object) { return object ? object->isa->name : "nil"; }
DEVICE_EXPORT const char* class_getName(Class* cls) { return cls ? cls->name : "nil"; }
DEVICE_EXPORT Class* class_getSuperclass(Class* cls) { return cls ? cls->super : nullptr; }

DEVICE_EXPORT void (*class_getMethodImplementation(Class* cls, const Selector* s))() {
  const Class::Slot* slot = cls->find(s);
  if (!slot) device::fail(std::string("class_getMethodImplementation: ") + cls->name + " has no " + s->name);
  return slot->imp;
}

DEVICE_EXPORT bool class_respondsToSelector(Class* cls, const Selector* s) {
  const Class::Slot* slot = cls->find(s);
  return slot && slot->since <= device::option(METAL_OPTION_OS_VERSION);
}

DEVICE_EXPORT void* objc_autoreleasePoolPush() { return device::pool_push(); }
DEVICE_EXPORT void objc_autoreleasePoolPop(void* token) { device::pool_pop(token); }
DEVICE_EXPORT Object* objc_retain(Object* object) { return device::retained(object); }
DEVICE_EXPORT void objc_release(Object* object) {
  if (object) device::release(object);
}
DEVICE_EXPORT Object* objc_autorelease(Object* object) { return device::autorelease(object); }
