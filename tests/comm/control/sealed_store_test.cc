#include "comm/control/sealed_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <algorithm>
#include <set>

#include "core/error.h"
#include "tests/support/errors.h"

namespace tessera::comm {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

using Bytes = std::vector<uint8_t>;

Bytes bytes(const std::string& text) { return {text.begin(), text.end()}; }
std::string text(const Bytes& bytes) { return {bytes.begin(), bytes.end()}; }

/// What a stranger sees, and may write.
class SealedStoreTest : public ::testing::Test {
 protected:
  c10::intrusive_ptr<c10d::HashStore> server_ = c10::make_intrusive<c10d::HashStore>();
  const std::string secret_ = "a secret of all ranks";
  c10::intrusive_ptr<SealedStore> one_ = c10::make_intrusive<SealedStore>(server_, secret_);
  c10::intrusive_ptr<SealedStore> two_ = c10::make_intrusive<SealedStore>(server_, secret_);
};

TEST_F(SealedStoreTest, RanksWithTheSecretReadWhatTheOthersWrite) {
  for (const std::string& value :
       {std::string(), std::string("x"), std::string("a\0b", 3), std::string(100000, 'y')}) {
    one_->set("name", bytes(value));
    EXPECT_EQ(text(two_->get("name")), value);
  }
  one_->multiSet({"a", "b"}, {bytes("1"), bytes("2")});
  EXPECT_EQ(two_->multiGet({"b", "a"}), (std::vector<Bytes>{bytes("2"), bytes("1")}));
  EXPECT_TRUE(two_->check({"a", "b"}));
  EXPECT_FALSE(two_->check({"a", "c"}));
  two_->wait({"a", "b"});
  EXPECT_TRUE(one_->deleteKey("a"));
  EXPECT_FALSE(two_->check({"a"}));
  EXPECT_EQ(one_->add("count", 2), 2);
  EXPECT_EQ(two_->add("count", 3), 5);
  const c10::intrusive_ptr<c10d::Store> clone = one_->clone();
  EXPECT_EQ(clone.use_count(), 1u);
  EXPECT_EQ(text(clone->get("b")), "2");
}

/// HashStore's own answers are what is expected.
TEST_F(SealedStoreTest, ComparesAndSetsAsAnUnsealedStore) {
  const auto plain = c10::make_intrusive<c10d::HashStore>();
  const std::vector<std::pair<std::string, std::string>> calls = {
      {"", "first"}, {"", "second"}, {"other", "third"}, {"first", "fourth"}, {"first", "fifth"}};
  for (const auto& [expected, desired] : calls) {
    const Bytes answer = plain->compareSet("key", bytes(expected), bytes(desired));
    EXPECT_EQ(text(two_->compareSet("key", bytes(expected), bytes(desired))), text(answer));
    EXPECT_EQ(text(one_->get("key")), text(plain->get("key")));
  }
}

TEST_F(SealedStoreTest, AStrangerSeesNeitherNamesNorValues) {
  one_->set("tessera/rank/0", bytes("address 10.0.0.1"));
  one_->set("tessera/rank/1", bytes("address 10.0.0.1"));
  std::set<Bytes> values;
  for (const std::string& key : server_->listKeys()) {
    EXPECT_THAT(key, Not(HasSubstr("rank")));
    const std::string value = text(server_->get(key));
    EXPECT_THAT(value, Not(HasSubstr("10.0.0.1")));
    values.insert(server_->get(key));
  }
  EXPECT_EQ(values.size(), 2U) << "equal values of two names differ";
}

TEST_F(SealedStoreTest, WhatAStrangerWritesIsRefused) {
  one_->set("name", bytes("value"));
  const std::string sealed_name = server_->listKeys().front();
  const Bytes sealed = server_->get(sealed_name);
  for (size_t at = 0; at < sealed.size(); ++at) {
    Bytes changed = sealed;
    changed[at] ^= 1;
    server_->set(sealed_name, changed);
    EXPECT_THROW(two_->get("name"), CommError) << at;
    EXPECT_THROW(two_->multiGet({"name"}), CommError) << at;
  }
  for (const std::string& forged : {std::string(), std::string("value"), std::string(40, 'x')}) {
    server_->set(sealed_name, bytes(forged));
    EXPECT_THROW(two_->get("name"), CommError);
  }
  server_->set(sealed_name, sealed);
  EXPECT_EQ(text(two_->get("name")), "value");
  EXPECT_EQ(testing::error_of([&] {
              server_->set(sealed_name, bytes("value"));
              two_->get("name");
            }),
            "the rendezvous' value of name was written by something that does not have this run's "
            "TESSERA_RUN_SECRET");
}

TEST_F(SealedStoreTest, AValueCountsUnderItsNameOnly) {
  one_->set("a", bytes("1"));
  const std::string a = server_->listKeys().front();
  const Bytes sealed = server_->get(a);
  one_->set("b", bytes("2"));
  const auto keys = server_->listKeys();
  const std::string b =
      *std::find_if(keys.begin(), keys.end(), [&](const std::string& key) { return key != a; });
  server_->set(b, sealed);
  EXPECT_THROW(two_->get("b"), CommError);
}

TEST_F(SealedStoreTest, AnotherSecretFindsNothing) {
  one_->set("name", bytes("value"));
  SealedStore other(server_, secret_ + "!");
  EXPECT_FALSE(other.check({"name"}));
  EXPECT_NE(SealedStore::fingerprint(secret_), SealedStore::fingerprint(secret_ + "!"));
  EXPECT_EQ(SealedStore::fingerprint(secret_), SealedStore::fingerprint(secret_));
  EXPECT_THAT(SealedStore::fingerprint(secret_), Not(HasSubstr(secret_)));
}

}  // namespace
}  // namespace tessera::comm
