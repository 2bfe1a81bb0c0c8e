// Histograms of a model's parameters and gradients, for the monitors.
#pragma once

#include <string>
#include <vector>

#include "engine/engine.h"
#include "monitor/histogram.h"

namespace tessera::train {

struct NamedHistogram {
  std::string name;
  Histogram histogram;
};

/// Collective. To be called after a step() that updates and before the next backward(). For each parameter
/// returns "parameters/NAME", of its fp32 master weights (of the parameter itself if it is frozen), and,
/// unless it is frozen, "gradients/NAME", of the mean gradient over the global batch, unscaled, before
/// clipping. Equal on all ranks, and equal to the histogram of the whole tensor. Each rank counts its own
/// shards; one all-reduce sums the counts, 12 KB per tensor. Throws CommError.
std::vector<NamedHistogram> histograms_of(Engine& engine);

}  // namespace tessera::train
