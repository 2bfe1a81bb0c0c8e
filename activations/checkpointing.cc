#include "activations/checkpointing.h"

#include <algorithm>
#include <sstream>

#include "activations/blocks.h"
#include "core/str.h"

namespace tessera::activations {
namespace {

/// Forwards that some ranks have and others have not, until there is no plan.
constexpr int kMaxIncompleteProfiles = 8;

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

/// What ranks must have in common to follow one plan, and this rank's choice.
std::string describe(const Profile& profile, const Plan& plan) {
  size_t digest = 0;
  for (const Profile::Call& call : profile.calls)
    digest = digest * 1'000'003 + std::hash<std::string>()(call.name);
  std::string text = str(digest, " ", profile.results.size(), " ");
  for (const Fate fate : plan.fates) text += static_cast<char>('0' + static_cast<int>(fate));
  return text;
}

}  // namespace

Checkpointing::Checkpointing(zero::ShardedModel& model, const PolicyOptions& options, bool install_hooks)
    : model_(model), subject_(subject_of(model, options)), listener_(subject_) {
  if (install_hooks) install_autograd_hooks();
  for (const int block : subject_->blocks) num_blocks_ = std::max(num_blocks_, block + 1);
}

Plan Checkpointing::choose_plan(const Profile& profile) const {
  const PolicyOptions& options = subject_->recording->options();
  TensorSpill* const spill = subject_->recording->spill();
  if (spill == nullptr) return choose(profile, options.budget_bytes);
  return choose(profile, options.budget_bytes,
                OffloadCost{spill->measure(), options.min_offload_bytes, spill->buffer_bytes()});
}

void Checkpointing::end_forward() {
  ++subject_->pass;
  const std::optional<Profile> profile = subject_->recording->end_pass();
  if (!profile) return;
  const bool no_forward = profile->results.empty();  // on this rank
  if (!no_forward) plan_ = choose_plan(*profile);
  const auto all =
      model_.comm().exchange(no_forward ? "" : describe(*profile, *plan_), "activation_checkpointing");
  const auto without = std::count(all.begin(), all.end(), "");
  const bool some = without > 0 && without < static_cast<int64_t>(all.size());
  if (some) ++incomplete_profiles_;
  if (without > 0 && incomplete_profiles_ < kMaxIncompleteProfiles) {
    plan_.reset();
    return subject_->recording->profile_again();
  }
  const auto operators = [](const std::string& text) { return text.substr(0, text.rfind(' ')); };
  const bool alike = without == 0 && std::all_of(all.begin(), all.end(), [&](const std::string& other) {
                       return operators(other) == operators(all.front());
                     });
  if (!alike) plan_.reset();
  if (plan_) {
    const std::string fates = all.front().substr(all.front().rfind(' ') + 1);
    for (size_t id = 0; id < fates.size(); ++id) plan_->fates[id] = static_cast<Fate>(fates[id] - '0');
  }
  subject_->recording->follow(plan_);
}

}  // namespace tessera::activations
