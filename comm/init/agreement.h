// All ranks agree on what one rank has found out or failed at: an exception on one rank alone would leave the
// others waiting.
#pragma once

#include <functional>
#include <string>
#include <utility>

#include "comm/communicator.h"

namespace tessera::comm {

/// Collective. Runs `function`. If it throws on any rank: the first line of its message, after the rank's
/// number unless all ranks have failed with the same; else "".
std::string failure_on_any(Communicator& comm, const char* label, const std::function<void()>& function);

/// Collective. The same; throws the message on all ranks as an E.
template <class E>
void on_all_ranks(Communicator& comm, const char* label, const std::function<void()>& function) {
  if (const std::string failure = failure_on_any(comm, label, function); !failure.empty()) throw E(failure);
}

/// Collective. The first rank whose `mine` is not rank 0's; 0: all ranks have the same.
int first_unlike(Communicator& comm, const char* label, const std::string& mine);

/// Has rank 0's answer, or why there is none.
struct Answer {
  bool is_failure = false;
  std::string text;  ///< the answer, or why there is none
};

/// Collective. Runs `answer` on rank 0 only; returns its result on all ranks.
Answer ask_rank_0(Communicator& comm, const char* label, const std::function<std::string()>& answer);

/// Collective. The same; throws a failure on all ranks as an E.
template <class E>
std::string from_rank_0(Communicator& comm, const char* label, const std::function<std::string()>& answer) {
  Answer found = ask_rank_0(comm, label, answer);
  if (found.is_failure) throw E(found.text);
  return std::move(found.text);
}

}  // namespace tessera::comm
