// What tests hear of a CheckpointWriter and of HostFolders.
#pragma once

#include "core/files/disk.h"
#include "core/test_seam.h"
#include "engine/checkpoint/checkpoint_writer.h"
#include "engine/checkpoint/host_folders.h"

namespace tessera {

using DiskProbe = decltype(DiskOptions::probe);
/// Called for every file operation of a save that begins while it exists; what it throws is the disk's error.
using ScopedCheckpointProbe = TestSeam<CheckpointWriter, DiskProbe>;
/// The same of HostFolders that are made.
using ScopedHostFoldersProbe = TestSeam<HostFolders, DiskProbe>;

}  // namespace tessera
