// DeferredModel: makes a model without the memory and the values of its parameters, and computes these later,
// one parameter at a time.
//
// [Note: making a model without memory]
// A model's constructor allocates and fills all of it, which a rank that keeps a shard has no room for. So
// the constructor runs while operators are recorded instead of run (zero/deferred/recorder.h). Then units are
// filled one after another: rank 0 runs the operators whose results the unit's parameters are, copies these
// into the unit, and frees them; the other ranks receive the unit (zero/unit/param_unit.h). What a rank holds
// meanwhile are its shards, one unit, one parameter, and what some operator has yet to read. The values are
// those of ordinary making to the bit, and so is the state of the random generators afterwards, on every
// rank; ranks other than 0 draw no random numbers, if their generators began in rank 0's state.
//
// Where values are loaded right after (a checkpoint, weights), nobody computes them: units hold zeros, and
// the generators stay as they are.
//
// Other tensors that the model holds are computed at once when `make` has returned: buffers on rank 0, whose
// values all ranks get, and tensors that are neither parameters nor buffers on every rank. A parameter that
// shares memory with such a tensor is one too. What cannot be put off runs while the model is made
// (recorder.h); if a raw pointer is asked for that is not there yet, the model is made once more, in the
// ordinary way. So `make` may be called twice. libtorch's generators have the same state both times; what
// else `make` changes is its caller's to restore.
//
// The idea is torchdistX's deferred_init.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "core/log.h"

namespace tessera::zero {

namespace deferred {
class OperatorLog;
}

/// Has counts for a test or a report.
struct MakingCounts {
  bool whole = false;        ///< made in the ordinary way, since something could not be put off
  int64_t num_recorded = 0;  ///< operators
  int64_t num_run = 0;       ///< of these, run
  int64_t num_drawn = 0;     ///< random operators run, or run on scratch memory for the generator's state
};

/// Makes one model, once. Used by one thread. While make() runs, no other thread of the process makes one.
class DeferredModel {
 public:
  explicit DeferredModel(Logger log = {});
  ~DeferredModel();
  DeferredModel(const DeferredModel&) = delete;

  /// Calls `make`. What it throws when called in the ordinary way, this throws.
  void make(const std::function<void()>& make);

  // -- what ShardedModel does, in this order --
  struct Request {
    std::vector<at::Tensor> parameters;  ///< each once
    std::vector<bool> computed;          ///< by parameter: whether this rank computes it
    std::vector<at::Tensor> buffers;
    bool first_rank = true;  ///< computes buffers, and makes all draws
    bool keeps_generators = false;
  };
  /// Computes buffers and other tensors that the model holds.
  void begin(Request request);
  /// Writes a parameter's values into `destination`, (numel), and frees their memory. Zeros if this
  /// rank does not compute it. Each parameter once.
  void fill(int parameter, at::Tensor destination);
  /// Collective. Every rank's generators get the state that ordinary making would have left.
  void finish(comm::Communicator& comm);

  MakingCounts counts() const;

 private:
  Logger log_to_;
  std::unique_ptr<deferred::OperatorLog> log_;  // null: made in the ordinary way
  Request request_;
};

/// What two tensors have in common that lie in one memory, also while there is none yet.
const void* memory_of(const at::Tensor& tensor);

}  // namespace tessera::zero
