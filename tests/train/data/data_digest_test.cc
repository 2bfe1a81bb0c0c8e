#include "train/data/data_digest.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/init/init.h"
#include "core/error.h"
#include "tests/support/errors.h"
#include "tests/train/blobs_task.h"

namespace tessera::train {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::Not;

const BlobsOptions kSets{.train_size = 100, .eval_size = 7, .test_size = 40, .noise = 0.1};

/// The error of each of three ranks if the task of rank `strange` differs.
template <class E>
std::vector<std::string> errors(const BlobsOptions& theirs, int strange) {
  std::vector<std::string> heard(3);
  comm::run_threads(3, {.timeout = std::chrono::seconds(60)}, [&](comm::CommunicatorPtr comm) {
    const BlobsTask task(comm->rank() == strange ? theirs : kSets);
    heard[static_cast<size_t>(comm->rank())] =
        tessera::testing::error_of<E>([&] { check_same_data(task, *comm); });
  });
  return heard;
}

void reverse(at::Tensor& x, at::Tensor& y) { x = x.flip(0), y = y.flip(0); }
void relabel(at::Tensor&, at::Tensor& y) { y = (y + 1).remainder(4); }

TEST(DataDigest, EqualDataAreAccepted) {
  EXPECT_THAT(errors<Error>(kSets, 1), Each(""));
  comm::run_threads(
      1, {}, [&](comm::CommunicatorPtr comm) { EXPECT_NO_THROW(check_same_data(BlobsTask(kSets), *comm)); });
}

TEST(DataDigest, SizesContentsAndOrderCount) {
  BlobsOptions options = kSets;
  options.train_size = 101;
  EXPECT_THAT(errors<ConfigError>(options, 2),
              Each(AllOf(HasSubstr("the training set has 100 samples on rank 0, but 101 on rank 2"),
                         Not(HasSubstr("\n")))));

  using Change = std::function<void(at::Tensor&, at::Tensor&)>;
  for (const Change& change : {Change(reverse), Change(relabel)}) {
    options = kSets;
    options.change_training = change;
    EXPECT_THAT(errors<ConfigError>(options, 1),
                Each(AllOf(HasSubstr("the training set of rank 1 has other samples than rank 0's"),
                           Not(HasSubstr("\n")))));
    options = kSets;
    options.change_evaluation = change;
    EXPECT_THAT(errors<ConfigError>(options, 2), Each(HasSubstr("the evaluation set of rank 2")));
    options = kSets;
    options.change_test = change;
    EXPECT_THAT(errors<ConfigError>(options, 0), Each(HasSubstr("the test set of rank 1")))
        << "the other ranks are compared with rank 0";
  }
}

TEST(DataDigest, TypesAndShapesCount) {
  BlobsOptions options = kSets;
  options.change_evaluation = [](at::Tensor& x, at::Tensor&) { x = x.to(at::kDouble); };
  EXPECT_THAT(errors<ConfigError>(options, 1), Each(HasSubstr("the evaluation set of rank 1")));
  options.change_evaluation = [](at::Tensor& x, at::Tensor&) { x = x.unsqueeze(1); };
  EXPECT_THAT(errors<ConfigError>(options, 1), Each(HasSubstr("the evaluation set of rank 1")));
}

TEST(DataDigest, ChangesOfARunsDataAreDescribed) {
  comm::run_threads(1, {}, [&](comm::CommunicatorPtr comm) {
    const DataDigest before = check_same_data(BlobsTask(kSets), *comm);
    EXPECT_EQ(describe_change(before, before), "");
    EXPECT_EQ(digest_from_json(to_json(before)), before);
    EXPECT_EQ(describe_change({}, before), "") << "older checkpoints have no digest";
    BlobsOptions options = kSets;
    options.eval_size = 9;
    options.change_test = relabel;
    EXPECT_EQ(describe_change(before, check_same_data(BlobsTask(options), *comm)),
              "the evaluation set has 9 samples, 7 before; the test set has other samples than before");
  });
}

TEST(DataDigest, ARecordThatOneRankCannotReadEndsAll) {
  BlobsOptions options = kSets;
  options.broken_record = 50;  // the ninth of the sixteen
  EXPECT_THAT(errors<DataError>(options, 1), Each("rank 1: blobs: record 50 is broken"));
}

}  // namespace
}  // namespace tessera::train
