#include "checkpoint/foreign/foreign_checkpoint.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <future>
#include <optional>
#include <set>
#include <string_view>
#include <system_error>
#include <thread>

#include "checkpoint/block_hashes.h"
#include "checkpoint/checkpoint_error.h"
#include "checkpoint/formats/safetensors.h"
#include "checkpoint/formats/torch_file.h"
#include "core/check.h"
#include "core/files/input_file.h"
#include "core/numel.h"
#include "core/str.h"
#include "core/utf8.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;
using Wide = __int128;  // products of sizes that files say

constexpr size_t kMaxRuns = size_t{1} << 22;           // of one tensor
constexpr int64_t kMaxElements = int64_t{1} << 60;     // of one tensor
constexpr Wide kMaxRowsOneByOne = Wide{1} << 24;       // that check() sorts
constexpr int64_t kPieceBytes = int64_t{8} << 20;      // of one pass of read()
constexpr int64_t kSmallRowBytes = int64_t{16} << 10;  // shorter rows are read together
constexpr int64_t kMostUnwanted = 8;                   // bytes read for one that is wanted

/// A dimension of a box: `size` elements, with distances in the tensor and in the file, in elements.
struct Dimension {
  int64_t size;
  int64_t tensor_step;
  int64_t file_step;
};

/// Dimensions of more than one element, outermost first. Those that lie in a row in tensor and file are one.
std::vector<Dimension> joined(const std::vector<Dimension>& dimensions) {
  std::vector<Dimension> out;
  for (auto inner = dimensions.rbegin(); inner != dimensions.rend(); ++inner) {
    if (inner->size == 1) continue;
    if (!out.empty() && Wide{out.back().tensor_step} * out.back().size == inner->tensor_step &&
        Wide{out.back().file_step} * out.back().size == inner->file_step)
      out.back().size *= inner->size;
    else
      out.push_back(*inner);
  }
  std::reverse(out.begin(), out.end());
  return out;
}

/// The first elements of all combinations of indices of `dimensions`: (element of the tensor, of the file).
std::vector<std::pair<int64_t, int64_t>> starts_of(const std::vector<Dimension>& dimensions) {
  std::vector<std::pair<int64_t, int64_t>> starts = {{0, 0}};
  for (const Dimension& one : dimensions) {
    if (Wide{one.size} * static_cast<int64_t>(starts.size()) > static_cast<Wide>(kMaxRuns))
      throw CheckpointError("a tensor whose elements lie in more than ", kMaxRuns,
                            " pieces; expected one that is contiguous, or nearly so");
    std::vector<std::pair<int64_t, int64_t>> next;
    next.reserve(starts.size() * static_cast<size_t>(one.size));
    for (const auto& [tensor, file] : starts)
      for (int64_t i = 0; i < one.size; ++i)
        next.emplace_back(tensor + i * one.tensor_step, file + i * one.file_step);
    starts = std::move(next);
  }
  return starts;
}

/// The product of sizes; throws for what no tensor has.
int64_t checked_numel(const std::vector<int64_t>& shape) {
  Wide product = 1;
  bool none = false;
  for (const int64_t size : shape) {
    if (size < 0) throw CheckpointError("the shape ", describe_shape(shape), "; expected sizes from 0 on");
    none |= size == 0;
    if (size > 0) product *= size;
    if (product > kMaxElements)
      throw CheckpointError("the shape ", describe_shape(shape), " is too large for a tensor");
  }
  return none ? 0 : static_cast<int64_t>(product);
}

/// Calls visit(file, byte of the file, bytes, byte of the destination) for each row's part of the elements
/// [begin, end) of a tensor.
template <class Visit>
void for_each_row(const ForeignTensor& tensor, int64_t begin, int64_t end, const Visit& visit) {
  const int64_t width = size_bytes(tensor.type);
  for (const Run& run : tensor.runs) {
    if (run.numel == 0 || run.begin >= end) continue;
    int64_t first = 0, last = 0;
    if (run.rows > 1) {
      const int64_t past =
          begin - run.begin - run.numel;  // rows that begin here or earlier end before `begin`
      if (past >= 0) first = past / run.tensor_step + 1;
      last = std::min(run.rows - 1, (end - 1 - run.begin) / run.tensor_step);
    }
    for (int64_t row = first; row <= last; ++row) {
      const int64_t row_begin = run.begin + row * run.tensor_step;
      const int64_t from = std::max(row_begin, begin), to = std::min(row_begin + run.numel, end);
      if (from >= to) continue;
      visit(run.file, run.offset + row * run.file_step + (from - row_begin) * width, (to - from) * width,
            (from - begin) * width);
    }
  }
}

/// A run as a range of the tensor, for check().
struct Cover {
  int64_t begin, numel, rows, step;

  int64_t end() const { return begin + (rows - 1) * step + numel; }
};

/// Whether the two are one, which then replaces `a`; `b` begins at or after the begin of `a`.
bool join_covers(Cover& a, const Cover& b) {
  if (a.rows == 1 && b.rows == 1) {
    if (a.begin + a.numel != b.begin) return false;
    a.numel += b.numel;
    return true;
  }
  const int64_t step = a.rows > 1 ? a.step : b.step;
  if (a.rows > 1 && b.rows > 1 && a.step != b.step) return false;
  if (a.rows == b.rows && a.begin + a.numel == b.begin && a.numel + b.numel <= step) {
    a.numel += b.numel;
    if (a.numel == step) a = {a.begin, step * a.rows, 1, 0};
    return true;
  }
  if (a.numel == b.numel && a.begin + a.rows * step == b.begin) {
    a.rows += b.rows;
    a.step = step;
    return true;
  }
  return false;
}

std::string elements(int64_t begin, int64_t end) {
  return end - begin == 1 ? str("element ", begin) : str("elements ", begin, " to ", end - 1);
}

/// Throws unless the covers have each of `numel` elements once. Runs of usual layouts are joined until one is
/// left; of others the rows are sorted.
void check_covers(std::vector<Cover> covers, int64_t numel) {
  std::sort(covers.begin(), covers.end(), [](const Cover& a, const Cover& b) {
    return std::pair(a.begin, a.end()) < std::pair(b.begin, b.end());
  });
  std::vector<Cover> joined;
  for (const Cover& cover : covers) {
    joined.push_back(cover);
    while (joined.size() > 1 && join_covers(joined[joined.size() - 2], joined.back())) joined.pop_back();
  }
  if (joined.size() == 1 && joined[0].rows == 1 && joined[0].begin == 0 && joined[0].numel == numel) return;
  Wide total = 0, rows = 0;
  for (const Cover& cover : joined) total += Wide{cover.numel} * cover.rows, rows += cover.rows;
  if (rows > kMaxRowsOneByOne)
    throw CheckpointError("its elements lie in ", static_cast<int64_t>(rows),
                          " pieces that do not fit together; expected each element once");
  std::vector<std::pair<int64_t, int64_t>> ranges;
  ranges.reserve(static_cast<size_t>(rows));
  for (const Cover& cover : joined)
    for (int64_t row = 0; row < cover.rows; ++row)
      ranges.emplace_back(cover.begin + row * cover.step, cover.begin + row * cover.step + cover.numel);
  std::sort(ranges.begin(), ranges.end());
  int64_t next = 0;
  for (const auto& [begin, end] : ranges) {
    if (begin > next)
      throw CheckpointError("no file has ", elements(next, begin), " of ", numel, "; expected each once");
    if (begin < next)
      throw CheckpointError("the files have ", elements(begin, std::min(end, next)), " of ", numel,
                            " twice; expected each once");
    next = end;
  }
  if (next != numel)
    throw CheckpointError("no file has ", elements(next, numel), " of ", numel, "; expected each once");
}

/// Sizes of files, asked for once.
class FileSizes {
 public:
  explicit FileSizes(const std::vector<fs::path>& files) : files_(files), bytes_(files.size(), -1) {}

  int64_t operator[](size_t file) {
    if (bytes_[file] < 0) {
      std::error_code error;
      const auto bytes = fs::file_size(files_[file], error);
      if (error)
        throw CheckpointError(files_[file], ": cannot be read: ", error.message(),
                              "; expected a file of the checkpoint");
      bytes_[file] = static_cast<int64_t>(bytes);
    }
    return bytes_[file];
  }
  int64_t all() {
    int64_t sum = 0;
    for (size_t file = 0; file < files_.size(); ++file) sum += (*this)[file];
    return sum;
  }

 private:
  const std::vector<fs::path>& files_;
  std::vector<int64_t> bytes_;
};

void check_run(const Run& run, const ForeignCheckpoint& checkpoint, int64_t numel, int64_t width,
               FileSizes& sizes) {
  if (run.file < 0 || static_cast<size_t>(run.file) >= checkpoint.files.size())
    throw CheckpointError("lies in file ", run.file, " of ", checkpoint.files.size(),
                          "; expected one of them");
  const bool counts = run.numel >= 0 && run.rows >= 0 && run.begin >= 0 && run.offset >= 0;
  const bool steps = run.rows <= 1 || (run.tensor_step >= run.numel && run.file_step >= 0);
  if (!counts || !steps)
    throw CheckpointError("a run of ", run.rows, " rows of ", run.numel, " elements, ", run.tensor_step,
                          " apart, from element ", run.begin, " on; expected rows that do not overlap");
  if (run.numel == 0 || run.rows == 0) return;
  const Wide steps_taken = run.rows - 1;
  if (const Wide end = run.begin + steps_taken * run.tensor_step + run.numel; end > numel)
    throw CheckpointError("the files have elements up to ",
                          end > kMaxElements ? kMaxElements : static_cast<int64_t>(end), "; expected ", numel,
                          ", as the shape says");
  const int64_t bytes = sizes[static_cast<size_t>(run.file)];
  const Wide end = run.offset + steps_taken * run.file_step + Wide{run.numel} * width;
  if (end > bytes)
    throw CheckpointError("its elements end beyond the end of ",
                          checkpoint.files[static_cast<size_t>(run.file)].string(), ", which has ", bytes,
                          " bytes; expected ", end > INT64_MAX ? INT64_MAX : static_cast<int64_t>(end),
                          ": the file was cut off, or belongs to another checkpoint");
}

void check_tensor(const ForeignTensor& tensor, const std::string& what, const ForeignCheckpoint& checkpoint,
                  FileSizes& sizes) {
  try {
    const int64_t numel = checked_numel(tensor.shape);
    std::vector<Cover> covers;
    covers.reserve(tensor.runs.size());
    for (const Run& run : tensor.runs) {
      check_run(run, checkpoint, numel, size_bytes(tensor.type), sizes);
      if (run.numel == 0 || run.rows == 0) continue;
      if (run.rows == 1 || run.tensor_step == run.numel)
        covers.push_back({run.begin, run.numel * run.rows, 1, 0});
      else
        covers.push_back({run.begin, run.numel, run.rows, run.tensor_step});
    }
    if (numel > 0) check_covers(std::move(covers), numel);
  } catch (const CheckpointError& error) {
    throw CheckpointError(checkpoint.path, ": ", what, ": ", error.what());
  }
}

}  // namespace

void ForeignCheckpoint::lose(LostValue::Kind kind, const std::string& name, const std::string& line) {
  not_read.push_back(line);
  lost.push_back({kind, name, line});
}

void ForeignCheckpoint::lose_since(size_t begin, LostValue::Kind kind, const std::string& name) {
  for (size_t i = begin; i < not_read.size(); ++i) lost.push_back({kind, name, not_read[i]});
}

int64_t check_archives(const ForeignCheckpoint& checkpoint) {
  const size_t threads = std::min<size_t>(std::max(1U, std::thread::hardware_concurrency()), 8);
  std::vector<std::future<int64_t>> parts;
  for (size_t first = 0; first < std::min(threads, checkpoint.archives.size()); ++first)
    parts.push_back(
        std::async(std::launch::async, [&, first] { return check_archives(checkpoint, first, threads); }));
  int64_t checked = 0;
  for (std::future<int64_t>& part : parts) checked += part.get();
  return checked;
}

int64_t check_archives(const ForeignCheckpoint& checkpoint, size_t first, size_t step) {
  int64_t checked = 0;
  for (size_t i = first; i < checkpoint.archives.size(); i += step) {
    const ArchivePart& one = checkpoint.archives[i];
    try {
      checked += TorchFile(one.path, one.begin, one.bytes).verify() ? 1 : 0;
    } catch (const DiskError& error) {
      throw CheckpointError(error.what());
    }
  }
  return checked;
}

int64_t ForeignTensor::numel() const { return numel_of(shape); }

std::vector<Run> runs_of_box(int file, int64_t offset, DType type, const std::vector<int64_t>& shape,
                             const std::vector<int64_t>& begin, const std::vector<int64_t>& sizes,
                             const std::vector<int64_t>& strides) {
  const size_t rank = shape.size();
  TESSERA_CHECK(begin.size() == rank && sizes.size() == rank && strides.size() == rank, "a box of ", rank,
                " dimensions");
  checked_numel(shape);
  if (checked_numel(sizes) == 0) return {};
  std::vector<Dimension> dimensions(rank);
  int64_t first = 0, tensor_step = 1;
  for (size_t d = rank; d-- > 0;) {
    if (begin[d] < 0 || begin[d] > shape[d] - sizes[d])
      throw CheckpointError("a part from ", describe_shape(begin), " on of the sizes ", describe_shape(sizes),
                            " of a tensor of the shape ", describe_shape(shape),
                            "; expected one that lies within it");
    if (strides[d] < 0 || (sizes[d] > 1 && Wide{strides[d]} * (sizes[d] - 1) > kMaxElements))
      throw CheckpointError("the strides ", describe_shape(strides), "; expected those of a tensor");
    dimensions[d] = {sizes[d], tensor_step, strides[d]};
    first += begin[d] * tensor_step;
    tensor_step *= shape[d];
  }
  dimensions = joined(dimensions);
  const int64_t width = size_bytes(type);
  Run run{.file = file, .offset = offset, .begin = first, .numel = 1};
  if (!dimensions.empty() && dimensions.back().tensor_step == 1 && dimensions.back().file_step == 1) {
    run.numel = dimensions.back().size;
    dimensions.pop_back();
  }
  // The largest of the other dimensions has the rows, so that there are few runs.
  if (!dimensions.empty()) {
    const auto largest =
        std::max_element(dimensions.rbegin(), dimensions.rend(),
                         [](const Dimension& a, const Dimension& b) { return a.size < b.size; });
    run.rows = largest->size;
    run.tensor_step = largest->tensor_step;
    run.file_step = largest->file_step * width;
    dimensions.erase(std::next(largest).base());
  }
  std::vector<Run> runs;
  for (const auto& [tensor, in_file] : starts_of(dimensions)) {
    runs.push_back(run);
    runs.back().begin += tensor;
    runs.back().offset += in_file * width;
  }
  return runs;
}

std::vector<Run> runs_of_strided(int file, int64_t offset, DType type, const std::vector<int64_t>& shape,
                                 const std::vector<int64_t>& strides) {
  return runs_of_box(file, offset, type, shape, std::vector<int64_t>(shape.size(), 0), shape, strides);
}

ForeignTensor contiguous_tensor(int file, int64_t offset, DType type, const std::vector<int64_t>& shape) {
  ForeignTensor out{.type = type, .shape = shape, .runs = {}};
  const bool is_empty = std::ranges::find(shape, 0) != shape.end();  // the others may be large
  if (!is_empty) out.runs = {{file, offset, 0, out.numel()}};
  return out;
}

/// A file that is read: one of Tessera's safetensors by its hashes, another one as it is.
struct ForeignFiles::Open {
  explicit Open(const fs::path& path) : plain(path) {
    constexpr size_t kLengthBytes = 8;  // of the header, before its '{'
    std::array<std::byte, kLengthBytes + 1> start{};
    if (plain.read_some(0, start) < start.size() || start.back() != std::byte{'{'}) return;
    hashed.emplace(path);
    if (!hashed->has_hashes()) hashed.reset();
  }

  InputFile plain;
  std::optional<SafetensorsFile> hashed;
};

ForeignFiles::ForeignFiles(std::vector<fs::path> files)
    : files_(std::make_unique<OpenFiles<Open>>(std::move(files))) {}

ForeignFiles::~ForeignFiles() = default;

void ForeignFiles::read_at(int file, int64_t offset, std::span<std::byte> destination) const {
  try {
    const auto input = files_->get(file);
    if (input->hashed) return input->hashed->read_at(offset, destination);
    const auto got = static_cast<int64_t>(input->plain.read_some(offset, destination));
    if (const auto wanted = static_cast<int64_t>(destination.size()); got < wanted)
      throw CheckpointError(input->plain.path(), " ends at byte ", offset + got, "; expected ",
                            offset + wanted, " at least: it was cut off");
  } catch (const DiskError& error) {
    throw CheckpointError(error.what());
  }
}

void ForeignFiles::read(const ForeignTensor& tensor, int64_t begin, std::span<std::byte> destination) const {
  const int64_t width = size_bytes(tensor.type), numel = tensor.numel();
  const auto bytes = static_cast<int64_t>(destination.size());
  TESSERA_CHECK(bytes % width == 0 && begin >= 0 && begin <= numel && bytes / width <= numel - begin,
                "bytes of ", bytes / width, " elements from ", begin, " on of a tensor that has ", numel);
  struct Span {
    int64_t rows = 0, bytes = 0, begin = INT64_MAX, end = 0;
    std::vector<std::byte> content;
  };
  for (int64_t done = 0; done < bytes;) {
    const int64_t now = std::min(kPieceBytes, bytes - done);
    const auto piece = destination.subspan(static_cast<size_t>(done), static_cast<size_t>(now));
    const int64_t first = begin + done / width, last = first + now / width;
    std::map<int, Span> spans;
    for_each_row(tensor, first, last, [&](int file, int64_t offset, int64_t length, int64_t) {
      Span& span = spans[file];
      ++span.rows;
      span.bytes += length;
      span.begin = std::min(span.begin, offset);
      span.end = std::max(span.end, offset + length);
    });
    // Many short rows that lie close together are read with what is between them.
    for (auto& [file, span] : spans) {
      const int64_t extent = span.end - span.begin;
      if (span.rows < 2 || span.bytes / span.rows > kSmallRowBytes || extent > span.bytes * kMostUnwanted)
        continue;
      span.content.resize(static_cast<size_t>(extent));
      read_at(file, span.begin, span.content);
    }
    for_each_row(tensor, first, last, [&](int file, int64_t offset, int64_t length, int64_t to) {
      const auto part = piece.subspan(static_cast<size_t>(to), static_cast<size_t>(length));
      const Span& span = spans[file];
      if (span.content.empty())
        read_at(file, offset, part);
      else
        std::memcpy(part.data(), span.content.data() + (offset - span.begin), part.size());
    });
    done += now;
  }
}

std::string content_digest(const std::vector<std::pair<std::string, const ForeignTensor*>>& tensors,
                           const ForeignFiles& files) {
  constexpr int64_t kMostElements = 64;
  std::string text;
  for (const auto& [name, tensor] : tensors) {
    text += str(name, '\0', name_of(tensor->type), describe_shape(tensor->shape), '\n');
    const int64_t numel = std::min(tensor->numel(), kMostElements);
    std::vector<std::byte> elements(static_cast<size_t>(numel * size_bytes(tensor->type)));
    if (numel > 0) files.read(*tensor, (tensor->numel() - numel) / 2, elements);
    text.append(reinterpret_cast<const char*>(elements.data()), elements.size());
  }
  return text_digest(text);
}

void check(const ForeignCheckpoint& checkpoint) {
  constexpr int64_t kSharedBytes = int64_t{1} << 26;  // that parameters have in common
  FileSizes sizes(checkpoint.files);
  Wide other_bytes = 0;
  int64_t most_bytes = -1;
  std::set<std::string_view> names;
  const auto add_name = [&](const std::string& name) {
    if (name.empty()) throw CheckpointError(checkpoint.path, ": a tensor without a name; expected one");
    if (!names.insert(name).second)
      throw CheckpointError(checkpoint.path, ": the name ", quoted_name(name),
                            " is there twice; expected each parameter and buffer once");
  };
  for (const ForeignParameter& parameter : checkpoint.parameters) {
    add_name(parameter.name);
    for (const std::string& alias : parameter.aliases) add_name(alias);
    const std::string what = str("parameter ", quoted_name(parameter.name));
    const size_t groups = checkpoint.groups.size();
    if (groups > 0 && (parameter.group < 0 || static_cast<size_t>(parameter.group) >= groups))
      throw CheckpointError(checkpoint.path, ": ", what, ": is of group ", parameter.group, "; there are ",
                            groups, " groups");
    check_tensor(parameter.weights, what, checkpoint, sizes);
    for (const auto& [name, state] : parameter.states) {
      const std::string which = str(what, ", state ", quoted_name(name));
      if (state.shape != parameter.weights.shape)
        throw CheckpointError(checkpoint.path, ": ", which, ": has the shape ", describe_shape(state.shape),
                              "; expected that of the parameter, ", describe_shape(parameter.weights.shape));
      check_tensor(state, which, checkpoint, sizes);
    }
    for (const auto& [name, state] : parameter.other_states) {
      const std::string which = str(what, ", state ", quoted_name(name));
      check_tensor(state, which, checkpoint, sizes);
      // Nothing else bounds them: a tensor may have one element of a file many times.
      other_bytes += Wide{state.numel()} * size_bytes(state.type);
      if (most_bytes < 0) most_bytes = sizes.all() + kSharedBytes;
      if (other_bytes > most_bytes)
        throw CheckpointError(checkpoint.path, ": ", which,
                              ": with it the optimizer's states have more bytes than the files");
    }
  }
  for (const auto& [name, buffer] : checkpoint.buffers) {
    add_name(name);
    check_tensor(buffer, str("buffer ", quoted_name(name)), checkpoint, sizes);
  }
}

}  // namespace tessera::checkpoint
