#include "comm/init/agreement.h"

#include <algorithm>

#include "comm/control/error_message.h"
#include "core/error.h"
#include "core/str.h"

namespace tessera::comm {

std::string failure_on_any(Communicator& comm, const char* label, const std::function<void()>& function) {
  std::string error;
  try {
    function();
  } catch (const std::exception& caught) {
    error = error_message(caught);
  }
  const std::vector<std::string> errors = comm.exchange(error, label);
  const auto first =
      std::find_if(errors.begin(), errors.end(), [](const std::string& one) { return !one.empty(); });
  if (first == errors.end()) return "";
  const bool same =
      std::all_of(errors.begin(), errors.end(), [&](const std::string& other) { return other == *first; });
  return same ? *first : str("rank ", first - errors.begin(), ": ", *first);
}

int first_unlike(Communicator& comm, const char* label, const std::string& mine) {
  const std::vector<std::string> ranks = comm.exchange(mine, label);
  const auto other =
      std::find_if(ranks.begin(), ranks.end(), [&](const std::string& one) { return one != ranks.front(); });
  return other == ranks.end() ? 0 : static_cast<int>(other - ranks.begin());
}

Answer ask_rank_0(Communicator& comm, const char* label, const std::function<std::string()>& answer) {
  Answer mine;
  if (comm.rank() == 0) {
    try {
      mine.text = answer();
    } catch (const std::exception& error) {
      mine = {.is_failure = true, .text = error_message(error)};
    }
  }
  const std::string text = comm.exchange(str(mine.is_failure ? '-' : '+', mine.text), label).front();
  if (text.empty()) throw CommError(label, ": rank 0 has given no answer");
  return {.is_failure = text.front() == '-', .text = text.substr(1)};
}

}  // namespace tessera::comm
