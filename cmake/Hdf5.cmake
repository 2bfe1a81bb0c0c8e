# tessera::libhdf5 (the C library) and TESSERA_HDF5_INCLUDE_DIR. Also part of the installed package.
# Not find_package(HDF5): that one compiles C programs, and C is no language of this project.
find_path(TESSERA_HDF5_INCLUDE_DIR NAMES hdf5.h PATH_SUFFIXES hdf5/serial)
find_library(TESSERA_HDF5_LIBRARY NAMES hdf5_serial hdf5 PATH_SUFFIXES hdf5/serial)
foreach(_found TESSERA_HDF5_INCLUDE_DIR TESSERA_HDF5_LIBRARY)
  if(NOT ${_found})
    message(FATAL_ERROR "HDF5 (hdf5.h, libhdf5) not found: Debian package libhdf5-dev brings it "
      "(`make deps`, or apt-get install libhdf5-dev).")
  endif()
endforeach()
if(NOT TARGET tessera::libhdf5)
  add_library(tessera::libhdf5 UNKNOWN IMPORTED)
  set_target_properties(tessera::libhdf5 PROPERTIES IMPORTED_LOCATION "${TESSERA_HDF5_LIBRARY}")
endif()
