# Target tessera::torch: libtorch out of the PyPI wheel, without its CMake package (which demands a CUDA
# toolkit when the wheel has CUDA, and links everything). Only libtorch_cpu and libc10 are linked; the
# CUDA half is opened at run time by a plugin (core/cuda_plugin.h), so CPU runs never load it. Also part of the installed package.
set(TESSERA_TORCH_DIR "" CACHE PATH "Folder `torch` of an installed torch==2.11.0 wheel (default: the one in .deps/, or in CMAKE_PREFIX_PATH)")
if(NOT TESSERA_TORCH_DIR)
  file(GLOB _torch_dirs "${PROJECT_SOURCE_DIR}/.deps/venv/lib/python3*/site-packages/torch")
  foreach(_dir IN LISTS _torch_dirs CMAKE_PREFIX_PATH)  # as find_package(Torch) is told
    if(NOT TESSERA_TORCH_DIR AND EXISTS "${_dir}/lib/libtorch_cpu.so")
      set(TESSERA_TORCH_DIR "${_dir}")
    endif()
  endforeach()
endif()
if(NOT EXISTS "${TESSERA_TORCH_DIR}/lib/libtorch_cpu.so")
  set(_where "${TESSERA_TORCH_DIR}")
  if(NOT _where)
    set(_where ".deps/venv or CMAKE_PREFIX_PATH")
  endif()
  message(FATAL_ERROR "libtorch not found in ${_where}: PyPI package torch==2.11.0 brings it "
    "(`make deps` installs it into .deps/; -DTESSERA_TORCH_DIR=<site-packages>/torch names another place).")
endif()
file(STRINGS "${TESSERA_TORCH_DIR}/version.py" _torch_version REGEX "^__version__")
if(NOT _torch_version MATCHES "2\\.11\\.0")
  message(FATAL_ERROR "${TESSERA_TORCH_DIR} has ${_torch_version}; Tessera is built against PyPI package torch==2.11.0 "
    "(`make deps`).")
endif()

get_filename_component(_site_packages "${TESSERA_TORCH_DIR}" DIRECTORY)
file(GLOB TESSERA_NVIDIA_LIB_DIRS "${_site_packages}/nvidia/*/lib")
# libtorch_cpu.so of this wheel is linked to both, also where there is no GPU.
foreach(_library_and_package libcudart.so.13=nvidia-cuda-runtime libcupti.so.13=nvidia-cuda-cupti)
  string(REPLACE "=" ";" _library_and_package ${_library_and_package})
  list(GET _library_and_package 0 _library)
  list(GET _library_and_package 1 _package)
  if(NOT EXISTS "${_site_packages}/nvidia/cu13/lib/${_library}")
    message(FATAL_ERROR "${_library}, which libtorch_cpu.so needs, not found: "
      "PyPI package ${_package} brings it (`make deps`).")
  endif()
endforeach()

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
