#include "zero/reduce/gradient_summary.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cmath>

#include "zero/kernels/kernels.h"
#include "zero/memory/pause_listening.h"

namespace tessera::zero {

at::Tensor to_be_copied(int64_t numel, at::Device device) {
  return at::zeros({numel}, at::TensorOptions().dtype(at::kDouble).pinned_memory(device.is_cuda()));
}

namespace {

/// The one wait for the device that a step has.
at::Tensor on_host(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  at::Tensor host = to_be_copied(tensor.numel(), tensor.device()).view(tensor.sizes());
  host.copy_(tensor, /*non_blocking=*/true);
  const c10::impl::VirtualGuardImpl guard(tensor.device().type());
  guard.synchronizeStream(guard.getStream(tensor.device()));
  return host;
}

}  // namespace

at::Tensor all_gather_owned(comm::Communicator& comm, at::Device device, const std::vector<at::Tensor>& mine,
                            const Mesh& mesh, std::string_view label) {
  int64_t num = 0;
  for (const at::Tensor& part : mine) num += part.numel();
  const at::Tensor all =
      at::empty({comm.size() * num}, at::TensorOptions().dtype(at::kDouble).device(device));
  const at::Tensor place = all.narrow(0, comm.rank() * num, num);
  int64_t end = 0;
  for (const at::Tensor& part : mine) {
    place.narrow(0, end, part.numel()).copy_(part, /*non_blocking=*/true);
    end += part.numel();
  }
  if (comm.size() > 1) comm.all_gather(all, place, label)->wait();
  const at::Tensor by_rank = on_host(all).view({comm.size(), num});
  at::Tensor by_part = at::empty_like(by_rank);
  for (int rank = 0; rank < comm.size(); ++rank) by_part[mesh.owned_part(rank)].copy_(by_rank[rank]);
  return by_part;
}

namespace {

/// The first parameter with an element that is not finite, in what this rank owns; -1: none. `norms`: this
/// rank's, (units, 2).
int first_nonfinite(const Layout& layout, std::vector<ParamUnit>& units, const GradientReducer& gradients,
                    const double* norms) {
  for (ParamUnit& unit : units) {
    if (norms[2 * unit.index + 1] == 0) continue;
    const InMemory gradient(unit, kGradient, InMemory::Access::kRead);
    return layout.parameter_at(unit.index,
                               unit.owned_range.begin + kernels::first_nonfinite(gradients.owned(unit)));
  }
  return -1;
}

/// What a rank gives to the all-gather beside its norms: digest, flag {late, by unit} {used, by parameter}.
at::Tensor flags_of_rank(const GradientReducer& gradients, at::Device device, const RankFlags& mine) {
  const std::vector<bool> late = gradients.late_units(), used = gradients.used();
  const at::Tensor flags = to_be_copied(static_cast<int64_t>(2 + late.size() + used.size()), device);
  auto* next = static_cast<double*>(flags.data_ptr());
  *next++ = mine.digest;
  *next++ = mine.raise_flag;
  next = std::copy(late.begin(), late.end(), next);
  std::copy(used.begin(), used.end(), next);
  return flags;
}

/// Adds what one rank gave.
void take_part(const double* norms, const double* flags, size_t num_units, double& sum_of_squares,
               std::vector<bool>& late, GradientSummary& summary) {
  double sum = 0;  // of a rank's units, in their order
  for (size_t unit = 0; unit < num_units; ++unit) {
    sum += norms[2 * unit];
    summary.num_nonfinite += static_cast<int64_t>(norms[2 * unit + 1]);
  }
  sum_of_squares += sum;
  ++flags;  // the digest
  if (*flags++ != 0) summary.flag_raised = true;
  for (size_t unit = 0; unit < num_units; ++unit)
    if (*flags++ != 0) late[unit] = true;
  for (size_t parameter = 0; parameter < summary.used.size(); ++parameter)
    if (*flags++ != 0) summary.used[parameter] = true;
}

}  // namespace

GradientSummary summarize(const Layout& layout, std::vector<ParamUnit>& units,
                          const GradientReducer& gradients, comm::Communicator& comm, const RankFlags& mine) {
  const OurOwnWork scope;
  const size_t num_units = units.size(), num_parameters = layout.parameters().size();
  const at::Device device = units.front().memory.full().device();
  const Mesh& mesh = units.front().mesh;
  const at::Tensor parts =
      all_gather_owned(comm, device, {gradients.norms().view(-1), flags_of_rank(gradients, device, mine)},
                       mesh, "gradient norm");

  GradientSummary summary;
  summary.used.resize(num_parameters);
  std::vector<bool> late(num_units);
  double sum_of_squares = 0;
  const auto part_of = [&](int part) { return parts.const_data_ptr<double>() + part * parts.size(1); };
  for (int part = 0; part < comm.size(); ++part) {
    take_part(part_of(part), part_of(part) + 2 * num_units, num_units, sum_of_squares, late, summary);
    if (part_of(part)[2 * num_units] != part_of(0)[2 * num_units]) summary.is_same_step = false;
  }
  summary.norm = std::sqrt(sum_of_squares);
  for (size_t unit = 0; unit < num_units; ++unit)
    if (late[unit]) summary.late_units.push_back(static_cast<int>(unit));
  if (summary.num_nonfinite == 0) return summary;

  const at::Tensor found = to_be_copied(1, device);
  *static_cast<double*>(found.data_ptr()) =
      first_nonfinite(layout, units, gradients, part_of(mesh.owned_part(comm.rank())));
  const at::Tensor firsts =
      all_gather_owned(comm, device, {found}, mesh, "first gradient that is not finite");
  int first = static_cast<int>(num_parameters);
  for (int part = 0; part < comm.size(); ++part)
    if (const double theirs = firsts.const_data_ptr<double>()[part]; theirs >= 0)
      first = std::min(first, static_cast<int>(theirs));
  if (first < static_cast<int>(num_parameters)) summary.first_nonfinite = layout.parameters()[first].name;
  return summary;
}

}  // namespace tessera::zero
