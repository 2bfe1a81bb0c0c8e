#include "engine/autocast.h"

#include "comm/torch_dtype.h"

namespace tessera {

AutocastScope::AutocastScope(const AutocastConfig& config, at::Device device)
    : enabled_(config.enabled), device_type_(device.type()) {
  if (!enabled_) return;
  enabled_before_ = at::autocast::is_autocast_enabled(device_type_);
  dtype_before_ = at::autocast::get_autocast_dtype(device_type_);
  cache_before_ = at::autocast::is_autocast_cache_enabled();
  at::autocast::set_autocast_enabled(device_type_, true);
  at::autocast::set_autocast_dtype(device_type_, to_torch(config.dtype));
  at::autocast::set_autocast_cache_enabled(true);
  at::autocast::increment_nesting();
}

AutocastScope::~AutocastScope() {
  if (!enabled_) return;
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(device_type_, enabled_before_);
  at::autocast::set_autocast_dtype(device_type_, dtype_before_);
  at::autocast::set_autocast_cache_enabled(cache_before_);
}

}  // namespace tessera
