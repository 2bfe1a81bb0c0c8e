#include "zero/gradient_summary.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "zero/kernels/kernels.h"
#include "zero/operator_listener.h"

namespace tessera::zero {

std::vector<std::vector<double>> all_gather_doubles(comm::Communicator& comm, at::Device device,
                                                    const std::vector<double>& mine, std::string_view label) {
  const auto num = static_cast<int64_t>(mine.size());
  at::Tensor all = at::empty({comm.size() * num}, at::TensorOptions().dtype(at::kDouble));
  at::Tensor part = all.narrow(0, comm.rank() * num, num);
  std::copy(mine.begin(), mine.end(), part.data_ptr<double>());
  if (comm.size() > 1) {
    at::Tensor on_device = all.to(device);
    comm.all_gather(on_device, on_device.narrow(0, comm.rank() * num, num), label)->wait();
    all = on_device.cpu();
  }
  std::vector<std::vector<double>> parts;
  for (int rank = 0; rank < comm.size(); ++rank) {
    const double* begin = all.data_ptr<double>() + rank * num;
    parts.emplace_back(begin, begin + num);
  }
  return parts;
}

std::vector<std::vector<double>> in_order_of_pieces(std::vector<std::vector<double>> by_rank,
                                                    const Mesh& mesh) {
  std::vector<std::vector<double>> by_piece(by_rank.size());
  for (size_t rank = 0; rank < by_rank.size(); ++rank)
    by_piece[static_cast<size_t>(mesh.piece(static_cast<int>(rank)))] = std::move(by_rank[rank]);
  return by_piece;
}

namespace {

/// The head of a rank's part of the all-gather. Behind it: {late, by unit} {used, by parameter}.
enum Head : size_t { kSumOfSquares, kNumNonfinite, kFirstNonfinite, kFlag, kHeadSize };

int parameter_at(const Layout& layout, const ParamUnit& unit, int64_t element) {
  for (int parameter : unit.spec.parameters)
    if (intersect(layout.slice(parameter).range(), {element, element + 1}).numel() > 0) return parameter;
  return -1;
}

std::vector<double> part_of_rank(const Layout& layout, std::vector<ParamUnit>& units,
                                 const GradientReducer& gradients, bool raise_flag) {
  std::vector<double> mine(kHeadSize, 0.0);
  mine[kFirstNonfinite] = -1;
  mine[kFlag] = raise_flag;
  for (ParamUnit& unit : units) {
    if (!unit.spec.trainable) continue;
    const kernels::NormPart part = gradients.norm(unit);
    mine[kSumOfSquares] += part.sum_of_squares;
    mine[kNumNonfinite] += static_cast<double>(part.num_nonfinite);
    if (part.num_nonfinite > 0 && mine[kFirstNonfinite] < 0) {
      const InMemory gradient(unit, kGradient, InMemory::Access::kRead);
      const int64_t first = kernels::first_nonfinite(gradients.piece(unit));
      mine[kFirstNonfinite] = parameter_at(layout, unit, unit.piece_range.begin + first);
    }
  }
  for (bool late : gradients.late_units()) mine.push_back(late);
  for (bool used : gradients.used()) mine.push_back(used);
  return mine;
}

}  // namespace

GradientSummary summarize(const Layout& layout, std::vector<ParamUnit>& units,
                          const GradientReducer& gradients, comm::Communicator& comm, bool raise_flag) {
  const PauseListening our_own_operators;
  const at::NoGradGuard no_grad;
  const size_t num_units = units.size(), num_parameters = layout.parameters().size();
  const at::Device device = units.front().memory.full().device();
  const std::vector<double> mine = part_of_rank(layout, units, gradients, raise_flag);

  GradientSummary summary;
  summary.used.resize(num_parameters);
  std::vector<bool> late(num_units);
  double sum_of_squares = 0;
  auto first_nonfinite = static_cast<int>(num_parameters);
  for (const std::vector<double>& part :
       in_order_of_pieces(all_gather_doubles(comm, device, mine, "gradient norm"), units.front().mesh)) {
    sum_of_squares += part[kSumOfSquares];
    summary.num_nonfinite += static_cast<int64_t>(part[kNumNonfinite]);
    if (part[kFirstNonfinite] >= 0)
      first_nonfinite = std::min(first_nonfinite, static_cast<int>(part[kFirstNonfinite]));
    if (part[kFlag] != 0) summary.flag_raised = true;
    for (size_t unit = 0; unit < num_units; ++unit)
      if (part[kHeadSize + unit] != 0) late[unit] = true;
    for (size_t parameter = 0; parameter < num_parameters; ++parameter)
      if (part[kHeadSize + num_units + parameter] != 0) summary.used[parameter] = true;
  }
  summary.norm = std::sqrt(sum_of_squares);
  if (first_nonfinite < static_cast<int>(num_parameters))
    summary.first_nonfinite = layout.parameters()[first_nonfinite].name;
  for (size_t unit = 0; unit < num_units; ++unit)
    if (late[unit]) summary.late_units.push_back(static_cast<int>(unit));
  return summary;
}

}  // namespace tessera::zero
