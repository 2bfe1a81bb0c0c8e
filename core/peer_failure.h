// PeerFailure: tells an error that another rank's end has caused from one of this rank's own.
#pragma once

#include "core/error.h"

namespace tessera {

/// Says that another rank has ended or left the group. A rank that fails with it is not the cause: the
/// launcher names another one where there is one.
class PeerFailure : public CommError {
 public:
  using CommError::CommError;
};

}  // namespace tessera
