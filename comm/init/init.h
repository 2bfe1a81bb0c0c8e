// How a rank joins its group: from torchrun's environment variables, alone, or as a thread (tests).
#pragma once

#include <exception>
#include <functional>

#include "comm/communicator.h"
#include "comm/join_options.h"
#include "core/environment/environment.h"

namespace tessera::comm {

using tessera::Environment;
using tessera::environment;

/// The device that join() takes, for a program that needs to know, or to fail, before it joins. With
/// CUDA it loads libtorch's CUDA half (core/cuda_plugin.h): to be called before anything else touches
/// libtorch, which otherwise settles for having no CUDA. Throws CommError for a backend that does not exist
/// or does not move such tensors, Error when CUDA is asked for and this host has no device for each of its
/// ranks.
at::Device choose_device(const JoinOptions& options, const Environment& env);

/// Collective. Joins the group described by `env` over c10d's TCPStore (one rank alone: no network at all).
/// Throws what choose_device() does, and CommError in one line: port in use (with the address), ranks missing
/// (which), WORLD_SIZE, backend, timeout or device differing between ranks, one RANK given to two processes,
/// too few files that may be open.
///
/// Communicator::device() is choose_device(); on CUDA it is the current device from now on.
///
/// Rank 0's process serves the store: at its exit it waits for the others [Note: the last to end].
CommunicatorPtr join(const JoinOptions& options = {}, const Environment& env = environment());

/// Tells the other ranks why this one leaves the group, which is of no use from then on. To be called where
/// an error is caught, before what uses the communicator is destroyed: the others' messages then say the
/// reason. Throws a PeerFailure with the error's message where that is none, because something of libtorch
/// has passed it on, and another rank's end is why.
void leave_because_of(const std::exception& error, Communicator& comm);

/// Runs `body(comm)` on `world_size` threads, each a rank of one group over c10d's HashStore, and returns
/// when all have ended. When one throws, its group is aborted: the others' collectives fail at once, naming
/// the rank and its error. The first exception by time is rethrown; a CommError, mostly the consequence of
/// another rank's error, only when there is no other. Ranks as threads share the process's default random
/// generator.
void run_threads(int world_size, const JoinOptions& options,
                 const std::function<void(CommunicatorPtr)>& body);

}  // namespace tessera::comm
