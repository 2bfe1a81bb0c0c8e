#include "checkpoint/consolidate/archive_sequence.h"

#include <cstring>

#include "core/check.h"

namespace tessera::checkpoint {

size_t PlannedArchive::stream(int64_t bytes) {
  storages.push_back({.bytes = bytes, .content = {}});
  return storages.size() - 1;
}

size_t PlannedArchive::place(std::string content) {
  const auto bytes = static_cast<int64_t>(content.size());
  storages.push_back({.bytes = bytes, .content = std::move(content)});
  return storages.size() - 1;
}

void ArchiveSequence::complete() {
  for (size_t i = 0; i < plan_.storages.size(); ++i)
    if (const auto& content = plan_.storages[i].content)
      archive_->write(*file_, base_, i, 0, std::as_bytes(std::span(*content)));
  archive_->finish(*file_, base_);
  archive_.reset();
  close();
}

bool ArchiveSequence::advance() {
  if (archive_) complete();
  std::optional<PlannedArchive> next_plan = next();
  if (!next_plan) return false;
  first_tensor_ += streamed_.size();
  plan_ = std::move(*next_plan);
  streamed_.clear();
  std::vector<int64_t> sizes;
  for (size_t i = 0; i < plan_.storages.size(); ++i) {
    sizes.push_back(plan_.storages[i].bytes);
    if (!plan_.storages[i].content) streamed_.push_back(i);
  }
  archive_.emplace(std::move(plan_.pickle), sizes);
  std::tie(file_, base_) = open(archive_->bytes());
  return true;
}

void ArchiveSequence::write(size_t tensor, std::span<const std::byte> data) {
  while (!archive_ || tensor >= first_tensor_ + streamed_.size())
    TESSERA_CHECK(advance(), "no archive has tensor ", tensor);
  if (tensor != tensor_) written_ = 0;
  tensor_ = tensor;
  archive_->write(*file_, base_, streamed_[tensor - first_tensor_], written_, data);
  written_ += static_cast<int64_t>(data.size());
}

void ArchiveSequence::finish() {
  while (advance()) {
  }
}

std::string float_bytes(float value) {
  std::string bytes(sizeof value, '\0');
  std::memcpy(bytes.data(), &value, sizeof value);
  return bytes;
}

}  // namespace tessera::checkpoint
