// AutocastScope: torch.autocast(device_type, dtype) during its lifetime; does nothing when disabled.
#pragma once

#include <ATen/autocast_mode.h>

#include "engine/config/config.h"

namespace tessera {

/// Turns autocast on during its lifetime.
class AutocastScope {
 public:
  AutocastScope(const AutocastConfig& config, at::Device device);
  ~AutocastScope();
  AutocastScope(const AutocastScope&) = delete;

 private:
  bool enabled_;
  at::DeviceType device_type_;
  bool enabled_before_ = false;
  at::ScalarType dtype_before_ = at::kFloat;
  bool cache_before_ = false;
};

}  // namespace tessera
