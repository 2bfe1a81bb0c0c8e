// What a training program includes: ranks, configuration, engine, checkpoints, and access to whole
// parameters. Two headers stand beside it: <tessera/engine/client_optimizer.h> (an optimizer of torch::optim,
// which takes long to compile) and <tessera/train/task/task.h> (a task of your own for a program like
// `tessera`).
#pragma once

#include "comm/init/init.h"
#include "core/error.h"
#include "engine/checkpointing.h"
#include "engine/config/parse.h"
#include "engine/engine.h"
#include "zero/gathered_parameters.h"
#include "zero/optimizer/update_rule.h"
