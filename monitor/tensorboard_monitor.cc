#include "monitor/tensorboard_monitor.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/json/json_text.h"
#include "core/str.h"

namespace tessera {
namespace {

// Field numbers of tensorboard/compat/proto: event.proto, summary.proto, histogram.proto, tensor.proto.
constexpr int kEventSummary = 5, kEventSessionLog = 7;
constexpr int kSessionStatus = 1, kSessionStart = 1;
constexpr int kSummaryValue = 1;
namespace value {
constexpr int kTag = 1, kSimpleValue = 2, kImage = 4, kHistogram = 5, kTensor = 8, kMetadata = 9;
}

/// A Summary with one more value.
void add(ProtoMessage& summary, const std::string& tag, ProtoMessage content) {
  summary.message(kSummaryValue, content.bytes(value::kTag, tag));
}

ProtoMessage histogram_proto(const Histogram& histogram) {
  return ProtoMessage()
      .real64(1, histogram.min)
      .real64(2, histogram.max)
      .real64(3, histogram.num)
      .real64(4, histogram.sum)
      .real64(5, histogram.sum_squares)
      .real64s(6, histogram.bucket_limit)
      .real64s(7, histogram.bucket);
}

ProtoMessage image_proto(const PngView& png) {
  return ProtoMessage()
      .integer(1, png.height)
      .integer(2, png.width)
      .integer(3, png.channels)
      .bytes(4, png.bytes);
}

/// TensorBoard shows text as Markdown: this is what shows it as it is.
std::string fenced(const std::string& language, const std::string& text) {
  size_t longest = 2, length = 0;
  for (const char c : text) longest = std::max(longest, length = c == '`' ? length + 1 : 0);
  const std::string fence(longest + 1, '`');
  return str(fence, language, "\n", text, "\n", fence);
}

/// A tensor of one string, and the metadata that has it shown by TensorBoard's text plugin.
ProtoMessage text_value(const std::string& text) {
  constexpr int kTypeString = 7;
  const ProtoMessage shape = ProtoMessage().message(2, ProtoMessage().integer(1, 1));
  const ProtoMessage plugin = ProtoMessage().bytes(1, "text");
  return ProtoMessage()
      .message(value::kTensor, ProtoMessage().integer(1, kTypeString).message(2, shape).bytes(8, text))
      .message(value::kMetadata, ProtoMessage().message(1, plugin));
}

}  // namespace

TensorboardMonitor::TensorboardMonitor(const std::filesystem::path& folder,
                                       std::optional<int64_t> resumed_after)
    : first_step_(resumed_after ? *resumed_after + 1 : 0), file_(folder) {
  file_.write(first_step_, kEventSessionLog, ProtoMessage().integer(kSessionStatus, kSessionStart));
}

void TensorboardMonitor::scalars(int64_t step, const Scalars& scalars) {
  ProtoMessage summary;
  for (const auto& [name, number] : scalars)
    add(summary, name, ProtoMessage().real32(value::kSimpleValue, static_cast<float>(number)));
  file_.write(step, kEventSummary, summary);
}

void TensorboardMonitor::histogram(const std::string& name, int64_t step, const Histogram& histogram) {
  ProtoMessage summary;
  add(summary, name, ProtoMessage().message(value::kHistogram, histogram_proto(histogram)));
  file_.write(step, kEventSummary, summary);
}

void TensorboardMonitor::image(const std::string& name, int64_t step, const PngView& png) {
  ProtoMessage summary;
  add(summary, name, ProtoMessage().message(value::kImage, image_proto(png)));
  file_.write(step, kEventSummary, summary);
}

// Named as a SummaryWriter's add_text does.
void TensorboardMonitor::text(const std::string& name, int64_t step, const std::string& text) {
  ProtoMessage summary;
  add(summary, name + "/text_summary", text_value(fenced("", text)));
  file_.write(step, kEventSummary, summary);
}

void TensorboardMonitor::params(const nlohmann::ordered_json& params) {
  using nlohmann::ordered_json;
  ProtoMessage summary;
  add(summary, "params/text_summary", text_value(fenced("json", json_text(params, 2))));
  file_.write(first_step_, kEventSummary, summary);
}

}  // namespace tessera
