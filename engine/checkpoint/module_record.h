// ModuleRecord: what a checkpoint says of a module's state besides tensors ([Note: a module's state is read
// when it is used] in zero/model/module_state.h).
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "zero/model/module_state.h"
#include "zero/sharded_model.h"

namespace tessera {

/// A buffer that is not as initialize() found it.
struct BufferChange {
  std::optional<zero::BufferKind> first;  ///< what initialize() found; unset: no buffer of that name
  bool is_none = false;                   ///< it is registered as None now
};

struct ModuleRecord {
  bool is_known = false;  ///< false: of a checkpoint from before there were records
  /// Has the changes by buffer's name; a buffer that is not in the checkpoint is gone, or None.
  std::map<std::string, BufferChange> changed;
  std::vector<std::string> extra_state;  ///< names of what get_extra_state() gave
};

/// Returns the record of the module as it is now.
ModuleRecord record_of(const zero::ShardedModel& model);
nlohmann::json to_json(const ModuleRecord& record);
/// `state`: the manifest's. Throws CheckpointError naming `source`, key, what was found and expected.
ModuleRecord parse_module_record(const nlohmann::json& state, const std::string& source);

}  // namespace tessera
