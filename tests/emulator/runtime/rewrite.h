// From preprocessed MSL text to C++ text for the shim, and what the host may ask about it. Token by token, line for line:
// every rewritten token stays on its line, so that clang's messages and the line table keep the user's positions.
// Knows nothing of files, processes or threads.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace emu {

struct Parameter {
  std::string name;
  std::string attribute;   // "buffer", "threadgroup", or a thread attribute's name; "" if it has none
  uint32_t index = 0;      // of buffer or threadgroup
  std::string condition;   // [[function_constant(name)]]
  int line = 0;
};

struct Kernel {
  std::string host_name;
  std::string expression;  // what C++ calls it: ns::f or ns::f<float, 4>
  std::vector<Parameter> parameters;
  uint32_t max_total_threads = 0;
};

struct Constant {
  std::string name, type_text;
  uint32_t index = 0, type = 0, size = 0;
  bool required = false;
};

struct ConstantValue {
  uint32_t type = 0;
  std::string bytes;
};

struct Message {
  std::string file;
  int line;
  std::string text;
};

struct Rewritten {
  std::vector<Kernel> kernels;
  std::vector<Constant> constants;
  std::vector<Message> errors;
  // The text, for one kernel (all other explicit instantiations left out) or, with kernel < 0, all of it.
  std::string text;
};

struct RewriteOptions {
  uint32_t language_version = 0x30001;
  int kernel = -1;
  bool wrap = false;  // in a namespace of its own, for the strict check
  const std::map<std::string, ConstantValue> *values = nullptr;
};

Rewritten rewrite(const std::string &preprocessed, const RewriteOptions &options);
uint32_t data_type_size(uint32_t type);

}  // namespace emu
