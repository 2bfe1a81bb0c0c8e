// The operations on files that a process calls in the C library, recorded for FileRecorder (power_loss.h),
// which starts, stops and reads the recording.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace tessera::testing::recorded {

using Identity = std::pair<dev_t, ino_t>;
constexpr int kNone = -1;  // no node

/// A file or folder that was there at the start or has been made since.
struct Node {
  bool is_folder = false;
  std::string bytes;                 // of a file
  std::map<std::string, int> names;  // of a folder: numbers of nodes
};

struct NameChange {
  int folder;
  std::string name;
  int node;  // kNone: the name is removed
};

struct Operation {
  std::string what;
  std::vector<NameChange> changes;  // of names
  int node = kNone;                 // otherwise: written to or synced
  bool is_sync = false;
  int64_t offset = 0;
  std::string bytes;
  int64_t size = -1;  // the file is at least this long afterwards
};

/// Of the whole process: there is one, because the C library's functions are.
struct Recording {
  std::atomic<bool> active{false};  // the members below change only while it is true, under the mutex
  std::mutex mutex;
  std::vector<Node> nodes;  // as at the start, new ones empty
  std::map<Identity, int> numbers;
  int root = kNone;
  std::vector<Operation> operations;
};

Recording& recording();

/// Adds a node for the file or folder at `path`. Returns its number.
int add_node(const std::string& path, bool is_folder);

}  // namespace tessera::testing::recorded
