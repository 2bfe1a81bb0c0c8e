// OperatorLog: the operators that were recorded while a model was made, and the storages whose values they
// compute. It runs them later, in whichever order the values are asked for, and gives the same values as
// running them at once would have.
//
// A value is a storage at a point of the log. To compute it, the operators are run that wrote the storage
// since it was last overwritten as a whole, after those that computed what they read. An operator waits for
// earlier ones that read what it overwrites. Random operators draw from the state that the generator would
// have had (random_stream.h): those that are passed over are drawn into scratch memory for the sake of the
// state, and drawn again from the saved state when they are asked for. Operators whose results nobody reads
// are never run, except that random ones advance the generator.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "zero/deferred/deferred_model.h"
#include "zero/deferred/random_stream.h"

namespace tessera::zero::deferred {

struct RecordedOperator {
  explicit RecordedOperator(const c10::OperatorHandle& handle) : handle(handle) {}

  c10::OperatorHandle handle;
  torch::jit::Stack arguments;      ///< tensors are views that share the storages
  std::vector<at::Tensor> outputs;  ///< of its own, without memory; undefined where it returned none
  std::vector<int> reads;           ///< entries whose values it needs
  std::vector<int> overwrites;      ///< entries that it writes as a whole, and doesn't read
  std::vector<int> changes;         ///< entries that it writes in part, or reads as well (also in `reads`)
  /// A tensor from outside, which is kept by reference.
  struct Outside {
    at::Tensor tensor;
    std::optional<uint32_t> version;
    uint64_t hash;  ///< of its values, on the CPU
  };
  std::vector<Outside> outside;
  std::vector<int> written_arguments;
  at::ScalarType default_dtype = at::kFloat;
  int stream = -1, draw = -1;  ///< of a random operator
  int generator_argument = -1;
  bool reads_to_draw = false;  ///< random, and reads values: it cannot draw without them
  bool done = false;
  bool live = true;  ///< somebody needs its result

  std::set<int> touched() const;  ///< entries that it reads or writes
};

/// Keeps recorded operators, and runs them when their values are wanted. Not thread-safe.
class OperatorLog {
 public:
  struct Entry {
    c10::Storage storage;
    bool has_memory = false;
    bool made_here = false;             ///< while recording; others' memory is never freed
    std::vector<int> writers, readers;  ///< operators, in order
    int num_pending = 0;                ///< of these, not done
    int num_uses = 0;   ///< after recording: live operators and demands that are still to come
    bool kept = false;  ///< after recording: has its memory as long as the storage lives
  };

  // -- recording --
  /// The entry of a storage, or -1.
  int find(const at::Tensor& tensor) const;
  int find_or_add(const at::Tensor& tensor, bool has_memory);
  Entry& entry(int index) { return entries_[index]; }
  /// Whether the program would see other values than the entry has now.
  bool pending_write(int entry) const;
  void add(RecordedOperator recorded);
  /// The generator's stream, which begins now if it is new.
  int stream_of(const at::Generator& generator);
  RandomStream& stream(int index) { return *streams_[index]; }
  int num_streams() const { return static_cast<int>(streams_.size()); }
  /// Computes the entry's value as of now, the final one after recording; `to_write`: also runs what reads
  /// the present value.
  void compute(int entry, bool to_write);
  /// Calls `draw` with the generator in the state that it has in ordinary making.
  void draw_now(int stream, const std::function<void()>& draw);
  /// Whether others than operators may write into the memory that the tensor has: it is not of this
  /// log, or somebody has a pointer to it ([Note: raw pointers to memory that is there]).
  bool is_exposed(int entry) const;

  // -- afterwards --
  /// Throws Error if a tensor from outside has other values than when it was recorded.
  void end_recording();
  /// How many references to an entry's storage are not the log's.
  int64_t outside_references(int entry) const;
  /// `demands`: the entries whose values will be asked for, once each time they are named.
  /// `all_draws`: RandomStream::finish() may be called. What nobody needs loses its memory.
  void plan(const std::vector<int>& demands, bool all_draws);
  /// One demand less, or one operator that has needed the entry.
  void release(int entry);
  /// Gives the storage memory for values that come from elsewhere.
  void receive(int entry);
  int num_entries() const { return static_cast<int>(entries_.size()); }

  const MakingCounts& counts() const { return counts_; }

 private:
  struct Wanted;
  void run_in_order(const Wanted& wanted);
  void run(int index);
  void ensure_memory(int entry);
  void call(int index, bool on_scratch);
  void adopt(RecordedOperator& recorded, const torch::jit::Stack& results);
  void draw(int stream, int draw);
  void check_outside(const RecordedOperator& recorded) const;
  void open_to_all(int entry);

  std::deque<RecordedOperator> operators_;
  std::vector<Entry> entries_;
  std::unordered_map<const c10::StorageImpl*, int> index_;
  std::vector<std::unique_ptr<RandomStream>> streams_;
  std::vector<std::vector<int>> operator_of_draw_;  // by stream and draw
  std::vector<int64_t> own_references_;             // by entry, after recording
  bool recording_ = true;
  MakingCounts counts_;
};

/// Returns a hash of a tensor's values on the CPU; 0 for other devices.
uint64_t hash_of(const at::Tensor& tensor);

/// The same argument with each tensor (also in lists) replaced.
c10::IValue map_tensors(const c10::IValue& value,
                        const std::function<at::Tensor(const at::Tensor&)>& replacement);
/// Calls `visit` for each defined tensor. False if the argument may hold tensors elsewhere than in
/// lists.
bool visit_tensors(const c10::IValue& value, const std::function<void(const at::Tensor&)>& visit);

}  // namespace tessera::zero::deferred
