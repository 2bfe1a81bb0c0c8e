# The installed package. tessera::tessera is everything; tessera::engine (without the trainer), tessera::comm and so on are its parts.
#   find_package(tessera REQUIRED)
#   target_link_libraries(app PRIVATE tessera::tessera)
# libtorch is a wheel's: -DTESSERA_TORCH_DIR=<site-packages>/torch, or that folder in CMAKE_PREFIX_PATH.
include(CMakeFindDependencyMacro)
find_dependency(Threads)
find_dependency(nlohmann_json)
find_dependency(ZLIB)
find_dependency(PNG)
include("${CMAKE_CURRENT_LIST_DIR}/Hdf5.cmake")
include("${CMAKE_CURRENT_LIST_DIR}/SmallLibraries.cmake")
include("${CMAKE_CURRENT_LIST_DIR}/Torch.cmake")
include("${CMAKE_CURRENT_LIST_DIR}/tesseraTargets.cmake")
