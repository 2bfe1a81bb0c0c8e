// OperatorOrigin: which operator, and which module, a thread is at. A module is known by its parameters: the
// one whose parameter was read last. A node of backward belongs to the module of the operator that made it,
// which autograd's sequence numbers tell.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "zero/operators/forward_notes.h"
#include "zero/operators/tap.h"
#include "zero/plan/layout.h"

namespace tessera {

class OperatorOrigin {
 public:
  using Intern = std::function<int(const std::string&)>;

  /// What a thread is in the middle of.
  struct Place {
    int depth = 0;      ///< operators begun and not ended
    uint64_t call = 0;  ///< number of the outermost one; 0: outside of all
    int op = -1;        ///< its name
    int module = -1;
    bool in_backward = false;
  };
  /// Of this thread.
  static Place& here();

  /// `intern`: gives names their numbers; called by any thread. Without `layout` no module is known.
  OperatorOrigin(const zero::Layout* layout, Intern intern);

  /// For operators and nodes of backward, of any thread.
  void begin(const zero::OperatorCall& call);
  void end();

 private:
  int module_of_inputs(const zero::OperatorCall& call) const;

  static constexpr size_t kMostNodes = 1 << 20;

  const Intern intern_;
  std::vector<std::map<int64_t, int>> modules_;  // of each unit: the first element of a parameter -> module
  std::atomic<uint64_t> num_calls_{0};
  zero::ForwardNotes<int> modules_of_forward_{kMostNodes};
};

}  // namespace tessera
