tessera_test(parity_test TORCH DISCOVER SOURCES ${CMAKE_CURRENT_LIST_DIR}/parity_test.cc DEPS tessera::engine)
