#include "comm/control/sealed_store.h"

#include <sodium.h>

#include <algorithm>
#include <utility>

#include "core/error.h"

namespace tessera::comm {
namespace {

using Bytes = std::vector<uint8_t>;
using Key = std::array<unsigned char, 32>;

constexpr size_t kNonce = crypto_aead_xchacha20poly1305_ietf_NPUBBYTES;
constexpr size_t kTag = crypto_aead_xchacha20poly1305_ietf_ABYTES;
static_assert(Key().size() == crypto_aead_xchacha20poly1305_ietf_KEYBYTES);

const unsigned char* bytes_of(const std::string& text) {
  return reinterpret_cast<const unsigned char*>(text.data());
}

/// The first `Size` bytes of BLAKE2b: of `first`, its length and `second`, with a key.
template <size_t Size>
std::array<unsigned char, Size> keyed_hash(const Key& key, const std::string& first,
                                           const Bytes& second = {}) {
  crypto_generichash_state state;
  crypto_generichash_init(&state, key.data(), key.size(), Size);
  const uint64_t length = first.size();
  crypto_generichash_update(&state, reinterpret_cast<const unsigned char*>(&length), sizeof length);
  crypto_generichash_update(&state, bytes_of(first), first.size());
  crypto_generichash_update(&state, second.data(), second.size());
  std::array<unsigned char, Size> hash{};
  crypto_generichash_final(&state, hash.data(), hash.size());
  return hash;
}

/// The key for one purpose.
Key derived(const std::string& secret, const std::string& purpose) {
  if (sodium_init() < 0) throw CommError("libsodium finds no source of random numbers");
  Key hash{};
  crypto_generichash(hash.data(), hash.size(), bytes_of(secret), secret.size(), nullptr, 0);
  return keyed_hash<32>(hash, "tessera: " + purpose);
}

template <size_t Size>
std::string in_hex(const std::array<unsigned char, Size>& bytes) {
  std::string text(2 * Size + 1, '\0');
  sodium_bin2hex(text.data(), text.size(), bytes.data(), bytes.size());
  text.pop_back();
  return text;
}

}  // namespace

SealedStore::SealedStore(c10::intrusive_ptr<c10d::Store> store, const std::string& secret,
                         const std::string& session)
    : SealedStore(std::move(store), derived(secret, "names" + session), derived(secret, "nonces" + session),
                  derived(secret, "values" + session)) {}

SealedStore::SealedStore(c10::intrusive_ptr<c10d::Store> store, const Key& names, const Key& nonces,
                         const Key& values)
    : store_(std::move(store)), names_(names), nonces_(nonces), values_(values) {}

std::string SealedStore::fingerprint(const std::string& secret) {
  return in_hex(derived(secret, "fingerprint"));
}

std::string SealedStore::sealed_name(const std::string& name) const {
  return in_hex(keyed_hash<16>(names_, name));
}

std::vector<std::string> SealedStore::sealed_names(const std::vector<std::string>& names) const {
  std::vector<std::string> sealed;
  for (const std::string& name : names) sealed.push_back(sealed_name(name));
  return sealed;
}

/// The nonce, then the encrypted value with its tag.
Bytes SealedStore::seal(const std::string& name, const Bytes& value) const {
  const auto nonce = keyed_hash<kNonce>(nonces_, name, value);
  Bytes sealed(kNonce + value.size() + kTag);
  std::copy(nonce.begin(), nonce.end(), sealed.begin());
  crypto_aead_xchacha20poly1305_ietf_encrypt(sealed.data() + kNonce, nullptr, value.data(), value.size(),
                                             bytes_of(name), name.size(), nullptr, nonce.data(),
                                             values_.data());
  return sealed;
}

Bytes SealedStore::open(const std::string& name, const Bytes& sealed) const {
  Bytes value(sealed.size() < kNonce + kTag ? 0 : sealed.size() - kNonce - kTag);
  if (sealed.size() < kNonce + kTag ||
      crypto_aead_xchacha20poly1305_ietf_decrypt(value.data(), nullptr, nullptr, sealed.data() + kNonce,
                                                 sealed.size() - kNonce, bytes_of(name), name.size(),
                                                 sealed.data(), values_.data()) != 0)
    throw CommError("the rendezvous' value of ", name,
                    " was written by something that does not have this run's TESSERA_RUN_SECRET");
  return value;
}

c10::intrusive_ptr<c10d::Store> SealedStore::clone() {
  return c10::intrusive_ptr<SealedStore>::unsafe_steal_from_new(
      new SealedStore(store_->clone(), names_, nonces_, values_));  // the constructor is private
}

void SealedStore::set(const std::string& key, const Bytes& value) {
  store_->set(sealed_name(key), seal(key, value));
}

/// No value (as before the first one) has no sealed form.
Bytes SealedStore::compareSet(const std::string& key, const Bytes& expected, const Bytes& desired) {
  const Bytes found = store_->compareSet(sealed_name(key), expected.empty() ? Bytes() : seal(key, expected),
                                         seal(key, desired));
  return found.empty() ? Bytes() : open(key, found);
}

Bytes SealedStore::get(const std::string& key) { return open(key, store_->get(sealed_name(key))); }

int64_t SealedStore::add(const std::string& key, int64_t value) {
  return store_->add(sealed_name(key), value);
}

bool SealedStore::deleteKey(const std::string& key) { return store_->deleteKey(sealed_name(key)); }

bool SealedStore::check(const std::vector<std::string>& keys) { return store_->check(sealed_names(keys)); }

int64_t SealedStore::getNumKeys() { return store_->getNumKeys(); }

void SealedStore::wait(const std::vector<std::string>& keys) { store_->wait(sealed_names(keys)); }

void SealedStore::wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) {
  store_->wait(sealed_names(keys), timeout);
}

std::vector<Bytes> SealedStore::multiGet(const std::vector<std::string>& keys) {
  std::vector<Bytes> values = store_->multiGet(sealed_names(keys));
  for (size_t i = 0; i < keys.size(); ++i) values[i] = open(keys[i], values[i]);
  return values;
}

void SealedStore::setTimeout(const std::chrono::milliseconds& timeout) {
  Store::setTimeout(timeout);
  store_->setTimeout(timeout);
}

}  // namespace tessera::comm
