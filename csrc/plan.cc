// Turns the JSON of a plan into its checked form. Keys that the launcher does not use are left alone: Python adds explanations.
#include "plan.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "error.h"
#include "json.h"

namespace launcher {
namespace {

// Limits of the Metal API; those of a device and of a pipeline are checked when the plan is prepared.
constexpr int64_t kMostBindings = 31;
constexpr int64_t kMostInlineBytes = 4096;
constexpr int64_t kMostThreads = 1024;
constexpr int64_t kMostConstants = 65536;

struct DTypeRow {
  DType dtype;
  const char* name;
  uint64_t size;
};
constexpr DTypeRow kDTypes[] = {
    {DType::kBool, "bool", 1},       {DType::kInt8, "int8", 1},       {DType::kUInt8, "uint8", 1},
    {DType::kUInt16, "uint16", 2},   {DType::kInt32, "int32", 4},     {DType::kUInt32, "uint32", 4},
    {DType::kInt64, "int64", 8},     {DType::kFloat16, "float16", 2}, {DType::kBFloat16, "bfloat16", 2},
    {DType::kFloat32, "float32", 4}, {DType::kFloat64, "float64", 8}, {DType::kOther, "another dtype", 0},
};

// A value of the plan together with where it stands, for messages.
class Node {
 public:
  Node(const Json& json, std::string where) : json_(json), where_(std::move(where)) {}

  [[noreturn]] void fail(const std::string& what) const {
    throw Error(Cause::kInvalidPlan, "invalid plan: " + (where_.empty() ? std::string("the plan") : where_) + " " + what);
  }
  Node at(const char* key) const {
    const Json* found = optional(key);
    const std::string inner = where_.empty() ? key : where_ + "." + key;
    if (!found) Node(json_, inner).fail("is missing");
    return Node(*found, inner);
  }
  const Json* optional(const char* key) const {
    if (json_.kind != Json::kObject) fail("must be an object");
    const Json* found = json_.find(key);
    return found && found->kind != Json::kNull ? found : nullptr;
  }
  std::vector<Node> items() const {
    if (json_.kind != Json::kList) fail("must be a list");
    std::vector<Node> out;
    out.reserve(json_.items.size());
    for (size_t i = 0; i < json_.items.size(); ++i) out.emplace_back(json_.items[i], where_ + "[" + std::to_string(i) + "]");
    return out;
  }
  std::vector<Node> items(const char* key) const { return optional(key) ? at(key).items() : std::vector<Node>(); }
  const std::string& string() const {
    if (json_.kind != Json::kString) fail("must be a string");
    return json_.string;
  }
  int64_t integer(int64_t least, int64_t most) const {
    if (json_.kind != Json::kInteger || json_.integer < least || json_.integer > most)
      fail("must be an integer from " + std::to_string(least) + " to " + std::to_string(most));
    return json_.integer;
  }
  bool boolean() const {
    if (json_.kind != Json::kBool) fail("must be true or false");
    return json_.boolean;
  }
  double number() const {
    if (json_.kind != Json::kInteger && json_.kind != Json::kNumber) fail("must be a number");
    return json_.number;
  }

 private:
  const Json& json_;
  std::string where_;
};

template <size_t N>
std::array<uint64_t, N> extents(const Node& node, int64_t least, int64_t most) {
  const std::vector<Node> items = node.items();
  if (items.size() != N) node.fail("must have " + std::to_string(N) + " entries");
  std::array<uint64_t, N> out{};
  for (size_t i = 0; i < N; ++i) out[i] = static_cast<uint64_t>(items[i].integer(least, most));
  return out;
}

BufferPlan read_buffer(const Node& node) {
  BufferPlan out;
  out.name = node.at("name").string();
  const std::string& role = node.at("role").string();
  if (role == "input") out.role = Role::kInput;
  else if (role == "output") out.role = Role::kOutput;
  else if (role == "scratch") out.role = Role::kScratch;
  else if (role == "updated") out.role = Role::kUpdated;
  else node.at("role").fail("must be input, output, scratch or updated, not \"" + role + "\"");
  const std::string& dtype = node.at("dtype").string();
  out.dtype = DType::kOther;
  for (const DTypeRow& row : kDTypes)
    if (row.size && dtype == row.name) out.dtype = row.dtype;
  if (out.dtype == DType::kOther) node.at("dtype").fail("is not a known dtype: \"" + dtype + "\"");
  out.bytes = size_of(out.dtype);
  for (const Node& extent : node.at("shape").items()) {
    out.shape.push_back(extent.integer(0, std::numeric_limits<int64_t>::max()));
    if (__builtin_mul_overflow(out.bytes, static_cast<uint64_t>(out.shape.back()), &out.bytes))
      extent.fail("makes the buffer too large");
  }
  return out;
}

ConstantPlan read_constant(const Node& node) {
  ConstantPlan out;
  out.index = static_cast<uint32_t>(node.at("index").integer(0, kMostConstants - 1));
  const std::string& type = node.at("type").string();
  const Node value = node.at("value");
  auto put = [&](ConstantType as, auto number) {
    out.type = as;
    std::memcpy(out.value.data(), &number, sizeof number);
  };
  if (type == "bool") put(ConstantType::kBool, value.boolean());
  else if (type == "short") put(ConstantType::kShort, static_cast<int16_t>(value.integer(INT16_MIN, INT16_MAX)));
  else if (type == "ushort") put(ConstantType::kUShort, static_cast<uint16_t>(value.integer(0, UINT16_MAX)));
  else if (type == "int") put(ConstantType::kInt, static_cast<int32_t>(value.integer(INT32_MIN, INT32_MAX)));
  else if (type == "uint") put(ConstantType::kUInt, static_cast<uint32_t>(value.integer(0, UINT32_MAX)));
  else if (type == "float") put(ConstantType::kFloat, static_cast<float>(value.number()));
  else node.at("type").fail("is not a known type of constant: \"" + type + "\"");
  return out;
}

std::string read_hex(const Node& node) {
  const std::string& text = node.string();
  auto digit = [&](char c) -> int {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    node.fail("must be hexadecimal");
  };
  if (text.empty() || text.size() % 2 || text.size() / 2 > kMostInlineBytes)
    node.fail("must be 1 to " + std::to_string(kMostInlineBytes) + " bytes in hexadecimal");
  std::string out;
  for (size_t i = 0; i < text.size(); i += 2) out += static_cast<char>(digit(text[i]) << 4 | digit(text[i + 1]));
  return out;
}

DispatchPlan read_dispatch(const Node& node, const std::vector<BufferPlan>& buffers, const std::string& instantiations) {
  DispatchPlan out;
  out.kernel = node.at("kernel").string();
  out.instantiation = node.optional("instantiation") ? node.at("instantiation").string() : instantiations;
  for (const Node& constant : node.items("constants")) {
    out.constants.push_back(read_constant(constant));
    for (size_t i = 0; i + 1 < out.constants.size(); ++i)
      if (out.constants[i].index == out.constants.back().index) constant.fail("repeats an index");
  }
  out.threadgroups = extents<3>(node.at("threadgroups"), 0, UINT32_MAX);
  out.threads = extents<3>(node.at("threads"), 1, kMostThreads);
  if (out.threads[0] * out.threads[1] * out.threads[2] > kMostThreads)
    node.at("threads").fail("are more than " + std::to_string(kMostThreads));
  for (const Node& memory : node.items("threadgroup_memory")) {
    out.threadgroup_memory.push_back(static_cast<uint32_t>(memory.integer(0, 1 << 20)));
    if (out.threadgroup_memory.back() % 16) memory.fail("must be a multiple of 16");
  }
  if (out.threadgroup_memory.size() > kMostBindings) node.at("threadgroup_memory").fail("has too many entries");
  for (const Node& item : node.items("arguments")) {
    ArgumentPlan argument;
    argument.index = static_cast<uint32_t>(item.at("index").integer(0, kMostBindings - 1));
    for (const ArgumentPlan& other : out.arguments)
      if (other.index == argument.index) item.fail("repeats an index");
    if (item.optional("buffer")) {
      const std::string& name = item.at("buffer").string();
      argument.buffer = 0;
      while (argument.buffer < buffers.size() && buffers[argument.buffer].name != name) ++argument.buffer;
      if (argument.buffer == buffers.size()) item.at("buffer").fail("names no buffer of the plan: \"" + name + "\"");
      argument.written = buffers[argument.buffer].role != Role::kInput;
      if (item.optional("written")) argument.written = item.at("written").boolean();
      if (argument.written && buffers[argument.buffer].role == Role::kInput) item.at("written").fail("is true of an input");
    } else {
      argument.bytes = read_hex(item.at("bytes"));
    }
    out.arguments.push_back(std::move(argument));
  }
  if (node.optional("multiply_accumulates")) {
    out.multiply_accumulates = node.at("multiply_accumulates").number();
    if (!(out.multiply_accumulates >= 0) || std::isinf(out.multiply_accumulates))
      node.at("multiply_accumulates").fail("must be a finite number from 0");
  }
  if (node.optional("grid_argument")) {
    const auto index = static_cast<uint32_t>(node.at("grid_argument").integer(0, kMostBindings - 1));
    const bool there = std::any_of(out.arguments.begin(), out.arguments.end(), [&](const ArgumentPlan& argument) {
      return argument.index == index && argument.bytes.size() >= sizeof(GridBytes);
    });
    if (!there) node.at("grid_argument").fail("is no argument of " + std::to_string(sizeof(GridBytes)) + " bytes or more");
    out.grid_argument = index;
  }
  return out;
}

}  // namespace

const char* name_of(DType dtype) { return kDTypes[static_cast<size_t>(dtype)].name; }
uint64_t size_of(DType dtype) { return kDTypes[static_cast<size_t>(dtype)].size; }

Plan parse_plan(std::string_view text) {
  const Json json = parse_json(text);
  const Node root(json, "");
  Plan out;
  out.name = root.at("name").string();
  const Node library = root.at("library");
  out.source = library.at("source").string();
  const std::string shared = library.optional("instantiations") ? library.at("instantiations").string() : std::string();
  const auto language = extents<2>(library.at("language"), 0, 255);
  out.language = {static_cast<uint32_t>(language[0]), static_cast<uint32_t>(language[1])};
  for (const Node& node : root.at("buffers").items()) {
    BufferPlan buffer = read_buffer(node);
    for (const BufferPlan& other : out.buffers)
      if (other.name == buffer.name) node.fail("repeats the name \"" + buffer.name + "\"");
    const auto at = static_cast<uint32_t>(out.buffers.size());
    if (buffer.role == Role::kInput || buffer.role == Role::kUpdated) out.operands.push_back(at);
    if (buffer.role != Role::kInput) out.results.push_back(at);
    out.buffers.push_back(std::move(buffer));
  }
  for (const Node& node : root.at("dispatches").items()) out.dispatches.push_back(read_dispatch(node, out.buffers, shared));
  return out;
}

}  // namespace launcher
