// GlooGroup: c10d's process group over Gloo with what it lacks: tags of our choice, abort(), and connections
// that are proven to be the other ranks'.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <cstdint>
#include <memory>
#include <vector>

#include "comm/control/group_store.h"
#include "comm/gloo/gloo.h"

namespace tessera::comm {

// Gloo's headers (Debian's) are older than the Gloo inside libtorch, and some of its classes differ. So
// nothing here or in gloo.cc touches a Gloo object; pointers to them are only passed along.
// (ProcessGroupGloo::setTimeout, inline, would.)

/// Adds tags of our choice and abort() to c10d's group. One thread at a time, except abort().
class GlooGroup final : public c10d::ProcessGroupGloo {
 public:
  using c10d::ProcessGroupGloo::ProcessGroupGloo;

  // [Note: tags] Gloo matches messages by tag, which c10d counts up with every collective. A tag of ours also
  // carries a fingerprint of the collective (transport_communicator.cc): two ranks that issue different
  // things under one number never exchange a byte. With plain counting, buffers of different sizes would
  // meet, and Gloo ends the process then, by an exception on its I/O thread.
  void use_tag(uint32_t tag) { collectiveCounter_ = tag; }
  /// Each device's connections; a collective takes those of number `tag` modulo this.
  uint32_t num_contexts() const { return static_cast<uint32_t>(contexts_.size()); }

  // Aborting Gloo: c10d has no abort for Gloo, and destroying a group waits for what is pending. But a
  // receive that runs into its timeout makes Gloo fail all pending operations of the group and close its
  // connections. So abort() posts one that is never answered. On a connection that is already broken posting
  // throws, hence the loop over peers. Each device has a context of its own, chosen by the tag.
  void abort() override;

 private:
  at::Tensor scratch_ = at::zeros({1}, at::kByte);
};

// [Note: a receive that never ends]
// When a connection closes, Gloo fails what waits for a message on it, but not the operation whose message
// has arrived in part, nor one that has sent a part of its own: these wait for their own time limit,
// comm.timeout_s, in the group's threads, and ~ProcessGroupGloo joins its threads. The larger the messages,
// the more likely. So a group that was aborted is destroyed by a thread of its own, for which nobody waits
// longer than a moment. What the operation refers to (buffers, connections, devices) is kept alive by it;
// nothing reads or writes the buffers, because the connections are closed.

/// Destroys a group after abort(), or leaves that to a thread. Nothing that the group's operations
/// call may depend on the caller afterwards.
void release_aborted(c10::intrusive_ptr<GlooGroup> group);

// [Note: proven connections]
// Gloo takes a connection for the rank's that it waits for if its first 8 bytes are the right number, and
// these numbers count up from 0. So a program outside of the run that connects (a port scanner that sends
// zeros) could get a rank's place: it then closes the connection, and connecting fails, or is silent, and the
// first collective never ends. So a device's numbers begin at a random one here, from 1024 to 5119, and the
// ranks prove after connecting that they talk to each other: each sends, over every connection, a random word
// that it has told the others through the store. Where that fails on any rank, all connect anew, up to 5
// times in all, and until one of them has spent connect_timeout. What a program could still do that knows the
// protocol of Gloo: docs/security.md.

/// Collective. Connects every pair of ranks, which find each other through `store`, over options.devices.
/// Throws CommError when that fails on a rank (with its reason, the same on all ranks), RankIsGone.
c10::intrusive_ptr<GlooGroup> connect_gloo_group(const GroupStore& store, const GlooOptions& options);

}  // namespace tessera::comm
