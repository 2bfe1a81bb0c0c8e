#include "checkpoint/hdf5/hdf5_image.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/hdf5/hdf5_library.h"
#include "core/error.h"
#include "core/files/disk_error.h"
#include "core/files/file_descriptor.h"
#include "core/str.h"

namespace tessera::checkpoint {
namespace {

// A page, so that data can be mapped, and read or written with O_DIRECT.
constexpr hsize_t kAlignmentBytes = 4096;

/// A hyperslab: `start` and `count` by dimension.
struct Hdf5Block {
  std::vector<hsize_t> start, count;
  int64_t numel = 0;
};

/// Appends the blocks of positions [begin, end) below the indices `start` of the leading dimensions.
void add_blocks(std::span<const int64_t> shape, std::vector<hsize_t> start, int64_t begin, int64_t end,
                std::vector<Hdf5Block>& blocks) {
  if (begin >= end) return;
  const size_t dim = start.size();
  int64_t inner = 1;  // positions in one step along this dimension
  for (size_t i = dim + 1; i < shape.size(); ++i) inner *= shape[i];
  int64_t first = begin / inner;
  const int64_t last = (end - 1) / inner;
  const auto descend = [&](int64_t row, int64_t from, int64_t to) {
    std::vector<hsize_t> below = start;
    below.push_back(static_cast<hsize_t>(row));
    add_blocks(shape, std::move(below), from, to, blocks);
  };
  if (first == last && end - begin < inner)
    return descend(first, begin % inner, begin % inner + (end - begin));
  if (begin % inner != 0) descend(first++, begin % inner, inner);
  const int64_t full_end = end / inner;
  if (full_end > first) {
    Hdf5Block block{
        .start = start, .count = std::vector<hsize_t>(dim, 1), .numel = (full_end - first) * inner};
    block.start.push_back(static_cast<hsize_t>(first));
    block.count.push_back(static_cast<hsize_t>(full_end - first));
    for (size_t i = dim + 1; i < shape.size(); ++i) {
      block.start.push_back(0);
      block.count.push_back(static_cast<hsize_t>(shape[i]));
    }
    blocks.push_back(std::move(block));
  }
  if (end % inner != 0) descend(full_end, 0, end % inner);
}

/// The blocks of positions [begin, end), counted row by row, in order, that HDF5 can select: at most
/// 2 x dimensions - 1. For a scalar, one block without start and count.
std::vector<Hdf5Block> blocks_of_range(std::span<const int64_t> shape, int64_t begin, int64_t end) {
  if (shape.empty()) return {{.start = {}, .count = {}, .numel = end - begin}};
  std::vector<Hdf5Block> blocks;
  add_blocks(shape, {}, begin, end, blocks);
  return blocks;
}

}  // namespace

bool is_hdf5_type(DType type) {
  return type <= DType::kUInt64 || type == DType::kComplex64 || type == DType::kComplex128;
}

std::string hdf5_path(std::string_view group, std::string_view name) {
  if (name == ".") return str(group, "%2E");
  std::string link(group);
  for (char c : name) {
    if (c == '/')
      link += "%2F";
    else if (c == '%')
      link += "%25";
    else
      link += c;
  }
  return link;
}

struct Hdf5Builder::Handles {
  class AnonymousFile {
   public:
    AnonymousFile() : descriptor_(::memfd_create("tessera-hdf5", MFD_CLOEXEC)) {
      if (!descriptor_) throw CheckpointError("cannot create a file in memory: ", std::strerror(errno));
    }

    std::string path() const { return str("/proc/self/fd/", descriptor_.get()); }
    int64_t bytes() const {
      struct stat status{};
      return ::fstat(descriptor_.get(), &status) == 0 ? status.st_size : -1;
    }
    std::string read(int64_t begin, int64_t end) const {
      std::string bytes(static_cast<size_t>(end - begin), '\0');
      for (size_t got = 0; got < bytes.size();) {
        const ssize_t n = ::pread(descriptor_.get(), bytes.data() + got, bytes.size() - got,
                                  begin + static_cast<int64_t>(got));
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0)
          throw CheckpointError("cannot read a file in memory: ",
                                n < 0 ? std::strerror(errno) : "it ends early");
        got += static_cast<size_t>(n);
      }
      return bytes;
    }

   private:
    FileDescriptor descriptor_;
  };

  // Held until everything below is closed: members are destroyed from the last to the first.
  Hdf5Library library;
  const std::string* purpose = nullptr;
  AnonymousFile memory;
  Hdf5Id file, links;
  std::vector<std::pair<int64_t, int64_t>> data;  // byte ranges of the datasets
  std::vector<int64_t> offsets;

  template <class Result>
  Result check(Result result, const std::string& what) const {
    if (result < 0) throw CheckpointError("cannot lay out ", *purpose, ": ", what, ": ", reason());
    return result;
  }
  /// A limit on file size (ulimit -f) also holds for the file in memory, and HDF5 does not report it.
  std::string reason() const {
    rlimit limit{};
    const bool is_limited = ::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
    return is_limited && errno == EFBIG ? describe_errno(EFBIG) : hdf5_reason();
  }
  Hdf5Id own(hid_t id, Hdf5Id::Close close, const std::string& what) const {
    return {check(id, what), close};
  }

  void create(Hdf5Readers readers);
  Hdf5Id type(DType type, const std::string& path) const;
  Hdf5Id space(const std::vector<int64_t>& shape, const std::string& path) const;
  Hdf5Id dataset(const Hdf5Dataset& dataset, hid_t creation) const;
  Hdf5Id creation_properties(const std::string& path) const;
  void attribute(hid_t object, const Hdf5Attribute& attribute, const std::string& path) const;
  void make_groups(const std::string& path) const;
};

void Hdf5Builder::Handles::create(Hdf5Readers readers) {
  const Hdf5Id access = own(H5Pcreate(H5P_FILE_ACCESS), H5Pclose, "file access");
  // The stdio driver, because the default one asks for the file's real path, and a file in memory has none.
  check(H5Pset_fapl_stdio(access), "file access");
  check(H5Pset_fclose_degree(access, H5F_CLOSE_STRONG), "file access");
  check(H5Pset_libver_bounds(access, H5F_LIBVER_V18,
                             readers == Hdf5Readers::kSince1_8 ? H5F_LIBVER_V18 : H5F_LIBVER_V110),
        "versions");
  check(H5Pset_alignment(access, kAlignmentBytes, kAlignmentBytes), "alignment");
  const Hdf5Id creation = own(H5Pcreate(H5P_FILE_CREATE), H5Pclose, "file creation");
  check(H5Pset_obj_track_times(creation, false), "file creation");  // same content, same bytes
  file = own(H5Fcreate(memory.path().c_str(), H5F_ACC_TRUNC, creation, access), H5Fclose, "file");
  links = own(H5Pcreate(H5P_LINK_CREATE), H5Pclose, "links");
  check(H5Pset_char_encoding(links, H5T_CSET_UTF8), "links");
}

Hdf5Id Hdf5Builder::Handles::type(DType type, const std::string& path) const {
  const auto standard = [&](hid_t id) { return own(H5Tcopy(id), H5Tclose, path); };
  switch (type) {
    case DType::kFloat64: return standard(H5T_IEEE_F64LE);
    case DType::kFloat32: return standard(H5T_IEEE_F32LE);
    case DType::kInt64: return standard(H5T_STD_I64LE);
    case DType::kInt32: return standard(H5T_STD_I32LE);
    case DType::kInt16: return standard(H5T_STD_I16LE);
    case DType::kInt8: return standard(H5T_STD_I8LE);
    case DType::kUInt8: return standard(H5T_STD_U8LE);
    case DType::kUInt16: return standard(H5T_STD_U16LE);
    case DType::kUInt32: return standard(H5T_STD_U32LE);
    case DType::kUInt64: return standard(H5T_STD_U64LE);
    case DType::kComplex64:
    case DType::kComplex128: {  // as h5py has it
      const size_t bytes = static_cast<size_t>(size_bytes(type)) / 2;
      const Hdf5Id part = standard(bytes == 4 ? H5T_IEEE_F32LE : H5T_IEEE_F64LE);
      Hdf5Id complex = own(H5Tcreate(H5T_COMPOUND, 2 * bytes), H5Tclose, path);
      check(H5Tinsert(complex, "r", 0, part), path);
      check(H5Tinsert(complex, "i", bytes, part), path);
      return complex;
    }
    case DType::kBFloat16:
    case DType::kFloat16: {
      const size_t mantissa_bits = type == DType::kBFloat16 ? 7 : 10;
      Hdf5Id half = standard(H5T_IEEE_F32LE);
      check(H5Tset_fields(half, 15, mantissa_bits, 15 - mantissa_bits, 0, mantissa_bits), path);
      check(H5Tset_size(half, 2), path);
      check(H5Tset_ebias(half, type == DType::kBFloat16 ? 127 : 15), path);
      return half;
    }
    case DType::kBool: {
      Hdf5Id boolean = own(H5Tenum_create(H5T_STD_I8LE), H5Tclose, path);
      for (signed char value : {0, 1})
        check(H5Tenum_insert(boolean, value == 0 ? "FALSE" : "TRUE", &value), path);
      return boolean;
    }
    default: break;
  }
  switch (size_bytes(type)) {  // see is_hdf5_type()
    case 1: return standard(H5T_STD_U8LE);
    case 2: return standard(H5T_STD_U16LE);
    case 4: return standard(H5T_STD_U32LE);
    default: break;
  }
  throw CheckpointError("cannot lay out ", *purpose, ": ", path, ": unknown element type");
}

Hdf5Id Hdf5Builder::Handles::space(const std::vector<int64_t>& shape, const std::string& path) const {
  if (shape.empty()) return own(H5Screate(H5S_SCALAR), H5Sclose, path);
  const std::vector<hsize_t> sizes(shape.begin(), shape.end());
  return own(H5Screate_simple(static_cast<int>(sizes.size()), sizes.data(), nullptr), H5Sclose, path);
}

Hdf5Id Hdf5Builder::Handles::creation_properties(const std::string& path) const {
  Hdf5Id creation = own(H5Pcreate(H5P_DATASET_CREATE), H5Pclose, path);
  check(H5Pset_obj_track_times(creation, false), path);
  return creation;
}

/// Makes the groups above a path. HDF5 would make them itself, but with the current time in them.
void Hdf5Builder::Handles::make_groups(const std::string& path) const {
  const Hdf5Id creation = own(H5Pcreate(H5P_GROUP_CREATE), H5Pclose, path);
  check(H5Pset_obj_track_times(creation, false), path);
  for (size_t end = path.find('/', 1); end != path.npos; end = path.find('/', end + 1)) {
    const std::string group = path.substr(0, end);
    if (H5Lexists(file, group.c_str(), H5P_DEFAULT) > 0) continue;
    own(H5Gcreate2(file, group.c_str(), links, creation, H5P_DEFAULT), H5Gclose, group);
  }
}

Hdf5Id Hdf5Builder::Handles::dataset(const Hdf5Dataset& dataset, hid_t creation) const {
  make_groups(dataset.path);
  const Hdf5Id element = type(dataset.type, dataset.path);
  const Hdf5Id extent = space(dataset.shape, dataset.path);
  Hdf5Id made = own(H5Dcreate2(file, dataset.path.c_str(), element, extent, links, creation, H5P_DEFAULT),
                    H5Dclose, dataset.path);
  for (const Hdf5Attribute& one : dataset.attributes) attribute(made, one, dataset.path);
  return made;
}

void Hdf5Builder::Handles::attribute(hid_t object, const Hdf5Attribute& attribute,
                                     const std::string& path) const {
  const std::string what = str(path, ": attribute ", attribute.name);
  const Hdf5Id scalar = own(H5Screate(H5S_SCALAR), H5Sclose, what);
  const auto write = [&](hid_t stored, hid_t given, const void* value) {
    const Hdf5Id made = own(
        H5Acreate2(object, attribute.name.c_str(), stored, scalar, H5P_DEFAULT, H5P_DEFAULT), H5Aclose, what);
    check(H5Awrite(made, given, value), what);
  };
  if (const int64_t* number = std::get_if<int64_t>(&attribute.value))
    return write(H5T_STD_I64LE, H5T_NATIVE_INT64, number);
  const Hdf5Id text = own(H5Tcopy(H5T_C_S1), H5Tclose, what);
  check(H5Tset_size(text, H5T_VARIABLE), what);
  check(H5Tset_cset(text, H5T_CSET_UTF8), what);
  const char* value = std::get<std::string>(attribute.value).c_str();
  write(text, text, &value);
}

Hdf5Builder::Hdf5Builder(std::string purpose, Hdf5Readers readers)
    : purpose_(std::move(purpose)), handles_(std::make_unique<Handles>()) {
  handles_->purpose = &purpose_;
  handles_->create(readers);
}

Hdf5Builder::~Hdf5Builder() = default;

void Hdf5Builder::add(const Hdf5Dataset& dataset) {
  const Hdf5Id creation = handles_->creation_properties(dataset.path);
  handles_->check(H5Pset_layout(creation, H5D_CONTIGUOUS), dataset.path);
  handles_->check(H5Pset_alloc_time(creation, H5D_ALLOC_TIME_EARLY), dataset.path);
  handles_->check(H5Pset_fill_time(creation, H5D_FILL_TIME_NEVER), dataset.path);
  const Hdf5Id made = handles_->dataset(dataset, creation);
  const auto bytes = static_cast<int64_t>(H5Dget_storage_size(made));
  int64_t offset = 0;
  if (bytes > 0) {
    const haddr_t address = H5Dget_offset(made);
    handles_->check(address == HADDR_UNDEF ? -1 : 0, dataset.path);
    offset = static_cast<int64_t>(address);
    handles_->data.emplace_back(offset, offset + bytes);
  }
  handles_->offsets.push_back(offset);
}

void Hdf5Builder::add_virtual(const Hdf5Dataset& dataset, std::span<const Hdf5Source> sources) {
  const std::string& path = dataset.path;
  const Hdf5Id creation = handles_->creation_properties(path);
  for (const Hdf5Source& source : sources) {
    auto next = static_cast<hsize_t>(source.dataset_begin);
    for (const Hdf5Block& block : blocks_of_range(dataset.shape, source.begin, source.begin + source.numel)) {
      const Hdf5Id extent = handles_->space(dataset.shape, path);
      if (!block.start.empty())
        handles_->check(H5Sselect_hyperslab(extent, H5S_SELECT_SET, block.start.data(), nullptr,
                                            block.count.data(), nullptr),
                        path);
      const Hdf5Id shown = handles_->space({source.dataset_numel}, path);
      const auto count = static_cast<hsize_t>(block.numel);
      handles_->check(H5Sselect_hyperslab(shown, H5S_SELECT_SET, &next, nullptr, &count, nullptr), path);
      handles_->check(H5Pset_virtual(creation, extent, source.file.c_str(), source.dataset.c_str(), shown),
                      path);
      next += count;
    }
  }
  handles_->dataset(dataset, creation);
}

void Hdf5Builder::add_link(const std::string& existing, const std::string& path) {
  handles_->check(H5Lcreate_hard(handles_->file, existing.c_str(), handles_->file, path.c_str(),
                                 handles_->links, H5P_DEFAULT),
                  path);
}

void Hdf5Builder::add_external_link(const std::string& file, const std::string& dataset,
                                    const std::string& path) {
  handles_->check(H5Lcreate_external(file.c_str(), dataset.c_str(), handles_->file, path.c_str(),
                                     handles_->links, H5P_DEFAULT),
                  path);
}

void Hdf5Builder::set_attribute(const std::string& path, const Hdf5Attribute& attribute) {
  const Hdf5Id object = handles_->own(H5Oopen(handles_->file, path.c_str(), H5P_DEFAULT), H5Oclose, path);
  handles_->attribute(object, attribute, path);
}

Hdf5Image Hdf5Builder::finish() {
  Handles& handles = *handles_;
  errno = 0;  // a limit on file size (ulimit -f) shows here first, and HDF5 does not report the reason
  const herr_t closed = handles.file.close();
  handles.check(closed, errno == 0 ? "closing" : str("closing: ", std::strerror(errno)));
  Hdf5Image image{.file_bytes = handles.check(handles.memory.bytes(), "its length"),
                  .metadata = {},
                  .offsets = handles.offsets};
  std::sort(handles.data.begin(), handles.data.end());
  handles.data.emplace_back(image.file_bytes, image.file_bytes);
  int64_t covered = 0;
  for (const auto& [begin, end] : handles.data) {
    if (begin > covered)
      image.metadata.push_back({.offset = covered, .bytes = handles.memory.read(covered, begin)});
    covered = std::max(covered, end);
  }
  return image;
}

}  // namespace tessera::checkpoint
