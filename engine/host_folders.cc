#include "engine/host_folders.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <map>
#include <memory>
#include <span>
#include <utility>

#include "checkpoint/block_hashes.h"
#include "checkpoint/catalog.h"
#include "checkpoint/checkpoint_error.h"
#include "checkpoint/reader.h"
#include "checkpoint/shard_file.h"
#include "checkpoint/verify.h"
#include "comm/agreement.h"
#include "core/error.h"
#include "core/input_file.h"
#include "core/pending_file.h"
#include "core/str.h"
#include "zero/operator_listener.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using checkpoint::Manifest;
using nlohmann::json;

constexpr int64_t kChunkBytes = int64_t{16} << 20;  // sent at a time

DiskOptions in_memory() { return {.sync = false, .probe = {}}; }

/// Runs parts of a transfer in which other ranks take part: after a failure here they go on, and learn of it
/// at the end.
class Attempt {
 public:
  template <class Part>
  void operator()(const Part& part) {
    if (!error_.empty()) return;
    try {
      part();
    } catch (const std::exception& error) {
      error_ = error.what();
    }
  }
  /// Collective. Throws the first failure on all ranks.
  void finish(comm::Communicator& comm, const char* label) const {
    comm::on_all_ranks<CheckpointError>(comm, label, [&] {
      if (!error_.empty()) throw CheckpointError(error_);
    });
  }

 private:
  std::string error_;
};

/// The file, from the tensors in which it is sent: (n) uint8 on any device.
class Arriving {
 public:
  Arriving(const Disk& disk, const fs::path& path, int64_t bytes) : file_(disk, path), bytes_(bytes) {}
  void append(const at::Tensor& chunk) {
    const int64_t size = std::min(chunk.numel(), bytes_ - file_.file().appended());
    const at::Tensor here = chunk.narrow(0, 0, size).cpu();
    file_.file().append(
        std::span(static_cast<const std::byte*>(here.const_data_ptr()), static_cast<size_t>(size)));
  }
  void publish() { file_.publish(); }

 private:
  PendingFile file_;
  int64_t bytes_;
};

/// Bytes `offset`… of the file, as many as there are, to the front of `chunk`: (n) uint8 on any device.
void read_chunk(const InputFile& file, int64_t offset, const at::Tensor& chunk) {
  const int64_t size = std::min(chunk.numel(), file.bytes() - offset);
  if (size <= 0) return;
  const at::Tensor here = at::empty({size}, at::kByte);
  file.read_at(offset,
               std::span(static_cast<std::byte*>(here.mutable_data_ptr()), static_cast<size_t>(size)));
  chunk.narrow(0, 0, size).copy_(here);
}

/// A checkpoint in the folder of one host.
struct Held {
  std::string identity;  // equal where its files are: of its content but for model.h5, which each host makes
  std::string tag;
  int64_t order = 0;
  std::vector<std::string> problems;  // by file; empty: it is whole here
};

void to_json(json& out, const Held& held) { out = {held.identity, held.tag, held.order, held.problems}; }
void from_json(const json& in, Held& held) {
  in.at(0).get_to(held.identity);
  in.at(1).get_to(held.tag);
  in.at(2).get_to(held.order);
  in.at(3).get_to(held.problems);
}

/// What this host has.
std::vector<Held> held_in(const fs::path& folder,
                          const std::function<std::optional<int64_t>(const json& state)>& order) {
  std::vector<Held> all;
  for (const std::string& tag : checkpoint::list_checkpoints(folder)) try {
      Manifest manifest = checkpoint::read_manifest(folder / tag);
      const std::optional<int64_t> place = order(manifest.state);
      if (!place) continue;
      Held held{
          .identity = {}, .tag = tag, .order = *place, .problems = checkpoint::verify(folder, tag).by_file};
      manifest.files.pop_back();  // model.h5
      held.problems.pop_back();
      std::string records;
      for (const checkpoint::FileRecord& file : manifest.files)
        records += checkpoint::file_record_to_text(file);
      held.identity = checkpoint::text_digest(records + manifest.state.dump());
      all.push_back(std::move(held));
    } catch (const CheckpointError&) {
      // No manifest, or a damaged one: what else is in the folder is of no use without it.
    }
  return all;
}

}  // namespace

std::unique_ptr<HostFolders> HostFolders::join(comm::CommunicatorPtr comm, const fs::path& mine) {
  const std::vector<std::string> folders = comm->exchange(mine.string(), "folders in memory");
  if (std::find(folders.begin(), folders.end(), "") != folders.end()) return nullptr;
  return std::unique_ptr<HostFolders>(new HostFolders(std::move(comm), mine, folders));
}

HostFolders::HostFolders(comm::CommunicatorPtr comm, fs::path mine, const std::vector<std::string>& folders)
    : comm_(std::move(comm)), mine_(std::move(mine)) {
  std::map<std::string, int> known;
  int rank = 0;
  for (const std::string& folder : folders) {
    const auto [host, is_new] = known.emplace(folder, num_hosts());
    if (is_new) owners_.push_back(rank);
    hosts_.push_back(host->second);
    ++rank;
  }
}

/// The ranks that send each other their files: some of each of the partners' hosts, this one among them.
std::vector<int> HostFolders::partners() const {
  int first = host() / 2 * 2, last = first + 2;
  if (num_hosts() % 2 == 1 && last >= num_hosts() - 1) first = num_hosts() - 3, last = num_hosts();
  std::vector<int> sizes(owners_.size()), places;
  for (const int host : hosts_) places.push_back(sizes[host]++);
  const int fewest = *std::min_element(sizes.begin() + first, sizes.begin() + last);
  std::vector<int> ranks;
  for (int rank = 0; rank < comm_->size(); ++rank)
    if (hosts_[rank] >= first && hosts_[rank] < last &&
        places[rank] % fewest == places[comm_->rank()] % fewest)
      ranks.push_back(rank);
  return ranks;
}

void HostFolders::copy(const std::string& tag, int file) {
  if (num_hosts() == 1) return;
  const zero::PauseListening our_own_operators;
  const at::NoGradGuard no_grad;
  const std::vector<int> ranks = partners();
  if (!partners_) partners_ = comm_->split(ranks, "copies in memory");
  const int me = partners_->rank();
  const bool writes = std::find_if(ranks.begin(), ranks.end(), [&](int rank) {
                        return hosts_[rank] == host();
                      }) == ranks.begin() + me;  // the first one of this host

  Attempt attempt;
  const Disk disk(in_memory());
  std::optional<InputFile> mine;
  attempt([&] { mine.emplace(mine_ / tag / checkpoint::rank_file_name(file)); });
  struct Size {
    int64_t file, bytes;
  };
  const std::vector<Size> sizes =
      partners_->exchange(Size{file, mine ? mine->bytes() : 0}, "files in memory");
  std::vector<std::unique_ptr<Arriving>> arriving(sizes.size());
  attempt([&] {
    for (size_t i = 0; writes && i < sizes.size(); ++i)
      if (hosts_[ranks[i]] != host())
        arriving[i] = std::make_unique<Arriving>(
            disk, mine_ / tag / checkpoint::rank_file_name(static_cast<int>(sizes[i].file)), sizes[i].bytes);
  });

  int64_t largest = 0;
  for (const Size& size : sizes) largest = std::max(largest, size.bytes);
  const int64_t chunk = std::min(kChunkBytes, largest);
  const at::Tensor all = at::empty({chunk * static_cast<int64_t>(sizes.size())},
                                   at::TensorOptions(at::kByte).device(comm_->device()));
  for (int64_t offset = 0; offset < largest; offset += chunk) {
    attempt([&] { read_chunk(*mine, offset, all.narrow(0, me * chunk, chunk)); });
    partners_->all_gather(all, all.narrow(0, me * chunk, chunk), "copies in memory")->wait();
    attempt([&] {
      for (size_t i = 0; i < arriving.size(); ++i)
        if (arriving[i]) arriving[i]->append(all.narrow(0, static_cast<int64_t>(i) * chunk, chunk));
    });
  }
  attempt([&] {
    for (const auto& one : arriving)
      if (one) one->publish();
  });
  attempt.finish(*comm_, "copies in memory");
}

HostFolders::Found HostFolders::find(const std::function<std::optional<int64_t>(const json& state)>& order) {
  std::vector<Held> mine;
  comm::on_all_ranks<CheckpointError>(*comm_, "checkpoints in memory", [&] {
    if (!owns()) return;
    if (!fs::is_directory(mine_)) throw CheckpointError(str(mine_.string(), ": the folder is gone"));
    mine = held_in(mine_, order);
  });
  struct Checkpoint {
    Held held;  // problems: of the files that are whole nowhere
    std::vector<int> hosts;
    std::vector<std::vector<bool>> has;  // by host and file
  };
  std::map<std::string, Checkpoint> found;  // by identity
  const std::vector<std::string> answers = comm_->exchange(json(mine).dump(), "checkpoints in memory");
  for (int host = 0; host < num_hosts(); ++host)
    for (const Held& held : json::parse(answers[owners_[host]]).get<std::vector<Held>>()) {
      Checkpoint& one = found.try_emplace(held.identity, Checkpoint{held, {}, {}}).first->second;
      one.hosts.push_back(host);
      one.has.resize(owners_.size(), std::vector<bool>(held.problems.size()));
      for (size_t file = 0; file < held.problems.size(); ++file) {
        one.has[host][file] = held.problems[file].empty();
        if (held.problems[file].empty()) one.held.problems[file].clear();
      }
    }

  Found result;
  const Checkpoint* latest = nullptr;
  std::optional<int64_t> latest_problem;
  for (const auto& [identity, one] : found) {
    const auto problem = std::find_if(one.held.problems.begin(), one.held.problems.end(),
                                      [](const std::string& text) { return !text.empty(); });
    if (problem == one.held.problems.end()) {
      if (!latest || one.held.order > latest->held.order) latest = &one;
    } else if (!latest_problem || one.held.order > *latest_problem) {
      latest_problem = one.held.order;
      result.problem = *problem;
    }
  }
  if (latest && latest_problem && *latest_problem < latest->held.order) result.problem.clear();
  tag_.clear();
  has_.clear();
  if (!latest) return result;

  tag_ = result.tag = latest->held.tag;
  has_ = latest->has;
  const int source = owners_[latest->hosts.front()];
  std::string text;
  const auto path = mine_ / tag_ / checkpoint::kManifestName;
  if (std::ssize(latest->hosts) < num_hosts()) {
    comm::on_all_ranks<CheckpointError>(*comm_, "manifest in memory", [&] {
      if (comm_->rank() == source) text = InputFile(path).read_all(checkpoint::kMaxManifestBytes);
    });
    text = comm_->exchange(text, "manifest in memory")[source];
  }
  comm::on_all_ranks<CheckpointError>(*comm_, "checkpoint in memory", [&] {
    const bool is_here = std::find(latest->hosts.begin(), latest->hosts.end(), host()) != latest->hosts.end();
    if (is_here || !owns()) return;
    const Disk disk(in_memory());
    disk.remove_all(mine_ / tag_);  // another one of that name
    disk.create_directories(mine_ / tag_);
    disk.replace_file(path, text);
  });
  comm::on_all_ranks<CheckpointError>(*comm_, "checkpoint in memory",
                                      [&] { result.state = checkpoint::read_manifest(mine_ / tag_).state; });
  return result;
}

void HostFolders::bring(const std::vector<int>& files) {
  if (num_hosts() == 1) return;
  const zero::PauseListening our_own_operators;
  const at::NoGradGuard no_grad;
  const std::vector<std::vector<int>> wanted = comm_->exchange(files, "files in memory");
  const Manifest manifest = checkpoint::read_manifest(mine_ / tag_);
  const Disk disk(in_memory());
  Attempt attempt;
  for (int file = 0; file < manifest.world_size(); ++file) {
    std::vector<bool> lacks(owners_.size());
    for (int rank = 0; rank < comm_->size(); ++rank)
      if (std::find(wanted[rank].begin(), wanted[rank].end(), file) != wanted[rank].end())
        lacks[hosts_[rank]] = lacks[hosts_[rank]] || !has_[hosts_[rank]][file];
    if (std::find(lacks.begin(), lacks.end(), true) == lacks.end()) continue;
    const auto source = std::find_if(has_.begin(), has_.end(), [&](const auto& has) { return has[file]; });
    const int root = owners_[source - has_.begin()];
    const int64_t bytes = manifest.rank_file(file).bytes;
    const fs::path path = mine_ / tag_ / manifest.rank_file(file).name;
    std::optional<InputFile> from;
    std::unique_ptr<Arriving> to;
    attempt([&] {
      if (comm_->rank() == root) from.emplace(path);
      if (owns() && lacks[host()]) to = std::make_unique<Arriving>(disk, path, bytes);
    });
    const at::Tensor chunk =
        at::empty({std::min(kChunkBytes, bytes)}, at::TensorOptions(at::kByte).device(comm_->device()));
    for (int64_t offset = 0; offset < bytes; offset += chunk.numel()) {
      attempt([&] {
        if (from) read_chunk(*from, offset, chunk);
      });
      comm_->broadcast(chunk, root, "file in memory")->wait();
      attempt([&] {
        if (to) to->append(chunk);
      });
    }
    attempt([&] {
      if (to) to->publish();
    });
    for (size_t host = 0; host < lacks.size(); ++host) has_[host][file] = has_[host][file] || lacks[host];
  }
  attempt.finish(*comm_, "files in memory");
}

}  // namespace tessera
