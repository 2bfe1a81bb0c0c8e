// Temporary names of files and folders that are being written.
//
// Temporary names.
// NAME is written as NAME.tmp- and 16 random hexadecimal digits, in the same folder. The name cannot be
// predicted, and the file must be new, so that nothing is written through a symbolic link. Its writer holds a
// lock on it (flock), which ends with the process. A temporary file without a lock was left by a killed
// process; the next process that writes NAME removes it.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include "core/files/disk.h"
#include "core/files/file_descriptor.h"

namespace tessera {

/// "NAME.tmp-0123456789abcdef", with random digits.
std::string temporary_name(std::string_view name);
std::filesystem::path temporary_path(const std::filesystem::path& path);
/// "NAME" of "NAME.tmp-0123456789abcdef"; empty for other names.
std::string_view name_of_temporary(std::string_view file_name);

/// Locks a file or folder that was just created with the temporary name `path`, for the lifetime of
/// the descriptor and its duplicates. False: another process considered it abandoned and removes it; try
/// another name. Also true if the file system has no locks: then nothing is considered abandoned.
bool hold_temporary(const FileDescriptor& descriptor, const std::filesystem::path& path);

/// A new folder with a temporary name, and the lock on it.
struct HeldFolder {
  std::filesystem::path path;
  FileDescriptor lock;
};
/// Makes one for `path`, whose parent folder is there. Throws DiskError.
HeldFolder create_temporary_folder(const Disk& disk, const std::filesystem::path& path);

/// Whether another descriptor holds the temporary file or folder. If not, `descriptor` holds it. False as
/// well if the file system has no locks.
bool is_held(const std::filesystem::path& path, FileDescriptor& descriptor);

/// Removes temporary files and folders of `path` that killed processes left. Throws DiskError, but not
/// for a folder that cannot be listed.
void remove_abandoned(const Disk& disk, const std::filesystem::path& path);

/// The parent folder of a path; "." for a plain name.
std::filesystem::path directory_of(const std::filesystem::path& path);

/// The path with a name at its end: of "x/" it is "x"; "." and ".." are looked up in the file system.
std::filesystem::path named_path(const std::filesystem::path& path);
/// The last name of that.
std::string name_of_path(const std::filesystem::path& path);

}  // namespace tessera
