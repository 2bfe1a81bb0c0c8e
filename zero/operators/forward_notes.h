// ForwardNotes: what was noted of the operators of a forward, for their nodes of backward. Autograd's
// sequence numbers tell which node is whose: of several operators that have the same number the last one
// makes the node.
#pragma once

#include <ATen/record_function.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

namespace tessera::zero {

/// Thread-safe.
template <class Note>
class ForwardNotes {
 public:
  /// Of more than `most` the oldest is forgotten: a forward may never have a backward.
  explicit ForwardNotes(size_t most) : most_(most) {}

  /// `change` is called with what is noted of the node that this operator is about to make: a Note() at
  /// first.
  template <class Change>
  void note(const at::RecordFunction& forward, const Change& change) {
    const std::lock_guard lock(mutex_);
    const Key key{at::RecordFunction::currentThreadId(), forward.seqNr()};
    const auto [entry, is_new] = notes_.try_emplace(key);
    if (is_new) by_age_.emplace(entry->second.number = next_number_++, key);
    change(entry->second.note);
    if (notes_.size() > most_) forget(notes_.find(by_age_.begin()->second));
  }
  std::optional<Note> of(const at::RecordFunction& backward) const {
    const std::lock_guard lock(mutex_);
    const auto found = notes_.find({backward.forwardThreadId(), backward.seqNr()});
    return found == notes_.end() ? std::nullopt : std::optional(found->second.note);
  }
  void forget(const at::RecordFunction& backward) {
    const std::lock_guard lock(mutex_);
    const auto found = notes_.find({backward.forwardThreadId(), backward.seqNr()});
    if (found != notes_.end()) forget(found);
  }
  template <class Predicate>
  void forget_if(const Predicate& predicate) {
    const std::lock_guard lock(mutex_);
    for (auto entry = notes_.begin(); entry != notes_.end();)
      entry = predicate(entry->second.note) ? forget(entry) : std::next(entry);
  }

 private:
  using Key = std::pair<uint64_t, int64_t>;  // thread of the forward, sequence number
  struct Entry {
    uint64_t number = 0;
    Note note = {};
  };
  using Notes = std::map<Key, Entry>;

  typename Notes::iterator forget(typename Notes::iterator entry) {
    by_age_.erase(entry->second.number);
    return notes_.erase(entry);
  }

  const size_t most_;
  mutable std::mutex mutex_;  // guards what follows
  Notes notes_;
  std::map<uint64_t, Key> by_age_;  // by Entry::number
  uint64_t next_number_ = 0;
};

}  // namespace tessera::zero
