// A launch plan: which kernels of which source run in which order over which buffers. Read from JSON and checked once, so that
// nothing after this needs to doubt it. Knows neither Metal nor XLA, and not what the kernels compute.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace launcher {

enum class DType : uint8_t {
  kBool,
  kInt8,
  kUInt8,
  kUInt16,
  kInt32,
  kUInt32,
  kInt64,
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat64,
  kOther
};
const char* name_of(DType dtype);
uint64_t size_of(DType dtype);

enum class Role : uint8_t { kInput, kOutput, kScratch, kUpdated };  // kUpdated: an operand, and in its memory a result

struct BufferPlan {
  std::string name;
  Role role = Role::kInput;
  DType dtype = DType::kFloat32;
  std::vector<int64_t> shape;
  uint64_t bytes = 0;
};

enum class ConstantType : uint8_t { kBool, kShort, kUShort, kInt, kUInt, kFloat };

struct ConstantPlan {
  uint32_t index = 0;
  ConstantType type = ConstantType::kInt;
  std::array<uint8_t, 4> value{};  // in the layout that Metal reads
};

struct ArgumentPlan {
  static constexpr uint32_t kBytes = ~0u;
  uint32_t index = 0;
  uint32_t buffer = kBytes;  // position in Plan::buffers, or kBytes
  bool written = false;      // whether the kernel may write the buffer
  std::string bytes;
};

struct DispatchPlan {
  std::string kernel;
  std::string instantiation;  // follows the base text of its library
  std::vector<ConstantPlan> constants;
  std::array<uint64_t, 3> threadgroups{}, threads{};
  std::vector<uint32_t> threadgroup_memory;
  std::vector<ArgumentPlan> arguments;
  double multiply_accumulates = 0;        // an estimate, for the whole grid
  std::optional<uint32_t> grid_argument;  // index of the bytes that begin with GridBytes
  bool empty() const { return threadgroups[0] == 0 || threadgroups[1] == 0 || threadgroups[2] == 0; }
};

// How a kernel is told which part of its grid a launch is: the first threadgroup, and the extent of the whole.
using GridBytes = std::array<uint32_t, 6>;

struct Plan {
  std::string name;
  std::string source;  // hash under which the base text was registered
  std::array<uint32_t, 2> language{};
  std::vector<BufferPlan> buffers;
  std::vector<uint32_t> operands, results;  // positions in `buffers`, in the order of the call
  std::vector<DispatchPlan> dispatches;
};

// Throws Error(kInvalidPlan), whose text names the place in the plan.
Plan parse_plan(std::string_view text);

}  // namespace launcher
