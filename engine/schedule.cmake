# Learning-rate schedules and the loss scaler: arithmetic only, no libtorch.
tessera_library(schedule
  SOURCES
    ${CMAKE_CURRENT_LIST_DIR}/loss_scaler.cc
    ${CMAKE_CURRENT_LIST_DIR}/lr_schedule.cc
    ${CMAKE_CURRENT_LIST_DIR}/schedule_params.cc
  DEPS tessera::core)
