// CompiledGraphs: which parameters the graphs of torch.compile read.
//
// [Note: compiled graphs] A graph that AOTAutograd has compiled reads raw pointers: of its operators only
// some are heard (inductor's matrix products). But it runs inside of one autograd function, which is heard:
// CompiledFunction, with every tensor of the graph among its inputs, parameters included. That is a read of
// all of them, which stay unsharded until it ends. Its backward, the node CompiledFunctionBackward with the
// same sequence number, reads parameters among the tensors that were saved, and has none among its inputs:
// the units that its forward has read are gathered again. Without autograd (under no_grad, or where neither a
// parameter nor an input of the graph requires a gradient, as in a frozen part) there is no such function,
// and nothing is heard: the Python package then announces inductor's graphs (CompiledGraphRead), which is a
// read of all parameters among their inputs. A graph that neither has announced gets an error from data_ptr()
// (see unit_memory.h).
#pragma once

#include <ATen/record_function.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string_view>
#include <utility>
#include <vector>

#include "zero/memory/unit_memory.h"

namespace tessera::zero {

/// Remembers the units that each forward of a graph has read, until its backward has ended. Thread-safe.
/// Keeps handles, and no memory of an engine that is gone once forget_the_gone() was called.
class CompiledGraphs {
 public:
  static constexpr std::string_view kForward = "CompiledFunction", kBackward = "CompiledFunctionBackward";
  static constexpr std::string_view kAnnounced = "CompiledGraphRead";

  /// A forward graph that begins, for `function`, reads a parameter of this unit.
  void add(const at::RecordFunction& function, UnitHandle* unit);
  /// The units that the forward of this backward graph has read.
  std::vector<UnitHandle*> read_by_forward_of(const at::RecordFunction& backward) const;
  /// That backward graph has ended.
  void erase(const at::RecordFunction& backward);
  /// Drops what belongs to engines that are gone.
  void forget_the_gone();

 private:
  /// A forward that never has a backward is forgotten after this number of later ones.
  static constexpr size_t kMostGraphs = 4096;
  using Key = std::pair<int64_t, uint64_t>;  // sequence number, thread of the forward

  mutable std::mutex mutex_;  // guards what follows
  std::map<Key, std::vector<std::shared_ptr<UnitHandle>>> units_;
};

}  // namespace tessera::zero
