// What an optimizer is, without libtorch: its kind, its hyper-parameters, the states it keeps.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "zero/kernels/sums.h"

namespace tessera::kernels {

/// Those from kAdafactor on update whole parameters (zero/optimizer/whole_formula.h) and have no states in
/// shards.
enum class OptimizerKind : uint8_t {
  kAdam,
  kAdamW,
  kSGD,
  kAdagrad,
  kRMSprop,
  kLion,
  kLamb,
  kMuon,
  kAdafactor,
  kAdamW8bit,
};

constexpr bool updates_whole_parameters(OptimizerKind kind) { return kind >= OptimizerKind::kAdafactor; }

/// How Muon's rate depends on a matrix' shape; torch.optim.Muon's adjust_lr_fn.
enum class AdjustLr : uint8_t { kOriginal, kMatchRmsAdamW, kSpectralUnclamped };

/// Hyper-parameters of one param group; each optimizer reads the ones its formula has.
struct Hyper {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.0;
  double momentum = 0.0;        ///< SGD, RMSprop, Muon
  double dampening = 0.0;       ///< SGD
  bool nesterov = false;        ///< SGD, Muon
  double lr_decay = 0.0;        ///< Adagrad
  double alpha = 0.99;          ///< RMSprop: decay of the mean square
  bool centered = false;        ///< RMSprop: by the variance; equal in all groups
  bool amsgrad = false;         ///< Adam, AdamW: by the largest mean square so far
  bool maximize = false;        ///< Adam, AdamW, SGD, Adagrad, RMSprop, Adafactor: steps along the gradient
  bool bias_correction = true;  ///< Adam, AdamW, LAMB
  double max_coeff = 10.0;      ///< LAMB: bounds of the trust ratio, as DeepSpeed's keys
  double min_coeff = 0.01;
  bool use_muon = true;                      ///< Muon; false: AdamW updates the group's matrices, too
  double adam_lr_ratio = 1.0;                ///< Muon: AdamW's rate is lr times this
  int64_t ns_steps = 5;                      ///< Muon: iterations that make a matrix orthogonal
  AdjustLr adjust_lr = AdjustLr::kOriginal;  ///< Muon
  double beta2_decay = -0.8;                 ///< Adafactor: exponent of the step in the second moment's decay
  double eps2 = 1e-3;            ///< Adafactor: least root mean square of a parameter; eps is eps1
  double d = 1.0;                ///< Adafactor: clipping threshold of the update
  int64_t optim_bits = 8;        ///< AdamW8bit: 8, or 32 for fp32 moments
  int64_t min_8bit_size = 4096;  ///< AdamW8bit: a smaller parameter has fp32 moments
  bool operator==(const Hyper&) const = default;
};

/// Names of the fp32 state tensors an optimizer keeps for each element, in order, torch.optim's: Adam,
/// AdamW, LAMB {"exp_avg", "exp_avg_sq"}, with amsgrad also "max_exp_avg_sq"; SGD {"momentum_buffer"}, or
/// none without momentum; Adagrad {"sum"}; RMSprop {"square_avg"}, where it is centered "grad_avg", with
/// momentum "momentum_buffer"; Lion {"exp_avg"}; Muon those of AdamW, of which a matrix uses the first; none
/// for those that update whole parameters. Every state starts at zero. Of two groups of an optimizer, the
/// names of one are the first of the other's.
std::vector<std::string_view> state_names(OptimizerKind kind, const Hyper& hyper);

/// |weights| / |update| within [min_coeff, max_coeff]; 1 when either norm is zero.
double lamb_trust_ratio(const Hyper& hyper, const LambPart& total);

}  // namespace tessera::kernels
