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
// Rank 0 also writes a fingerprint of its secret, unsealed, so that a rank with another secret, or none, can
// say why it does not join. Everybody who can connect may overwrite it. So it decides nothing for a rank that
// has a secret: rank 0's answer to the challenge does, and a rank that gets none within 10 s although rank 0
// is there ends. A rank without a secret, which believes everything else that the store says, ends at once.
#pragma once

#include <string>
#include <thread>

#include "comm/control/group_store.h"
#include "comm/rendezvous/registration.h"
#include "core/environment/environment.h"

namespace tessera::comm {

/// Throws CommError when the store has another fingerprint than this rank's secret has. Only rank 0 writes
/// it, or a stranger: a rank that has a secret asks only once rank 0 ought to have answered.
void check_secret(const GroupStore& plain, const Environment& env);

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
