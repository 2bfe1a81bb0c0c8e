#include "checkpoint/hdf5_reader.h"

#include <algorithm>

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/hdf5_library.h"
#include "core/check.h"
#include "core/input_file.h"
#include "core/str.h"
#include "core/utf8.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;

bool has_fields(hid_t type, size_t exponent_at, size_t exponent_bits, size_t bias) {
  size_t sign = 0, exponent = 0, exponent_size = 0, mantissa = 0, mantissa_size = 0;
  return H5Tget_fields(type, &sign, &exponent, &exponent_size, &mantissa, &mantissa_size) >= 0 &&
         sign == 15 && exponent == exponent_at && exponent_size == exponent_bits && mantissa == 0 &&
         mantissa_size == exponent_at && H5Tget_ebias(type) == bias;
}

std::optional<DType> float_type(hid_t type) {
  const auto is = [&](hid_t little, hid_t big) {
    return H5Tequal(type, little) > 0 || H5Tequal(type, big) > 0;
  };
  if (is(H5T_IEEE_F64LE, H5T_IEEE_F64BE)) return DType::kFloat64;
  if (is(H5T_IEEE_F32LE, H5T_IEEE_F32BE)) return DType::kFloat32;
  if (H5Tget_size(type) != 2) return std::nullopt;
  if (has_fields(type, 10, 5, 15)) return DType::kFloat16;
  if (has_fields(type, 7, 8, 127)) return DType::kBFloat16;
  return std::nullopt;
}

std::optional<DType> integer_type(hid_t type) {
  if (H5Tget_sign(type) == H5T_SGN_NONE)
    return H5Tget_size(type) == 1 ? std::optional(DType::kUInt8) : std::nullopt;
  switch (H5Tget_size(type)) {
    case 8: return DType::kInt64;
    case 4: return DType::kInt32;
    case 2: return DType::kInt16;
    case 1: return DType::kInt8;
    default: return std::nullopt;
  }
}

/// h5py's bool: an enum of one byte.
std::optional<DType> enum_type(hid_t type) {
  signed char no = -1, yes = -1;
  const bool is_bool = H5Tget_size(type) == 1 && H5Tget_nmembers(type) == 2 &&
                       H5Tenum_valueof(type, "FALSE", &no) >= 0 && H5Tenum_valueof(type, "TRUE", &yes) >= 0 &&
                       no == 0 && yes == 1;
  return is_bool ? std::optional(DType::kBool) : std::nullopt;
}

std::optional<DType> element_type(hid_t type) {
  switch (H5Tget_class(type)) {
    case H5T_FLOAT: return float_type(type);
    case H5T_INTEGER: return integer_type(type);
    case H5T_ENUM: return enum_type(type);
    default: return std::nullopt;
  }
}

std::string describe(hid_t type) {
  const size_t bytes = H5Tget_size(type);
  switch (H5Tget_class(type)) {
    case H5T_FLOAT: return str("a floating-point type of ", bytes, " bytes");
    case H5T_INTEGER:
      return str(H5Tget_sign(type) == H5T_SGN_NONE ? "an unsigned" : "a signed", " integer of ", bytes,
                 " bytes");
    case H5T_STRING: return "text";
    case H5T_COMPOUND: return "a compound type";
    case H5T_VLEN: return "rows of different lengths";
    default: return "another type";
  }
}

constexpr int64_t kLargestCompression = 4096;  // as a factor; deflate reaches 1032

bool is_little_endian(hid_t type) { return H5Tget_size(type) == 1 || H5Tget_order(type) == H5T_ORDER_LE; }

}  // namespace

struct Hdf5File::Handles {
  const fs::path& path;
  Hdf5Id file;

  [[noreturn]] void fail(const std::string& name, const std::string& what) const {
    throw CheckpointError(str(path.string(), ": ", quoted_name(name), " ", what));
  }
  Hdf5Id own(const std::string& name, hid_t id, Hdf5Id::Close close) const {
    if (id < 0) fail(name, str("cannot be read: ", hdf5_reason()));
    return {id, close};
  }
  Hdf5Id dataset(const std::string& name) const {
    if (name.empty() || name == "/") fail(name, "is not the name of a dataset");
    Hdf5Id object = own(name, H5Oopen(file, name.c_str(), H5P_DEFAULT), H5Oclose);
    if (H5Iget_type(object) != H5I_DATASET) fail(name, "is not a dataset");
    return object;
  }
};

Hdf5File::Hdf5File(const fs::path& path) : path_(path), handles_(new Handles{path_, {}}) {
  try {
    file_bytes_ = InputFile(path).bytes();
  } catch (const DiskError& error) {
    throw CheckpointError(error.what());
  }
  const Hdf5Library library;
  handles_->file = {H5Fopen(path.c_str(), H5F_ACC_RDONLY, H5P_DEFAULT), H5Fclose};
  if (handles_->file < 0)
    throw CheckpointError(str("cannot open ", path.string(), ": no HDF5 file: ", hdf5_reason()));
}

Hdf5File::~Hdf5File() {
  const Hdf5Library library;
  handles_.reset();
}

std::vector<std::string> Hdf5File::names() const {
  const Hdf5Library library;
  std::vector<std::string> links, names;
  const auto keep = [](hid_t, const char* name, const H5L_info_t*, void* into) -> herr_t {
    static_cast<std::vector<std::string>*>(into)->emplace_back(name);
    return 0;
  };
  H5Lvisit(handles_->file, H5_INDEX_NAME, H5_ITER_NATIVE, keep, &links);
  for (const std::string& name : links) {
    const Hdf5Id object(H5Oopen(handles_->file, name.c_str(), H5P_DEFAULT), H5Oclose);
    if (object >= 0 && H5Iget_type(object) == H5I_DATASET) names.push_back(name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

Hdf5Stored Hdf5File::find(const std::string& name) const {
  const Hdf5Library library;
  const Hdf5Id dataset = handles_->dataset(name);
  const Hdf5Id type = handles_->own(name, H5Dget_type(dataset), H5Tclose);
  const Hdf5Id space = handles_->own(name, H5Dget_space(dataset), H5Sclose);
  const Hdf5Id creation = handles_->own(name, H5Dget_create_plist(dataset), H5Pclose);
  const std::optional<DType> element = element_type(type);
  if (!element)
    handles_->fail(name, str("holds ", describe(type),
                             "; expected bool, int8 to int64, uint8, fp16, bf16, fp32 or fp64"));

  Hdf5Stored stored{.name = name, .type = *element, .shape = {}, .bytes = 0, .offset = std::nullopt};
  std::vector<hsize_t> sizes(static_cast<size_t>(std::max(0, H5Sget_simple_extent_ndims(space))));
  H5Sget_simple_extent_dims(space, sizes.data(), nullptr);
  stored.shape.assign(sizes.begin(), sizes.end());
  if (H5Sget_simple_extent_type(space) == H5S_NULL) stored.shape = {0};
  stored.bytes = size_bytes(*element);
  for (const int64_t size : stored.shape)
    if (size < 0 || __builtin_mul_overflow(stored.bytes, size, &stored.bytes))
      handles_->fail(name, "has more bytes than can be counted");

  const haddr_t address =
      H5Dget_offset(dataset);  // defined for contiguous data in this file that was written
  const H5D_layout_t layout = H5Pget_layout(creation);
  const bool elsewhere = layout == H5D_VIRTUAL || H5Pget_external_count(creation) > 0;
  if (!elsewhere && stored.bytes / kLargestCompression > file_bytes_)
    handles_->fail(name, str("says to have shape ", describe_shape(stored.shape), ", ", stored.bytes,
                             " bytes, in a file of ", file_bytes_,
                             "; expected a size that can be true (the file is damaged)"));
  // Compact data is in the object's header. HDF5 1.10 copies as many bytes as the shape needs, also past the
  // end of the stored data.
  const auto held = static_cast<int64_t>(H5Dget_storage_size(dataset));
  if (layout == H5D_COMPACT && held != stored.bytes)
    handles_->fail(name, str("says to have shape ", describe_shape(stored.shape), ", ", stored.bytes,
                             " bytes, but holds ", held, " (the file is damaged)"));
  const bool plain = layout == H5D_CONTIGUOUS && !elsewhere && is_little_endian(type);
  if (plain && address != HADDR_UNDEF && held == stored.bytes) stored.offset = static_cast<int64_t>(address);
  return stored;
}

void Hdf5File::read(const Hdf5Stored& stored, std::span<std::byte> destination) const {
  TESSERA_CHECK(static_cast<int64_t>(destination.size()) == stored.bytes);
  if (destination.empty()) return;
  const Hdf5Library library;
  const Hdf5Id dataset = handles_->dataset(stored.name);
  const Hdf5Id type = handles_->own(stored.name, H5Dget_type(dataset), H5Tclose);
  const Hdf5Id memory = handles_->own(stored.name, H5Tcopy(type), H5Tclose);
  if (!is_little_endian(type)) H5Tset_order(memory, H5T_ORDER_LE);
  if (H5Dread(dataset, memory, H5S_ALL, H5S_ALL, H5P_DEFAULT, destination.data()) < 0)
    handles_->fail(stored.name, str("cannot be read: ", hdf5_reason()));
}

}  // namespace tessera::checkpoint
