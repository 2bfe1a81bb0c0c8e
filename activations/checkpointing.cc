#include "activations/checkpointing.h"

#include <algorithm>
#include <sstream>

#include "activations/blocks.h"
#include "core/str.h"

namespace tessera::activations {
namespace {

std::shared_ptr<Subject> subject_of(zero::ShardedModel& model, const PolicyOptions& options) {
  const zero::Layout& layout = model.layout();
  auto subject = std::make_shared<Subject>();
  subject->recording = std::make_shared<Recording>(options);
  subject->residency = &model.residency();
  std::vector<NamedShape> shapes;
  for (int i = 0; i < layout.num_parameters(); ++i) {
    const zero::ParameterSpec& spec = layout.parameters()[i];
    shapes.push_back({spec.name, str(static_cast<int>(spec.dtype), " ", join(spec.shape, "x"))});
    subject->slices.push_back(layout.slice(i));
  }
  for (const zero::UnitSpec& unit : layout.units()) subject->parameters.push_back(unit.parameters);
  if (options.kind == PolicyOptions::Kind::kCheap)
    subject->blocks.assign(shapes.size(), -1);
  else
    subject->blocks = blocks_of(shapes, options.is_block);
  return subject;
}

}  // namespace

Checkpointing::Checkpointing(zero::ShardedModel& model, const PolicyOptions& options, bool install_hooks)
    : subject_(subject_of(model, options)), listener_(subject_) {
  if (install_hooks) install_autograd_hooks();
  for (int& block : subject_->blocks) {
    num_blocks_ = std::max(num_blocks_, block + 1);
    if (block >= options.num_blocks) block = -1;
  }
}

void Checkpointing::end_forward() {
  ++subject_->pass;
  subject_->recording->end_pass();
}

}  // namespace tessera::activations
