// Names of files and folders that are not whole yet.
//
// [Note: temporary names]
// What will be NAME is written as NAME.tmp- and 16 random hexadecimal digits, beside it. Nobody can
// foresee the name, and a file of it is made anew or not at all, so that nothing is written through
// a symbolic link that waits there. Its writer holds a lock on it (flock), which ends with the
// process, however that ends: what nobody holds a lock on was left behind by a killed process, and
// the next one that writes NAME removes it.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include "core/disk.h"
#include "core/file_descriptor.h"

namespace tessera {

/// Local. "NAME.tmp-0123456789abcdef", with random digits.
std::string temporary_name(std::string_view name);
std::filesystem::path temporary_path(const std::filesystem::path& path);
/// Local. "NAME" of "NAME.tmp-0123456789abcdef"; empty for a name of another form.
std::string_view name_of_temporary(std::string_view file_name);

/// Local. Locks a file or folder that was just made under the temporary name `path`, for the life of the
/// descriptor and its copies. False: another process took it for a leftover and removes it; the next name
/// will do. True as well where the file system has no locks: nothing is taken for a leftover there.
bool hold_temporary(const FileDescriptor& descriptor, const std::filesystem::path& path);

/// Local. Removes what killed processes have left of `path`. Throws DiskError; a
/// folder that cannot be listed has none.
void remove_abandoned(const Disk& disk, const std::filesystem::path& path);

/// Local. The folder a name is in; "." for a plain name.
std::filesystem::path directory_of(const std::filesystem::path& path);

}  // namespace tessera
