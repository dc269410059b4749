// Runs clang (through `zig clang`) on MSL text: preprocess, rewrite, check, make an object file. Results are cached by content.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "rewrite.h"

namespace emu {

struct Settings {
  std::string zig, include_dir, cache_dir;
};
void configure(const char *zig, const char *include_dir, const char *cache_dir);

struct Macro {
  std::string name, value;
};

struct Source {
  std::string text, file_name;
  uint32_t language_version = 0x30001;
  bool fast_math = true;
  std::vector<Macro> macros;
  std::vector<std::string> include_paths;
};

struct Checked {
  std::string preprocessed;
  Rewritten rewritten;
};

// Both throw std::runtime_error with a message for the user; the C interface turns it into a string.
Checked check_source(const Source &source, std::string *warnings);
// How a kernel is compiled: without checks; with them, variables starting as a pattern; with them, starting as zeros.
enum { kFast, kChecked, kCheckedZeros, kVariants };
std::string compile_kernel(const Source &source, const std::string &preprocessed, int kernel,
                           const std::map<std::string, ConstantValue> &values, int variant, std::string *warnings);

// Conversions between address spaces, which the executing dialect lets pass and Metal does not: one message per line.
std::string strict_check(const Source &source);

}  // namespace emu
