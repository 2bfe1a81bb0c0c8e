// HDF5 files whose data is elsewhere, or nowhere: each is refused by name before any data is read.
#include "checkpoint/hdf5/hdf5_reader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <hdf5.h>

#include <filesystem>
#include <functional>
#include <numeric>
#include <vector>

#include "checkpoint/checkpoint_error.h"
#include "core/files/temporary_folder.h"
#include "tests/support/errors.h"
#include "tests/support/files.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;
using tessera::testing::error_of;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr hsize_t kShape[] = {64, 8}, kChunk[] = {16, 8};
constexpr int64_t kNumel = 64 * 8;

class Hdf5ReaderTest : public ::testing::Test {
 protected:
  /// Makes a file; `fill` puts "x" into it.
  fs::path make(const std::string& name, const std::function<void(hid_t file)>& fill,
                bool latest_format = false) const {
    const fs::path path = folder_.path() / name;
    const hid_t access = H5Pcreate(H5P_FILE_ACCESS);
    if (latest_format) H5Pset_libver_bounds(access, H5F_LIBVER_LATEST, H5F_LIBVER_LATEST);
    const hid_t file = H5Fcreate(path.c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, access);
    H5Pclose(access);
    fill(file);
    EXPECT_GE(H5Fclose(file), 0);
    return path;
  }
  /// Adds a dataset (64, 8) of 0, 1, 2, … of which the first `num_rows` are written.
  static void add(hid_t file, const char* name, hid_t creation, hsize_t num_rows,
                  const hsize_t* most = nullptr) {
    const hid_t space = H5Screate_simple(2, kShape, most);
    const hid_t dataset = H5Dcreate2(file, name, H5T_IEEE_F32LE, space, H5P_DEFAULT, creation, H5P_DEFAULT);
    ASSERT_GE(dataset, 0);
    if (num_rows > 0) {
      std::vector<float> values(kNumel);
      std::iota(values.begin(), values.end(), 0.0f);
      const hsize_t start[] = {0, 0}, count[] = {num_rows, 8};
      const hid_t memory = H5Screate_simple(2, count, nullptr);
      H5Sselect_hyperslab(space, H5S_SELECT_SET, start, nullptr, count, nullptr);
      ASSERT_GE(H5Dwrite(dataset, H5T_NATIVE_FLOAT, memory, space, H5P_DEFAULT, values.data()), 0);
      H5Sclose(memory);
    }
    H5Dclose(dataset);
    H5Sclose(space);
  }
  static hid_t chunked() {
    const hid_t creation = H5Pcreate(H5P_DATASET_CREATE);
    H5Pset_chunk(creation, 2, kChunk);
    return creation;
  }
  /// A file whose "x" has all of its data.
  fs::path plain() const {
    return make("plain.h5", [](hid_t file) { add(file, "x", H5P_DEFAULT, 64); });
  }
  static void expect_values(const fs::path& path, const std::string& name = "x") {
    const Hdf5File file(path);
    const Hdf5Stored stored = file.find(name);
    std::vector<float> values(kNumel), expected(kNumel);
    std::iota(expected.begin(), expected.end(), 0.0f);
    file.read(stored, std::as_writable_bytes(std::span(values)));
    EXPECT_EQ(values, expected);
  }
  static std::string refused(const fs::path& path, const std::string& name = "x") {
    return error_of<CheckpointError>([&] {
      const Hdf5File file(path);
      EXPECT_TRUE(file.has(name));
      file.find(name);
    });
  }

  const TemporaryFolder folder_{"hdf5_reader"};
};

TEST_F(Hdf5ReaderTest, AVirtualDatasetIsRefusedWhetherItsSourcesAreThereOrNot) {
  for (const std::string& source : {plain().string(), std::string("/nonexistent.h5"), std::string(".")}) {
    const fs::path path = make("virtual.h5", [&](hid_t file) {
      add(file, "y", H5P_DEFAULT, 64);
      const hid_t creation = H5Pcreate(H5P_DATASET_CREATE), space = H5Screate_simple(2, kShape, nullptr);
      ASSERT_GE(H5Pset_virtual(creation, space, source.c_str(), "y", space), 0);
      H5Sclose(space);
      add(file, "x", creation, 0);
      H5Pclose(creation);
    });
    EXPECT_THAT(refused(path),
                AllOf(HasSubstr(path.string() + ": 'x' is a virtual dataset (1 source, '" + source),
                      HasSubstr("its elements are not here")));
    expect_values(path, "y");
  }
}

TEST_F(Hdf5ReaderTest, OneOfManySourcesThatAreMissingIsNamed) {
  const fs::path path = make("virtual.h5", [&](hid_t file) {
    const hid_t creation = H5Pcreate(H5P_DATASET_CREATE), space = H5Screate_simple(2, kShape, nullptr);
    for (hsize_t half = 0; half < 2; ++half) {
      const hsize_t start[] = {32 * half, 0}, count[] = {32, 8};
      H5Sselect_hyperslab(space, H5S_SELECT_SET, start, nullptr, count, nullptr);
      ASSERT_GE(H5Pset_virtual(creation, space, half == 0 ? plain().c_str() : "/nonexistent.h5", "x", space),
                0);
    }
    H5Sclose(space);
    add(file, "x", creation, 0);
    H5Pclose(creation);
  });
  EXPECT_THAT(refused(path), HasSubstr("is a virtual dataset (2 sources, the first '" + plain().string()));
}

// Reading it would show any file that the user can read.
TEST_F(Hdf5ReaderTest, ExternalStorageIsRefused) {
  const fs::path secret = folder_.path() / "secret";
  write_text(secret, std::string(kNumel * 4, 's'));
  for (const std::string& other : {secret.string(), std::string("/nonexistent.bin")}) {
    const fs::path path = make("external.h5", [&](hid_t file) {
      const hid_t creation = H5Pcreate(H5P_DATASET_CREATE);
      ASSERT_GE(H5Pset_external(creation, other.c_str(), 0, kNumel * 4), 0);
      add(file, "x", creation, 0);
      H5Pclose(creation);
    });
    EXPECT_THAT(refused(path),
                AllOf(HasSubstr(path.string() + ": 'x' has its elements in another file, '" + other),
                      HasSubstr("external storage")));
  }
}

TEST_F(Hdf5ReaderTest, LinksOutOfTheFileAreRefused) {
  const fs::path other = make("other.h5", [](hid_t file) {
    const hid_t group = H5Gcreate2(file, "g", H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
    add(group, "x", H5P_DEFAULT, 64);
    H5Gclose(group);
  });
  const fs::path path = make("links.h5", [&](hid_t file) {
    H5Lcreate_external(other.c_str(), "g/x", file, "x", H5P_DEFAULT, H5P_DEFAULT);
    H5Lcreate_external(other.c_str(), "g", file, "group", H5P_DEFAULT, H5P_DEFAULT);
    H5Lcreate_external("/nonexistent.h5", "x", file, "missing", H5P_DEFAULT, H5P_DEFAULT);
    H5Lcreate_soft("/group/x", file, "soft", H5P_DEFAULT, H5P_DEFAULT);
  });
  const std::string leads = " leads by an external link to ";
  EXPECT_THAT(refused(path), HasSubstr("'x'" + leads + "'g/x' in '" + other.string()));
  EXPECT_THAT(refused(path, "group/x"), HasSubstr("'group/x'" + leads + "'g' in '" + other.string()));
  EXPECT_THAT(refused(path, "missing"), HasSubstr("'missing'" + leads + "'x' in '/nonexistent.h5'"));
  EXPECT_THAT(refused(path, "soft"), HasSubstr("'soft'" + leads + "'g' in '" + other.string()));
  EXPECT_TRUE(Hdf5File(path).names().empty());
}

TEST_F(Hdf5ReaderTest, SoftLinksAreFollowedWithinTheFile) {
  const fs::path path = make("soft.h5", [](hid_t file) {
    const hid_t group = H5Gcreate2(file, "g", H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
    add(group, "y", H5P_DEFAULT, 64);
    H5Gclose(group);
    H5Lcreate_soft("/g/y", file, "x", H5P_DEFAULT, H5P_DEFAULT);
    H5Lcreate_soft("/g", file, "h", H5P_DEFAULT, H5P_DEFAULT);
    H5Lcreate_soft("/nowhere", file, "dangling", H5P_DEFAULT, H5P_DEFAULT);
    H5Lcreate_soft("/loop", file, "loop", H5P_DEFAULT, H5P_DEFAULT);
  });
  expect_values(path, "x");
  expect_values(path, "g/y");
  expect_values(path, "h/y");
  EXPECT_THAT(refused(path, "dangling"),
              HasSubstr("'dangling' leads by a soft link to '/nowhere', which is not in the file"));
  EXPECT_THAT(refused(path, "loop"),
              HasSubstr("'loop' leads by a soft link to '/loop', which is not in the file"));
  for (const char* missing : {"", "y", "g/x", "nowhere/x"})
    EXPECT_FALSE(Hdf5File(path).has(missing)) << missing;
}

TEST_F(Hdf5ReaderTest, WhatWasNeverWrittenIsRefused) {
  const fs::path path = make("never.h5", [](hid_t file) { add(file, "x", H5P_DEFAULT, 0); });
  EXPECT_THAT(refused(path), HasSubstr(path.string() + ": 'x' was never written"));
  EXPECT_THAT(refused(make("filled.h5",
                           [](hid_t file) {
                             const hid_t creation = H5Pcreate(H5P_DATASET_CREATE);
                             const float seven = 7;
                             H5Pset_fill_value(creation, H5T_NATIVE_FLOAT, &seven);
                             add(file, "x", creation, 0);
                             H5Pclose(creation);
                           })),
              HasSubstr("was never written"));
}

// Each of the ways in which a file lists its chunks.
TEST_F(Hdf5ReaderTest, ChunksThatWereNeverWrittenAreCounted) {
  constexpr hsize_t kUnlimited = H5S_UNLIMITED;
  constexpr hsize_t kMost[][2] = {{64, 8}, {kUnlimited, 8}, {kUnlimited, kUnlimited}};
  for (const bool latest_format : {false, true})
    for (const bool packed : {false, true})
      for (const auto& most : kMost)
        for (const hsize_t rows : {0, 16, 40, 64}) {
          const fs::path path = make(
              "chunks.h5",
              [&](hid_t file) {
                const hid_t creation = chunked();
                if (packed) H5Pset_deflate(creation, 4);
                add(file, "x", creation, rows, most);
                H5Pclose(creation);
              },
              latest_format);
          const hsize_t written = (rows + 15) / 16;
          if (written == 4)
            expect_values(path);
          else
            EXPECT_THAT(refused(path),
                        HasSubstr("was not written as a whole: " + std::to_string(4 - written) +
                                  " of its 4 chunks are not in the file"));
        }
}

TEST_F(Hdf5ReaderTest, OneChunkForAll) {
  for (const hsize_t rows : {0, 64}) {
    const fs::path path = make(
        "one.h5",
        [&](hid_t file) {
          const hid_t creation = H5Pcreate(H5P_DATASET_CREATE);
          H5Pset_chunk(creation, 2, kShape);
          add(file, "x", creation, rows);
          H5Pclose(creation);
        },
        /*latest_format=*/true);
    if (rows > 0)
      expect_values(path);
    else
      EXPECT_THAT(refused(path), HasSubstr("1 of its 1 chunks are not in the file"));
  }
}

// With the last rows in a chunk that is not full.
TEST_F(Hdf5ReaderTest, ChunksAtTheEdgeCount) {
  const fs::path path = make("edge.h5", [&](hid_t file) {
    const hid_t creation = H5Pcreate(H5P_DATASET_CREATE);
    const hsize_t chunk[] = {15, 3};
    H5Pset_chunk(creation, 2, chunk);
    add(file, "x", creation, 64);
    H5Pclose(creation);
  });
  expect_values(path);
}

TEST_F(Hdf5ReaderTest, DatasetsWithoutElementsNeedNoData) {
  const fs::path path = make("empty.h5", [](hid_t file) {
    const hsize_t none[] = {0, 8};
    const hid_t space = H5Screate_simple(2, none, nullptr);
    H5Dclose(H5Dcreate2(file, "x", H5T_IEEE_F32LE, space, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT));
    H5Sclose(space);
  });
  EXPECT_EQ(Hdf5File(path).find("x").bytes, 0);
}

// HDF5 would load its code from a plugin.
TEST_F(Hdf5ReaderTest, FiltersThatAreNotOfHdf5AreRefused) {
  const fs::path path = make("filter.h5", [](hid_t file) {
    const hid_t creation = chunked();
    ASSERT_GE(H5Pset_filter(creation, 32001, H5Z_FLAG_OPTIONAL, 0, nullptr), 0);
    add(file, "x", creation, 64);
    H5Pclose(creation);
  });
  EXPECT_THAT(refused(path), HasSubstr(path.string() + ": 'x' is stored through the filter 32001"));
}

TEST_F(Hdf5ReaderTest, ReferencesAreNoData) {
  const fs::path path = make("references.h5", [](hid_t file) {
    const hid_t space = H5Screate_simple(2, kShape, nullptr);
    for (const auto& [name, type] : {std::pair("x", H5T_STD_REF_DSETREG), std::pair("y", H5T_STD_REF_OBJ)})
      H5Dclose(H5Dcreate2(file, name, type, space, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT));
    H5Sclose(space);
  });
  for (const char* name : {"x", "y"})
    EXPECT_THAT(refused(path, name), HasSubstr("holds references to objects or regions"));
}

}  // namespace
}  // namespace tessera::checkpoint
