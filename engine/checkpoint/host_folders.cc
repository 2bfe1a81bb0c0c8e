#include "engine/checkpoint/host_folders.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <thread>
#include <utility>

#include "checkpoint/block_hashes.h"
#include "checkpoint/checkpoint_error.h"
#include "checkpoint/read/reader.h"
#include "checkpoint/sharded/catalog.h"
#include "checkpoint/sharded/checkpoint_files.h"
#include "comm/init/agreement.h"
#include "comm/rendezvous/network.h"
#include "core/error.h"
#include "core/files/input_file.h"
#include "core/files/pending_file.h"
#include "core/json/json_reader.h"
#include "core/json/json_text.h"
#include "core/str.h"
#include "engine/checkpoint/checkpoint_types.h"
#include "engine/checkpoint/checkpoint_writer_internal.h"
#include "zero/memory/pause_listening.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using checkpoint::Manifest;
using nlohmann::json;

constexpr int64_t kChunkBytes = int64_t{16} << 20;  // sent at a time

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
    file_.file().append(bytes_of(chunk.narrow(0, 0, size).cpu()));
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
  file.read_at(offset, bytes_of(here));
  chunk.narrow(0, 0, size).copy_(here);
}

/// A checkpoint in the folder of one host.
struct Held {
  std::string identity;  // equal where its files are: of its content but for model.h5, which each host makes
  std::string tag;
  int64_t order = 0;
  std::string files;    // by file: '+' it is whole here, '-' it is not
  std::string damaged;  // what is wrong with the first file that is here and not whole; empty: none is
};

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Held, identity, tag, order, files, damaged)

/// What this host has. `unreadable`: the tags without a manifest that can be read, and why.
std::vector<Held> held_in(const fs::path& folder,
                          const std::function<std::optional<int64_t>(const json& state)>& order,
                          std::map<std::string, std::string>& unreadable) {
  std::vector<Held> all;
  for (const std::string& tag : checkpoint::list_folders(folder)) try {
      const Manifest manifest = checkpoint::read_manifest(folder / tag);
      const std::optional<int64_t> place = order(manifest.state);
      if (!place) continue;
      const std::vector<std::string> problems = checkpoint::verify(folder, tag).by_file;
      Held held{.identity = {}, .tag = tag, .order = *place, .files = {}, .damaged = {}};
      for (int rank = 0; rank < manifest.world_size(); ++rank) {
        const std::string& problem = problems[static_cast<size_t>(rank)];
        held.files += problem.empty() ? '+' : '-';
        if (!problem.empty() && held.damaged.empty() &&
            fs::exists(folder / tag / manifest.rank_file(rank).name))
          held.damaged = problem;
      }
      held.identity = checkpoint::content_digest(manifest);
      all.push_back(std::move(held));
    } catch (const CheckpointError& error) {  // what else is in the folder is of no use without it
      unreadable[tag] = error.what();
    }
  return all;
}

/// Equal for ranks with the same folder; empty for an empty path. Paths alone would be equal where hosts have
/// folders of the same name. Throws CheckpointError if others may write to it.
std::string identity_of(const fs::path& folder) {
  constexpr std::chrono::milliseconds kPatience{5000}, kPause{20};
  if (folder.empty()) return "";
  const auto give_up = std::chrono::steady_clock::now() + kPatience;
  struct stat found{};
  while (::lstat(folder.c_str(), &found) != 0) {
    if (std::chrono::steady_clock::now() > give_up)  // find() and saves will say so
      return str(comm::loopback_domain(), "/", folder);
    std::this_thread::sleep_for(kPause);
  }
  if (!S_ISDIR(found.st_mode) || found.st_uid != ::geteuid() || (found.st_mode & (S_IWGRP | S_IWOTH)) != 0)
    throw CheckpointError(folder, ": found something of user ", found.st_uid, " with mode ", std::oct,
                          found.st_mode, std::dec, "; expected a folder of user ", ::geteuid(),
                          " that nobody else may write to");
  return str(comm::loopback_domain(), "/", found.st_dev, "/", found.st_ino);
}

}  // namespace

std::unique_ptr<HostFolders> HostFolders::join(comm::CommunicatorPtr comm, const fs::path& mine) {
  std::string identity;
  comm::on_all_ranks<CheckpointError>(*comm, "folders in memory", [&] { identity = identity_of(mine); });
  const std::vector<std::string> hosts = comm->exchange(identity, "folders in memory");
  if (std::find(hosts.begin(), hosts.end(), "") != hosts.end()) return nullptr;
  return std::unique_ptr<HostFolders>(new HostFolders(std::move(comm), mine, comm::Hosts(hosts)));
}

HostFolders::HostFolders(comm::CommunicatorPtr comm, fs::path mine, comm::Hosts hosts)
    : comm_(std::move(comm)),
      mine_(std::move(mine)),
      disk_({.sync = false, .probe = ScopedHostFoldersProbe::current()}),
      hosts_(std::move(hosts)) {
  for (int host = 0; host < num_hosts(); ++host) owners_.push_back(hosts_.ranks_of(host).front());
}

/// The ranks that send each other their files: some of each of the partners' hosts, this one among them.
std::vector<int> HostFolders::partners() const {
  int first = host() / 2 * 2, last = first + 2;
  if (num_hosts() % 2 == 1 && last >= num_hosts() - 1) first = num_hosts() - 3, last = num_hosts();
  auto fewest = std::ssize(hosts_.ranks_of(first));
  for (int host = first; host < last; ++host) fewest = std::min(fewest, std::ssize(hosts_.ranks_of(host)));
  const auto place = [&](int rank) { return hosts_.index_of(rank) % fewest; };
  std::vector<int> ranks;
  for (int rank = 0; rank < comm_->size(); ++rank)
    if (const int host = hosts_.host_of(rank);
        host >= first && host < last && place(rank) == place(comm_->rank()))
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
                        return hosts_.host_of(rank) == host();
                      }) == ranks.begin() + me;  // the first one of this host

  Attempt attempt;
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
      if (hosts_.host_of(ranks[i]) != host())
        arriving[i] = std::make_unique<Arriving>(
            disk_, mine_ / tag / checkpoint::rank_file_name(static_cast<int>(sizes[i].file)), sizes[i].bytes);
  });

  int64_t largest = 0;
  for (const Size& size : sizes) largest = std::max(largest, size.bytes);
  const int64_t chunk = std::min(kChunkBytes, largest);
  at::Tensor all;
  comm::on_all_ranks<CheckpointError>(*comm_, "copies in memory", [&] {
    all = at::empty({chunk * static_cast<int64_t>(sizes.size())},
                    at::TensorOptions(at::kByte).device(comm_->device()));
  });
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

void HostFolders::discard(const std::string& tag) const {
  if (!owns()) return;
  try {
    disk_.remove_all(mine_ / tag);
  } catch (const DiskError&) {
    // The next save that succeeds removes it.
  }
}

HostFolders::Found HostFolders::find(const std::function<std::optional<int64_t>(const json& state)>& order) {
  std::vector<Held> mine;
  std::map<std::string, std::string> unreadable;  // by tag
  comm::on_all_ranks<CheckpointError>(*comm_, "checkpoints in memory", [&] {
    if (!owns()) return;
    if (!fs::is_directory(mine_)) throw CheckpointError(mine_, ": there is no such folder");
    mine = held_in(mine_, order, unreadable);
  });
  struct Checkpoint {
    Held held;  // files: that are whole on any host
    std::vector<int> hosts;
    std::vector<std::vector<bool>> has;  // by host and file
  };
  std::map<std::string, Checkpoint> found;  // by identity
  const std::vector<std::string> answers =
      comm_->exchange(json_text(json::array({mine, unreadable})), "checkpoints in memory");
  unreadable.clear();
  for (int host = 0; host < num_hosts(); ++host) {
    const json answer = parse_json(answers[owners_[host]]);
    unreadable.merge(answer.at(1).get<std::map<std::string, std::string>>());
    for (const Held& held : answer.at(0).get<std::vector<Held>>()) {
      Checkpoint& one = found.try_emplace(held.identity, Checkpoint{held, {}, {}}).first->second;
      one.hosts.push_back(host);
      one.has.resize(owners_.size(), std::vector<bool>(held.files.size()));
      if (one.held.damaged.empty()) one.held.damaged = held.damaged;
      for (size_t file = 0; file < held.files.size(); ++file)
        if (held.files[file] == '+') one.has[host][file] = true, one.held.files[file] = '+';
    }
  }

  Found result;
  const Checkpoint* latest = nullptr;
  std::optional<int64_t> latest_problem;
  for (const auto& [identity, one] : found) {
    const size_t lacks = one.held.files.find('-');
    if (lacks == std::string::npos) {
      if (!latest || one.held.order > latest->held.order) latest = &one;
    } else if (!latest_problem || one.held.order > *latest_problem) {
      latest_problem = one.held.order;
      result.problem = str(one.held.tag, ": ", checkpoint::rank_file_name(static_cast<int>(lacks)),
                           " is whole on no host", one.held.damaged.empty() ? "" : "; ", one.held.damaged);
    }
  }
  if (latest && latest_problem && *latest_problem < latest->held.order) result.problem.clear();
  for (const auto& [tag, why] : unreadable)
    if (result.problem.empty() && (!latest || latest->held.tag != tag)) result.problem = why;
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
    disk_.remove_all(mine_ / tag_);  // another one of that name
    disk_.create_directory(mine_ / tag_);
    disk_.replace_file(path, text);
  });
  comm::on_all_ranks<CheckpointError>(*comm_, "checkpoint in memory",
                                      [&] { result.state = checkpoint::read_manifest(mine_ / tag_).state; });
  return result;
}

/// Collective. By host and file: whether a rank of the host is to read it, and the host does not have it.
std::vector<std::vector<bool>> HostFolders::missing(const std::vector<int>& files) const {
  std::string mine(has_.front().size(), '-');
  for (const int file : files) mine[static_cast<size_t>(file)] = '+';
  const std::vector<std::string> wanted = comm_->exchange(mine, "files in memory");
  std::vector<std::vector<bool>> missing(owners_.size(), std::vector<bool>(mine.size()));
  for (size_t rank = 0; rank < wanted.size(); ++rank) {
    const int host = hosts_.host_of(static_cast<int>(rank));
    for (size_t file = 0; file < mine.size(); ++file)
      if (wanted[rank][file] == '+' && !has_[host][file]) missing[host][file] = true;
  }
  return missing;
}

void HostFolders::bring(const std::vector<int>& files) {
  if (num_hosts() == 1) return;
  const zero::PauseListening our_own_operators;
  const at::NoGradGuard no_grad;
  const std::vector<std::vector<bool>> missing = this->missing(files);
  if (!senders_) senders_ = comm_->split(owns() ? owners_ : std::vector{comm_->rank()}, "files in memory");
  std::optional<Manifest> manifest;
  at::Tensor chunk;
  comm::on_all_ranks<CheckpointError>(*comm_, "files in memory", [&] {
    manifest = checkpoint::read_manifest(mine_ / tag_);
    chunk = at::empty({kChunkBytes}, at::TensorOptions(at::kByte).device(comm_->device()));
  });
  Attempt attempt;
  for (int file = 0; owns() && file < manifest->world_size(); ++file) {
    const auto is_true = [&](const std::vector<bool>& of_host) { return of_host[file]; };
    if (std::none_of(missing.begin(), missing.end(), is_true)) continue;
    const int source = static_cast<int>(std::find_if(has_.begin(), has_.end(), is_true) - has_.begin());
    const int64_t bytes = manifest->rank_file(file).bytes;
    const fs::path path = mine_ / tag_ / manifest->rank_file(file).name;
    std::optional<InputFile> from;
    std::unique_ptr<Arriving> to;
    attempt([&] {
      if (host() == source) from.emplace(path);
      if (missing[host()][file]) to = std::make_unique<Arriving>(disk_, path, bytes);
    });
    for (int64_t offset = 0; offset < bytes; offset += kChunkBytes) {
      const at::Tensor part = chunk.narrow(0, 0, std::min(kChunkBytes, bytes - offset));
      attempt([&] {
        if (from) read_chunk(*from, offset, part);
      });
      senders_->broadcast(part, source, "file in memory")->wait();
      attempt([&] {
        if (to) to->append(part);
      });
    }
    attempt([&] {
      if (!to) return;
      brought_.push_back(path);
      to->publish();
    });
  }
  attempt.finish(*comm_, "files in memory");
}

void HostFolders::release() {
  for (const fs::path& path : std::exchange(brought_, {})) try {
      disk_.remove_all(path);
    } catch (const DiskError&) {
      // The next save removes the checkpoint.
    }
}

}  // namespace tessera
