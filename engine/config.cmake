# The configuration: strict JSON, key tables, EngineConfig. Without libtorch, so that the launcher and the
# tools can read a configuration in milliseconds.
tessera_library(config
  SOURCES
    ${CMAKE_CURRENT_LIST_DIR}/config_batch.cc
    ${CMAKE_CURRENT_LIST_DIR}/config_check.cc
    ${CMAKE_CURRENT_LIST_DIR}/config_document.cc
    ${CMAKE_CURRENT_LIST_DIR}/config_json.cc
    ${CMAKE_CURRENT_LIST_DIR}/config_key.cc
    ${CMAKE_CURRENT_LIST_DIR}/config_keys.cc
    ${CMAKE_CURRENT_LIST_DIR}/config_keys_deepspeed.cc
    ${CMAKE_CURRENT_LIST_DIR}/config_keys_optimizer.cc
    ${CMAKE_CURRENT_LIST_DIR}/config_optimizer.cc
    ${CMAKE_CURRENT_LIST_DIR}/config_overrides.cc
    ${CMAKE_CURRENT_LIST_DIR}/config_parse.cc
    ${CMAKE_CURRENT_LIST_DIR}/config_schema.cc
    ${CMAKE_CURRENT_LIST_DIR}/config_section.cc
    ${CMAKE_CURRENT_LIST_DIR}/config_suggest.cc
  DEPS tessera::core nlohmann_json::nlohmann_json)
