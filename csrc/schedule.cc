// Splits the outermost axis that suffices, so that pieces are few and large, and fills command buffers in order.
#include "schedule.h"

#include <algorithm>

namespace launcher {
namespace {

// The most threadgroups along each axis for boxes of at most `most` of them, as even as can be.
std::array<uint64_t, 3> box_of(const std::array<uint64_t, 3>& groups, double most) {
  std::array<uint64_t, 3> box{1, 1, 1};
  double inner = 1;  // threadgroups of a box of extent 1 along the axis
  for (size_t axis = 0; axis < 3; ++axis) {
    const double fit = std::max(1.0, most / inner);
    if (fit < static_cast<double>(groups[axis])) {
      const auto longest = static_cast<uint64_t>(fit);
      const uint64_t parts = (groups[axis] + longest - 1) / longest;
      box[axis] = (groups[axis] + parts - 1) / parts;
      break;
    }
    box[axis] = groups[axis];
    inner *= static_cast<double>(groups[axis]);
  }
  return box;
}

// What the pieces of a command buffer since its last barrier read and wrote, by position in Plan::buffers.
class Uses {
 public:
  explicit Uses(size_t buffers) : seen_(buffers, kNothing) {}
  // Whether the dispatch must wait for what is there; it is there from now on.
  bool add(const DispatchPlan& dispatch) {
    const bool waits = std::any_of(dispatch.arguments.begin(), dispatch.arguments.end(), [&](const ArgumentPlan& argument) {
      return argument.buffer != ArgumentPlan::kBytes &&
             (seen_[argument.buffer] == kWritten || (seen_[argument.buffer] == kRead && argument.written));
    });
    if (waits) clear();
    for (const ArgumentPlan& argument : dispatch.arguments)
      if (argument.buffer != ArgumentPlan::kBytes)
        seen_[argument.buffer] = std::max<uint8_t>(seen_[argument.buffer], argument.written ? kWritten : kRead);
    return waits;
  }
  void clear() { std::fill(seen_.begin(), seen_.end(), kNothing); }

 private:
  enum : uint8_t { kNothing, kRead, kWritten };
  std::vector<uint8_t> seen_;
};

}  // namespace

std::vector<std::vector<Piece>> schedule(const Plan& plan, double most) {
  std::vector<std::vector<Piece>> out;
  Uses uses(plan.buffers.size());
  double filled = 0;
  auto add = [&](const Piece& piece, double work) {
    if (out.empty() || (filled > 0 && filled + work > most)) {
      out.emplace_back();
      uses.clear();
      filled = 0;
    }
    filled += work;
    out.back().push_back(piece);
    out.back().back().barrier = uses.add(plan.dispatches[piece.dispatch]);
  };
  for (uint32_t at = 0; at < plan.dispatches.size(); ++at) {
    const DispatchPlan& dispatch = plan.dispatches[at];
    if (dispatch.empty()) continue;
    const auto& groups = dispatch.threadgroups;
    const double total = static_cast<double>(groups[0]) * static_cast<double>(groups[1]) * static_cast<double>(groups[2]);
    const double each = dispatch.multiply_accumulates / total;
    const bool split = dispatch.grid_argument && dispatch.multiply_accumulates > most;
    const std::array<uint64_t, 3> box = split ? box_of(groups, most / each) : groups;
    Piece piece;
    piece.dispatch = at;
    for (piece.origin[2] = 0; piece.origin[2] < groups[2]; piece.origin[2] += box[2])
      for (piece.origin[1] = 0; piece.origin[1] < groups[1]; piece.origin[1] += box[1])
        for (piece.origin[0] = 0; piece.origin[0] < groups[0]; piece.origin[0] += box[0]) {
          double count = 1;
          for (size_t axis = 0; axis < 3; ++axis) {
            piece.groups[axis] = std::min(box[axis], groups[axis] - piece.origin[axis]);
            count *= static_cast<double>(piece.groups[axis]);
          }
          add(piece, each * count);
        }
  }
  return out;
}

}  // namespace launcher
