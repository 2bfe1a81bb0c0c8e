#include "tests/engine/unusual_models.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/transformercoder.h>
#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <mutex>
#include <sstream>
#include <vector>

#include "core/str.h"

namespace tessera::testing {
namespace {

using torch::nn::Linear;
namespace init = torch::nn::init;

// Above what is small enough to be computed at once.
constexpr int64_t kLarge = 300;

void views(BuiltImpl& m) {
  m.parameter("transposed", torch::randn({6, 10}).t());
  const at::Tensor flat = torch::rand({40});
  m.parameter("head", flat.narrow(0, 0, 12).view({3, 4}));
  m.parameter("tail", flat.narrow(0, 16, 24).view({4, 6}));
  const at::Tensor large = torch::randn({kLarge, kLarge});
  m.parameter("upper", large.slice(0, 0, 100));
  m.parameter("lower", large.slice(0, 100));
}

void given_other_data(BuiltImpl& m) {
  const Linear linear = m.module("linear", Linear(8, 12));
  linear->weight.set_data(torch::randn({12, 8}) * 3);
  linear->bias.set_data(linear->weight.sum(1).detach());
}

void sixteen_bits(BuiltImpl& m) {
  m.module("linear", Linear(kLarge, kLarge));
  m.parameter("made", torch::randn({5, 6}, at::kBFloat16));
  m.to(at::kBFloat16);
}

void initialisers(BuiltImpl& m) {
  const auto weight = [&](const char* name, at::IntArrayRef sizes) {
    return m.parameter(name, torch::empty(sizes));
  };
  init::orthogonal_(weight("orthogonal", {24, 16}));
  init::xavier_normal_(weight("xavier", {kLarge, kLarge}));
  init::kaiming_normal_(weight("kaiming", {8, 4, 3, 3}));
  init::sparse_(weight("sparse", {20, 10}), 0.3);
  init::dirac_(weight("dirac", {6, 6, 3}));
  init::eye_(weight("eye", {9, 9}));
  init::constant_(weight("constant", {kLarge, 2 * kLarge}), 0.25);
  const at::NoGradGuard no_grad;
  // As torch.nn.init.trunc_normal_ does it.
  at::Tensor truncated = weight("truncated", {kLarge, kLarge});
  truncated.uniform_(-0.9, 0.9).erfinv_().mul_(std::sqrt(2.0)).add_(0.1).clamp_(-1, 1);
  weight("random", {12}).random_(0, 100);
  weight("exponential", {12}).exponential_();
  weight("bernoulli", {12}).bernoulli_(0.3);
}

void clones(BuiltImpl& m) {
  const Linear first = m.module("first", Linear(kLarge, kLarge));
  m.module("second", std::dynamic_pointer_cast<torch::nn::LinearImpl>(first->clone()));
  m.parameter("third", first->weight.detach().clone().mul_(2));
}

// The options keep the first layer, which is not registered.
void clones_of_others(BuiltImpl& m) {
  m.module("encoder", torch::nn::TransformerEncoder(torch::nn::TransformerEncoderOptions(
                          torch::nn::TransformerEncoderLayerOptions(16, 2).dim_feedforward(24), 3)));
}

// A first initialisation that nothing is left of, and one in several passes.
void twice(BuiltImpl& m) {
  std::vector<Linear> layers;
  for (int i = 0; i < 4; ++i) layers.push_back(m.module(std::to_string(i), Linear(kLarge, kLarge)));
  const at::NoGradGuard no_grad;
  for (Linear& layer : layers) layer->weight.normal_(0, 0.02);
  for (Linear& layer : layers) layer->bias.zero_();
  for (int i : {2, 0}) layers[i]->weight.normal_(0, 0.01);
  for (Linear& layer : layers) layer->weight.mul_(0.5).add_(layer->bias);
  layers[1]->weight[3].zero_();
  layers[3]->weight.copy_(layers[1]->weight.t());
}

// Values that are read before they are overwritten.
void overtaken(BuiltImpl& m) {
  at::Tensor first = torch::randn({kLarge, kLarge});
  const at::Tensor copy = first.clone();
  first.normal_(1, 2);
  const at::Tensor part = first.slice(0, 0, 20).clone();
  first.slice(0, 0, 20).zero_();
  m.parameter("first", first);
  m.parameter("copy", copy);
  m.parameter("part", part);
}

void seeds(BuiltImpl& m) {
  m.parameter("a", torch::randn({kLarge, kLarge}));
  torch::manual_seed(7);
  m.parameter("b", torch::randn({kLarge, kLarge}));
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const at::Tensor state = generator.get_state();
  m.parameter("c", torch::randn({31}));
  torch::manual_seed(7);
  m.parameter("d", torch::randn({30}));
  generator.set_state(state);
  m.parameter("e", torch::randn({31}));  // as c
  const at::Generator own = at::detail::createCPUGenerator(11);
  m.parameter("f", torch::randn({20}, own));
  m.parameter("g", torch::randn({20}));
  m.parameter("h", torch::randn({20}, own));
}

void buffers(BuiltImpl& m) {
  m.module("norm", torch::nn::BatchNorm1d(6));
  m.buffer("noise", torch::randn({kLarge, kLarge}).uniform_());
  m.parameter("weight", torch::randn({kLarge, kLarge}));
  m.buffer("positions", torch::arange(40).expand({1, -1}));
}

void others(BuiltImpl& m) {
  m.parameter("weight", torch::randn({kLarge, kLarge}));
  m.others.push_back(torch::randn({kLarge, kLarge}));
  m.others.push_back(torch::ones({kLarge, kLarge}).tril());
  m.others.push_back(torch::rand({kLarge, kLarge}).normal_());  // overwritten
  m.others.push_back(m.parameter("last", torch::randn({5, 6})).detach());
}

void values(BuiltImpl& m) {
  const at::Tensor first = m.parameter("first", torch::randn({kLarge, kLarge}));
  const double norm = first.detach().norm().item<double>();
  m.parameter("second", torch::randn({static_cast<int64_t>(norm) / 10, 4}));
  const at::NoGradGuard no_grad;
  at::Tensor third = m.parameter("third", torch::randn({12}));
  if (third[0].item<float>() > 0) third.mul_(2);
  m.parameter("fourth", third.index({third > 0}).clone());  // of a size that depends on values
}

void drawn_by_values(BuiltImpl& m) {
  const at::Tensor rates = torch::rand({kLarge, kLarge}) * 5;
  m.parameter("bernoulli", at::bernoulli(rates / 5));
  at::Tensor chances = torch::empty({kLarge, kLarge});
  m.parameter("chances", chances.bernoulli_(rates / 5));
  m.parameter("after", torch::randn({20}));
  m.parameter("permuted", torch::randperm(30).to(at::kFloat));
  m.parameter("dropped", at::dropout(torch::ones({40}), 0.5, /*train=*/true));
}

// Without a kernel for meta tensors.
void run_at_once(BuiltImpl& m) {
  m.parameter("before", torch::randn({20}));
  m.parameter("poisson", at::poisson(torch::rand({kLarge, kLarge}) * 5));
  m.parameter("chosen", at::multinomial(torch::rand({20}), 4).to(at::kFloat));
  m.parameter("absolute",
              torch::randn({kLarge, kLarge}).abs());  // writes into an empty tensor, which it resizes
  m.parameter("after", torch::randn({20}));
}

void tables(BuiltImpl& m) {
  const at::Tensor places = torch::arange(kLarge, at::kFloat).unsqueeze(1);
  const at::Tensor rates = torch::exp(torch::arange(0, kLarge, 2, at::kFloat) * -0.03);
  at::Tensor sinusoids = torch::zeros({kLarge, kLarge});
  sinusoids.slice(1, 0, kLarge, 2) = torch::sin(places * rates);
  sinusoids.slice(1, 1, kLarge, 2).copy_(torch::cos(places * rates));
  m.parameter("sinusoids", sinusoids, /*requires_grad=*/false);
  m.parameter("listed", torch::tensor({1.5F, 2.5F, -3.0F}));
  at::Tensor row = torch::zeros({kLarge}), table = torch::empty({kLarge, kLarge});
  for (int64_t i = 0; i < 5; ++i) {
    for (int64_t j = 0; j < kLarge; ++j) row.data_ptr<float>()[j] = static_cast<float>(i * j);
    table[i].copy_(row);
  }
  table.slice(0, 5).uniform_();
  m.parameter("table", table);
}

void from_outside(BuiltImpl& m) {
  static const at::Tensor kept = at::arange(kLarge * kLarge, at::kFloat).view({kLarge, kLarge});
  m.parameter("kept", torch::empty({kLarge, kLarge}));
  m.parameter("scaled", torch::randn({kLarge, kLarge}));
  const at::NoGradGuard no_grad;
  m.named_parameters()["kept"].copy_(kept);
  m.named_parameters()["scaled"].mul_(kept);
  std::vector<float> numbers(kLarge * kLarge, 3);
  at::Tensor loaded = torch::empty({kLarge, kLarge});
  loaded.copy_(at::from_blob(numbers.data(), {kLarge, kLarge}));
  std::fill(numbers.begin(), numbers.end(), -1.0F);
  m.parameter("loaded", loaded);
  m.parameter("real", kept.clone());
}

void with_history(BuiltImpl& m) {
  const at::Tensor g = m.parameter("g", torch::rand({6, 1}));
  const at::Tensor v = m.parameter("v", torch::randn({6, 8}));
  m.others.push_back(v * (g / v.norm()));  // a part of the graph
}

void unfilled(BuiltImpl& m) {
  m.parameter("weight", torch::zeros({kLarge, kLarge}));
  m.parameter("empty", torch::empty({0}));
  m.parameter("scalar", torch::tensor(2.5F));
  m.parameter("ones", torch::ones({kLarge, kLarge}));
  m.parameter("like", torch::rand_like(m.named_parameters()["ones"].detach()));
}

void raw_pointers(BuiltImpl& m) {
  at::Tensor weight = torch::randn({kLarge, kLarge});
  weight.data_ptr<float>()[5] = 42;
  m.parameter("weight", weight);
}

// Pointers that were taken while the memory was there stay right, also where operators write afterwards.
void pointers_kept(BuiltImpl& m) {
  const at::NoGradGuard no_grad;
  at::Tensor small = m.parameter("small", torch::zeros({100}));
  auto* const small_data = small.data_ptr<float>();
  small.normal_();
  for (int i = 0; i < 100; ++i) small_data[i] *= 0.5F;
  m.parameter("between", torch::randn({kLarge, kLarge}));
  at::Tensor computed = torch::randn({kLarge, kLarge});
  computed.mul_(1 / computed.abs().max().item<double>());
  computed.sum().item<double>();  // computes it
  auto* const data = computed.data_ptr<float>();
  data[0] = 5;
  m.parameter("copied", torch::empty({kLarge, kLarge})).copy_(computed);
  data[0] = 7;
  m.parameter("noisy", torch::empty({kLarge, kLarge})).normal_().add_(computed);
  data[0] = 9;
  computed.normal_();
  data[1] = 11;
  m.parameter("computed", computed);
  m.parameter("last", torch::randn({50}));
}

// Memory from outside that is used again and again.
void one_buffer_for_all(BuiltImpl& m) {
  const at::NoGradGuard no_grad;
  auto numbers = std::make_shared<std::vector<float>>(kLarge * kLarge);
  const at::Tensor buffer = at::from_blob(numbers->data(), {kLarge, kLarge}, [numbers](void*) {});
  for (int layer = 0; layer < 3; ++layer) {
    std::fill(numbers->begin(), numbers->end(), static_cast<float>(layer));
    m.parameter(str("weight", layer), torch::randn({kLarge, kLarge})).add_(buffer);
    m.parameter(str("transposed", layer), torch::empty({kLarge, kLarge})).copy_(buffer.t().slice(0, 1, 2));
  }
  at::Tensor(buffer).uniform_();
  m.parameter("scale", torch::full({2}, (*numbers)[3]));
  m.parameter("kept", buffer, /*requires_grad=*/false);
}

// The program's own tensor, which libtorch allocated, changed through a pointer.
void outside_changed_by_pointer(BuiltImpl& m) {
  static const at::Tensor table = at::zeros({kLarge, kLarge});
  for (int layer = 0; layer < 2; ++layer) {
    table.data_ptr<float>()[0] = static_cast<float>(layer);
    m.parameter(str("weight", layer), torch::empty({kLarge, kLarge})).detach().copy_(table);
  }
}

at::Tensor state_of(at::Generator generator) {
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

// What a generator shows is what it has in ordinary making.
void states(BuiltImpl& m) {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  m.parameter("before", torch::randn({kLarge, kLarge}));
  m.parameter("seed", torch::full({1}, static_cast<double>(generator.current_seed() % 1000)));
  m.buffer("state", state_of(generator));
  at::Generator clone;
  {
    const std::lock_guard lock(generator.mutex());
    clone = generator.clone();
  }
  m.parameter("cloned", at::randn({kLarge, kLarge}, clone));
  m.parameter("drawn", torch::randn({7}));
  at::Generator own = at::detail::createCPUGenerator(3);
  m.parameter("own", at::randn({20}, own));
  {
    const std::lock_guard lock(own.mutex());
    own.set_state(m.named_buffers()["state"]);
  }
  m.parameter("own_again", at::randn({20}, own));
  m.buffer("own_state", state_of(own));
  m.buffer("clone_state", state_of(clone));
  const at::Tensor saved = state_of(generator);
  m.parameter("forked", torch::rand({kLarge, kLarge}));
  {
    const std::lock_guard lock(generator.mutex());
    generator.set_state(saved);
  }
  m.parameter("number", torch::full({1}, generator.get<at::CPUGeneratorImpl>()->random() / 7e9));
  m.parameter("after", torch::randn({20}));
}

struct OtherGenerator : at::CPUGeneratorImpl {
  using at::CPUGeneratorImpl::CPUGeneratorImpl;
};

// A generator that is not watched, as CUDA's are not.
void generators_of_another_class(BuiltImpl& m) {
  at::Generator own = at::make_generator<OtherGenerator>(7);
  m.parameter("first", at::randn({kLarge, kLarge}, own));
  m.buffer("state", state_of(own));
  m.parameter("second", at::rand({20}, own));
  m.parameter("number", torch::full({1}, own.get<at::CPUGeneratorImpl>()->random() / 7e9));
  m.parameter("third", at::normal(0, 2, {kLarge, kLarge}, own));
  m.parameter("last", torch::randn({20}));
}

void prints(BuiltImpl& m) {
  m.parameter("weight", torch::randn({3}));
  std::ostringstream text;
  text << m.named_parameters()["weight"];
  m.parameter("length", torch::full({2}, static_cast<double>(text.str().size())));
}

void draws_itself(BuiltImpl& m) {
  m.parameter("before", torch::randn({20}));
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  {
    const std::lock_guard lock(generator.mutex());
    m.parameter("number", torch::full({3}, generator.get<at::CPUGeneratorImpl>()->random() / 7e9));
  }
  m.parameter("after", torch::randn({20}));
}

}  // namespace

const std::vector<UnusualModel>& unusual_models() {
  static const std::vector<UnusualModel> models = {
      {"Views", views, false, true},  // autograd keeps what they are views of
      {"GivenOtherData", given_other_data, false, true},
      {"SixteenBits", sixteen_bits},
      {"Initialisers", initialisers},
      {"Clones", clones},
      {"ClonesOfOthers", clones_of_others, false, true},
      {"Twice", twice},
      {"Overtaken", overtaken},
      {"Seeds", seeds, false, true},  // asks for the state
      {"Buffers", buffers},
      {"Others", others, false, true},
      {"Values", values, false, true},
      {"DrawnByValues", drawn_by_values},
      {"RunAtOnce", run_at_once, false, true},
      {"Tables", tables},
      {"FromOutside", from_outside},
      {"WithHistory", with_history, false, true},
      {"Unfilled", unfilled},
      {"RawPointers", raw_pointers, true},
      {"PointersKept", pointers_kept, false, true},
      {"OneBufferForAll", one_buffer_for_all, false, true},
      {"OutsideChangedByPointer", outside_changed_by_pointer, true},
      {"States", states, false, true},
      {"GeneratorsOfAnotherClass", generators_of_another_class, false, true},
      {"Prints", prints, true},
      {"DrawsItself", draws_itself, true},
  };
  return models;
}

}  // namespace tessera::testing
