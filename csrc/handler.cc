// Between XLA's buffers and futures and the launcher. Raw pointers and dims are all that outlives the call.
#include "handler.h"

#include <memory>
#include <string_view>
#include <vector>

#include "launch.h"
#include "xla/ffi/api/ffi.h"

namespace launcher {
namespace {

namespace ffi = xla::ffi;

DType dtype_of(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::PRED: return DType::kBool;
    case ffi::DataType::S8: return DType::kInt8;
    case ffi::DataType::U8: return DType::kUInt8;
    case ffi::DataType::U16: return DType::kUInt16;
    case ffi::DataType::S32: return DType::kInt32;
    case ffi::DataType::U32: return DType::kUInt32;
    case ffi::DataType::S64: return DType::kInt64;
    case ffi::DataType::F16: return DType::kFloat16;
    case ffi::DataType::BF16: return DType::kBFloat16;
    case ffi::DataType::F32: return DType::kFloat32;
    case ffi::DataType::F64: return DType::kFloat64;
    default: return DType::kOther;
  }
}

ffi::Error as_ffi(const Error& error) {
  ffi::ErrorCode code = ffi::ErrorCode::kInternal;
  switch (error.cause) {
    case Cause::kInvalidPlan: code = ffi::ErrorCode::kInvalidArgument; break;
    case Cause::kUnavailable: code = ffi::ErrorCode::kUnavailable; break;
    case Cause::kCompilation: code = ffi::ErrorCode::kFailedPrecondition; break;
    case Cause::kOutOfMemory: code = ffi::ErrorCode::kResourceExhausted; break;
    case Cause::kTimeout: code = ffi::ErrorCode::kDeadlineExceeded; break;
    case Cause::kIgnored: code = ffi::ErrorCode::kUnavailable; break;
    case Cause::kVictim: code = ffi::ErrorCode::kAborted; break;
    case Cause::kExecution: break;
  }
  return ffi::Error(code, error.what());
}

Memory memory_of(const ffi::AnyBuffer& buffer) {
  const auto dims = buffer.dimensions();
  return {buffer.untyped_data(), dtype_of(buffer.element_type()), dims.begin(), dims.size()};
}

void start(const ffi::Dictionary& attributes, const ffi::RemainingArgs& arguments, const ffi::RemainingRets& returns,
           const std::shared_ptr<ffi::Promise>& promise) {
  const auto plan = attributes.get<std::string_view>("plan");
  if (!plan.has_value()) throw Error(Cause::kInvalidPlan, "the call has no string attribute `plan`");
  std::vector<Memory> operands, results;
  operands.reserve(arguments.size());
  results.reserve(returns.size());
  for (size_t i = 0; i < arguments.size(); ++i) operands.push_back(memory_of(*arguments.get<ffi::AnyBuffer>(i)));
  for (size_t i = 0; i < returns.size(); ++i) results.push_back(memory_of(**returns.get<ffi::AnyBuffer>(i)));
  launch(*plan, operands, results, [promise](const Error* error) {
    if (error) promise->SetError(as_ffi(*error));
    else promise->SetAvailable();
  });
}

ffi::Future run(ffi::Dictionary attributes, ffi::RemainingArgs arguments, ffi::RemainingRets returns) noexcept {
  auto promise = std::make_shared<ffi::Promise>();
  ffi::Future future(*promise);
  try {
    start(attributes, arguments, returns, promise);
  } catch (const Error& error) {
    promise->SetError(as_ffi(error));
  } catch (const std::exception& error) {
    promise->SetError(ffi::Error(ffi::ErrorCode::kInternal, error.what()));
  }
  return future;
}

XLA_FFI_DEFINE_HANDLER(g_handler, run, ffi::Ffi::Bind().Attrs().RemainingArgs().RemainingRets());

}  // namespace

void* handler() { return reinterpret_cast<void*>(g_handler); }

std::pair<int, int> api_version() { return {XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR}; }

}  // namespace launcher
