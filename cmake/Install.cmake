# `cmake --install build --prefix P`: the command, the configurations, and the libraries with their headers and a CMake package, so that a
# project elsewhere needs find_package(tessera) and nothing of this tree (docs/own_model_cpp.md; tests/install builds one).
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
set(_package "${CMAKE_INSTALL_LIBDIR}/cmake/tessera")

get_property(_libraries GLOBAL PROPERTY TESSERA_LIBRARIES)
foreach(_library IN LISTS _libraries)
  get_target_property(_room ${_library} SOURCE_DIR)
  file(RELATIVE_PATH _room "${PROJECT_SOURCE_DIR}" "${_room}")
  string(REGEX REPLACE "/.*" "" _room "${_room}")
  if(_room IN_LIST TESSERA_PUBLIC_ROOMS)
    list(APPEND _installed ${_library})
  endif()
endforeach()
add_library(tessera_everything INTERFACE)
set_target_properties(tessera_everything PROPERTIES EXPORT_NAME tessera)
target_link_libraries(tessera_everything INTERFACE tessera::train)

install(TARGETS ${_installed} tessera_everything EXPORT tessera ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}/tessera")
install(EXPORT tessera NAMESPACE tessera:: FILE tesseraTargets.cmake DESTINATION "${_package}")
install(CODE "set(SOURCE [[${PROJECT_SOURCE_DIR}]])\nset(ROOMS [[${TESSERA_PUBLIC_ROOMS}]])
  set(INCLUDES \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_INCLUDEDIR}\")")
install(SCRIPT cmake/InstallHeaders.cmake)
write_basic_package_version_file("${PROJECT_BINARY_DIR}/tesseraConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
configure_file(cmake/tesseraConfig.cmake.in "${PROJECT_BINARY_DIR}/tesseraConfig.cmake" @ONLY)
install(FILES "${PROJECT_BINARY_DIR}/tesseraConfig.cmake" cmake/Torch.cmake cmake/Hdf5.cmake cmake/SmallLibraries.cmake "${PROJECT_BINARY_DIR}/tesseraConfigVersion.cmake"
  DESTINATION "${_package}")

install(TARGETS tessera RUNTIME DESTINATION "${CMAKE_INSTALL_BINDIR}")
install(FILES "${CMAKE_BINARY_DIR}/zero_to_fp32" DESTINATION "${CMAKE_INSTALL_BINDIR}")  # a link to the one beside it
if(TARGET tessera_cuda)
  install(TARGETS tessera_cuda LIBRARY DESTINATION "${CMAKE_INSTALL_BINDIR}")  # looked for beside the program
endif()
# The completions and the manual page are what the command prints.
foreach(_file bash=bash-completion/completions/tessera zsh=zsh/site-functions/_tessera man=man/man1/tessera.1)
  string(REGEX MATCH "^(.*)=(.*)$" _ "${_file}")
  install(CODE "execute_process(COMMAND \"$<TARGET_FILE:tessera>\" completion ${CMAKE_MATCH_1} COMMAND_ERROR_IS_FATAL ANY
    OUTPUT_FILE \"${PROJECT_BINARY_DIR}/completion.${CMAKE_MATCH_1}\")")
  cmake_path(GET CMAKE_MATCH_2 PARENT_PATH _folder)
  cmake_path(GET CMAKE_MATCH_2 FILENAME _name)
  install(FILES "${PROJECT_BINARY_DIR}/completion.${CMAKE_MATCH_1}" DESTINATION "${CMAKE_INSTALL_DATADIR}/${_folder}" RENAME "${_name}")
endforeach()
install(DIRECTORY configs/ DESTINATION "${CMAKE_INSTALL_DATADIR}/tessera/configs")
install(DIRECTORY examples/project/ DESTINATION "${CMAKE_INSTALL_DATADIR}/tessera/project")
install(FILES LICENSE CHANGELOG.md DESTINATION "${CMAKE_INSTALL_DATADIR}/doc/tessera")
