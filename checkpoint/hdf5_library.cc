#include "checkpoint/hdf5_library.h"

namespace tessera::checkpoint {
namespace {

std::mutex& library_mutex() {
  static std::mutex mutex;  // the library is one a process, so is its lock
  return mutex;
}

/// HDF5 would close at exit what is still open, and crashes over a file it could not write (a limit on
/// the size of files). Nothing of ours is left to close. To be called before any other function of HDF5;
/// where a host program has, it decides.
void leave_exit_alone() { [[maybe_unused]] static const herr_t once = H5dont_atexit(); }

}  // namespace

Hdf5Library::Hdf5Library() : lock_(library_mutex()) {
  leave_exit_alone();
  H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);  // of this thread; errors are exceptions here
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
