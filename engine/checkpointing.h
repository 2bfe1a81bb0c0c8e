// What Engine::save_checkpoint and load_checkpoint take and give. Names follow
// deepspeed.DeepSpeedEngine's arguments.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace tessera {

struct LoadOptions {
  /// True: any difference between the checkpoint's and the model's parameters and buffers is an error
  /// that names them. False: what has the same name and shape is loaded, the rest stays as it is and is
  /// listed in LoadedCheckpoint::not_loaded.
  bool strict = true;
  bool load_optimizer_states = true;  ///< false: moments and step counts start anew
  /// True: parameters and buffers only; optimizer, counters, loss scale and random numbers stay as they are.
  bool load_module_only = false;
  /// Stands at the end of the error of a checkpoint that does not fit: what can be done where the engine
  /// is used. Empty: these options' names.
  std::string advice = {};
};

struct LoadedCheckpoint {
  std::string path;  ///< DIR/TAG
  std::string tag;
  nlohmann::json client_state;  ///< as given to save_checkpoint()
  int saved_world_size = 0;
  std::vector<std::string> not_loaded;  ///< one line each; empty after a strict load
  int64_t bytes_read = 0;  ///< by this rank; what it loads is read twice: verified first, then taken over
};

}  // namespace tessera
