tessera_test(engine_config_test
  SOURCES
    ${CMAKE_CURRENT_LIST_DIR}/config_batch_test.cc
    ${CMAKE_CURRENT_LIST_DIR}/config_check_test.cc
    ${CMAKE_CURRENT_LIST_DIR}/config_docs_test.cc
    ${CMAKE_CURRENT_LIST_DIR}/config_fuzz_test.cc
    ${CMAKE_CURRENT_LIST_DIR}/config_json_test.cc
    ${CMAKE_CURRENT_LIST_DIR}/config_parse_test.cc
    ${CMAKE_CURRENT_LIST_DIR}/config_section_test.cc
  DEPS tessera::config)
target_compile_definitions(engine_config_test PRIVATE TESSERA_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
