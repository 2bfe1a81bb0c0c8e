// The hosts of a run: DeepSpeed's hostfile ("HOST slots=N" lines) and its --include and --exclude
// ("host1@host2:0,2").
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tessera::launcher {

/// A host and its slots, in order: a rank each; the numbers are those of its devices.
struct Host {
  std::string name;  ///< or address; an IPv6 address without brackets
  std::vector<int> slots;
  std::string user = {};  ///< of user@host; empty: none was given

  /// What ssh and pdsh get: "n1", "user@n1".
  std::string target() const { return user.empty() ? name : user + '@' + name; }
};

/// Reads a hostfile: a host a line, as "HOST slots=N" with slots 0 to N-1, or "USER@HOST slots=N
/// max_slots=M" as Open MPI's have it; `#` begins a comment. A host is a name of letters, digits, '.', '-'
/// and
/// '_' or an address. Throws ConfigError with FILE:LINE for a line of another form and for a host that stands
/// there twice, and for a file without hosts.
std::vector<Host> read_hostfile(const std::string& path);

/// The hosts and slots that --include names (without slots: all of a host), or all but those that
/// --exclude names, in the hostfile's order. An empty text is no filter. Throws ConfigError for both at once,
/// for a host or slot that is not there, and if none is left.
std::vector<Host> select_hosts(const std::vector<Host>& hosts, const std::string& include,
                               const std::string& exclude);

/// The hosts in --include's form, with all slots, and back.
std::string encode_hosts(const std::vector<Host>& hosts);
std::vector<Host> decode_hosts(std::string_view text);

/// The numbers of "0,2" or "0-3,8". Throws ConfigError that names `option`.
std::vector<int> parse_numbers(std::string_view text, std::string_view option);

}  // namespace tessera::launcher
