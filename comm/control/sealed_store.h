// SealedStore: a c10d store whose names and values only ranks with the run's secret can read and make.
//
// The run's secret.
// c10d's TCPStore answers all who connect. What ranks say to each other there decides where they connect and
// what they trust: addresses, NCCL's id, the secrets by which ranks share memory. So where TESSERA_RUN_SECRET
// is set, which the launcher does, each name is a keyed hash (BLAKE2b) of the name, and each value is
// encrypted and authenticated together with its name (XChaCha20-Poly1305). The nonce is a keyed hash of name
// and value, so that equal values stay equal and compareSet() works. Numbers that add() counts are not
// sealed. A stranger who connects can remove or overwrite what is there, which ends the run with an error.
// What was recorded of another run has other keys (comm/rendezvous/session.h). (Keys are derived by purpose
// from the secret's hash; all by libsodium.)
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <array>
#include <string>
#include <vector>

namespace tessera::comm {

class SealedStore final : public c10d::Store {
 public:
  /// `secret`: not empty. Stores with different `session` have different keys.
  SealedStore(c10::intrusive_ptr<c10d::Store> store, const std::string& secret,
              const std::string& session = "");

  /// Tells whether two secrets are equal, without telling what they are.
  static std::string fingerprint(const std::string& secret);

  // These are c10d's. What reads a value throws CommError when no rank with the secret has written it.
  c10::intrusive_ptr<c10d::Store> clone() override;
  void set(const std::string& key, const std::vector<uint8_t>& value) override;
  std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& desired) override;
  std::vector<uint8_t> get(const std::string& key) override;
  int64_t add(const std::string& key, int64_t value) override;
  bool deleteKey(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  int64_t getNumKeys() override;
  void wait(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override;
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override;
  void setTimeout(const std::chrono::milliseconds& timeout) override;

 private:
  using Key = std::array<unsigned char, 32>;
  SealedStore(c10::intrusive_ptr<c10d::Store> store, const Key& names, const Key& nonces, const Key& values);

  std::string sealed_name(const std::string& name) const;
  std::vector<std::string> sealed_names(const std::vector<std::string>& names) const;
  std::vector<uint8_t> seal(const std::string& name, const std::vector<uint8_t>& value) const;
  std::vector<uint8_t> open(const std::string& name, const std::vector<uint8_t>& sealed) const;

  const c10::intrusive_ptr<c10d::Store> store_;
  const Key names_, nonces_, values_;
};

}  // namespace tessera::comm
