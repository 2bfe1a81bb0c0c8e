#include "comm/transport.h"

#include <ATen/ops/from_blob.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>

#include "core/check.h"

namespace tessera::comm {
namespace {

template <class Kept>
at::Tensor view_of(const at::Tensor& buffer, void* data, int64_t numel, at::ScalarType dtype, Kept held) {
  return at::for_blob(data, {numel})
      .deleter([kept = std::move(held), info = c10::ThreadLocalDebugInfo::current()](void*) mutable {
        // Gloo's threads may be the last to free it; the memory meter counts by this thread-local state.
        const c10::DebugInfoGuard guard(info);
        kept.reset();
      })
      .options(buffer.options().dtype(dtype).requires_grad(false))
      .target_device(buffer.device())
      .make_tensor();
}

}  // namespace

int place_of(const std::vector<int>& ranks, int rank) {
  const auto found = std::find(ranks.begin(), ranks.end(), rank);
  TESSERA_CHECK(found != ranks.end(), "rank ", rank, " is not in the group");
  return static_cast<int>(found - ranks.begin());
}

std::vector<int> chosen_from(const std::vector<int>& numbers, const std::vector<int>& places) {
  std::vector<int> chosen;
  for (const int place : places) chosen.push_back(numbers[static_cast<size_t>(place)]);
  return chosen;
}

at::Tensor plain_view(const at::Tensor& buffer, int64_t begin, int64_t numel) {
  char* data = static_cast<char*>(buffer.data_ptr()) + begin * buffer.element_size();
  return view_of(buffer, data, numel, buffer.scalar_type(), at::Tensor(buffer));
}

at::Tensor plain_view_at(void* data, int64_t numel, at::ScalarType dtype, const at::Tensor& owner) {
  return view_of(owner, data, numel, dtype, at::Tensor(owner));
}

at::Tensor plain_bytes(const at::Tensor& buffer) {
  return view_of(buffer, buffer.data_ptr(), static_cast<int64_t>(buffer.nbytes()), at::kByte,
                 at::Tensor(buffer));
}

at::Tensor plain_bytes(std::shared_ptr<at::Tensor> buffer) {
  const at::Tensor& tensor = *buffer;
  return view_of(tensor, tensor.data_ptr(), static_cast<int64_t>(tensor.nbytes()), at::kByte,
                 std::move(buffer));
}

}  // namespace tessera::comm
