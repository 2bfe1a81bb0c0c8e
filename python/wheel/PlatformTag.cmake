# At installation: what the wheel's binaries need of glibc and libstdc++ is not newer than its platform tag, TESSERA_PLATFORM, says. The
# numbers are those of auditwheel's policy manylinux_2_35.
if(TESSERA_PLATFORM STREQUAL "")
  return()  # linux_x86_64: this machine
endif()
if(NOT TESSERA_PLATFORM STREQUAL "manylinux_2_35_x86_64")
  message(FATAL_ERROR "TESSERA_PLATFORM=${TESSERA_PLATFORM}: expected manylinux_2_35_x86_64, or nothing")
endif()
set(_newest_GLIBC 2.35)
set(_newest_GLIBCXX 3.4.30)
set(_newest_CXXABI 1.3.13)
file(GLOB _binaries "${CMAKE_INSTALL_PREFIX}/tessera/_engine*.so" "${CMAKE_INSTALL_PREFIX}/tessera/bin/*")
foreach(_binary IN LISTS _binaries)
  execute_process(COMMAND readelf --version-info --wide "${_binary}" OUTPUT_VARIABLE _versions COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCHALL "Name: (GLIBC|GLIBCXX|CXXABI)_[0-9.]+" _needed "${_versions}")
  list(REMOVE_DUPLICATES _needed)
  foreach(_symbol IN LISTS _needed)
    string(REGEX MATCH "Name: ([A-Z]+)_([0-9.]+)" _ "${_symbol}")
    if(CMAKE_MATCH_2 VERSION_GREATER _newest_${CMAKE_MATCH_1})
      message(FATAL_ERROR "${_binary} needs ${CMAKE_MATCH_1}_${CMAKE_MATCH_2}, and ${TESSERA_PLATFORM} has ${CMAKE_MATCH_1}_${_newest_${CMAKE_MATCH_1}}: "
        "build on an older system, or a wheel for systems like this one: make wheel PLATFORM=")
    endif()
  endforeach()
endforeach()
