tessera_test(parity_test TORCH SOURCES ${CMAKE_CURRENT_LIST_DIR}/parity_test.cc DEPS tessera::engine)
tessera_test(engine_test TORCH
  SOURCES
    ${CMAKE_CURRENT_LIST_DIR}/counts_test.cc
    ${CMAKE_CURRENT_LIST_DIR}/engine_test.cc
    ${CMAKE_CURRENT_LIST_DIR}/memory_test.cc
    ${CMAKE_CURRENT_LIST_DIR}/modes_test.cc
    ${CMAKE_CURRENT_LIST_DIR}/optimizer_parity_test.cc
    ${CMAKE_CURRENT_LIST_DIR}/param_groups_test.cc
    ${CMAKE_CURRENT_LIST_DIR}/precision_test.cc
  DEPS tessera::engine)

# A rank as a process of its own, and the test that launches it.
add_executable(engine_test_rank ${CMAKE_CURRENT_LIST_DIR}/engine_test_rank.cc)
tessera_compile_options(engine_test_rank)
tessera_use_torch(engine_test_rank)
target_link_libraries(engine_test_rank PRIVATE tessera::engine)
tessera_test(engine_process_test SOURCES ${CMAKE_CURRENT_LIST_DIR}/process_test.cc DEPS tessera::launcher)
add_dependencies(engine_process_test engine_test_rank)
