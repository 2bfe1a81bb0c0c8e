# The CUDA plugin, libtessera_cuda.so, beside the `tessera` program (core/cuda_plugin.h opens it at run time).
#
#   tessera_cuda_sources(a.cc b.cu …)   from any folder: adds sources; does nothing when CUDA is off
#   tessera_cuda_finish()               once, after all folders: makes the library
#
# .cu files are compiled without libtorch's headers (raw pointers and cudaStream_t only); .cc files with them.
set(TESSERA_CUDA "AUTO" CACHE STRING "Build the CUDA plugin: AUTO (when nvcc, NCCL and libtorch_cuda are found), ON or OFF")
set_property(CACHE TESSERA_CUDA PROPERTY STRINGS AUTO ON OFF)

set(TESSERA_HAS_CUDA OFF)
if(NOT TESSERA_CUDA STREQUAL "OFF")
  set(_missing "")
  find_package(CUDAToolkit QUIET)
  find_program(TESSERA_NVCC nvcc HINTS "${CUDAToolkit_BIN_DIR}" /usr/local/cuda/bin)
  if(NOT TESSERA_TORCH_CUDA)
    list(APPEND _missing "a torch for CUDA (${TESSERA_TORCH_DIR} is for the CPU)")
  elseif(NOT CUDAToolkit_FOUND OR NOT TESSERA_NVCC OR NOT CUDAToolkit_VERSION_MAJOR EQUAL _cuda_major)
    list(APPEND _missing "nvcc (NVIDIA's CUDA toolkit ${_cuda_major}, which this torch is built for: package cuda-toolkit-${_cuda_major}-0 of NVIDIA's Debian repository)")
  endif()
  # The wheel's own NCCL first: its header is the one libtorch_cuda was built with.
  find_path(TESSERA_NCCL_INCLUDE_DIR nccl.h HINTS "${_site_packages}/nvidia/nccl/include" ${CUDAToolkit_INCLUDE_DIRS} NO_CACHE)
  if(NOT TESSERA_NCCL_INCLUDE_DIR)
    list(APPEND _missing "nccl.h (PyPI package nvidia-nccl-cu${_cuda_major}, or NVIDIA's Debian package libnccl-dev)")
  endif()
  if(NOT EXISTS "${TESSERA_TORCH_DIR}/lib/libtorch_cuda.so")
    list(APPEND _missing "libtorch_cuda.so (the CUDA build of PyPI package torch)")
  endif()
  if(NOT _missing)
    set(TESSERA_HAS_CUDA ON)
  elseif(TESSERA_CUDA STREQUAL "ON")
    string(REPLACE ";" "\n  " _missing "${_missing}")
    message(FATAL_ERROR "TESSERA_CUDA=ON, but these were not found:\n  ${_missing}")
  endif()
endif()

if(TESSERA_HAS_CUDA)
  if(NOT CMAKE_CUDA_COMPILER)
    set(CMAKE_CUDA_COMPILER "${TESSERA_NVCC}")
  endif()
  # Machine code for Ampere, Ada, Hopper and Blackwell (a device also runs that of its generation's earlier ones), and
  # PTX for what comes after: 10 s and 1 MB more than for one. -DCMAKE_CUDA_ARCHITECTURES=native builds for the GPUs here.
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 80-real 86-real 89-real 90-real 100-real 120)
  endif()
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${CMAKE_CXX_COMPILER_LAUNCHER})
  enable_language(CUDA)
  set(CMAKE_CUDA_STANDARD 17)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
  message(STATUS "CUDA plugin: on (toolkit ${CUDAToolkit_VERSION}, architectures ${CMAKE_CUDA_ARCHITECTURES})")
else()
  message(STATUS "CUDA plugin: off (CPU only)")
endif()

function(tessera_cuda_sources)
  if(TESSERA_HAS_CUDA)
    foreach(_source IN LISTS ARGN)
      get_filename_component(_source "${_source}" ABSOLUTE BASE_DIR "${CMAKE_CURRENT_SOURCE_DIR}")
      set_property(GLOBAL APPEND PROPERTY TESSERA_CUDA_SOURCES "${_source}")
    endforeach()
  endif()
endfunction()

function(tessera_cuda_finish)
  get_property(_sources GLOBAL PROPERTY TESSERA_CUDA_SOURCES)
  if(NOT TESSERA_HAS_CUDA OR NOT _sources)
    return()
  endif()
  add_library(tessera_cuda MODULE ${_sources})
  set_target_properties(tessera_cuda PROPERTIES
    LIBRARY_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}" POSITION_INDEPENDENT_CODE ON)
  target_include_directories(tessera_cuda PRIVATE "${PROJECT_SOURCE_DIR}")
  # libtorch's headers for C++ only; the toolkit's own for both.
  get_target_property(_torch_includes tessera::torch INTERFACE_INCLUDE_DIRECTORIES)
  get_target_property(_torch_definitions tessera::torch INTERFACE_COMPILE_DEFINITIONS)
  foreach(_dir IN LISTS _torch_includes TESSERA_NCCL_INCLUDE_DIR)
    target_compile_options(tessera_cuda PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:SHELL:-isystem ${_dir}>")
  endforeach()
  target_compile_definitions(tessera_cuda PRIVATE $<$<COMPILE_LANGUAGE:CXX>:${_torch_definitions};USE_C10D_NCCL;USE_CUDA>)
  target_compile_options(tessera_cuda PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:${TESSERA_CXX_FLAGS}>")
  target_link_libraries(tessera_cuda PRIVATE
    "${TESSERA_TORCH_DIR}/lib/libtorch_cuda.so" "${TESSERA_TORCH_DIR}/lib/libc10_cuda.so"
    "${TESSERA_TORCH_DIR}/lib/libtorch_cpu.so" "${TESSERA_TORCH_DIR}/lib/libc10.so" CUDA::cudart)
  # What libtorch_cuda itself needs (cuDNN, cuBLAS, NCCL …) may be absent on the machine that builds.
  target_link_options(tessera_cuda PRIVATE
    -Wl,--unresolved-symbols=ignore-in-shared-libs -Wl,--no-as-needed "-Wl,-rpath,${TESSERA_TORCH_DIR}/lib")
  foreach(_dir IN LISTS TESSERA_NVIDIA_LIB_DIRS)
    target_link_options(tessera_cuda PRIVATE "-Wl,-rpath,${_dir}")
  endforeach()
endfunction()
