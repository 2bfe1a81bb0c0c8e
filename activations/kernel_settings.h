// KernelSettings: what a kernel reads beside its arguments: libtorch's settings of the process (default
// dtype, deterministic algorithms, TF32, oneDNN, cuDNN, number of threads) and of the thread (grad mode,
// autocast, denormal numbers). A model may change them for a part of its forward, so a call has those of its
// time.
#pragma once

#include <array>
#include <cstdint>

namespace tessera::activations {

using KernelSettings = std::array<int32_t, 27>;

/// Returns those that operators of this thread read now.
KernelSettings current_settings();

/// Gives this thread's operators `wanted` during its lifetime. It sets what differs, and sets it back. Some
/// settings belong to the process: other threads read them meanwhile, too.
class WithSettings {
 public:
  explicit WithSettings(const KernelSettings& wanted);
  ~WithSettings();
  WithSettings(const WithSettings&) = delete;

 private:
  const KernelSettings wanted_, before_;
};

}  // namespace tessera::activations
