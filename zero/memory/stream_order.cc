#include "zero/memory/stream_order.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace tessera::zero {

void StreamOrder::follow() {
  if (device_.is_cpu()) return;
  const c10::Stream current = c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
  if (last_ && *last_ != current) {
    several_ = true;
    c10::Event given(device_.type());
    given.record(*last_);
    given.block(current);
  }
  last_ = current;
}

void StreamOrder::uses(const at::DataPtr& memory) const {
  if (!several_ || memory.get() == nullptr) return;
  const c10::impl::VirtualGuardImpl device(device_.type());
  device.recordDataPtrOnStream(memory, device.getStream(device_));
}

}  // namespace tessera::zero
