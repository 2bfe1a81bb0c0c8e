#include "zero/stream_order.h"

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace tessera::zero {

void StreamOrder::follow(c10::function_ref<void()> leave) {
  if (!device_.is_cuda()) return;
  const c10::Stream current = c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
  if (last_ && *last_ != current) {
    {
      const c10::StreamGuard on_last(*last_);
      leave();
    }
    c10::Event given(device_.type());
    given.record(*last_);
    given.block(current);
  }
  last_ = current;
}

}  // namespace tessera::zero
