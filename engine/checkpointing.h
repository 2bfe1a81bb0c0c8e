// Arguments and results of Engine::load_checkpoint. Names follow deepspeed.DeepSpeedEngine's arguments.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/foreign/foreign_checkpoint.h"

namespace tessera {

class HostFolders;

struct SaveOptions {
  bool save_latest = true;                 ///< false: DIRECTORY/latest stays as it is
  bool exclude_frozen_parameters = false;  ///< true: parameters of frozen units are left out
};

struct LoadOptions {
  /// True: any difference between the checkpoint's and the model's parameters and buffers is an error
  /// that names them. False: tensors with the same name and shape are loaded, the others keep their values
  /// and are listed in LoadedCheckpoint::not_loaded.
  bool strict = true;
  bool load_optimizer_states = true;  ///< false: moments and step counts stay as they are
  /// False: the learning-rate schedule goes on where it is, and not where the checkpoint's was.
  bool load_lr_scheduler_states = true;
  /// True: parameters and buffers only; optimizer, counters, loss scale and random numbers stay as they are.
  bool load_module_only = false;
  /// False: a schedule's state, a rate, states of the optimizer, a loss scale or a count of updates that the
  /// checkpoint has and that cannot be taken over are an error that names them. True: they are listed in
  /// LoadedCheckpoint::not_loaded, and this run's own are used.
  bool allow_partial_load = false;
  /// Says, a line each, what the caller cannot take over of a client state (as of
  /// LoadedCheckpoint::client_state), and of what was lost of options and schedule. `schedule_steps`: what
  /// another program's schedule has counted; nullopt: the checkpoint is Tessera's own. Is called on all
  /// ranks, before anything changes; a CheckpointError of it is one of load_checkpoint(), which names the
  /// checkpoint. Unset: the configuration has the options, and a schedule of its own the place of the
  /// source's.
  std::function<std::vector<std::string>(const nlohmann::json& client_state,
                                         std::optional<int64_t> schedule_steps,
                                         const std::vector<checkpoint::LostValue>& lost)>
      not_taken_over = {};
  /// The names of the parameters in the groups of the optimizer, in their order, as the states of another
  /// program's checkpoint may have numbers. Empty: as far as the files tell.
  std::vector<std::vector<std::string>> optimizer_groups = {};
  /// The folders in memory whose HostFolders::find() has found the checkpoint; `directory` is this host's.
  /// Unset: `directory` is one folder that all ranks share.
  HostFolders* folders = nullptr;
  /// The end of the error for a checkpoint that does not fit: what the caller's user can do. Empty: these
  /// options' names.
  std::string advice = {};
  /// The same where the optimizer's states do not fit. Empty: `advice`.
  std::string optimizer_advice = {};
  /// The end of the error for a checkpoint of which something cannot be taken over.
  std::string partial_advice = "allow_partial_load = true goes on without";
};

struct LoadedCheckpoint {
  std::string path;  ///< DIR/TAG
  std::string tag;
  nlohmann::json client_state;  ///< as given to save_checkpoint()
  int saved_world_size = 0;
  /// One line each. Of Tessera's own checkpoints empty after a strict load; of another program's also what
  /// could not be taken over.
  std::vector<std::string> not_loaded;
  /// The program that has saved it, where that is not Tessera. `client_state` is then as of a Python program:
  /// {"client_state": what its caller gave, "tessera.param_groups", "tessera.lr_scheduler", …}.
  std::string saved_by;
  /// Of another program's checkpoint: what its optimizer had other values for than this one, which keeps its
  /// own: "param group 0: weight_decay: it was 0.1, and is 0.01". The same on all ranks.
  std::vector<std::string> other_values;
  int64_t bytes_read = 0;  ///< by this rank; loaded data is read twice: first verified, then copied
};

}  // namespace tessera
