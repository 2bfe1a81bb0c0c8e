#include "tests/support/power_loss.h"

#include <algorithm>
#include <cstddef>
#include <fstream>
#include <iterator>
#include <random>
#include <utility>
#include <vector>

#include "tests/support/recorded_calls.h"

namespace tessera::testing {

namespace fs = std::filesystem;
using recorded::kNone;
using recorded::NameChange;
using recorded::Node;
using recorded::Operation;
using recorded::Recording;
using recorded::recording;

namespace {

/// Adds nodes for `path` and everything below it, with their bytes.
int snapshot(const fs::path& path) {
  Recording& log = recording();
  const int number = recorded::add_node(path.string(), fs::is_directory(path));
  if (log.nodes[number].is_folder) {
    for (const fs::directory_entry& entry : fs::directory_iterator(path)) {
      const int child = snapshot(entry.path());
      log.nodes[number].names[entry.path().filename().string()] = child;
    }
  } else {
    std::ifstream file(path, std::ios::binary);
    log.nodes[number].bytes = {std::istreambuf_iterator<char>(file), {}};
  }
  return number;
}

/// Of a write, the first `keep_bytes` only.
void apply(const Operation& operation, std::vector<Node>& nodes, size_t keep_bytes = std::string::npos) {
  for (const NameChange& change : operation.changes) {
    auto& names = nodes[change.folder].names;
    if (change.node == kNone)
      names.erase(change.name);
    else
      names[change.name] = change.node;
  }
  if (operation.node == kNone || operation.is_sync) return;
  std::string& bytes = nodes[operation.node].bytes;
  const std::string written = operation.bytes.substr(0, keep_bytes);
  const size_t end = std::max(static_cast<size_t>(operation.offset) + written.size(),
                              static_cast<size_t>(std::max<int64_t>(0, operation.size)));
  if (bytes.size() < end) bytes.resize(end, '\0');
  bytes.replace(static_cast<size_t>(operation.offset), written.size(), written);
}

bool touches(const Operation& operation, int node) {
  return (!operation.is_sync && operation.node == node) ||
         std::any_of(operation.changes.begin(), operation.changes.end(),
                     [&](const NameChange& change) { return change.folder == node; });
}

/// Writes node `number`, and everything below it, as `target`.
void materialize(const std::vector<Node>& nodes, int number, const fs::path& target) {
  if (!nodes[number].is_folder) {
    std::ofstream(target, std::ios::binary) << nodes[number].bytes;
    return;
  }
  fs::create_directory(target);
  for (const auto& [name, child] : nodes[number].names) materialize(nodes, child, target / name);
}

}  // namespace

FileRecorder::FileRecorder(const fs::path& root) {
  Recording& log = recording();
  log.nodes.clear();
  log.numbers.clear();
  log.operations.clear();
  log.root = snapshot(root);
  log.active = true;
}

FileRecorder::~FileRecorder() { stop(); }
void FileRecorder::stop() { recording().active = false; }
int FileRecorder::size() const { return static_cast<int>(recording().operations.size()); }
std::string FileRecorder::describe(int i) const {
  return recording().operations.at(static_cast<size_t>(i)).what;
}

void FileRecorder::replay(int num_operations, Unsynced unsynced, uint64_t seed,
                          const fs::path& target) const {
  const Recording& log = recording();
  std::vector<Node> nodes = log.nodes;
  std::vector<const Operation*> pending;
  for (int i = 0; i < num_operations; ++i) {
    const Operation& operation = log.operations[static_cast<size_t>(i)];
    if (!operation.is_sync) {
      pending.push_back(&operation);
      continue;
    }
    for (const Operation*& one : pending)
      if (touches(*one, operation.node)) apply(*std::exchange(one, nullptr), nodes);
    std::erase(pending, nullptr);
  }
  std::mt19937_64 random(seed);
  for (const Operation* one : pending) {
    const bool is_name = !one->changes.empty();
    switch (unsynced) {
      case Unsynced::kNothingStays: break;
      case Unsynced::kAllStays: apply(*one, nodes); break;
      case Unsynced::kNamesStay:
        if (is_name) apply(*one, nodes);
        break;
      case Unsynced::kBytesStay:
        if (!is_name) apply(*one, nodes);
        break;
      case Unsynced::kChance:
        if (random() % 2 == 0)
          apply(*one, nodes, random() % 2 == 0 ? std::string::npos : random() % (one->bytes.size() + 1));
        break;
    }
  }
  materialize(nodes, log.root, target);
}

}  // namespace tessera::testing
