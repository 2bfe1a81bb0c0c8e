#include "python/binding/python_engine.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/formats/model_writer.h"
#include "comm/control/error_message.h"
#include "comm/init/agreement.h"
#include "core/files/disk.h"
#include "engine/checkpoint/checkpoint_types.h"
#include "zero/memory/pause_listening.h"
#include "zero/model/module_state.h"

namespace tessera::python {

void PyEngine::begin_forward() {
  if (scope_) throw Error("the engine's forward was called from inside of its forward");
  scope_.emplace(*this);
}

void PyEngine::end_forward(const std::vector<at::Tensor>& results) {
  TESSERA_CHECK(scope_.has_value());
  try {
    scope_->finish(results);
  } catch (...) {
    scope_.reset();
    throw;
  }
  scope_.reset();
}

void PyEngine::save_model(const std::string& path, const std::vector<SavedTensor>& tensors) {
  sharded_model().broadcast_buffers();
  const Disk disk;
  const zero::Layout& layout = sharded_model().layout();
  std::unique_ptr<checkpoint::ModelWriter> writer;
  at::Tensor room;
  comm::on_all_ranks<CheckpointError>(comm(), "model to save", [&] {
    std::vector<int> units;
    for (const auto& [name, aliases, source, dtype] : tensors)
      if (const auto* parameter = std::get_if<std::string>(&source))
        units.push_back(layout.slice(layout.find(*parameter)).unit);
    room = at::empty({sharded_model().room_for_units(units)}, at::dtype(at::kByte).device(comm().device()));
    if (rank() != 0) return;
    checkpoint::ModelWriterOptions options;
    options.path = path;
    const auto format = checkpoint::model_format_of(path);
    if (!format)
      throw CheckpointError(path, ": no format has this ending; expected .safetensors, .pt or .h5");
    options.format = *format;
    for (const auto& [name, aliases, source, dtype] : tensors) {
      const auto* buffer = std::get_if<at::Tensor>(&source);
      if (buffer) dtype_of(*buffer, name);  // throws for what files cannot hold
      options.tensors.push_back(
          {.name = name,
           .shape = buffer ? buffer->sizes().vec()
                           : layout.parameters().at(layout.find(std::get<std::string>(source))).shape,
           .type = from_torch(dtype),
           .aliases = aliases});
    }
    writer = checkpoint::open_model_writer(disk, std::move(options));
  });
  std::string failure;  // of this rank, which goes on with the collectives
  const auto append = [&](const at::Tensor& value, at::ScalarType dtype) {
    if (!writer || !failure.empty()) return;
    try {
      const zero::PauseListening our_own_operators;
      const at::NoGradGuard no_grad;
      const at::Tensor converted = value.scalar_type() == dtype ? value : value.to(dtype);
      writer->append(bytes_of(zero::bytes_of_elements(converted).cpu()));
    } catch (const std::exception& error) {
      failure = comm::error_message(error);
    }
  };
  for (const auto& [name, aliases, source, dtype] : tensors) {
    if (const auto* buffer = std::get_if<at::Tensor>(&source)) {
      append(*buffer, dtype);
      continue;
    }
    const zero::UnitSlice& slice = layout.slice(layout.find(std::get<std::string>(source)));
    sharded_model().with_full_unit(slice.unit, room, [&, type = dtype](const at::Tensor& full) {
      append(full.narrow(0, slice.offset, slice.numel), type);
    });
  }
  comm::on_all_ranks<CheckpointError>(comm(), "saved model", [&] {
    if (!failure.empty()) throw CheckpointError(failure);
    if (writer) writer->finish();
  });
}

}  // namespace tessera::python
