// torch_pch.h and the modules of torch::nn that most models have, for what makes models.
#pragma once

#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include "cmake/torch_pch.h"
