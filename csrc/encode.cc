// Pieces of grids as dispatches, with the barriers between them.
#include "encode.h"

#include <cstring>

#include "statistics.h"

namespace launcher {
namespace {

GridBytes grid_bytes(const DispatchPlan& dispatch, const Piece& piece) {
  GridBytes out{};
  for (size_t axis = 0; axis < 3; ++axis) {
    out[axis] = static_cast<uint32_t>(piece.origin[axis]);
    out[3 + axis] = static_cast<uint32_t>(dispatch.threadgroups[axis]);
  }
  return out;
}

void encode(const Prepared& prepared, const Piece& piece, const std::vector<Place>& places, MTL::ComputeCommandEncoder* encoder) {
  const DispatchPlan& dispatch = prepared.plan.dispatches[piece.dispatch];
  if (piece.barrier) {
    encoder->memoryBarrier(MTL::BarrierScopeBuffers);
    count(statistics().barriers);
  }
  encoder->pushDebugGroup(prepared.kernels[piece.dispatch].get());
  encoder->setComputePipelineState(prepared.pipelines[piece.dispatch]->state.get());
  for (const ArgumentPlan& argument : dispatch.arguments) {
    if (argument.index == dispatch.grid_argument) {
      const GridBytes part = grid_bytes(dispatch, piece);
      std::string bytes = argument.bytes;
      std::memcpy(bytes.data(), part.data(), sizeof part);
      encoder->setBytes(bytes.data(), bytes.size(), argument.index);
    } else if (argument.buffer == ArgumentPlan::kBytes) {
      encoder->setBytes(argument.bytes.data(), argument.bytes.size(), argument.index);
    } else {
      const Place& place = places[argument.buffer];
      encoder->setBuffer(place.buffer, place.offset, argument.index);
    }
  }
  for (size_t at = 0; at < dispatch.threadgroup_memory.size(); ++at)
    if (dispatch.threadgroup_memory[at]) encoder->setThreadgroupMemoryLength(dispatch.threadgroup_memory[at], at);
  const auto &groups = piece.groups, &threads = dispatch.threads;
  encoder->dispatchThreadgroups(MTL::Size(groups[0], groups[1], groups[2]), MTL::Size(threads[0], threads[1], threads[2]));
  encoder->popDebugGroup();
  count(statistics().dispatches);
}

}  // namespace

void encode(const Prepared& prepared, size_t at, const std::vector<Place>& places, MTL::ComputeCommandEncoder* encoder) {
  for (const Piece& piece : prepared.command_buffers[at]) encode(prepared, piece, places, encoder);
}

}  // namespace launcher
