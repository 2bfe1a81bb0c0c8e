// The pickle in a file of torch.save: name, shape and storage of each tensor.
#pragma once

#include <string>
#include <vector>

#include "checkpoint/formats/model_writer.h"

namespace tessera::checkpoint {

/// Data.pkl of an OrderedDict {name: tensor}: pickle protocol 2, of the few opcodes and globals
/// that torch.load(weights_only=True) accepts. Tensor `i` fills storage "i" (entry data/i of the
/// archive), on the CPU; tied names are tensors of the same storage. Source: what torch 2.11 writes,
/// and torch/_weights_only_unpickler.py.
std::string state_dict_pickle(const std::vector<ModelTensor>& tensors);

}  // namespace tessera::checkpoint
