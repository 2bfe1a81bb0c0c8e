#include "activations/checkpointing.h"

#include <algorithm>
#include <string>
#include <vector>

#include "activations/blocks.h"
#include "core/str.h"

namespace tessera::activations {
namespace {

std::shared_ptr<RecordedModel> recorded_model(zero::ShardedModel& model, const PolicyOptions& options) {
  const zero::Layout& layout = model.layout();
  auto recorded = std::make_shared<RecordedModel>();
  recorded->recording = std::make_shared<Recording>(options);
  recorded->residency = &model.residency();
  recorded->layout = &layout;
  std::vector<NamedShape> shapes;
  for (const zero::ParameterSpec& spec : layout.parameters())
    shapes.push_back({spec.name, str(static_cast<int>(spec.dtype), " ", join(spec.shape, "x"))});
  if (options.kind == PolicyOptions::Kind::kCheap)
    recorded->blocks.assign(shapes.size(), -1);
  else
    recorded->blocks = blocks_of(shapes, options.is_block);
  return recorded;
}

}  // namespace

Checkpointing::Checkpointing(zero::ShardedModel& model, const PolicyOptions& options, bool install_hooks)
    : recorded_(recorded_model(model, options)), recorder_(recorded_) {
  if (install_hooks) install_autograd_hooks();
  for (const int block : recorded_->blocks) num_blocks_ = std::max(num_blocks_, block + 1);
}

void Checkpointing::end_forward() {
  ++recorded_->pass;
  recorded_->recording->end_pass();
}

}  // namespace tessera::activations
