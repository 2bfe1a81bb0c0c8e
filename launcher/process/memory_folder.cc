#include "launcher/process/memory_folder.h"

namespace tessera::launcher {

MemoryFolder::MemoryFolder() : folder_("tessera_memory", "/dev/shm") { guard_.remove_if_killed(path()); }

}  // namespace tessera::launcher
