// Histograms of a model's parameters and gradients, for monitors.
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

/// Collective. After a step() that updates, and before the next backward(): for each parameter
/// "parameters/NAME", its fp32 master weights (the parameter itself where it is frozen), and, unless it is
/// frozen, "gradients/NAME": the mean over the global batch, unscaled, before clipping. Equal on all ranks,
/// and to the histogram of the whole tensor. Each rank counts its own shards; what travels is the counts, 12
/// KB a tensor, in one all-reduce. Throws CommError.
std::vector<NamedHistogram> histograms_of(Engine& engine);

}  // namespace tessera::train
