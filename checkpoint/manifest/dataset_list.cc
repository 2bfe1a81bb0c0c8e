#include "checkpoint/manifest/dataset_list.h"

#include <algorithm>
#include <utility>

namespace tessera::checkpoint {

DatasetList::DatasetList(std::vector<DatasetRecord> records) {
  const auto shared = std::make_shared<Shared>();
  shared->records = std::move(records);
  for (const DatasetRecord& record : shared->records) {
    shared->by_name.emplace(record.name, &record);
    shared->end_byte = std::max(shared->end_byte, record.offset + record.bytes);
  }
  shared_ = shared;
}

const DatasetRecord* DatasetList::find(std::string_view name) const {
  const auto found = shared_->by_name.find(name);
  return found == shared_->by_name.end() ? nullptr : found->second;
}

}  // namespace tessera::checkpoint
