// A communicator that passes everything on to another one. Tests override what they observe or make fail.
#pragma once

#include <memory>
#include <string_view>
#include <utility>

#include "comm/labelled.h"

namespace tessera::testing {

/// Forwards every virtual member of Communicator to `inner`. Duplicates are the inner one's, unless
/// duplicate() is overridden too, also those for exchange(); so are parts, and split().
class ForwardingCommunicator : public comm::LabelledCommunicator {
 public:
  explicit ForwardingCommunicator(comm::CommunicatorPtr inner)
      : LabelledCommunicator(std::move(inner), /*suffix=*/"") {}

  comm::CommunicatorPtr duplicate_for_exchange(std::string_view name) override { return duplicate(name); }
};

}  // namespace tessera::testing
