tessera_test(lr_schedule_test SOURCES ${CMAKE_CURRENT_LIST_DIR}/lr_schedule_test.cc DEPS tessera::schedule)
tessera_test(loss_scaler_test SOURCES ${CMAKE_CURRENT_LIST_DIR}/loss_scaler_test.cc DEPS tessera::schedule)
