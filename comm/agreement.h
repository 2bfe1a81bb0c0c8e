// What one rank has found out, or failed at, is what all ranks go on with: an exception on one
// alone would leave the others waiting.
#pragma once

#include <functional>
#include <string>
#include <utility>

#include "comm/communicator.h"

namespace tessera::comm {

/// Collective. Runs `function`. Where it has thrown on any rank, its message (the first line), with the
/// rank's number where not all have failed alike; else "".
std::string failure_on_any(Communicator& comm, const char* label, const std::function<void()>& function);

/// Collective. The same, thrown on all ranks as an E, which is made of the message.
template <class E>
void on_all_ranks(Communicator& comm, const char* label, const std::function<void()>& function) {
  if (const std::string failure = failure_on_any(comm, label, function); !failure.empty()) throw E(failure);
}

/// What a rank has found.
struct Answer {
  bool is_failure = false;
  std::string text;  ///< the answer, or why there is none
};

/// Collective. Runs `answer` on rank 0 alone.
Answer ask_rank_0(Communicator& comm, const char* label, const std::function<std::string()>& answer);

/// Collective. The same, its failure thrown on all ranks as an E.
template <class E>
std::string from_rank_0(Communicator& comm, const char* label, const std::function<std::string()>& answer) {
  Answer found = ask_rank_0(comm, label, answer);
  if (found.is_failure) throw E(found.text);
  return std::move(found.text);
}

}  // namespace tessera::comm
