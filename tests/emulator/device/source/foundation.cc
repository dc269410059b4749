// NSString, NSArray, NSDictionary, NSNumber, NSError, NSURL, NSProcessInfo, NSAutoreleasePool and the string constants that
// metal-cpp reads when it is loaded. Knows nothing of Metal but the names of two error keys.
#include "foundation.h"

#include <unistd.h>

#include <cctype>
#include <cstdio>
#include <cstdlib>

#include <Foundation/Foundation.hpp>  // Apple's, for structures passed by value and enumerators

#include "report.h"

namespace device {

void adopt_class(Class* cls, const char* name);  // objc_runtime.cc

}  // namespace device

// The class of strings that the compiler lays out for MTLSTR("..."): {isa, flags, characters, length}.
extern "C" __attribute__((visibility("default"))) device::Class __CFConstantStringClassReference;
device::Class __CFConstantStringClassReference;

namespace device {
namespace {

constexpr int kEightBitConstant = 0x07C8;

struct ConstantString {
  Class* isa;
  int flags;
  const char* characters;
  long length;
};

bool supported(NS::StringEncoding encoding) {
  return encoding == NS::UTF8StringEncoding || encoding == NS::ASCIIStringEncoding || encoding == NS::ISOLatin1StringEncoding;
}

void need_encoding(NS::StringEncoding encoding, const char* where) {
  if (!supported(encoding))
    fail(std::string(where) + ": string encoding " + std::to_string(encoding) + " is not modelled (UTF-8 and ASCII are)");
}

// Number of UTF-16 units, which is what NSString calls its length.
uint64_t utf16_length(std::string_view text) {
  uint64_t units = 0;
  for (unsigned char c : text) {
    if ((c & 0xC0) != 0x80) units++;
    if (c >= 0xF0) units++;
  }
  return units;
}

struct StringMethods : String {
  String* init_() { return this; }
  String* init_string(const String* other) {
    text = str(other);
    return this;
  }
  String* init_c(const char* characters, NS::StringEncoding encoding) {
    need_encoding(encoding, "initWithCString:encoding:");
    if (!characters) {
      report("null-argument", "initWithCString:encoding: was given a null pointer", this);
      return this;
    }
    text = characters;
    return this;
  }
  String* init_bytes(void* bytes, uint64_t length, NS::StringEncoding encoding, bool free_buffer) {
    need_encoding(encoding, "initWithBytesNoCopy:length:encoding:freeWhenDone:");
    text.assign(static_cast<const char*>(bytes), length);
    if (free_buffer) std::free(bytes);
    return this;
  }
  uint16_t character(uint64_t index) const {
    const std::string_view all = view();
    if (index >= all.size() || static_cast<unsigned char>(all[index]) >= 0x80)
      fail("characterAtIndex: is modelled for ASCII strings within their length only");
    return static_cast<uint16_t>(all[index]);
  }
  uint64_t length() const { return utf16_length(view()); }
  const char* utf8() const {
    return isa->constant ? reinterpret_cast<const ConstantString*>(this)->characters : text.c_str();
  }
  const char* c_string(NS::StringEncoding encoding) const {
    need_encoding(encoding, "cStringUsingEncoding:");
    return utf8();
  }
  uint64_t max_bytes(NS::StringEncoding) const { return 3 * length(); }
  uint64_t bytes(NS::StringEncoding encoding) const {
    need_encoding(encoding, "lengthOfBytesUsingEncoding:");
    return view().size();
  }
  bool equal_string(const String* other) const { return other && view() == other->view(); }
  bool equal_object(const Object* other) const { return equal(this, other); }
  uint64_t hash() const { return std::hash<std::string_view>()(view()); }
  NS::Range find(const String* needle, NS::UInteger options) const {
    if (options & ~static_cast<NS::UInteger>(NS::LiteralSearch)) fail("rangeOfString:options: is modelled for literal search only");
    const size_t at = view().find(needle->view());
    if (at == std::string_view::npos) return NS::Range(static_cast<NS::UInteger>(INTPTR_MAX), 0);
    return NS::Range(utf16_length(view().substr(0, at)), needle->isa ? utf16_length(needle->view()) : 0);
  }
  String* appended(const String* other) const { return temporary(str(this) + str(other)); }
  int64_t compare_no_case(const String* other) const {
    const std::string_view a = view(), b = other->view();
    for (size_t i = 0; i < a.size() && i < b.size(); ++i) {
      const int difference = std::tolower(static_cast<unsigned char>(a[i])) - std::tolower(static_cast<unsigned char>(b[i]));
      if (difference) return difference < 0 ? -1 : 1;
    }
    return a.size() < b.size() ? -1 : a.size() > b.size();
  }
  String* description() { return autoreleased(retained(static_cast<String*>(this))); }
  String* copy() { return retained(static_cast<String*>(this)); }
  static String* empty(Class*) { return temporary(""); }
  static String* with_string(Class*, const String* other) { return temporary(str(other)); }
  static String* with_c(Class*, const char* characters, NS::StringEncoding encoding) {
    need_encoding(encoding, "stringWithCString:encoding:");
    if (!characters) {
      report("null-argument", "stringWithCString:encoding: was given a null pointer");
      return nullptr;
    }
    return temporary(characters);
  }
};

struct Enumerator : Object {
  DEVICE_CLASS("NSEnumerator")
  std::vector<Ref<Object>> items;
  size_t at = 0;
  Object* next() { return at < items.size() ? items[at++].get() : nullptr; }
  Array* all() {
    std::vector<Ref<Object>> rest(items.begin() + static_cast<long>(at), items.end());
    at = items.size();
    return autoreleased(Array::with(std::move(rest)));
  }
};

struct ArrayMethods : Array {
  Array* init_() { return this; }
  Array* init_objects(Object* const* objects, uint64_t count) {
    for (uint64_t i = 0; i < count; ++i) {
      if (!objects[i]) fail("an NSArray was made with a nil object");
      items.emplace_back(objects[i]);
    }
    return this;
  }
  Object* at(uint64_t index) const {
    if (index >= items.size())
      fail("-[NSArray objectAtIndex:]: index " + std::to_string(index) + " beyond " + std::to_string(items.size()) + " objects");
    return items[index].get();
  }
  uint64_t count() const { return items.size(); }
  Object* enumerator() const {
    auto* made = make<Enumerator>();
    made->items = items;
    return autoreleased(made);
  }
  Array* copy() { return retained(static_cast<Array*>(this)); }
  String* description() const { return temporary(describe(this)); }
  static Array* empty(Class*) { return autoreleased(make<Array>()); }
  static Array* with_object(Class*, Object* object) { return autoreleased(Array::with({Ref<Object>(object)})); }
  static Array* with_objects(Class*, Object* const* objects, uint64_t count) {
    auto* made = static_cast<ArrayMethods*>(make<Array>());
    return autoreleased(made->init_objects(objects, count));
  }
};

struct Set : Array {
  DEVICE_CLASS("NSSet")
};

struct DictionaryMethods : Dictionary {
  Dictionary* init_() { return this; }
  Dictionary* init_objects(Object* const* objects, Object* const* keys, uint64_t count) {
    for (uint64_t i = 0; i < count; ++i) {
      if (!objects[i] || !keys[i]) fail("an NSDictionary was made with a nil key or object");
      bool replaced = false;
      for (auto& [key, value] : items)
        if (equal(key.get(), keys[i])) value.set(objects[i]), replaced = true;
      if (!replaced) items.emplace_back(Ref<Object>(keys[i]), Ref<Object>(objects[i]));
    }
    return this;
  }
  Object* key_enumerator() const {
    auto* made = make<Enumerator>();
    for (const auto& item : items) made->items.push_back(item.first);
    return autoreleased(made);
  }
  Object* object(const Object* key) const { return get(key); }
  uint64_t count() const { return items.size(); }
  Dictionary* copy() { return retained(static_cast<Dictionary*>(this)); }
  String* description() const { return temporary(describe(this)); }
  static Dictionary* empty(Class*) { return autoreleased(make<Dictionary>()); }
  static Dictionary* with_object(Class*, Object* object, Object* key) {
    auto* made = static_cast<DictionaryMethods*>(make<Dictionary>());
    return autoreleased(made->init_objects(&object, &key, 1));
  }
  static Dictionary* with_objects(Class*, Object* const* objects, Object* const* keys, uint64_t count) {
    auto* made = static_cast<DictionaryMethods*>(make<Dictionary>());
    return autoreleased(made->init_objects(objects, keys, count));
  }
};

template <class T>
constexpr const char* type_code() {
  if constexpr (std::is_same_v<T, bool>) return "B";
  else if constexpr (std::is_same_v<T, float>) return "f";
  else if constexpr (std::is_same_v<T, double>) return "d";
  else if constexpr (sizeof(T) == 1) return std::is_signed_v<T> ? "c" : "C";
  else if constexpr (sizeof(T) == 2) return std::is_signed_v<T> ? "s" : "S";
  else if constexpr (sizeof(T) == 4) return std::is_signed_v<T> ? "i" : "I";
  else return std::is_signed_v<T> ? "q" : "Q";
}

struct NumberMethods : Number {
  template <class T>
  void set(T value) {
    type = type_code<T>();
    if constexpr (std::is_same_v<T, bool>) kind = kBool;
    else if constexpr (std::is_floating_point_v<T>) kind = sizeof(T) == 4 ? kFloat : kDouble;
    else kind = std::is_signed_v<T> ? kSigned : kUnsigned;
    if constexpr (std::is_floating_point_v<T>) real = value;
    else integer = static_cast<int64_t>(value);
  }
  template <class T>
  Object* init_value(T value) {
    set(value);
    return this;
  }
  template <class T>
  static Object* with(Class*, T value) {
    auto* made = static_cast<NumberMethods*>(make<Number>());
    made->set(value);
    return autoreleased(static_cast<Object*>(made));
  }
  template <class T>
  T as() const {
    if (kind == kFloat || kind == kDouble) return static_cast<T>(real);
    return kind == kUnsigned ? static_cast<T>(static_cast<uint64_t>(integer)) : static_cast<T>(integer);
  }
  String* text() const { return temporary(describe(this)); }
  String* text_locale(const Object*) const { return temporary(describe(this)); }
  int64_t compare(const Number* other) const {
    const auto a = as<double>(), b = static_cast<const NumberMethods*>(other)->as<double>();
    return a < b ? -1 : a > b;
  }
  bool equal_number(const Number* other) const { return other && compare(other) == 0; }
  Object* copy() { return retained(static_cast<Object*>(this)); }
};

struct ValueMethods : Value {
  static Object* with_pointer(Class*, const void* pointer) {
    auto* made = make<Value>();
    made->kind = kPointer;
    made->type = "^v";
    made->pointer = pointer;
    return autoreleased(static_cast<Object*>(made));
  }
  void* pointer_value() const { return const_cast<void*>(pointer); }
  const char* type_of() const { return type; }
  Object* copy() { return retained(static_cast<Object*>(this)); }
};

struct ErrorMethods : Error {
  Object* init_all(String* given, int64_t number, Dictionary* dictionary) {
    domain.set(given);
    code = number;
    info.set(dictionary);
    return this;
  }
  static Error* with(Class*, String* given, int64_t number, Dictionary* dictionary) {
    auto* made = static_cast<ErrorMethods*>(make<Error>());
    made->init_all(given, number, dictionary);
    return autoreleased(static_cast<Error*>(made));
  }
  int64_t get_code() const { return code; }
  String* get_domain() const { return domain.get(); }
  Dictionary* get_info() const { return info.get(); }
  Object* entry(const char* key) const {
    if (!info) return nullptr;
    Ref<String> name = Ref<String>::adopt(String::with(key));
    return info->get(name.get());
  }
  String* described() const {
    if (Object* found = entry("NSLocalizedDescription")) return static_cast<String*>(found);
    return temporary("The operation couldn\xe2\x80\x99t be completed. (" + str(domain.get()) + " error " + std::to_string(code) + ".)");
  }
  String* reason() const { return static_cast<String*>(entry("NSLocalizedFailureReason")); }
  String* suggestion() const { return static_cast<String*>(entry("NSLocalizedRecoverySuggestion")); }
  Array* options() const { return static_cast<Array*>(entry("NSLocalizedRecoveryOptions")); }
  String* description() const { return temporary(describe(this)); }
  Object* copy() { return retained(static_cast<Object*>(this)); }
};

struct UrlMethods : Url {
  static Object* file(Class*, const String* path) {
    auto* made = make<Url>();
    made->path = str(path);
    return autoreleased(static_cast<Object*>(made));
  }
  Object* init_string(const String* text) {
    path = str(text);
    return this;
  }
  const char* file_system() const { return path.c_str(); }
  Object* copy() { return retained(static_cast<Object*>(this)); }
};

struct ProcessInfo : Object {
  DEVICE_CLASS("NSProcessInfo")
  static Object* shared(Class*) {
    static auto* only = [] {
      auto* made = make<ProcessInfo>();
      cls()->live--;  // lives as long as the process, so it is no leak
      return made;
    }();
    return only;
  }
  static NS::OperatingSystemVersion version_now() {
    const int64_t version = option(METAL_OPTION_OS_VERSION);
    return {version / 10000, version / 100 % 100, version % 100};
  }
  NS::OperatingSystemVersion version() const { return version_now(); }
  String* version_string() const {
    const auto now = version_now();
    return temporary("Version " + std::to_string(now.majorVersion) + "." + std::to_string(now.minorVersion));
  }
  bool at_least(NS::OperatingSystemVersion wanted) const {
    return option(METAL_OPTION_OS_VERSION) >= wanted.majorVersion * 10000 + wanted.minorVersion * 100 + wanted.patchVersion;
  }
  String* name() const { return temporary("emulated"); }
  int pid() const { return getpid(); }
  uint64_t processors() const { return static_cast<uint64_t>(sysconf(_SC_NPROCESSORS_ONLN)); }
  unsigned long long memory() const {
    return static_cast<unsigned long long>(sysconf(_SC_PHYS_PAGES)) * static_cast<unsigned long long>(sysconf(_SC_PAGESIZE));
  }
  int64_t thermal() const { return 0; }
  bool low_power() const { return false; }
  bool ios_on_mac() const { return false; }
};

struct Pool : Object {
  DEVICE_CLASS("NSAutoreleasePool")
  void* token = nullptr;
  ~Pool() {
    if (token) pool_pop(std::exchange(token, nullptr));
  }
  Object* init() {
    token = pool_push();
    return this;
  }
  void drain() { release(this); }
  void add(Object* object) { autorelease(object); }
};

}  // namespace

std::string_view String::view() const {
  if (!isa->constant) return text;
  auto* constant = reinterpret_cast<const ConstantString*>(this);
  if (constant->flags != kEightBitConstant) fail("a string literal with characters beyond ASCII is not modelled");
  return {constant->characters, static_cast<size_t>(constant->length)};
}

String* String::with(std::string_view text) {
  auto* made = make<String>();
  made->text = text;
  return made;
}

Array* Array::with(std::vector<Ref<Object>> items) {
  auto* made = make<Array>();
  made->items = std::move(items);
  return made;
}

bool equal(const Object* a, const Object* b) {
  if (a == b) return true;
  if (!a || !b) return false;
  if (is_kind(a, String::cls()) && is_kind(b, String::cls()))
    return static_cast<const String*>(a)->view() == static_cast<const String*>(b)->view();
  if (is_kind(a, Number::cls()) && is_kind(b, Number::cls()))
    return static_cast<const NumberMethods*>(a)->compare(static_cast<const Number*>(b)) == 0;
  return false;
}

Object* Dictionary::get(const Object* key) const {
  for (const auto& [known, value] : items)
    if (equal(known.get(), key)) return value.get();
  return nullptr;
}

std::string describe(const Object* object) {
  if (!object) return "(null)";
  if (is_kind(object, String::cls())) return std::string(static_cast<const String*>(object)->view());
  if (is_kind(object, Number::cls())) {
    auto* number = static_cast<const NumberMethods*>(object);
    if (number->kind == Value::kFloat || number->kind == Value::kDouble) {
      char text[40];
      std::snprintf(text, sizeof text, number->kind == Value::kFloat ? "%.9g" : "%.17g", number->real);
      return text;
    }
    return number->kind == Value::kUnsigned ? std::to_string(static_cast<uint64_t>(number->integer)) : std::to_string(number->integer);
  }
  if (is_kind(object, Error::cls())) {
    auto* error = static_cast<const ErrorMethods*>(object);
    return "Error Domain=" + str(error->domain.get()) + " Code=" + std::to_string(error->code) + " \"" + str(error->described()) + "\"";
  }
  std::string out;
  if (is_kind(object, Array::cls())) {
    for (const auto& item : static_cast<const Array*>(object)->items) out += (out.empty() ? "(" : ", ") + describe(item.get());
    return out.empty() ? "()" : out + ")";
  }
  if (is_kind(object, Dictionary::cls())) {
    for (const auto& [key, value] : static_cast<const Dictionary*>(object)->items)
      out += (out.empty() ? "{" : "; ") + describe(key.get()) + " = " + describe(value.get());
    return out.empty() ? "{}" : out + "}";
  }
  return std::string("<") + object->isa->name + ">";
}

Error* error(const char* domain, int64_t code, std::string_view text) {
  auto* made = make<Error>();
  made->domain = Ref<String>::adopt(String::with(domain));
  made->code = code;
  made->info = Ref<Dictionary>::adopt(make<Dictionary>());
  made->info->items.emplace_back(Ref<Object>::adopt(String::with("NSLocalizedDescription")), Ref<Object>::adopt(String::with(text)));
  return autoreleased(made);
}

void set_underlying(Error* error, const char* domain, int64_t code) {
  auto* made = make<Error>();
  made->domain = Ref<String>::adopt(String::with(domain));
  made->code = code;
  error->info->items.emplace_back(Ref<Object>::adopt(String::with("NSUnderlyingError")), Ref<Object>::adopt(made));
}

void set_error(Error** out, const char* domain, int64_t code, std::string_view text) {
  if (out) *out = error(domain, code, text);
}

// --- string constants ------------------------------------------------------------------------------------------------------------

// (variable, text); the texts of keys that this library itself writes must be right, the others only need to differ
#define DEVICE_CONSTANTS(X)                                                      \
  X(NSCocoaErrorDomain, "NSCocoaErrorDomain")                                    \
  X(NSPOSIXErrorDomain, "NSPOSIXErrorDomain")                                    \
  X(NSOSStatusErrorDomain, "NSOSStatusErrorDomain")                              \
  X(NSMachErrorDomain, "NSMachErrorDomain")                                      \
  X(NSUnderlyingErrorKey, "NSUnderlyingError")                                   \
  X(NSLocalizedDescriptionKey, "NSLocalizedDescription")                         \
  X(NSLocalizedFailureReasonErrorKey, "NSLocalizedFailureReason")                \
  X(NSLocalizedRecoverySuggestionErrorKey, "NSLocalizedRecoverySuggestion")      \
  X(NSLocalizedRecoveryOptionsErrorKey, "NSLocalizedRecoveryOptions")            \
  X(NSRecoveryAttempterErrorKey, "NSRecoveryAttempter")                          \
  X(NSHelpAnchorErrorKey, "NSHelpAnchor")                                        \
  X(NSDebugDescriptionErrorKey, "NSDebugDescription")                            \
  X(NSLocalizedFailureErrorKey, "NSLocalizedFailure")                            \
  X(NSStringEncodingErrorKey, "NSStringEncodingErrorKey")                        \
  X(NSURLErrorKey, "NSURL")                                                      \
  X(NSFilePathErrorKey, "NSFilePath")                                            \
  X(NSBundleDidLoadNotification, "NSBundleDidLoadNotification")                  \
  X(NSBundleResourceRequestLowDiskSpaceNotification, "NSBundleResourceRequestLowDiskSpaceNotification") \
  X(NSProcessInfoThermalStateDidChangeNotification, "NSProcessInfoThermalStateDidChangeNotification")   \
  X(NSProcessInfoPowerStateDidChangeNotification, "NSProcessInfoPowerStateDidChangeNotification")       \
  X(NSProcessInfoPerformanceProfileDidChangeNotification, "NSProcessInfoPerformanceProfileDidChangeNotification") \
  X(MTLCommandBufferEncoderInfoErrorKey, "MTLCommandBufferEncoderInfoErrorKey")  \
  X(MTLCommandBufferErrorDomain, "MTLCommandBufferErrorDomain")                  \
  X(MTLLibraryErrorDomain, "MTLLibraryErrorDomain")                              \
  X(MTLBinaryArchiveDomain, "MTLBinaryArchiveDomain")                            \
  X(MTLLogStateErrorDomain, "MTLLogStateErrorDomain")                            \
  X(MTLIOErrorDomain, "MTLIOErrorDomain")                                        \
  X(MTLTensorDomain, "MTLTensorDomain")                                          \
  X(MTLCounterErrorDomain, "MTLCounterErrorDomain")                              \
  X(MTLDeviceWasAddedNotification, "MTLDeviceWasAddedNotification")              \
  X(MTLDeviceRemovalRequestedNotification, "MTLDeviceRemovalRequestedNotification") \
  X(MTLDeviceWasRemovedNotification, "MTLDeviceWasRemovedNotification")          \
  X(MTLCommonCounterTimestamp, "GPUTimestamp")                                   \
  X(MTLCommonCounterSetTimestamp, "timestamp")

}  // namespace device

extern "C" {
#define DEVICE_DEFINE(name, text) __attribute__((visibility("default"), used)) device::String* name = nullptr;
DEVICE_CONSTANTS(DEVICE_DEFINE)
#undef DEVICE_DEFINE
__attribute__((visibility("default"), used)) int64_t NSDeviceCertificationiPhonePerformanceGaming = 1;
__attribute__((visibility("default"), used)) int64_t NSProcessPerformanceProfileDefault = 0;
__attribute__((visibility("default"), used)) int64_t NSProcessPerformanceProfileSustained = 1;
}

namespace device {

void define_foundation() {
  Class* root = Root::cls();
  define<String>(
      root,
      {m<&StringMethods::init_>("init"), m<&StringMethods::init_string>("initWithString:"),
       m<&StringMethods::init_c>("initWithCString:encoding:"),
       m<&StringMethods::init_bytes>("initWithBytesNoCopy:length:encoding:freeWhenDone:"),
       m<&StringMethods::character>("characterAtIndex:"), m<&StringMethods::length>("length"),
       m<&StringMethods::utf8>("UTF8String"), m<&StringMethods::utf8>("fileSystemRepresentation"),
       m<&StringMethods::c_string>("cStringUsingEncoding:"), m<&StringMethods::max_bytes>("maximumLengthOfBytesUsingEncoding:"),
       m<&StringMethods::bytes>("lengthOfBytesUsingEncoding:"), m<&StringMethods::equal_string>("isEqualToString:"),
       m<&StringMethods::equal_object>("isEqual:"), m<&StringMethods::hash>("hash"),
       m<&StringMethods::find>("rangeOfString:options:"), m<&StringMethods::appended>("stringByAppendingString:"),
       m<&StringMethods::compare_no_case>("caseInsensitiveCompare:"), m<&StringMethods::description>("description"),
       m<&StringMethods::description>("debugDescription"), m<&StringMethods::copy>("copy")},
      {m<&StringMethods::empty>("string"), m<&StringMethods::with_string>("stringWithString:"),
       m<&StringMethods::with_c>("stringWithCString:encoding:")},
      true);

  Class* constant = &__CFConstantStringClassReference;
  adopt_class(constant, "__NSCFConstantString");
  constant->constant = true;
  define_class(constant, String::cls(), {}, {});

  const std::vector<Method> array = {
      m<&ArrayMethods::init_>("init"),       m<&ArrayMethods::init_objects>("initWithObjects:count:"),
      m<&ArrayMethods::at>("objectAtIndex:"), m<&ArrayMethods::count>("count"),
      m<&ArrayMethods::enumerator>("objectEnumerator"), m<&ArrayMethods::copy>("copy"),
      m<&ArrayMethods::description>("description")};
  define<Array>(root, array,
                {m<&ArrayMethods::empty>("array"), m<&ArrayMethods::with_object>("arrayWithObject:"),
                 m<&ArrayMethods::with_objects>("arrayWithObjects:count:")},
                true);
  define<Set>(root, array, {}, true);
  define<Enumerator>(root, {m<&Enumerator::next>("nextObject"), m<&Enumerator::all>("allObjects")});
  define<Dictionary>(
      root,
      {m<&DictionaryMethods::init_>("init"), m<&DictionaryMethods::init_objects>("initWithObjects:forKeys:count:"),
       m<&DictionaryMethods::key_enumerator>("keyEnumerator"), m<&DictionaryMethods::object>("objectForKey:"),
       m<&DictionaryMethods::count>("count"), m<&DictionaryMethods::copy>("copy"),
       m<&DictionaryMethods::description>("description")},
      {m<&DictionaryMethods::empty>("dictionary"), m<&DictionaryMethods::with_object>("dictionaryWithObject:forKey:"),
       m<&DictionaryMethods::with_objects>("dictionaryWithObjects:forKeys:count:")},
      true);

  define<Value>(root,
                {m<&ValueMethods::pointer_value>("pointerValue"), m<&ValueMethods::type_of>("objCType"),
                 m<&ValueMethods::copy>("copy")},
                {m<&ValueMethods::with_pointer>("valueWithPointer:")});
#define NUMBER(type, name, Name)                                                                            \
  m<&NumberMethods::init_value<type>>("initWith" Name ":"), m<&NumberMethods::as<type>>(name "Value")
#define NUMBER_WITH(type, Name) m<&NumberMethods::with<type>>("numberWith" Name ":")
  define<Number>(
      Value::cls(),
      {NUMBER(char, "char", "Char"), NUMBER(unsigned char, "unsignedChar", "UnsignedChar"), NUMBER(short, "short", "Short"),
       NUMBER(unsigned short, "unsignedShort", "UnsignedShort"), NUMBER(int, "int", "Int"),
       NUMBER(unsigned, "unsignedInt", "UnsignedInt"), NUMBER(long, "long", "Long"),
       NUMBER(unsigned long, "unsignedLong", "UnsignedLong"), NUMBER(long long, "longLong", "LongLong"),
       NUMBER(unsigned long long, "unsignedLongLong", "UnsignedLongLong"), NUMBER(float, "float", "Float"),
       NUMBER(double, "double", "Double"), NUMBER(bool, "bool", "Bool"), m<&NumberMethods::as<long>>("integerValue"),
       m<&NumberMethods::as<unsigned long>>("unsignedIntegerValue"), m<&NumberMethods::text>("stringValue"),
       m<&NumberMethods::text>("description"), m<&NumberMethods::text_locale>("descriptionWithLocale:"),
       m<&NumberMethods::compare>("compare:"), m<&NumberMethods::equal_number>("isEqualToNumber:"), m<&NumberMethods::copy>("copy")},
      {NUMBER_WITH(char, "Char"), NUMBER_WITH(unsigned char, "UnsignedChar"), NUMBER_WITH(short, "Short"),
       NUMBER_WITH(unsigned short, "UnsignedShort"), NUMBER_WITH(int, "Int"), NUMBER_WITH(unsigned, "UnsignedInt"),
       NUMBER_WITH(long, "Long"), NUMBER_WITH(unsigned long, "UnsignedLong"), NUMBER_WITH(long long, "LongLong"),
       NUMBER_WITH(unsigned long long, "UnsignedLongLong"), NUMBER_WITH(float, "Float"), NUMBER_WITH(double, "Double"),
       NUMBER_WITH(bool, "Bool")},
      true);
#undef NUMBER
#undef NUMBER_WITH

  define<Error>(
      root,
      {m<&ErrorMethods::init_all>("initWithDomain:code:userInfo:"), m<&ErrorMethods::get_code>("code"),
       m<&ErrorMethods::get_domain>("domain"), m<&ErrorMethods::get_info>("userInfo"),
       m<&ErrorMethods::described>("localizedDescription"), m<&ErrorMethods::reason>("localizedFailureReason"),
       m<&ErrorMethods::suggestion>("localizedRecoverySuggestion"), m<&ErrorMethods::options>("localizedRecoveryOptions"),
       m<&ErrorMethods::description>("description"), m<&ErrorMethods::description>("debugDescription"),
       m<&ErrorMethods::copy>("copy")},
      {m<&ErrorMethods::with>("errorWithDomain:code:userInfo:")}, true);
  define<Url>(root,
              {m<&UrlMethods::init_string>("initWithString:"), m<&UrlMethods::init_string>("initFileURLWithPath:"),
               m<&UrlMethods::file_system>("fileSystemRepresentation"), m<&UrlMethods::copy>("copy")},
              {m<&UrlMethods::file>("fileURLWithPath:")}, true);
  define<ProcessInfo>(
      root,
      {m<&ProcessInfo::version>("operatingSystemVersion"), m<&ProcessInfo::version_string>("operatingSystemVersionString"),
       m<&ProcessInfo::at_least>("isOperatingSystemAtLeastVersion:"), m<&ProcessInfo::name>("processName"),
       m<&ProcessInfo::pid>("processIdentifier"), m<&ProcessInfo::processors>("processorCount"),
       m<&ProcessInfo::processors>("activeProcessorCount"), m<&ProcessInfo::memory>("physicalMemory"),
       m<&ProcessInfo::thermal>("thermalState"), m<&ProcessInfo::low_power>("isLowPowerModeEnabled"),
       m<&ProcessInfo::ios_on_mac>("isiOSAppOnMac")},
      {m<&ProcessInfo::shared>("processInfo")});
  define<Pool>(root, {m<&Pool::init>("init"), m<&Pool::drain>("drain"), m<&Pool::add>("addObject:")}, {}, true);

#define DEVICE_FILL(name, text) \
  name = String::with(text);    \
  String::cls()->live--;
  DEVICE_CONSTANTS(DEVICE_FILL)
#undef DEVICE_FILL
}

}  // namespace device
