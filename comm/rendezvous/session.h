// What keeps the store of one run apart from strangers, from other runs, and from what was recorded of an
// earlier run with the same secret.
//
// A session.
// With a secret (sealed_store.h) everything that ranks say goes through a SealedStore whose keys come from
// the secret and from a word that rank 0 draws for this run. A rank gets that word by a challenge: it writes
// a random word of its own, and rank 0 writes the answer under a name that contains it, sealed. So both sides
// know that the other is there now: an answer that was recorded has another name, and a registration that was
// recorded has keys of another run, under names that nobody asks for. A rank writes its challenge again until
// it is answered, because one that was recorded may have taken its place.
// Rank 0 also writes a fingerprint of its secret, unsealed, so that a rank with another secret, or none, ends
// at once and says why. Only rank 0 writes it: whoever comes first, and is not of the run, decides nothing.
#pragma once

#include <string>
#include <thread>

#include "comm/control/group_store.h"
#include "comm/rendezvous/registration.h"
#include "core/environment/environment.h"

namespace tessera::comm {

/// Throws CommError when rank 0 has written another fingerprint than this rank's secret has. True once
/// it has written the same.
bool check_secret(const GroupStore& plain, const Environment& env);

/// Owns the run's part of the store, and rank 0's thread.
struct Session {
  GroupStore store;      ///< for everything that ranks say from here on
  std::jthread answers;  ///< rank 0's, to challenges; to be kept until all ranks have registered
};

/// Collective. `prefix`: this run's part of `store`. Throws CommError: rank 0 does not answer, or has another
/// secret.
Session join_session(const c10::intrusive_ptr<c10d::Store>& store, const std::string& prefix,
                     const std::string& where, const Environment& env, WaitLimit& limit);

}  // namespace tessera::comm
