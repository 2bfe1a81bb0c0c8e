// Tells an error that another rank's end has caused from one of this rank's own.
#pragma once

#include <algorithm>
#include <array>
#include <string_view>

namespace tessera {

/// Whether a message says that another rank has ended or left. comm/control/diagnosis.cc, liveness.cc and
/// group_store.cc, and comm/rendezvous/registration.cc have the words. A rank that failed with such an error
/// is not the cause: the launcher names another one where there is one.
inline bool tells_of_a_peer(std::string_view message) {
  constexpr std::array<std::string_view, 5> kWords = {
      " left the group", " is gone (", " are gone (",
      "rank 0 is gone: ", " has ended with exit code 0 before"};
  return std::any_of(kWords.begin(), kWords.end(),
                     [&](std::string_view words) { return message.find(words) != message.npos; });
}

}  // namespace tessera
