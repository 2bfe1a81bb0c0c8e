# Third-party packages from Debian, each with the package that brings it when it is missing. packages.txt lists
# them all; a test holds the two together.
function(tessera_missing what debian_package)
  message(FATAL_ERROR "${what} not found: Debian package ${debian_package} brings it "
    "(`make deps`, or apt-get install ${debian_package}).")
endfunction()

function(tessera_require_file variable header debian_package)
  find_path(${variable} NAMES ${header})
  if(NOT ${variable})
    tessera_missing(${header} ${debian_package})
  endif()
endfunction()

macro(tessera_use package debian_package)  # a macro: find_package's variables stay in the caller's scope
  find_package(${package} QUIET)
  if(NOT ${package}_FOUND)
    tessera_missing(${package} ${debian_package})
  endif()
endmacro()

find_package(Threads REQUIRED)
tessera_use(nlohmann_json nlohmann-json3-dev)
tessera_use(spdlog libspdlog-dev)
tessera_use(CLI11 libcli11-dev)
tessera_use(ZLIB zlib1g-dev)
tessera_use(PNG libpng-dev)
tessera_use(JPEG libjpeg62-turbo-dev)
tessera_use(CURL libcurl4-openssl-dev)
tessera_require_file(TESSERA_XXHASH_INCLUDE_DIR xxhash.h libxxhash-dev)
tessera_require_file(TESSERA_GLOO_INCLUDE_DIR gloo/context.h libgloo-dev)
tessera_require_file(TESSERA_UTF8PROC_INCLUDE_DIR utf8proc.h libutf8proc-dev)
find_library(TESSERA_UTF8PROC_LIBRARY NAMES utf8proc)
if(NOT TESSERA_UTF8PROC_LIBRARY)
  tessera_missing("the library utf8proc" libutf8proc-dev)
endif()
include(Hdf5)
include(Liburing)

if(TESSERA_BUILD_TESTS)
  tessera_require_file(TESSERA_GMOCK_INCLUDE_DIR gmock/gmock.h libgmock-dev)
  tessera_use(GTest libgtest-dev)
  # For tests that are scripts and need nothing but the standard library. Debian's python3 is preferred: it is
  # the one that .deps/venv is made of.
  find_program(TESSERA_PYTHON NAMES python3 PATHS /usr/bin NO_DEFAULT_PATH)
  find_program(TESSERA_PYTHON NAMES python3)
  if(NOT TESSERA_PYTHON)
    tessera_missing(python3 python3-venv)
  endif()
  # For tests that need PyPI packages of requirements.txt.
  find_program(TESSERA_VENV_PYTHON NAMES python3 PATHS "${PROJECT_SOURCE_DIR}/.deps/venv/bin" NO_DEFAULT_PATH)
  if(NOT TESSERA_VENV_PYTHON)
    message(STATUS "Tests with PyPI packages are left out: there is no .deps/venv (`make test` makes it)")
  endif()
endif()
if(TESSERA_BUILD_BENCHMARKS)
  tessera_use(benchmark libbenchmark-dev)
endif()
