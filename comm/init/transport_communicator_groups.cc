// The part of TransportCommunicator that makes groups: of all ranks, duplicates, and parts of a group.
#include <algorithm>
#include <exception>
#include <numeric>
#include <utility>

#include "comm/init/self.h"
#include "comm/init/transport_communicator.h"
#include "comm/no_transport.h"
#include "core/check.h"
#include "core/str.h"

namespace tessera::comm {

using std::chrono::milliseconds;

namespace {

/// 0 … num - 1
std::vector<int> first_numbers(int num) {
  std::vector<int> numbers(static_cast<size_t>(num));
  std::iota(numbers.begin(), numbers.end(), 0);
  return numbers;
}

std::vector<int> chosen_from(const std::vector<int>& numbers, const std::vector<int>& places) {
  std::vector<int> chosen;
  for (const int place : places) chosen.push_back(numbers[static_cast<size_t>(place)]);
  return chosen;
}

}  // namespace

TransportCommunicator::TransportCommunicator(std::shared_ptr<GroupContext> context, milliseconds timeout,
                                             const MakeTransport& make, at::Device device)
    : Communicator(device),
      context_(std::move(context)),
      ranks_(first_numbers(context_->size())),
      rank_(context_->rank()),
      store_(context_->store().under("group")),
      recorder_(std::make_shared<FlightRecorder>(rank_, ranks_, store_, context_->store())),
      exchange_(store_.under("exchange"), rank(), size()),
      timeout_(timeout),
      name_("main"),
      exceptions_at_birth_(std::uncaught_exceptions()) {
  open(make);
}

TransportCommunicator::TransportCommunicator(const TransportCommunicator& original,
                                             const std::vector<int>& ranks, std::string name,
                                             GroupStore store, Use use)
    : Communicator(original.device()),
      context_(original.context_),
      ranks_(chosen_from(original.ranks_, ranks)),
      rank_(place_of(ranks, original.rank_)),
      store_(std::move(store)),
      recorder_(std::make_shared<FlightRecorder>(rank_, ranks_, store_, context_->store())),
      exchange_(store_.under("exchange"), rank(), size()),
      timeout_(original.timeout_),
      name_(std::move(name)),
      exceptions_at_birth_(std::uncaught_exceptions()) {
  open([&](const GroupStore& group_store, FailureHook on_failure) -> std::unique_ptr<Transport> {
    if (use == Use::kExchange) return std::make_unique<NoTransport>();
    return size() == original.size() ? original.transport_->duplicate(group_store, std::move(on_failure))
                                     : original.transport_->split(ranks, group_store, std::move(on_failure));
  });
}

std::shared_ptr<Communicator> TransportCommunicator::duplicate(std::string_view name, Use use) {
  exchange("", str("duplicate \"", name, '"'), timeout_);
  ++num_duplicates_;
  try {
    return std::make_shared<TransportCommunicator>(*this, first_numbers(size()),
                                                   str(name_, "/", num_duplicates_, " ", name),
                                                   store_.under(str("duplicate/", num_duplicates_)), use);
  } catch (const CommError& error) {
    fail_with(error.what());
  }
}

std::shared_ptr<Communicator> TransportCommunicator::split(const std::vector<int>& ranks,
                                                           std::string_view name) {
  TESSERA_CHECK(std::is_sorted(ranks.begin(), ranks.end()) && !ranks.empty());
  const std::vector<std::vector<int>> given = exchange(ranks, str("split \"", name, '"'));
  for (const int other : ranks)
    if (given[static_cast<size_t>(other)] != ranks)
      fail_with(str("split \"", name, "\": rank ", global_rank(rank_), " counts rank ", global_rank(other),
                    " in its group, which it is not in"));
  ++num_duplicates_;
  if (ranks.size() == 1)
    return std::make_shared<SelfCommunicator>(SimulatedGroup{.timeout = timeout_, .device = device()});
  try {
    const std::string place = str(num_duplicates_, "/", ranks[0]);
    return std::make_shared<TransportCommunicator>(*this, ranks, str(name_, "/", place, " ", name),
                                                   store_.under(str("split/", place)), Use::kCollectives);
  } catch (const CommError& error) {
    fail_with(error.what());
  }
}

}  // namespace tessera::comm
