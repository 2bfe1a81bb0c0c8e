#include "checkpoint/hdf5/hdf5_library.h"

namespace tessera::checkpoint {
namespace {

std::mutex& library_mutex() {
  static std::mutex mutex;  // one per process, as the library
  return mutex;
}

/// Turns off HDF5's exit handler, which closes what is still open and crashes when a file could not be
/// written (limit on file size). We close everything ourselves. Has no effect if the host program called HDF5
/// before.
void leave_exit_alone() { [[maybe_unused]] static const herr_t once = H5dont_atexit(); }

}  // namespace

Hdf5Library::Hdf5Library() : lock_(library_mutex()) {
  leave_exit_alone();
  H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);  // for this thread; we throw exceptions
}

std::string hdf5_reason() {
  std::string reason;
  const auto keep = [](unsigned, const H5E_error2_t* error, void* into) -> herr_t {
    if (error->desc != nullptr && *error->desc != '\0') *static_cast<std::string*>(into) = error->desc;
    return 0;
  };
  H5Ewalk2(H5E_DEFAULT, H5E_WALK_DOWNWARD, keep, &reason);
  return reason.empty() ? "HDF5 gives no reason" : reason;
}

}  // namespace tessera::checkpoint
