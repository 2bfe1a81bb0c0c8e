tessera_test(trainer_config_test SOURCES ${CMAKE_CURRENT_LIST_DIR}/trainer_config_test.cc DEPS tessera::train_config)
target_compile_definitions(trainer_config_test PRIVATE TESSERA_SOURCE_DIR="${PROJECT_SOURCE_DIR}" TESSERA_BUILD_DIR="${CMAKE_BINARY_DIR}")
