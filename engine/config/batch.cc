#include "engine/config/batch.h"

#include <algorithm>
#include <vector>

#include "core/error.h"
#include "core/str.h"

namespace tessera::config {
namespace {

[[noreturn]] void fail(const std::string& source, const std::string& what) {
  throw ConfigError(source, ": ", what);
}

int64_t product(int64_t a, int64_t b, int64_t world_size, const std::string& source) {
  int64_t ab = 0, all = 0;
  if (__builtin_mul_overflow(a, b, &ab) || __builtin_mul_overflow(ab, world_size, &all))
    fail(source, str(kMicroBatchSize, " x ", kAccumulationSteps, " x world size = ", a, " x ", b, " x ",
                     world_size, " is too large"));
  return all;
}

/// "train_batch_size 16 or 32": the multiples of `unit` on both sides of `value`.
std::string neighbours(const char* name, int64_t value, int64_t unit) {
  int64_t low = value / unit * unit;
  return low == 0 ? str(name, " ", unit) : str(name, " ", low, " or ", low + unit);
}

/// All three are given: they must multiply.
void check_triple(const Batch& batch, int64_t world, const std::string& source) {
  int64_t expected = product(batch.micro, batch.accumulation, world, source);
  if (batch.train == expected) return;
  std::vector<std::string> would_do = {str(kTrainBatchSize, " ", expected)};
  int64_t per_micro = batch.accumulation * world, per_step = batch.micro * world;
  if (batch.train % per_micro == 0) would_do.push_back(str(kMicroBatchSize, " ", batch.train / per_micro));
  if (batch.train % per_step == 0) would_do.push_back(str(kAccumulationSteps, " ", batch.train / per_step));
  fail(source, str(kTrainBatchSize, " ", batch.train, " != ", kMicroBatchSize, " ", batch.micro, " x ",
                   kAccumulationSteps, " ", batch.accumulation, " x world size ", world, " = ", expected,
                   "; ", join(would_do, ", or "), " would do"));
}

/// train / (other x world), which must leave no remainder.
int64_t divide(int64_t train, const char* other_name, int64_t other, int64_t world, const char* wanted,
               const std::string& source) {
  int64_t unit = product(other, 1, world, source);
  if (train % unit != 0)
    fail(source, str(kTrainBatchSize, " ", train, " is no multiple of ", other_name, " ", other,
                     " x world size ", world, " = ", unit, ", so that no ", wanted, " fits; ",
                     neighbours(kTrainBatchSize, train, unit), " would do"));
  return train / unit;
}

}  // namespace

Batch resolve_batch(const GivenBatch& given, int world_size, const std::string& source) {
  int64_t world = world_size;
  if (world < 1) fail(source, str("world size ", world, "; expected at least 1"));
  Batch batch;
  if (given.train && given.micro && given.accumulation) {
    batch = {*given.train, *given.micro, *given.accumulation};
    check_triple(batch, world, source);
  } else if (given.train && given.micro) {
    batch = {*given.train, *given.micro,
             divide(*given.train, kMicroBatchSize, *given.micro, world, kAccumulationSteps, source)};
  } else if (given.train) {
    int64_t steps = given.accumulation.value_or(1);
    batch = {*given.train, divide(*given.train, kAccumulationSteps, steps, world, kMicroBatchSize, source),
             steps};
  } else if (given.micro || given.any_auto) {
    int64_t micro = given.micro.value_or(kAutoMicroBatch), steps = given.accumulation.value_or(1);
    batch = {product(micro, steps, world, source), micro, steps};
  } else {
    fail(source, str("neither ", kTrainBatchSize, " nor ", kMicroBatchSize,
                     " is given; expected at least one of them"));
  }
  return batch;
}

std::optional<Batch> divide_batch(int64_t train, int64_t micro, int world_size) {
  if (world_size < 1 || train % world_size != 0) return std::nullopt;
  const int64_t share = train / world_size;
  Batch batch{train, std::min(micro, share), 1};
  while (share % batch.micro != 0) --batch.micro;
  batch.accumulation = share / batch.micro;
  return batch;
}

}  // namespace tessera::config
