#include "zero/deferred/operator_log.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/ScopeExit.h>

#include <xxhash.h>

#include <algorithm>
#include <limits>
#include <set>

#include "core/check.h"
#include "core/error.h"
#include "zero/deferred/closed_storage.h"

namespace tessera::zero::deferred {
namespace {

constexpr int kEnd = std::numeric_limits<int>::max();

}  // namespace

c10::IValue map_tensors(const c10::IValue& value,
                        const std::function<at::Tensor(const at::Tensor&)>& replacement) {
  if (value.isTensor()) return value.toTensor().defined() ? replacement(value.toTensor()) : value;
  if (!value.isList()) return value;
  const c10::List<c10::IValue> list = value.toList();
  c10::impl::GenericList copy(list.elementType());
  for (const c10::IValue& element : list) copy.push_back(map_tensors(element, replacement));
  return copy;
}

bool visit_tensors(const c10::IValue& value, const std::function<void(const at::Tensor&)>& visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) visit(value.toTensor());
    return true;
  }
  if (value.isList()) {
    bool plain = true;
    for (const c10::IValue& element : value.toListRef()) plain = visit_tensors(element, visit) && plain;
    return plain;
  }
  return !value.isTuple() && !value.isGenericDict() && !value.isObject() && !value.isPyObject() &&
         !value.isCustomClass();
}

uint64_t hash_of(const at::Tensor& tensor) {
  if (!tensor.is_cpu()) return 0;
  const c10::impl::ExcludeDispatchKeyGuard at_once(c10::DispatchKey::DeferredInit);
  const at::NoGradGuard no_grad;
  const at::Tensor values = tensor.detach().contiguous();
  return XXH3_64bits(values.const_data_ptr(), values.nbytes());
}

std::set<int> RecordedOperator::touched() const {
  std::set<int> entries(reads.begin(), reads.end());
  entries.insert(overwrites.begin(), overwrites.end());
  return entries;
}

// ------------------------------------------------------------------------------------------ recording

bool OperatorLog::pending_write(int entry) const {
  return !entries_[entry].has_memory ||
         std::ranges::any_of(entries_[entry].writers, [&](int writer) { return !operators_[writer].done; });
}

int OperatorLog::find(const at::Tensor& tensor) const {
  if (!tensor.has_storage()) return -1;
  const auto found = index_.find(tensor.storage().unsafeGetStorageImpl());
  return found == index_.end() ? -1 : found->second;
}

int OperatorLog::find_or_add(const at::Tensor& tensor, bool has_memory) {
  const auto [place, is_new] =
      index_.emplace(tensor.storage().unsafeGetStorageImpl(), static_cast<int>(entries_.size()));
  if (is_new) {
    Entry& added = entries_.emplace_back();
    added.storage = tensor.storage();
    added.has_memory = has_memory;
    added.made_here = !has_memory;
  }
  return place->second;
}

void OperatorLog::add(RecordedOperator recorded) {
  const int index = static_cast<int>(operators_.size());
  for (const int entry : recorded.reads) entries_[entry].readers.push_back(index);
  for (const std::vector<int>* written : {&recorded.overwrites, &recorded.changes})
    for (const int entry : *written) entries_[entry].writers.push_back(index);
  for (const int entry : recorded.overwrites) {
    // Nothing will read what is there now.
    Entry& whole = entries_[entry];
    if (whole.has_memory && whole.num_pending == 0 && whole.made_here) {
      drop_memory(whole.storage);
      whole.has_memory = false;
    }
  }
  for (const int entry : recorded.touched()) {
    Entry& waiting = entries_[entry];
    ++waiting.num_pending;
    // What others made is only read: they may go on reading it too.
    if (!waiting.writers.empty() || !waiting.has_memory) close(waiting.storage);
  }
  if (recorded.stream >= 0) {
    recorded.draw = streams_[recorded.stream]->record();
    operator_of_draw_[recorded.stream].push_back(index);
  }
  ++counts_.num_recorded;
  const int stream = recorded.stream;
  operators_.push_back(std::move(recorded));
  if (stream >= 0 && streams_[stream]->settles_each_draw()) streams_[stream]->settle();
}

int OperatorLog::stream_of(const at::Generator& generator) {
  for (int index = 0; index < num_streams(); ++index)
    if (streams_[index]->generator() == generator) return index;
  const int stream = num_streams();
  streams_.push_back(
      std::make_unique<RandomStream>(generator, [this, stream](int number) { draw(stream, number); }));
  operator_of_draw_.emplace_back();
  return stream;
}

void OperatorLog::draw_now(int stream, const std::function<void()>& body) {
  ++counts_.num_drawn;
  streams_[stream]->settle();
  body();
}

bool OperatorLog::is_exposed(int entry) const {
  const Entry& one = entries_[entry];
  if (!one.made_here) return true;
  return one.has_memory && one.storage.nbytes() > 0 && !is_closed(one.storage) && !is_watched(one.storage);
}

// ------------------------------------------------------------------------------------- what is needed

/// The operators that are needed for some values: see operator_log.h.
struct OperatorLog::Wanted {
  Wanted(const OperatorLog& log, bool readers_first) : log(log), readers_first(readers_first) {}

  void add(int index) {
    mark(index);
    follow();
  }
  void add_value(int entry, int before) {
    add_writers(entry, before);
    follow();
  }
  /// What reads the entry's present value.
  void add_all_readers(int entry) {
    for (const int reader : log.entries_[entry].readers)
      if (log.operators_[reader].live) add(reader);
  }

  const OperatorLog& log;
  const bool readers_first;
  std::set<int> marked;

 private:
  void mark(int index) {
    if (!log.operators_[index].done && marked.insert(index).second) open.push_back(index);
  }
  void follow() {
    while (!open.empty()) {
      const int next = open.back();
      open.pop_back();
      const RecordedOperator& recorded = log.operators_[next];
      for (const int entry : recorded.reads) add_writers(entry, next);
      if (!readers_first) continue;
      for (const int entry : recorded.overwrites) add_readers(entry, next);
      for (const int entry : recorded.changes) add_readers(entry, next);
    }
  }
  void add_writers(int entry, int before) {
    const std::vector<int>& writers = log.entries_[entry].writers;
    auto writer = std::lower_bound(writers.begin(), writers.end(), before);
    while (writer != writers.begin()) {
      const RecordedOperator& recorded = log.operators_[*--writer];
      if (recorded.done) return;
      mark(*writer);
      if (std::find(recorded.overwrites.begin(), recorded.overwrites.end(), entry) !=
          recorded.overwrites.end())
        return;
    }
  }
  void add_readers(int entry, int before) {
    for (const int reader : log.entries_[entry].readers) {
      if (reader >= before) return;
      if (log.operators_[reader].live) mark(reader);
    }
  }
  std::vector<int> open;
};

void OperatorLog::run_in_order(const Wanted& wanted) {
  for (const int index : wanted.marked)
    if (!operators_[index].done) run(index);
}

void OperatorLog::compute(int entry, bool to_write) {
  Wanted wanted(*this, /*readers_first=*/true);
  wanted.add_value(entry, kEnd);
  if (to_write) wanted.add_all_readers(entry);
  run_in_order(wanted);
  ensure_memory(entry);
  if (entries_[entry].num_pending == 0) open_to_all(entry);
}

/// Raw pointers work from now on. While recording, it is seen whether somebody asks for one.
void OperatorLog::open_to_all(int entry) {
  const c10::Storage& storage = entries_[entry].storage;
  if (!is_closed(storage)) return;
  open(storage);
  if (recording_ && entries_[entry].made_here) watch(storage);
}

void OperatorLog::ensure_memory(int entry) {
  if (entries_[entry].has_memory) return;
  give_memory(entries_[entry].storage);
  entries_[entry].has_memory = true;
}

// -------------------------------------------------------------------------------------------- running

void OperatorLog::check_outside(const RecordedOperator& recorded) const {
  for (const RecordedOperator::Outside& one : recorded.outside)
    if ((one.version && one.tensor._version() != *one.version) ||
        (recording_ && hash_of(one.tensor) != one.hash))
      throw Error("a tensor from outside that the model is made of was changed by ",
                  recorded.handle.operator_name().name,
                  "'s caller before its values were used: leave it as it is until initialize() returns");
}

void OperatorLog::run(int index) {
  RecordedOperator& recorded = operators_[index];
  check_outside(recorded);
  std::set<int> given_by_outputs;
  for (const at::Tensor& output : recorded.outputs)
    if (output.defined()) given_by_outputs.insert(find(output));
  for (const std::vector<int>* written : {&recorded.overwrites, &recorded.changes})
    for (const int entry : *written)
      if (!given_by_outputs.contains(entry)) ensure_memory(entry);
  if (recorded.stream < 0) {
    call(index, /*on_scratch=*/false);
  } else {
    ++counts_.num_drawn;
    const int stream = recorded.stream;
    streams_[stream]->at_draw(recorded.draw, [&] { call(index, /*on_scratch=*/false); });
  }
}

/// Makes a draw that was passed over.
void OperatorLog::draw(int stream, int number) {
  const int index = operator_of_draw_[stream][number];
  if (operators_[index].reads_to_draw) {
    Wanted wanted(*this, /*readers_first=*/true);
    wanted.add(index);
    return run_in_order(wanted);
  }
  ++counts_.num_drawn;
  call(index, /*on_scratch=*/true);
}

void OperatorLog::call(int index, bool on_scratch) {
  RecordedOperator& recorded = operators_[index];
  const at::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard at_once(c10::DispatchKey::DeferredInit);
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto set_dtype = [](caffe2::TypeMeta dtype) {
    if (at::get_default_dtype() != dtype) at::set_default_dtype(dtype);
  };
  const auto restore_dtype =
      c10::make_scope_exit([&, before = at::get_default_dtype()] { set_dtype(before); });
  set_dtype(at::scalarTypeToTypeMeta(recorded.default_dtype));
  torch::jit::Stack stack = recorded.arguments;
  std::vector<Opened> opened;
  if (on_scratch) {
    for (const int argument : recorded.written_arguments)
      stack[argument] = map_tensors(stack[argument], [](const at::Tensor& tensor) {
        return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options());
      });
  } else {
    for (const int entry : recorded.touched()) opened.emplace_back(entries_[entry].storage);
  }
  if (recorded.generator_argument >= 0) {
    stack[recorded.generator_argument] = streams_[recorded.stream]->own();
    recorded.handle.callBoxed(&stack);
  } else if (recorded.stream >= 0) {
    streams_[recorded.stream]->lend([&] { recorded.handle.callBoxed(&stack); });
  } else {
    recorded.handle.callBoxed(&stack);
  }
  if (on_scratch) return;
  adopt(recorded, stack);
  ++counts_.num_run;
  recorded.done = true;
  recorded.arguments.clear();
  opened.clear();
  for (const int entry : recorded.touched()) {
    if (--entries_[entry].num_pending == 0 && entries_[entry].has_memory) open_to_all(entry);
    if (!recording_ && recorded.live) release(entry);
  }
}

/// The results become the memory of the tensors that stand for them.
void OperatorLog::adopt(RecordedOperator& recorded, const torch::jit::Stack& results) {
  for (size_t i = 0; i < recorded.outputs.size(); ++i) {
    const at::Tensor& output = recorded.outputs[i];
    if (!output.defined()) continue;
    const at::Tensor& result = results[i].toTensor();
    TESSERA_CHECK(result.sizes() == output.sizes() && result.scalar_type() == output.scalar_type(),
                  recorded.handle.operator_name().name, " gives another shape on meta tensors");
    Entry& target = entries_[find(output)];
    const bool alone = result.storage().use_count() == 1 && result.use_count() == 1 &&
                       result.storage_offset() == 0 && result.strides() == output.strides() &&
                       result.storage().nbytes() >= target.storage.nbytes() && owns_memory(result.storage());
    if (alone) {
      take_memory(target.storage, result.storage());
    } else {
      give_memory(target.storage);
      const Opened opened(target.storage);
      at::Tensor(output).copy_(result);
    }
    target.has_memory = true;
  }
}

// ------------------------------------------------------------------------------------------ afterwards

void OperatorLog::end_recording() {
  for (const RecordedOperator& recorded : operators_)
    if (!recorded.done) check_outside(recorded);
  for (const auto& stream : streams_) stream->end_recording();
  recording_ = false;
  for (const Entry& entry : entries_) unwatch(entry.storage);
  own_references_.assign(entries_.size(), 1);
  const auto count = [&](const at::Tensor& tensor) {
    if (const int entry = find(tensor); entry >= 0) ++own_references_[entry];
  };
  for (const RecordedOperator& recorded : operators_) {
    for (const c10::IValue& argument : recorded.arguments) visit_tensors(argument, count);
    for (const at::Tensor& output : recorded.outputs)
      if (output.defined()) count(output);
  }
}

int64_t OperatorLog::outside_references(int entry) const {
  return static_cast<int64_t>(entries_[entry].storage.use_count()) - own_references_[entry];
}

void OperatorLog::plan(const std::vector<int>& demands, bool all_draws) {
  Wanted wanted(*this, /*readers_first=*/false);
  for (const int entry : demands) {
    wanted.add_value(entry, kEnd);
    ++entries_[entry].num_uses;
  }
  const bool draws = all_draws || std::any_of(wanted.marked.begin(), wanted.marked.end(),
                                              [&](int index) { return operators_[index].stream >= 0; });
  for (size_t index = 0; draws && index < operators_.size(); ++index)
    if (operators_[index].reads_to_draw) wanted.add(static_cast<int>(index));
  for (Entry& entry : entries_) entry.num_pending = 0;  // only live ones are run from now on
  for (size_t index = 0; index < operators_.size(); ++index) {
    RecordedOperator& recorded = operators_[index];
    recorded.live = wanted.marked.contains(static_cast<int>(index));
    if (!recorded.live && recorded.stream < 0) recorded.arguments.clear();  // which may be copies
    if (!recorded.live) continue;
    for (const int entry : recorded.touched()) {
      ++entries_[entry].num_uses;
      ++entries_[entry].num_pending;
    }
  }
  for (int stream = 0; stream < num_streams(); ++stream)
    streams_[stream]->wanted = [this, stream](int number) {
      const int index = operator_of_draw_[stream][number];
      return operators_[index].live && !operators_[index].done;
    };
  for (Entry& entry : entries_)
    if (entry.num_pending == 0 && entry.has_memory) open(entry.storage);
  for (Entry& entry : entries_)
    if (entry.num_uses == 0 && !entry.kept && entry.has_memory && entry.made_here) {
      drop_memory(entry.storage);
      entry.has_memory = false;
    }
}

void OperatorLog::release(int entry) {
  Entry& used = entries_[entry];
  if (--used.num_uses > 0 || used.kept || !used.has_memory || !used.made_here) return;
  drop_memory(used.storage);
  used.has_memory = false;
}

void OperatorLog::receive(int entry) {
  if (entries_[entry].has_memory) return;
  ensure_memory(entry);
  open(entries_[entry].storage);
}

}  // namespace tessera::zero::deferred
