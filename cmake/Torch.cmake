# Target tessera::torch: libtorch out of the PyPI wheel, without its CMake package (which demands a CUDA
# toolkit when the wheel has CUDA, and links everything). Only libtorch_cpu and libc10 are linked; the
# CUDA half is opened at run time by a plugin (core/cuda_plugin.h), so CPU runs never load it. Also part of the installed package.
#
# The one place that knows which versions of torch there are: Tessera builds with these, and an installed one belongs to the one that it
# was built with (tesseraConfig.cmake sets the list). What differs between them in C++ is in zero/memory/torch_versions.h.
if(NOT TESSERA_TORCH_MINORS)
  set(TESSERA_TORCH_MINORS 2.11 2.12 2.13 2.14 2.15)
endif()
list(JOIN TESSERA_TORCH_MINORS ", " _minors)
set(TESSERA_TORCH_DIR "" CACHE PATH "Folder `torch` of an installed wheel (default: the one in TESSERA_VENV, or in CMAKE_PREFIX_PATH)")
if(NOT TESSERA_TORCH_DIR)
  set(_torch_dirs "")
  if(TESSERA_VENV)
    file(GLOB _torch_dirs "${TESSERA_VENV}/lib/python3*/site-packages/torch")
  endif()
  foreach(_dir IN LISTS _torch_dirs CMAKE_PREFIX_PATH)  # as find_package(Torch) is told
    if(NOT TESSERA_TORCH_DIR AND EXISTS "${_dir}/lib/libtorch_cpu.so")
      set(TESSERA_TORCH_DIR "${_dir}")
    endif()
  endforeach()
endif()
if(NOT EXISTS "${TESSERA_TORCH_DIR}/lib/libtorch_cpu.so")
  set(_where "${TESSERA_TORCH_DIR}")
  if(NOT _where)
    set(_where "CMAKE_PREFIX_PATH")
    if(TESSERA_VENV)
      set(_where "${TESSERA_VENV} or CMAKE_PREFIX_PATH")
    endif()
  endif()
  message(FATAL_ERROR "libtorch not found in ${_where}: PyPI package torch brings it, of version ${_minors} "
    "(`make deps` installs one into .deps/; -DTESSERA_TORCH_DIR=<site-packages>/torch names another place).")
endif()
file(STRINGS "${TESSERA_TORCH_DIR}/version.py" _torch_version REGEX "^__version__")
string(REGEX MATCH "[0-9]+\\.[0-9]+\\.[0-9]+" _torch_version "${_torch_version}")
set(TESSERA_TORCH_VERSION "${_torch_version}" CACHE INTERNAL "That of the torch that is built with")
string(REGEX MATCH "^[0-9]+\\.[0-9]+" TESSERA_TORCH_MINOR "${TESSERA_TORCH_VERSION}")
if(NOT TESSERA_TORCH_MINOR IN_LIST TESSERA_TORCH_MINORS)
  message(FATAL_ERROR "${TESSERA_TORCH_DIR} has torch ${TESSERA_TORCH_VERSION}; expected ${_minors}.")
endif()

get_filename_component(_site_packages "${TESSERA_TORCH_DIR}" DIRECTORY)
file(GLOB TESSERA_NVIDIA_LIB_DIRS "${_site_packages}/nvidia/*/lib")
# The CUDA version of a wheel, such as 13.0; empty in a wheel for the CPU. libtorch_cpu.so is linked to its runtime, also where there is
# no GPU.
file(STRINGS "${TESSERA_TORCH_DIR}/version.py" _torch_cuda REGEX "^cuda")
string(REGEX MATCH "[0-9]+\\.[0-9]+" TESSERA_TORCH_CUDA "${_torch_cuda}")
string(REGEX MATCH "^[0-9]+" _cuda_major "${TESSERA_TORCH_CUDA}")
if(_cuda_major)
  foreach(_library_and_package libcudart=nvidia-cuda-runtime libcupti=nvidia-cuda-cupti)
    string(REPLACE "=" ";" _library_and_package ${_library_and_package})
    list(GET _library_and_package 0 _library)
    list(GET _library_and_package 1 _package)
    find_file(_found "${_library}.so.${_cuda_major}" PATHS ${TESSERA_NVIDIA_LIB_DIRS} NO_DEFAULT_PATH NO_CACHE)
    if(NOT _found)
      message(FATAL_ERROR "${_library}.so.${_cuda_major}, which libtorch_cpu.so needs, not found: "
        "PyPI package ${_package} brings it (`make deps`).")
    endif()
    unset(_found)
  endforeach()
endif()

if(TARGET tessera::torch)
  return()
endif()
# The OpenMP library that libtorch brings.
add_library(tessera::gomp UNKNOWN IMPORTED GLOBAL)
set_target_properties(tessera::gomp PROPERTIES IMPORTED_LOCATION "${TESSERA_TORCH_DIR}/lib/libgomp.so.1")
# Imported, so that what is installed names it, and not this machine's paths.
add_library(tessera::torch INTERFACE IMPORTED GLOBAL)
target_include_directories(tessera::torch SYSTEM INTERFACE
  "${TESSERA_TORCH_DIR}/include" "${TESSERA_TORCH_DIR}/include/torch/csrc/api/include")
# NDEBUG in every build type: record_function.h has a member that exists only without it, and the wheel
# was built with it.
target_compile_definitions(tessera::torch INTERFACE NDEBUG USE_DISTRIBUTED USE_C10D_GLOO)
target_link_libraries(tessera::torch INTERFACE
  "${TESSERA_TORCH_DIR}/lib/libtorch_cpu.so" "${TESSERA_TORCH_DIR}/lib/libc10.so" Threads::Threads)
target_link_options(tessera::torch INTERFACE
  "-Wl,-rpath,${TESSERA_TORCH_DIR}/lib" "-Wl,-rpath-link,${TESSERA_TORCH_DIR}/lib")
foreach(_dir IN LISTS TESSERA_NVIDIA_LIB_DIRS)
  target_link_options(tessera::torch INTERFACE "-Wl,-rpath,${_dir}" "-Wl,-rpath-link,${_dir}")
endforeach()
