// An optimizer of torch::optim that has no formula here runs as it is, on whole parameters: [Note: whole
// parameters] in zero/optimizer/whole_optimizer.h.
//
// Between steps its state() has what this rank owns. What a checkpoint keeps is what the optimizer's save()
// writes, as values without code: no file is given to libtorch's reader of archives, which can run code; it
// reads what was made here of the values.
#pragma once

#include <torch/optim/optimizer.h>

#include <memory>
#include <vector>

#include "zero/model/model_view.h"
#include "zero/optimizer/whole_optimizer.h"

namespace tessera {

/// `parameters`: the model's, which has those of the optimizer's groups. `on_one_rank`: rank 0 owns all.
/// `group_of`: by group of the optimizer, the param group of the engine, whose rate it gets; -1: none.
std::shared_ptr<zero::WholeOptimizer> run_as_it_is(std::shared_ptr<torch::optim::Optimizer> optimizer,
                                                   const std::vector<zero::NamedTensor>& parameters,
                                                   bool on_one_rank, std::vector<int> group_of);

}  // namespace tessera
