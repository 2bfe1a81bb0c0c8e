#include "checkpoint/formats/pickle_names.h"

#include <algorithm>
#include <iterator>
#include <unordered_set>

#include "core/str.h"

namespace tessera::checkpoint {
namespace {

using std::string_view;

/// A set of words, from a text of them.
class Words {
 public:
  explicit Words(string_view text) {
    for (size_t end; !text.empty(); text.remove_prefix(std::min(end, text.size()))) {
      end = text.find(' ');
      words_.insert(text.substr(0, end));
      end = end == string_view::npos ? end : end + 1;
    }
  }
  bool has(string_view word) const { return words_.contains(word); }

 private:
  std::unordered_set<string_view> words_;
};

/// Modules of Python's standard library, 2 and 3, and of its installers.
const Words kStandardModules{
    "BaseHTTPServer Bastion CGIHTTPServer ConfigParser Cookie DocXMLRPCServer HTMLParser Queue "
    "SimpleHTTPServer SimpleXMLRPCServer SocketServer StringIO Tkinter UserDict UserList UserString "
    "__builtin__ __future__ _abc _aix_support _ast _asyncio _bisect _blake2 _bootsubprocess _bz2 _codecs "
    "_codecs_cn _codecs_hk _codecs_iso2022 _codecs_jp _codecs_kr _codecs_tw _collections _collections_abc "
    "_compat_pickle _compression _contextvars _crypt _csv _ctypes _curses _curses_panel _datetime _dbm "
    "_decimal _elementtree _frozen_importlib _frozen_importlib_external _functools _gdbm _hashlib _heapq "
    "_imp _interpreters _io _json _locale _lsprof _lzma _markupbase _md5 _msi _multibytecodec "
    "_multiprocessing _opcode _operator _osx_support _overlapped _pickle _posixshmem _posixsubprocess "
    "_py_abc _pydecimal _pyio _queue _random _scproxy _sha1 _sha256 _sha3 _sha512 _signal _sitebuiltins "
    "_socket _sqlite3 _sre _ssl _stat _statistics _string _strptime _struct _symtable _testcapi _thread "
    "_threading_local _tkinter _tokenize _tracemalloc _typing _uuid _warnings _weakref _weakrefset "
    "_winapi _xxsubinterpreters _zoneinfo abc aifc annotationlib antigravity anydbm argparse array ast "
    "asynchat asyncio asyncore atexit audioop base64 bdb binascii bisect bsddb builtins bz2 cPickle "
    "cProfile cStringIO calendar cgi cgitb chunk cmath cmd code codecs codeop collections colorsys "
    "commands compileall concurrent configparser contextlib contextvars cookielib copy copy_reg "
    "copyreg crypt csv ctypes curses dataclasses datetime dbhash dbm decimal difflib dircache dis "
    "distutils doctest dumbdbm dummy_thread email encodings ensurepip enum errno exceptions faulthandler "
    "fcntl filecmp fileinput fnmatch fpformat fractions ftplib functools future_builtins gc gdbm "
    "genericpath getopt getpass gettext glob graphlib grp gzip hashlib heapq hmac hotshot html htmllib "
    "http httplib idlelib ihooks imaplib imghdr imp importlib imputil inspect interpreters io ipaddress "
    "itertools json keyword lib2to3 linecache locale logging lzma mailbox mailcap marshal math md5 mhlib "
    "mimetools mimetypes mmap modulefinder msilib msvcrt multiprocessing mutex netrc nis nntplib nt "
    "ntpath nturl2path numbers opcode operator optparse os ossaudiodev pathlib pdb pickle pickletools pip "
    "pipes pkg_resources pkgutil platform plistlib popen2 poplib posix posixfile posixpath pprint profile "
    "pstats pty pwd py_compile pyclbr pydoc pydoc_data pyexpat queue quopri random re readline "
    "reprlib resource rexec rfc822 rlcompleter robotparser runpy sched secrets select selectors sets "
    "setuptools sgmllib sha shelve shlex shutil signal site sitecustomize smtpd smtplib sndhdr socket "
    "socketserver spwd sqlite3 sre_compile sre_constants sre_parse ssl stat statistics string stringprep "
    "struct subprocess sunau symtable sys sysconfig syslog tabnanny tarfile telnetlib tempfile termios "
    "textwrap this thread threading time timeit tkMessageBox tkinter token tokenize tomllib trace "
    "traceback tracemalloc tty turtle turtledemo types typing unicodedata unittest urllib urllib2 "
    "urlparse usercustomize uu uuid venv warnings wave weakref webbrowser whichdb winreg winsound "
    "wsgiref xdrlib xml xmlrpc xmlrpclib zipapp zipfile zipimport zlib zoneinfo"};

/// Modules that other packages import, so that they are attributes of the packages: torch.serialization.os.
/// They are refused at any place in a name. Others of the standard library are not: people call modules of
/// their own "types" and "random".
const Words kHarmfulModules{
    "_io _pickle _posixsubprocess asyncio builtins cPickle cloudpickle codeop commands ctypes dill imp "
    "importlib joblib marshal multiprocessing nt ntpath os pdb pickle pip pkgutil posix posixpath pty "
    "runpy shelve shutil socket subprocess sys tempfile threading timeit urllib webbrowser zipimport"};

/// Classes of the standard library that modules import by name: mypackage.files.Popen.
const Words kHarmfulClasses{
    "CDLL FileIO InteractiveConsole InteractiveInterpreter OleDLL PackageImporter Popen PyDLL TarFile "
    "Unpickler WinDLL ZipFile"};

/// Modules of torch and numpy that read files, compile or run code; all that is in them is refused.
constexpr string_view kHarmfulFolders[] = {"numpy.distutils.",
                                           "numpy.f2py.",
                                           "numpy.testing.",
                                           "torch._dynamo.",
                                           "torch._inductor.",
                                           "torch.hub.",
                                           "torch.jit.",
                                           "torch.package.",
                                           "torch.utils._config_module.",
                                           "torch.utils.bottleneck.",
                                           "torch.utils.collect_env.",
                                           "torch.utils.cpp_extension."};

/// Functions and classes that make data.
const Words kData{
    "_codecs.encode _random.Random argparse.Namespace array._array_reconstructor array.array "
    "builtins.bool builtins.bytearray builtins.bytes builtins.complex builtins.dict builtins.float "
    "builtins.frozenset builtins.getattr builtins.int builtins.list builtins.object builtins.range "
    "builtins.set builtins.slice builtins.str builtins.tuple builtins.type collections.ChainMap "
    "collections.Counter collections.OrderedDict collections.UserDict collections.UserList "
    "collections.UserString collections.defaultdict collections.deque copyreg.__newobj__ "
    "copyreg.__newobj_ex__ copyreg._reconstructor datetime.date datetime.datetime datetime.time "
    "datetime.timedelta datetime.timezone decimal.Decimal fractions.Fraction ipaddress.IPv4Address "
    "ipaddress.IPv6Address numpy._core.multiarray._reconstruct numpy._core.multiarray.scalar "
    "numpy._core.numeric._frombuffer numpy.core.multiarray._reconstruct numpy.core.multiarray.scalar "
    "numpy.core.numeric._frombuffer numpy.dtype numpy.matrix numpy.memmap numpy.ndarray numpy.recarray "
    "numpy.rec.recarray numpy.random._pickle.__bit_generator_ctor "
    "numpy.random._pickle.__generator_ctor numpy.random._pickle.__randomstate_ctor "
    "numpy.random.__RandomState_ctor pathlib.Path "
    "pathlib.PosixPath pathlib.PurePath pathlib.PurePosixPath pathlib.PureWindowsPath pathlib.WindowsPath "
    "pathlib._local.Path pathlib._local.PosixPath pathlib._local.PurePath pathlib._local.PurePosixPath "
    "pathlib._local.PureWindowsPath pathlib._local.WindowsPath random.Random re._compile time.struct_time "
    "torch.Size torch._tensor._rebuild_from_type torch._tensor._rebuild_from_type_v2 "
    "torch._utils._rebuild_device_tensor_from_cpu_tensor torch._utils._rebuild_device_tensor_from_numpy "
    "torch._utils._rebuild_meta_tensor_no_storage torch._utils._rebuild_nested_tensor "
    "torch._utils._rebuild_parameter torch._utils._rebuild_parameter_with_state "
    "torch._utils._rebuild_qtensor torch._utils._rebuild_sparse_csr_tensor "
    "torch._utils._rebuild_sparse_tensor torch._utils._rebuild_tensor torch._utils._rebuild_tensor_v2 "
    "torch._utils._rebuild_tensor_v3 torch._utils._rebuild_wrapper_subclass "
    "torch._utils._rebuild_xla_tensor torch.device torch.fx.immutable_collections.immutable_dict "
    "torch.distributed.remote_device._remote_device torch.fx.immutable_collections.immutable_list "
    "torch.serialization._get_layout "
    "torch.tensor._rebuild_from_type types.GenericAlias types.SimpleNamespace uuid.UUID "
    "zoneinfo.ZoneInfo._unpickle"};

/// Those of them that are functions, with a meaning of their own in pickle.cc: no class has these names.
const Words kFunctions{
    "_codecs.encode builtins.getattr builtins.type copyreg.__newobj__ copyreg.__newobj_ex__ "
    "copyreg._reconstructor"};

bool is_identifier(string_view word) {
  const auto is_part = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
           (c & 0x80) != 0;
  };
  return !word.empty() && (word[0] < '0' || word[0] > '9') && std::all_of(word.begin(), word.end(), is_part);
}

/// What PEP 8 calls a class by: "Adam", "_Node".
bool is_capitalised(string_view word) {
  const size_t letter = word.find_first_not_of('_');
  return letter != string_view::npos && word[letter] >= 'A' && word[letter] <= 'Z';
}

/// Whether no part of the name leads into a module that is refused. `last`: the last part.
bool leads_to_no_harm(string_view name, string_view& last) {
  bool is_first = true;
  for (string_view rest = name;;) {
    const size_t dot = rest.find('.');
    last = rest.substr(0, dot);
    if (!is_identifier(last)) return false;
    if (last.starts_with("__") && !(is_first && (last == "__main__" || last == "__mp_main__"))) return false;
    if (kHarmfulModules.has(last) || (is_first && kStandardModules.has(last))) return false;
    is_first = false;
    if (dot == string_view::npos) break;
    rest.remove_prefix(dot + 1);
  }
  return std::none_of(std::begin(kHarmfulFolders), std::end(kHarmfulFolders),
                      [&](string_view folder) { return name.starts_with(folder); });
}

}  // namespace

std::string modern_name(string_view module, string_view name) {
  if (module == "__builtin__") {
    module = "builtins";
    if (name == "xrange") name = "range";
    if (name == "unicode") name = "str";
    if (name == "long") name = "int";
  }
  if (module == "copy_reg") module = "copyreg";
  if (module == "commands") module = "subprocess";
  if (module == "UserDict" && (name == "UserDict" || name == "IterableUserDict"))
    return "collections.UserDict";
  if (module == "UserList" || module == "UserString") module = "collections";
  return str(module, ".", name);
}

bool is_data_call(string_view name, PickleCall call) {
  if (kData.has(name)) return call == PickleCall::kCall || !kFunctions.has(name);
  string_view last;
  if (!leads_to_no_harm(name, last) || kHarmfulClasses.has(last)) return false;
  // What NEWOBJ names is a class, also when its name is that of a function by PEP 8.
  return is_capitalised(last) ||
         (call == PickleCall::kClass && !name.starts_with("torch.") && !name.starts_with("numpy."));
}

bool is_enum_class(string_view name) {
  string_view last;
  return leads_to_no_harm(name, last) && is_capitalised(last) && !kHarmfulClasses.has(last);
}

bool is_plain_attribute(string_view name) { return is_identifier(name) && !name.starts_with("__"); }

}  // namespace tessera::checkpoint
