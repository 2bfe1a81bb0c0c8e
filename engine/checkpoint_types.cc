#include "engine/checkpoint_types.h"

#include <algorithm>
#include <vector>

#include "checkpoint/checkpoint_error.h"
#include "core/error.h"
#include "core/str.h"

namespace tessera {

using checkpoint::ElementType;

at::ScalarType to_torch(ElementType type) {
  switch (type) {
    case ElementType::kFloat64: return at::kDouble;
    case ElementType::kFloat32: return at::kFloat;
    case ElementType::kBFloat16: return at::kBFloat16;
    case ElementType::kFloat16: return at::kHalf;
    case ElementType::kInt64: return at::kLong;
    case ElementType::kInt32: return at::kInt;
    case ElementType::kInt16: return at::kShort;
    case ElementType::kInt8: return at::kChar;
    case ElementType::kUInt8: return at::kByte;
    case ElementType::kBool: return at::kBool;
  }
  return at::kByte;
}

ElementType element_type_of(const at::Tensor& tensor, const std::string& name) {
  for (ElementType type : checkpoint::kElementTypes)
    if (to_torch(type) == tensor.scalar_type()) return type;
  throw CheckpointError(str("buffer ", name, " has the type ", at::toString(tensor.scalar_type()), ", which a checkpoint cannot hold"));
}

void on_all_ranks(comm::Communicator& comm, const char* label, const std::function<void()>& function) {
  std::string error;
  try {
    function();
  } catch (const std::exception& caught) {
    error = caught.what();
    error = error.empty() ? "unknown error" : error.substr(0, error.find('\n'));
  }
  const std::vector<std::string> errors = comm.exchange(error, label);
  for (int rank = 0; rank < comm.size(); ++rank) {
    if (errors[rank].empty()) continue;
    const bool same = std::all_of(errors.begin(), errors.end(), [&](const std::string& other) { return other == errors[rank]; });
    throw CheckpointError(same ? errors[rank] : str("rank ", rank, ": ", errors[rank]));
  }
}

std::string from_rank_0(comm::Communicator& comm, const char* label, const std::function<std::string()>& answer) {
  std::string mine;
  if (comm.rank() == 0) {
    try {
      mine = str("+", answer());
    } catch (const Error& error) {
      mine = str("-", error.what());
    }
  }
  const std::string text = comm.exchange(mine, label).front();
  if (text.empty() || text.front() == '-') throw CheckpointError(text.empty() ? "rank 0 gave no answer" : text.substr(1));
  return text.substr(1);
}

}  // namespace tessera
