#include "zero/optimizer/whole_formula.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <span>
#include <utility>

#include "core/ascii.h"
#include "core/check.h"
#include "core/error.h"
#include "core/json/json_field.h"
#include "core/str.h"
#include "zero/kernels/adam_8bit.h"
#include "zero/kernels/kernels.h"
#include "zero/optimizer/state_values.h"
#include "zero/optimizer/whole_parameters.h"

namespace tessera::zero {
namespace {

using kernels::Hyper;
using kernels::OptimizerKind;
using nlohmann::json;

at::Tensor zeros_like_of(const at::Tensor& of, at::IntArrayRef shape, at::ScalarType type = at::kFloat) {
  return at::zeros(shape, at::TensorOptions().dtype(type).device(of.device()));
}

at::Tensor flat(const at::Tensor& tensor) { return tensor.view({-1}); }

struct StateSpec {
  const char* name;
  std::vector<int64_t> shape;
  at::ScalarType type = at::kFloat;
};

std::vector<StateSpec> states_of(OptimizerKind kind, const ParameterSpec& parameter, bool in_8_bits) {
  const std::vector<int64_t>& shape = parameter.shape;
  if (kind == OptimizerKind::kAdafactor) {
    if (shape.size() < 2) return {{"variance", shape}};
    std::vector<int64_t> row = shape, column = shape;
    row.back() = 1;
    column[shape.size() - 2] = 1;
    return {{"row_var", row}, {"col_var", column}};
  }
  if (!in_8_bits) return {{"state1", shape}, {"state2", shape}};
  const std::vector<int64_t> blocks = {kernels::num_blocks_8bit(parameter.numel())};
  return {
      {"state1", shape, at::kByte}, {"absmax1", blocks}, {"state2", shape, at::kByte}, {"absmax2", blocks}};
}

/// bitsandbytes keeps what its codes stand for beside them. Takes that away where it is what ours stand for,
/// to rounding. Returns what is wrong, or "".
std::string take_code_values(FormulaStates& states) {
  for (const auto& [name, is_signed] : {std::pair{"qmap1", true}, {"qmap2", false}}) {
    const auto given = states.find(name);
    if (given == states.end()) continue;
    const std::span<const float> values = kernels::code_values(is_signed);
    const at::Tensor ours = at::tensor(at::ArrayRef<float>(values.data(), values.size()));
    const at::Tensor theirs = given->second.to(at::kCPU);
    if (theirs.scalar_type() != at::kFloat || !theirs.sizes().equals(ours.sizes()))
      return str("found ", name, " of ", c10::toString(theirs.scalar_type()), " and ",
                 describe_shape(theirs.sizes()), "; expected Float and ", describe_shape(ours.sizes()));
    if (!theirs.allclose(ours, /*rtol=*/1e-5, /*atol=*/1e-12))
      return str("the codes of ", name,
                 " stand for other numbers; expected those of bitsandbytes' dynamic map");
    states.erase(given);
  }
  return "";
}

/// What is wrong with the states of a parameter, or "".
std::string problem_of(const FormulaStates& found, const std::vector<StateSpec>& expected) {
  for (const auto& [name, shape, type] : expected) {
    const auto one = found.find(name);
    if (one == found.end() || one->second.sizes() != shape || one->second.scalar_type() != type)
      return str("expected ", name, " of ", describe_shape(shape), " and ", c10::toString(type));
  }
  for (const auto& [name, tensor] : found)
    if (std::ranges::none_of(expected, [&](const StateSpec& one) { return one.name == name; }))
      return str("found the state ", name, ", which this optimizer does not have");
  return "";
}

constexpr const char* kStep = "step";  // (), fp32, in checkpoints, as of torch's optimizers

/// torch's linalg.vector_norm(dim, keepdim=True).square_().div_(size)
at::Tensor mean_square(const at::Tensor& gradient, int64_t dim) {
  return at::linalg_vector_norm(gradient, 2, at::IntArrayRef{dim}, /*keepdim=*/true)
      .square_()
      .div_(gradient.size(dim));
}

double root_mean_square(const at::Tensor& tensor) {
  return tensor.norm(2).item<double>() / std::sqrt(static_cast<double>(tensor.numel()));
}

/// A formula of whole parameters: Tessera's own, or a rule of the caller's.
struct Formula {
  std::string name;
  std::function<void(const ParameterSpec&, const at::Tensor& weights, const at::Tensor& gradient,
                     FormulaStates&, const Hyper&, int64_t step)>
      update;
  /// Returns what is wrong with states that were saved, or "". May take away what another program has added.
  /// Unset: they are what the rule has made.
  std::function<std::string(const ParameterSpec&, FormulaStates&)> problem;
  /// Bytes of a parameter's states after an update. Unset: not known before.
  std::function<int64_t(const ParameterSpec&, const Hyper&)> bytes;
};

/// Updates what a rank owns. Owns the states.
class WholeFormula final : public WholeOptimizer {
 public:
  explicit WholeFormula(Formula formula) : formula_(std::move(formula)) {}

  std::string name() const override { return formula_.name; }
  bool on_one_rank() const override { return false; }

  void own(const std::vector<OwnedTensor>& parameters) override {
    for (const OwnedTensor& one : parameters) owned_.push_back({one.spec, one.tensor, {}, 0});
  }

  void step(const std::vector<Hyper>& groups) override {
    for (Owned& one : owned_) {
      const at::Tensor& gradient = one.tensor.grad();
      if (!gradient.defined()) continue;
      formula_.update(*one.spec, one.tensor, gradient, one.states,
                      groups[static_cast<size_t>(one.spec->group)], ++one.num_steps);
      if (one.num_steps == 1) check_new_states(one);
    }
  }

  int64_t bytes() const override {
    int64_t sum = 0;
    for (const Owned& one : owned_)
      for (const auto& [state, tensor] : one.states) sum += static_cast<int64_t>(tensor.nbytes());
    return sum;
  }

  int64_t formula_bytes(const std::vector<Hyper>& groups) const override {
    int64_t sum = 0;
    if (!formula_.bytes) return sum;
    for (const Owned& one : owned_)
      sum += formula_.bytes(*one.spec, groups[static_cast<size_t>(one.spec->group)]);
    return sum;
  }

  at::Tensor state() const override {
    StateValuesWriter writer;
    json states = json::object();
    for (const Owned& one : owned_) {
      if (one.num_steps == 0) continue;
      json& of_parameter = states[one.spec->name];
      for (const auto& [state, tensor] : one.states) of_parameter[state] = writer.add(tensor);
      of_parameter[kStep] = writer.add(
          at::scalar_tensor(static_cast<double>(one.num_steps), at::dtype(at::kFloat).device(at::kCPU)));
    }
    return writer.finish({{"state", states}, {"other", json::object()}});
  }

  void check_state_of_another_program(const at::Tensor& saved) const override {
    try {
      read_rank(saved, nullptr, [](size_t, FormulaStates, int64_t) {});
    } catch (const Error& error) {
      throw Error(error.what(),
                  "; expected the checkpoint of the same optimizer, or load_optimizer_states = false");
    }
  }

  void set_state(const std::vector<at::Tensor>& saved, const NamesInCheckpoint* names) override {
    for (Owned& one : owned_)
      if (names == nullptr || names->contains(one.spec->name)) one.states.clear(), one.num_steps = 0;
    for (const at::Tensor& of_rank : saved)
      read_rank(of_rank, names, [&](size_t i, FormulaStates states, int64_t num_steps) {
        owned_[i].states = std::move(states);
        owned_[i].num_steps = num_steps;
      });
  }

 private:
  struct Owned {
    const ParameterSpec* spec;
    at::Tensor tensor;
    FormulaStates states;
    int64_t num_steps;
  };

  /// At the first update, and not at the first save.
  void check_new_states(const Owned& one) const {
    for (const auto& [state, tensor] : one.states) {
      const std::string what = str(formula_.name, ": the state ", state, " of parameter ", one.spec->name);
      if (state == kStep) throw Error(what, " has the name of the step count; expected another one");
      if (!tensor.defined()) throw Error(what, " is no tensor; expected a defined one");
      try {
        StateValuesWriter::check(tensor);
      } catch (const Error& error) {
        throw Error(what, ": ", error.what());
      }
    }
  }

  /// Calls `take(i, states, num_steps)` for each of owned_ that the data have; `names` as in set_state().
  template <class Take>
  void read_rank(const at::Tensor& data, const NamesInCheckpoint* names, const Take& take) const {
    const StateValuesReader reader(data, str("states of ", formula_.name));
    const JsonField values = reader.values(), states = values["state"];
    for (size_t i = 0; i < owned_.size(); ++i) {
      const Owned& one = owned_[i];
      std::string name = one.spec->name;
      if (names != nullptr) {
        const auto saved = names->find(name);
        if (saved == names->end()) continue;
        name = saved->second;
      }
      if (!states.value().contains(name)) continue;
      const JsonField state = states[name];
      FormulaStates found;
      for (const auto& item : state.value().items())
        if (item.key() != kStep) found[item.key()] = reader.tensor(state[item.key()]).to(one.tensor.device());
      if (formula_.problem)
        if (const std::string problem = formula_.problem(*one.spec, found); !problem.empty())
          state.complain(problem);
      const JsonField step = state[kStep];
      double num_steps = 0;
      if (step.value().is_number())
        num_steps = step.value().get<double>();  // of another program
      else if (const at::Tensor count = reader.tensor(step); count.numel() == 1)
        num_steps = count.item<double>();
      if (!(num_steps >= 1 && num_steps < 1e15)) step.complain(str("found the step ", num_steps));
      take(i, std::move(found), static_cast<int64_t>(num_steps));
    }
  }

  Formula formula_;
  std::vector<Owned> owned_;
};

}  // namespace

bool has_in_name(const ParameterSpec& parameter, std::initializer_list<const char*> parts) {
  const auto has = [&](const std::string& name) {
    const std::string lower = ascii_lower(name);
    return std::ranges::any_of(parts,
                               [&](const char* part) { return lower.find(part) != std::string::npos; });
  };
  return has(parameter.name) || std::ranges::any_of(parameter.aliases, has);
}

bool is_embedding(const ParameterSpec& parameter) { return has_in_name(parameter, {"embed", "wte", "wpe"}); }

bool has_fp32_moments(const Hyper& hyper, int64_t numel, bool is_embedding) {
  return hyper.optim_bits == 32 || numel < hyper.min_8bit_size || is_embedding;
}

int64_t formula_state_bytes(OptimizerKind kind, const Hyper& hyper, const ParameterSpec& parameter) {
  const bool in_8_bits = !has_fp32_moments(hyper, parameter.numel(), is_embedding(parameter));
  int64_t sum = 0;
  for (const StateSpec& state : states_of(kind, parameter, in_8_bits))
    sum += c10::multiply_integers(state.shape) * (state.type == at::kByte ? 1 : 4);
  return sum;
}

int64_t most_owned_state_bytes(OptimizerKind kind, const std::vector<Hyper>& groups, const Layout& layout) {
  if (!kernels::updates_whole_parameters(kind)) return 0;
  const std::vector<int> owners = owners_of_parameters(layout);
  std::vector<int64_t> bytes(static_cast<size_t>(layout.world_size()), 0);
  for (int i = 0; i < layout.num_parameters(); ++i) {
    const ParameterSpec& parameter = layout.parameters()[i];
    if (owners[i] >= 0)
      bytes[owners[i]] += formula_state_bytes(kind, groups[static_cast<size_t>(parameter.group)], parameter);
  }
  return *std::max_element(bytes.begin(), bytes.end());
}

std::string problem_of_8bit_states(const ParameterSpec& parameter, FormulaStates& states) {
  if (const std::string problem = take_code_values(states); !problem.empty()) return problem;
  // fp32 or 8 bits: as it was saved, by the options of the parameter's group at that time.
  return problem_of(states, states_of(OptimizerKind::kAdamW8bit, parameter, states.contains("absmax1")));
}

void adafactor(const at::Tensor& weights, const at::Tensor& gradient, FormulaStates& states,
               const Hyper& hyper, int64_t step) {
  const at::Tensor grad = hyper.maximize ? -gradient : gradient;
  const auto t = static_cast<double>(step);
  const double beta2 = std::pow(t, hyper.beta2_decay), eps1 = hyper.eps;  // one minus beta2, in the paper
  const double rate = std::min(hyper.lr, 1 / std::sqrt(t)) * std::max(hyper.eps2, root_mean_square(weights));
  if (hyper.weight_decay != 0) weights.mul_(1 - hyper.lr * hyper.weight_decay);
  const auto state = [&](const char* name, at::IntArrayRef shape) -> at::Tensor& {
    at::Tensor& tensor = states[name];
    if (!tensor.defined()) tensor = zeros_like_of(weights, shape);
    return tensor;
  };
  at::Tensor estimate;
  if (grad.dim() > 1) {
    std::vector<int64_t> row = grad.sizes().vec(), column = row;
    row.back() = 1;
    column[row.size() - 2] = 1;
    at::Tensor &row_var = state("row_var", row), &col_var = state("col_var", column);
    row_var.lerp_(mean_square(grad, -1), beta2);
    col_var.lerp_(mean_square(grad, -2), beta2);
    estimate = at::matmul(row_var, col_var).div_(row_var.mean(at::IntArrayRef{-2}, true).clamp_(eps1));
  } else {
    at::Tensor& variance = state("variance", grad.sizes());
    variance.lerp_(grad * grad, beta2);
    estimate = variance.clone();
  }
  const at::Tensor update = estimate.clamp_(eps1 * eps1).rsqrt_().mul_(grad);
  const double clip = std::max(
      1.0, update.norm(2).item<double>() / (std::sqrt(static_cast<double>(update.numel())) * hyper.d));
  weights.add_(update, -rate / clip);
}

void adamw_8bit(const at::Tensor& weights, const at::Tensor& gradient, FormulaStates& states,
                const Hyper& hyper, int64_t step, bool is_embedding) {
  if (states.empty()) {
    const bool in_fp32 = has_fp32_moments(hyper, weights.numel(), is_embedding);
    for (const auto& [name, is_signed] : {std::pair{"1", true}, {"2", false}}) {
      at::Tensor& moment = states[str("state", name)];
      moment = zeros_like_of(weights, weights.sizes(), in_fp32 ? at::kFloat : at::kByte);
      if (in_fp32) continue;
      moment.fill_(kernels::code_of_zero(is_signed));
      states[str("absmax", name)] = zeros_like_of(weights, {kernels::num_blocks_8bit(weights.numel())});
    }
  }
  if (!states.contains("absmax1"))
    return kernels::update(OptimizerKind::kAdamW, /*grad_scale=*/1.0,
                           {{&hyper,
                             step,
                             {.master = flat(weights),
                              .grad = flat(gradient),
                              .state = {flat(states["state1"]), flat(states["state2"])},
                              .param = {}}}});
  kernels::adam_8bit(flat(weights), flat(gradient), {flat(states["state1"]), states["absmax1"]},
                     {flat(states["state2"]), states["absmax2"]}, hyper, step);
}

std::shared_ptr<WholeOptimizer> make_whole_formula(OptimizerKind kind, const std::string& name) {
  TESSERA_CHECK(kernels::updates_whole_parameters(kind));
  return std::make_shared<WholeFormula>(Formula{
      .name = name,
      .update =
          [kind](const ParameterSpec& parameter, const at::Tensor& weights, const at::Tensor& gradient,
                 FormulaStates& states, const Hyper& hyper, int64_t step) {
            if (kind == OptimizerKind::kAdafactor)
              adafactor(weights, gradient, states, hyper, step);
            else
              adamw_8bit(weights, gradient, states, hyper, step, is_embedding(parameter));
          },
      .problem =
          [kind](const ParameterSpec& parameter, FormulaStates& states) {
            return kind == OptimizerKind::kAdamW8bit
                       ? problem_of_8bit_states(parameter, states)
                       : problem_of(states, states_of(kind, parameter, /*in_8_bits=*/false));
          },
      .bytes = [kind](const ParameterSpec& parameter,
                      const Hyper& hyper) { return formula_state_bytes(kind, hyper, parameter); },
  });
}

std::shared_ptr<WholeOptimizer> make_whole_optimizer(std::shared_ptr<const WholeUpdateRule> rule) {
  const std::string name = rule->name();
  return std::make_shared<WholeFormula>(Formula{
      .name = name,
      .update =
          [rule = std::move(rule)](const ParameterSpec& parameter, const at::Tensor& weights,
                                   const at::Tensor& gradient, FormulaStates& states, const Hyper& hyper,
                                   int64_t step) {
            rule->update({parameter.name, weights, gradient, states},
                         {.number = step, .lr = hyper.lr, .weight_decay = hyper.weight_decay});
          },
      .problem = {},
      .bytes = {},
  });
}

}  // namespace tessera::zero
