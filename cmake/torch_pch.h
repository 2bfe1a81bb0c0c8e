// What most files that touch libtorch need, compiled once. Without torch/nn: every file that
// includes this pays 2 s for what torch::nn's headers leave to be instantiated, and the
// engine sees models as lists of tensors.
#pragma once

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <c10/core/StorageImpl.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>
