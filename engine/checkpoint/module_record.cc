#include "engine/checkpoint/module_record.h"

#include "checkpoint/checkpoint_error.h"
#include "comm/torch_dtype.h"
#include "core/json/json_field.h"
#include "core/str.h"

namespace tessera {

using nlohmann::json;

namespace {

constexpr const char* kModule = "module";

json kind_to_json(const std::optional<zero::BufferKind>& kind) {
  if (!kind) return nullptr;
  const auto dtype = find_dtype(kind->dtype);
  return {{"dtype", dtype ? std::string(name_of(*dtype)) : "other"}, {"shape", kind->shape}};
}

std::optional<zero::BufferKind> parse_kind(const JsonField& field) {
  if (field.value().is_null()) return std::nullopt;
  field.expect_keys({"dtype", "shape"});
  zero::BufferKind kind{.dtype = at::ScalarType::Undefined, .shape = {}};
  if (const auto dtype = dtype_named(field["dtype"].text())) kind.dtype = to_torch(*dtype);
  field["shape"].for_each([&](const JsonField& size) { kind.shape.push_back(size.integer(0)); });
  return kind;
}

}  // namespace

ModuleRecord record_of(const zero::ShardedModel& model) {
  ModuleRecord record{.is_known = true, .changed = {}, .extra_state = {}};
  std::map<std::string, BufferChange> gone;  // unless the module has it
  for (const auto& [name, kind] : model.first_kinds()) gone[name] = {.first = kind};
  if (const zero::ModuleState* state = model.module_state()) {
    for (const zero::NamedBuffer& buffer : state->buffers()) {
      const std::optional<zero::BufferKind> first = model.first_kind(buffer.name);
      gone.erase(buffer.name);
      if (!buffer.persistent) continue;
      const std::optional<zero::BufferKind> now =
          buffer.tensor.defined() ? std::optional(zero::kind_of(buffer.tensor)) : std::nullopt;
      if (now != first) record.changed[buffer.name] = {.first = first, .is_none = !now};
    }
    record.extra_state = state->extra_state_names();
  }
  record.changed.merge(gone);
  return record;
}

json to_json(const ModuleRecord& record) {
  json changed = json::object();
  for (const auto& [name, change] : record.changed)
    changed[name] = {{"first", kind_to_json(change.first)}, {"is_none", change.is_none}};
  return {{"changed_buffers", changed}, {"extra_state", record.extra_state}};
}

ModuleRecord parse_module_record(const json& state, const std::string& source) {
  ModuleRecord record;
  if (!state.contains(kModule)) return record;
  const std::string where = str(source, ": state");
  const JsonField root = JsonField::of<CheckpointError>(state, where);
  const JsonField field = root[kModule];
  record.is_known = true;
  const JsonField changed = field["changed_buffers"];
  if (!changed.value().is_object()) changed.fail("an object");
  for (const auto& [name, unused] : changed.value().items()) {
    const JsonField change = changed[name];
    record.changed[name] = {.first = parse_kind(change["first"]), .is_none = change["is_none"].boolean()};
  }
  field["extra_state"].for_each([&](const JsonField& name) { record.extra_state.push_back(name.text()); });
  return record;
}

}  // namespace tessera
