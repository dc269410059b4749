// Recursive descent over the text; numbers go through strtod and strtoll on a copy, which ends in a zero byte.
#include "json.h"

#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "error.h"

namespace launcher {
namespace {

constexpr int kMostNesting = 64;

class Reader {
 public:
  explicit Reader(std::string_view text) : text_(text) {}

  Json document() {
    Json value = read(0);
    space();
    if (at_ != text_.size()) fail("text after the end");
    return value;
  }

 private:
  [[noreturn]] void fail(const char* what) const {
    throw Error(Cause::kInvalidPlan, "the plan is not JSON: " + std::string(what) + " at byte " + std::to_string(at_));
  }
  char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }
  void space() {
    while (at_ < text_.size() && std::strchr(" \t\r\n", text_[at_]) && text_[at_]) ++at_;
  }
  bool take(char wanted) {
    space();
    if (peek() != wanted) return false;
    ++at_;
    return true;
  }
  bool take(std::string_view word) {
    if (text_.substr(at_, word.size()) != word) return false;
    at_ += word.size();
    return true;
  }

  Json read(int depth) {
    if (depth > kMostNesting) fail("too deeply nested");
    space();
    Json value;
    switch (peek()) {
      case '{': object(value, depth); return value;
      case '[': list(value, depth); return value;
      case '"':
        value.kind = Json::kString;
        value.string = string();
        return value;
      default: break;
    }
    if (take("null")) return value;
    if (take("true") || take("false")) {
      value.kind = Json::kBool;
      value.boolean = text_[at_ - 2] == 'u';
      return value;
    }
    value.kind = Json::kNumber;
    if (take("NaN")) {
      value.number = std::numeric_limits<double>::quiet_NaN();
    } else if (take("Infinity")) {
      value.number = HUGE_VAL;
    } else if (take("-Infinity")) {
      value.number = -HUGE_VAL;
    } else {
      number(value);
    }
    return value;
  }

  void object(Json& value, int depth) {
    value.kind = Json::kObject;
    ++at_;
    if (take('}')) return;
    do {
      space();
      if (peek() != '"') fail("a key must be a string");
      std::string key = string();
      if (!take(':')) fail("a colon is missing");
      value.members.emplace_back(std::move(key), read(depth + 1));
    } while (take(','));
    if (!take('}')) fail("an object does not end");
  }

  void list(Json& value, int depth) {
    value.kind = Json::kList;
    ++at_;
    if (take(']')) return;
    do value.items.push_back(read(depth + 1));
    while (take(','));
    if (!take(']')) fail("a list does not end");
  }

  void number(Json& value) {
    const size_t start = at_;
    bool whole = true;
    while (at_ < text_.size() && std::strchr("+-.eE0123456789", text_[at_]) && text_[at_]) {
      whole &= !std::strchr(".eE", text_[at_]);
      ++at_;
    }
    const std::string digits(text_.substr(start, at_ - start));
    char* end = nullptr;
    value.number = std::strtod(digits.c_str(), &end);
    if (digits.empty() || *end) {
      at_ = start;
      fail("no value");
    }
    if (!whole) return;
    errno = 0;
    value.integer = std::strtoll(digits.c_str(), nullptr, 10);
    if (errno == 0) value.kind = Json::kInteger;
  }

  uint32_t hex4() {
    uint32_t code = 0;
    for (int i = 0; i < 4; ++i, ++at_) {
      const char digit = peek();
      if (digit >= '0' && digit <= '9') code = code * 16 + static_cast<uint32_t>(digit - '0');
      else if (digit >= 'a' && digit <= 'f') code = code * 16 + static_cast<uint32_t>(digit - 'a' + 10);
      else if (digit >= 'A' && digit <= 'F') code = code * 16 + static_cast<uint32_t>(digit - 'A' + 10);
      else fail("a bad \\u escape");
    }
    return code;
  }

  static void append_utf8(std::string& out, uint32_t code) {
    auto byte = [&](uint32_t value) { out += static_cast<char>(value); };
    if (code < 0x80) return byte(code);
    if (code < 0x800) return byte(0xC0 | code >> 6), byte(0x80 | (code & 0x3F));
    if (code < 0x10000) return byte(0xE0 | code >> 12), byte(0x80 | (code >> 6 & 0x3F)), byte(0x80 | (code & 0x3F));
    byte(0xF0 | code >> 18), byte(0x80 | (code >> 12 & 0x3F)), byte(0x80 | (code >> 6 & 0x3F)), byte(0x80 | (code & 0x3F));
  }

  std::string string() {
    std::string out;
    for (++at_;;) {
      if (at_ >= text_.size()) fail("a string does not end");
      const char next = text_[at_++];
      if (next == '"') return out;
      if (next != '\\') {
        out += next;
        continue;
      }
      const char escaped = peek();
      ++at_;
      static constexpr const char* kFrom = "\"\\/bfnrt";
      static constexpr const char* kTo = "\"\\/\b\f\n\r\t";
      if (const char* found = escaped ? std::strchr(kFrom, escaped) : nullptr) {
        out += kTo[found - kFrom];
      } else if (escaped == 'u') {
        uint32_t code = hex4();
        if (code >= 0xD800 && code < 0xDC00 && take("\\u")) code = 0x10000 + ((code - 0xD800) << 10) + (hex4() - 0xDC00);
        append_utf8(out, code);
      } else {
        fail("a bad escape");
      }
    }
  }

  std::string_view text_;
  size_t at_ = 0;
};

}  // namespace

Json parse_json(std::string_view text) { return Reader(text).document(); }

}  // namespace launcher
