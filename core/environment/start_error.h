// Why a process or a thread could not be started.
#pragma once

#include <string>

namespace tessera {

/// The message for an errno of fork(), or of a new thread. For EAGAIN it names the limit of processes and
/// threads that was reached, if there is one.
std::string describe_start_errno(int error);

}  // namespace tessera
