#include "train/report/histograms.h"
#include "zero/memory/pause_listening.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <span>

namespace tessera::train {
namespace {

/// This rank's counts for one tensor.
struct Counted {
  std::string name;
  HistogramCounts counts;
};

/// Counts the part of a parameter that this rank owns. `owned_values`: of the part that it owns of the
/// parameter's unit, or of its gradients; they are multiplied by `scale` first.
HistogramCounts count(const zero::Layout& layout, int parameter, int part, const at::Tensor& owned_values,
                      double scale) {
  const zero::Range mine = layout.shard_part(parameter, part);
  HistogramCounts counts;
  if (mine.numel() == 0) return counts;
  const int64_t begin = mine.begin - layout.shard(layout.slice(parameter).unit, part).begin;
  at::Tensor values = owned_values.narrow(0, begin, mine.numel()).to(at::kCPU, at::kFloat);
  if (scale != 1) values = values * scale;
  counts.add({values.const_data_ptr<float>(), static_cast<size_t>(values.numel())});
  return counts;
}

std::vector<Counted> count_shards(Engine& engine) {
  zero::ShardedModel& model = engine.sharded_model();
  const zero::Layout& layout = model.layout();
  std::vector<Counted> all;
  for (int parameter = 0; parameter < static_cast<int>(layout.parameters().size()); ++parameter) {
    const int unit = layout.slice(parameter).unit;
    const std::string& name = layout.parameters()[static_cast<size_t>(parameter)].name;
    all.push_back({"parameters/" + name, count(layout, parameter, model.mesh().owned_part(),
                                               model.unit(unit).owned_state().weights, 1)});
    if (layout.units()[static_cast<size_t>(unit)].trainable)
      all.push_back({"gradients/" + name,
                     count(layout, parameter, model.mesh().owned_part(),
                           model.gradients().owned(model.unit(unit)), 1 / engine.gradient_scale())});
  }
  return all;
}

/// One tensor's numbers in the buffer that is all-reduced. num, sum, sum of squares and the counts are sums.
/// The least and the greatest value have one element per rank, which the other ranks leave 0.
class Place {
 public:
  Place(double* numbers, int world_size) : numbers_(numbers), world_size_(world_size) {}
  static int64_t size(int world_size) {
    return kNumSums + int64_t{2} * world_size + static_cast<int64_t>(HistogramCounts().counts.size());
  }

  void write(const HistogramCounts& mine, int rank) {
    numbers_[0] = mine.num;
    numbers_[1] = mine.sum;
    numbers_[2] = mine.sum_squares;
    least()[static_cast<size_t>(rank)] = mine.min;
    greatest()[static_cast<size_t>(rank)] = mine.max;
    std::copy(mine.counts.begin(), mine.counts.end(), greatest().data() + world_size_);
  }
  HistogramCounts read() {
    HistogramCounts all;
    all.num = numbers_[0];
    all.sum = numbers_[1];
    all.sum_squares = numbers_[2];
    all.min = *std::min_element(least().begin(), least().end());
    all.max = *std::max_element(greatest().begin(), greatest().end());
    std::copy_n(greatest().data() + world_size_, all.counts.size(), all.counts.begin());
    return all;
  }

 private:
  static constexpr int64_t kNumSums = 3;
  std::span<double> least() { return {numbers_ + kNumSums, static_cast<size_t>(world_size_)}; }
  std::span<double> greatest() {
    return {numbers_ + kNumSums + world_size_, static_cast<size_t>(world_size_)};
  }

  double* numbers_;
  int world_size_;
};

}  // namespace

std::vector<NamedHistogram> histograms_of(Engine& engine) {
  const zero::PauseListening our_own_operators;
  const at::NoGradGuard no_grad;
  const std::vector<Counted> mine = count_shards(engine);
  const int64_t size = Place::size(engine.world_size());
  at::Tensor numbers = at::zeros({static_cast<int64_t>(mine.size()) * size}, at::kDouble);
  const auto place = [&](size_t i) {
    return Place(numbers.mutable_data_ptr<double>() + static_cast<int64_t>(i) * size, engine.world_size());
  };
  for (size_t i = 0; i < mine.size(); ++i) place(i).write(mine[i].counts, engine.rank());

  at::Tensor summed = numbers.to(engine.device());
  engine.comm().all_reduce(summed, "histograms")->wait();
  numbers = summed.cpu();
  std::vector<NamedHistogram> histograms;
  for (size_t i = 0; i < mine.size(); ++i) histograms.push_back({mine[i].name, place(i).read().histogram()});
  return histograms;
}

}  // namespace tessera::train
