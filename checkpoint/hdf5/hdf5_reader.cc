#include "checkpoint/hdf5/hdf5_reader.h"

#include <algorithm>
#include <array>

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/hdf5/hdf5_library.h"
#include "core/check.h"
#include "core/files/input_file.h"
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
    case H5T_REFERENCE: return "references to objects or regions";
    case H5T_ARRAY: return "an array in each element";
    case H5T_OPAQUE:
    case H5T_BITFIELD: return "bytes without a type";
    default: return "another type";
  }
}

constexpr int64_t kLargestCompression = 4096;  // as a factor; deflate reaches 1032

bool is_little_endian(hid_t type) { return H5Tget_size(type) == 1 || H5Tget_order(type) == H5T_ORDER_LE; }

}  // namespace

struct Hdf5File::Handles {
  const fs::path& path;
  Hdf5Id file;
  Hdf5Id links = {};          ///< how links are followed: not to other files
  std::string external = {};  ///< set when such a link was met: where it leads

  template <class... What>
  [[noreturn]] void fail(const std::string& name, const What&... what) const {
    throw CheckpointError(path, ": ", quoted_name(name), " ", what...);
  }
  Hdf5Id own(const std::string& name, hid_t id, Hdf5Id::Close close) const {
    if (id < 0) fail(name, "cannot be read: ", hdf5_reason());
    return {id, close};
  }

  static herr_t refuse_external(const char*, const char*, const char* file, const char* object, unsigned*,
                                hid_t, void* into) {
    *static_cast<std::string*>(into) = str(quoted_name(object), " in ", quoted_name(file));
    return -1;
  }

  void open() {
    file = {H5Fopen(path.c_str(), H5F_ACC_RDONLY, H5P_DEFAULT), H5Fclose};
    if (file < 0) throw CheckpointError("cannot open ", path, ": no HDF5 file: ", hdf5_reason());
    links = {H5Pcreate(H5P_LINK_ACCESS), H5Pclose};
    if (links < 0 || H5Pset_elink_cb(links, refuse_external, &external) < 0)
      throw CheckpointError("cannot open ", path, ": ", hdf5_reason());
  }

  Hdf5Id dataset(const std::string& name) {
    if (name.empty() || name == "/") fail(name, "is not the name of a dataset");
    external.clear();
    Hdf5Id object(H5Oopen(file, name.c_str(), links), H5Oclose);
    if (object < 0) {
      const std::string reason = hdf5_reason();
      if (!external.empty())
        fail(name, "leads by an external link to ", external,
             "; expected a dataset of this file: no data is taken from other files");
      check_links(name);
      fail(name, "cannot be read: ", reason);
    }
    if (H5Iget_type(object) != H5I_DATASET) fail(name, "is not a dataset");
    return object;
  }

  /// Throws if the path has a link that leads nowhere, or one of a kind that is not HDF5's.
  void check_links(const std::string& name) const {
    for (size_t end = name.find('/', 1);; end = name.find('/', end + 1)) {
      const std::string part = name.substr(0, end);
      H5L_info_t info{};
      if (H5Lget_info(file, part.c_str(), &info, links) < 0) return;
      if (info.type > H5L_TYPE_EXTERNAL)
        fail(name, "leads through a link of the user-defined type ", static_cast<int>(info.type),
             "; expected a dataset of this file");
      if (info.type == H5L_TYPE_SOFT && H5Oexists_by_name(file, part.c_str(), links) <= 0) {
        std::string target(info.u.val_size, '\0');
        if (H5Lget_val(file, part.c_str(), target.data(), target.size(), links) < 0) target.clear();
        target.resize(std::min(target.find('\0'), target.size()));
        fail(name, "leads by a soft link to ", quoted_name(target), ", which is not in the file");
      }
      if (end == name.npos) return;
    }
  }

  /// Throws if the elements are in other files, or pass through code that is not HDF5's. Opens no other file.
  void check_storage(const std::string& name, hid_t creation) const {
    constexpr size_t kNameBytes = 4096;
    std::array<char, kNameBytes> text{};
    const auto named = [&text] { return quoted_name(text.data()); };
    if (H5Pget_layout(creation) == H5D_VIRTUAL) {
      size_t count = 0;
      H5Pget_virtual_count(creation, &count);
      std::string sources = "no source";
      if (count > 0 && H5Pget_virtual_filename(creation, 0, text.data(), text.size() - 1) >= 0) {
        sources = str(count, count == 1 ? " source, " : " sources, the first ", named());
      }
      fail(name, "is a virtual dataset (", sources,
           "): its elements are not here; expected a dataset that has them, such as "
           "new.create_dataset(NAME, data=old[NAME][:]) makes with h5py");
    }
    if (const int count = H5Pget_external_count(creation); count > 0) {
      H5Pget_external(creation, 0, text.size() - 1, text.data(), nullptr, nullptr);
      fail(name, "has its elements in ", count == 1 ? "another file, " : "other files, the first ", named(),
           " (external storage); expected a dataset that has them: no data is taken from other "
           "files");
    }
    const int num_filters = H5Pget_nfilters(creation);
    for (int i = 0; i < num_filters; ++i) {
      text.fill('\0');
      unsigned flags = 0;
      size_t num_values = 0;
      const H5Z_filter_t filter = H5Pget_filter2(creation, static_cast<unsigned>(i), &flags, &num_values,
                                                 nullptr, text.size() - 1, text.data(), nullptr);
      // For a filter that is not HDF5's own, H5Zfilter_avail would load a plugin.
      const bool is_known = filter > 0 && filter < H5Z_FILTER_RESERVED && H5Zfilter_avail(filter) > 0;
      if (!is_known)
        fail(name, "is stored through the filter ", static_cast<int>(filter),
             text[0] == '\0' ? "" : str(" (", named(), ")"),
             ", which is not here; expected gzip, shuffle or none");
    }
  }

  /// Throws if elements were never written: HDF5 would give the fill value for them. `shape`: not empty.
  void check_written(const std::string& name, hid_t dataset, hid_t space, hid_t creation,
                     const std::vector<int64_t>& shape) const {
    constexpr const char* kWhy = "would be read as the fill value";
    const H5D_layout_t layout = H5Pget_layout(creation);
    if (layout == H5D_CONTIGUOUS && H5Dget_offset(dataset) == HADDR_UNDEF)
      fail(name, "was never written: all of its elements ", kWhy, "; expected a dataset with data");
    if (layout != H5D_CHUNKED) return;
    std::array<hsize_t, H5S_MAX_RANK> chunk{};
    const int rank = H5Pget_chunk(creation, H5S_MAX_RANK, chunk.data());
    hsize_t expected = 1, written = 0;
    for (int dim = 0; dim < rank && dim < std::ssize(shape); ++dim) {
      const auto size = static_cast<hsize_t>(shape[static_cast<size_t>(dim)]);
      const hsize_t part = std::max<hsize_t>(1, chunk[static_cast<size_t>(dim)]);
      expected *= size / part + (size % part != 0 ? 1 : 0);
    }
    if (H5Dget_num_chunks(dataset, space, &written) < 0) fail(name, "cannot be read: ", hdf5_reason());
    if (written < expected)
      fail(name, "was not written as a whole: ", expected - written, " of its ", expected,
           " chunks are not in the file, and their elements ", kWhy,
           "; expected a dataset with all of its data");
  }
};

Hdf5File::Hdf5File(const fs::path& path) : path_(path), handles_(new Handles{path_, {}}) {
  try {
    file_bytes_ = InputFile(path).bytes();
  } catch (const DiskError& error) {
    throw CheckpointError(error.what());
  }
  const Hdf5Library library;
  handles_->open();
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
    const Hdf5Id object(H5Oopen(handles_->file, name.c_str(), handles_->links), H5Oclose);
    if (object >= 0 && H5Iget_type(object) == H5I_DATASET) names.push_back(name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

bool Hdf5File::has(const std::string& name) const {
  const Hdf5Library library;
  for (size_t end = name.find('/', 1); !name.empty(); end = name.find('/', end + 1)) {
    const htri_t found = H5Lexists(handles_->file, name.substr(0, end).c_str(), handles_->links);
    if (found == 0) return false;
    if (found < 0 || end == name.npos) return true;  // find() says why it cannot be looked up
  }
  return false;
}

Hdf5Stored Hdf5File::find(const std::string& name) const {
  const Hdf5Library library;
  const Hdf5Id dataset = handles_->dataset(name);
  const Hdf5Id creation = handles_->own(name, H5Dget_create_plist(dataset), H5Pclose);
  handles_->check_storage(name,
                          creation);  // first: the space of a virtual dataset is looked up in its sources
  const Hdf5Id type = handles_->own(name, H5Dget_type(dataset), H5Tclose);
  const Hdf5Id space = handles_->own(name, H5Dget_space(dataset), H5Sclose);
  const std::optional<DType> element = element_type(type);
  if (!element)
    handles_->fail(name, "holds ", describe(type),
                   "; expected bool, int8 to int64, uint8, fp16, bf16, fp32 or fp64");

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
  if (stored.bytes / kLargestCompression > file_bytes_)
    handles_->fail(name, "says to have shape ", describe_shape(stored.shape), ", ", stored.bytes,
                   " bytes, in a file of ", file_bytes_,
                   "; expected a size that can be true (the file is damaged)");
  // Compact data is in the object's header. HDF5 1.10 copies as many bytes as the shape needs, also past the
  // end of the stored data.
  const auto held = static_cast<int64_t>(H5Dget_storage_size(dataset));
  if (layout == H5D_COMPACT && held != stored.bytes)
    handles_->fail(name, "says to have shape ", describe_shape(stored.shape), ", ", stored.bytes,
                   " bytes, but holds ", held, " (the file is damaged)");
  if (stored.bytes > 0) handles_->check_written(name, dataset, space, creation, stored.shape);
  const bool plain = layout == H5D_CONTIGUOUS && is_little_endian(type);
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
    handles_->fail(stored.name, "cannot be read: ", hdf5_reason());
}

}  // namespace tessera::checkpoint
