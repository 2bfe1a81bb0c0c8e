#include "activations/kernel_settings.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DefaultDtype.h>
#ifdef __SSE2__
#include <xmmintrin.h>
#endif

#include <cstddef>

namespace tessera::activations {
namespace {

struct Setting {
  int32_t (*get)();
  void (*set)(int32_t value);
};

/// A flag of at::Context.
template <auto get, auto set>
constexpr Setting flag() {
  return {[] { return static_cast<int32_t>((at::globalContext().*get)()); },
          [](int32_t value) { (at::globalContext().*set)(value != 0); }};
}

/// fp32_precision of torch.backends, which set_float32_matmul_precision() and allow_tf32 write, too.
template <at::Float32Backend backend, at::Float32Op op>
constexpr Setting precision() {
  return {[] { return static_cast<int32_t>(at::globalContext().float32Precision(backend, op)); },
          [](int32_t value) {
            at::globalContext().setFloat32Precision(backend, op, static_cast<at::Float32Precision>(value));
          }};
}

template <auto get, auto set>
constexpr Setting reduction() {
  using Option = at::CuBLASReductionOption;
  return {[] { return static_cast<int32_t>((at::globalContext().*get)()); },
          [](int32_t value) {
            const auto option = static_cast<Option>(value);
            (at::globalContext().*set)(option == Option::AllowReducedPrecisionWithSplitK,
                                       option != Option::DisallowReducedPrecisionDisallowSplitK);
          }};
}

template <at::DeviceType device>
constexpr Setting autocast() {
  return {[] { return static_cast<int32_t>(at::autocast::is_autocast_enabled(device)); },
          [](int32_t value) { at::autocast::set_autocast_enabled(device, value != 0); }};
}

template <at::DeviceType device>
constexpr Setting autocast_dtype() {
  return {
      [] { return static_cast<int32_t>(at::autocast::get_autocast_dtype(device)); },
      [](int32_t value) { at::autocast::set_autocast_dtype(device, static_cast<at::ScalarType>(value)); }};
}

int32_t flush_denormal() {
#ifdef __SSE2__
  return (_mm_getcsr() & _MM_FLUSH_ZERO_ON) != 0 ? 1 : 0;
#else
  return 0;
#endif
}

using C = at::Context;
using at::Float32Backend;
using at::Float32Op;

constexpr Setting kSettings[] = {
    {[] { return static_cast<int32_t>(at::GradMode::is_enabled()); },
     [](int32_t value) { at::GradMode::set_enabled(value != 0); }},
    {[] { return static_cast<int32_t>(c10::get_default_dtype_as_scalartype()); },
     [](int32_t value) {
       c10::set_default_dtype(c10::scalarTypeToTypeMeta(static_cast<at::ScalarType>(value)));
     }},
    {[] { return static_cast<int32_t>(at::get_num_threads()); },
     [](int32_t value) { at::set_num_threads(value); }},
    {&flush_denormal, [](int32_t value) { C::setFlushDenormal(value != 0); }},
    autocast<at::kCPU>(),
    autocast_dtype<at::kCPU>(),
    autocast<at::kCUDA>(),
    autocast_dtype<at::kCUDA>(),
    {[] { return at::globalContext().deterministicAlgorithms() ? 1 : 0; },
     [](int32_t value) {
       C& context = at::globalContext();
       context.setDeterministicAlgorithms(value != 0, context.deterministicAlgorithmsWarnOnly());
     }},
    {[] { return at::globalContext().deterministicAlgorithmsWarnOnly() ? 1 : 0; },
     [](int32_t value) {
       C& context = at::globalContext();
       context.setDeterministicAlgorithms(context.deterministicAlgorithms(), value != 0);
     }},
    flag<&C::deterministicFillUninitializedMemory, &C::setDeterministicFillUninitializedMemory>(),
    flag<&C::userEnabledMkldnn, &C::setUserEnabledMkldnn>(),
    flag<&C::deterministicMkldnn, &C::setDeterministicMkldnn>(),
    flag<&C::userEnabledNNPACK, &C::setUserEnabledNNPACK>(),
    flag<&C::userEnabledCuDNN, &C::setUserEnabledCuDNN>(),
    flag<&C::benchmarkCuDNN, &C::setBenchmarkCuDNN>(),
    flag<&C::deterministicCuDNN, &C::setDeterministicCuDNN>(),
    flag<&C::allowFP16AccumulationCuBLAS, &C::setAllowFP16AccumulationCuBLAS>(),
    flag<&C::allowFP16ReductionCPU, &C::setAllowFP16ReductionCPU>(),
    reduction<&C::allowFP16ReductionCuBLAS, &C::setAllowFP16ReductionCuBLAS>(),
    reduction<&C::allowBF16ReductionCuBLAS, &C::setAllowBF16ReductionCuBLAS>(),
    precision<Float32Backend::CUDA, Float32Op::MATMUL>(),
    precision<Float32Backend::CUDA, Float32Op::CONV>(),
    precision<Float32Backend::CUDA, Float32Op::RNN>(),
    precision<Float32Backend::MKLDNN, Float32Op::MATMUL>(),
    precision<Float32Backend::MKLDNN, Float32Op::CONV>(),
    precision<Float32Backend::MKLDNN, Float32Op::RNN>(),
};
static_assert(std::size(kSettings) == std::tuple_size_v<KernelSettings>);

void set(const KernelSettings& wanted, const KernelSettings& now) {
  for (size_t i = 0; i < now.size(); ++i)
    if (wanted[i] != now[i]) kSettings[i].set(wanted[i]);
}

}  // namespace

KernelSettings current_settings() {
  KernelSettings settings;
  for (size_t i = 0; i < settings.size(); ++i) settings[i] = kSettings[i].get();
  return settings;
}

WithSettings::WithSettings(const KernelSettings& wanted) : wanted_(wanted), before_(current_settings()) {
  set(wanted_, before_);
}

WithSettings::~WithSettings() { set(before_, wanted_); }

}  // namespace tessera::activations
