// The Foundation classes that Metal's methods take and answer. Knows nothing of Metal.
#pragma once

#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "objc_runtime.h"

namespace device {

struct Array;
struct Dictionary;

struct String : Object {
  DEVICE_CLASS("NSString")
  std::string text;
  mutable std::string other_encoding;

  std::string_view view() const;  // also of a constant string, which has no `text`
  static String* with(std::string_view text);  // +1
};

inline std::string str(const String* string) { return string ? std::string(string->view()) : std::string(); }
inline String* temporary(std::string_view text) { return autoreleased(String::with(text)); }

struct Array : Object {
  DEVICE_CLASS("NSArray")
  std::vector<Ref<Object>> items;

  static Array* with(std::vector<Ref<Object>> items);  // +1
};

struct Dictionary : Object {
  DEVICE_CLASS("NSDictionary")
  std::vector<std::pair<Ref<Object>, Ref<Object>>> items;  // key, value, in the order given

  Object* get(const Object* key) const;
};

bool equal(const Object* a, const Object* b);
std::string describe(const Object* object);

struct Value : Object {
  DEVICE_CLASS("NSValue")
  enum Kind { kNone, kBool, kSigned, kUnsigned, kFloat, kDouble, kPointer, kBytes } kind = kNone;
  const char* type = "";
  int64_t integer = 0;
  double real = 0;
  const void* pointer = nullptr;
  std::string bytes;
};

struct Number : Value {
  DEVICE_CLASS("NSNumber")
};

struct Error : Object {
  DEVICE_CLASS("NSError")
  Ref<String> domain;
  int64_t code = 0;
  Ref<Dictionary> info;
};

struct Url : Object {
  DEVICE_CLASS("NSURL")
  std::string path;
};

// Autoreleased, with the text as its localised description.
Error* error(const char* domain, int64_t code, std::string_view text);
// The same beneath an error: what NSUnderlyingErrorKey answers.
void set_underlying(Error* error, const char* domain, int64_t code);
// Writes an autoreleased error where the caller wants one.
void set_error(Error** out, const char* domain, int64_t code, std::string_view text);

void define_foundation();

}  // namespace device
