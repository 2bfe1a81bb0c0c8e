#include "engine/profile/flop_counter.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/accumulate.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <string_view>
#include <vector>

namespace tessera {
namespace {

using Inputs = c10::ArrayRef<const c10::IValue>;

at::IntArrayRef sizes_of(const Inputs& inputs, size_t i) { return inputs.at(i).toTensor().sizes(); }

/// (..., m, k) times (..., k, n).
int64_t matrix_product(const Inputs& inputs, size_t first) {
  return 2 * c10::multiply_integers(sizes_of(inputs, first)) * sizes_of(inputs, first + 1).back();
}

/// Elements of a list of which a single one stands for all dimensions.
int64_t at_dimension(const std::vector<int64_t>& list, size_t dimension) {
  return list.size() == 1 ? list.front() : list.at(dimension);
}

struct Convolution {
  std::vector<int64_t> input, weight;  // shapes
  std::vector<int64_t> stride, padding, dilation;
  bool transposed = false;

  /// Each weight is used once at each place: of the output, or of a transposed one's input.
  int64_t flops() const {
    int64_t places = 1;
    for (size_t i = 2; i < input.size(); ++i) {
      const int64_t reach = at_dimension(dilation, i - 2) * (weight.at(i) - 1) + 1;
      places *= transposed
                    ? input[i]
                    : (input[i] + 2 * at_dimension(padding, i - 2) - reach) / at_dimension(stride, i - 2) + 1;
    }
    return 2 * input.at(0) * places * c10::multiply_integers(weight);
  }
};

Convolution convolution(const Inputs& inputs, size_t input, size_t stride) {
  return {.input = sizes_of(inputs, input).vec(),
          .weight = sizes_of(inputs, input + 1).vec(),
          .stride = inputs.at(stride).toIntVector(),
          .padding = inputs.at(stride + 1).toIntVector(),
          .dilation = inputs.at(stride + 2).toIntVector(),
          .transposed = inputs.at(stride + 3).toBool()};
}

/// convolution_backward(gradient, input, weight, bias sizes, stride, padding, dilation, transposed, output
/// padding, groups, [gradients of input, weight, bias])
int64_t convolution_backward(const Inputs& inputs) {
  const c10::List<bool> wanted = inputs.at(10).toBoolList();
  const int64_t num_wanted = static_cast<int64_t>(wanted.get(0)) + static_cast<int64_t>(wanted.get(1));
  return num_wanted * convolution(inputs, 1, 4).flops();
}

/// Query (..., queries, d), key (..., keys, d), value (..., keys, e): the scores, and their product with
/// values.
int64_t attention(const Inputs& inputs, size_t query) {
  const at::IntArrayRef q = sizes_of(inputs, query), k = sizes_of(inputs, query + 1),
                        v = sizes_of(inputs, query + 2);
  const int64_t scores = c10::multiply_integers(q.slice(0, q.size() - 1)) * k[k.size() - 2];
  return 2 * scores * (q.back() + v.back());
}

using Formula = int64_t (*)(const Inputs&);

/// Operators by name. Those that they call are not counted again.
const std::map<std::string_view, Formula>& formulas() {
  static const std::map<std::string_view, Formula> all = [] {
    std::map<std::string_view, Formula> found;
    for (const char* name : {"aten::mm", "aten::bmm"})
      found[name] = [](const Inputs& inputs) { return matrix_product(inputs, 0); };
    for (const char* name : {"aten::addmm", "aten::baddbmm"})
      found[name] = [](const Inputs& inputs) { return matrix_product(inputs, 1); };
    found["aten::convolution"] = [](const Inputs& inputs) { return convolution(inputs, 0, 3).flops(); };
    found["aten::convolution_backward"] = convolution_backward;
    found["aten::scaled_dot_product_attention"] = [](const Inputs& inputs) { return attention(inputs, 0); };
    for (const char* name : {"aten::_scaled_dot_product_flash_attention_for_cpu_backward",
                             "aten::_scaled_dot_product_flash_attention_backward",
                             "aten::_scaled_dot_product_efficient_attention_backward",
                             "aten::_scaled_dot_product_cudnn_attention_backward"})
      found[name] = [](const Inputs& inputs) { return 2 * attention(inputs, 1); };
    return found;
  }();
  return all;
}

thread_local int counted_depth = 0;  // operators under way that were counted

struct Counted : at::ObserverContext {
  Counted() { ++counted_depth; }
  ~Counted() override { --counted_depth; }
};

}  // namespace

/// Adds to all counters of the process.
class FlopObserver final : public zero::OperatorObserver {
 public:
  static FlopObserver& of_process() {
    static FlopObserver& observer = *new FlopObserver;
    return observer;
  }

  void add(FlopCounter* counter) {
    const std::lock_guard lock(mutex_);
    counters_.push_back(counter);
  }
  void remove(FlopCounter* counter) {
    const std::lock_guard lock(mutex_);
    std::erase(counters_, counter);
  }

  std::unique_ptr<at::ObserverContext> begin(const zero::OperatorCall& call) override {
    if (counted_depth > 0 || zero::RepeatedOperators::on_this_thread()) return nullptr;
    const bool in_backward = torch::autograd::get_current_graph_task_id() != -1;
    // A graph is recorded in forward. One that is recorded in backward repeats a forward
    // (torch.utils.checkpoint).
    if (at::GradMode::is_enabled() == in_backward) return nullptr;
    const auto formula = formulas().find(call.name());
    if (formula == formulas().end()) return nullptr;
    const int64_t flops = formula->second(call.inputs());
    const std::lock_guard lock(mutex_);
    for (FlopCounter* counter : counters_) (in_backward ? counter->backward_ : counter->forward_) += flops;
    return std::make_unique<Counted>();
  }
  void end(const zero::OperatorCall&, at::ObserverContext*) override {}

 private:
  std::mutex mutex_;
  std::vector<FlopCounter*> counters_;
};

FlopCounter::FlopCounter() : hearing_(zero::Turn::kFlops, FlopObserver::of_process(), {}) {
  FlopObserver::of_process().add(this);
}

FlopCounter::~FlopCounter() { FlopObserver::of_process().remove(this); }

}  // namespace tessera
