tessera_test(kernels_test TORCH
  SOURCES
    ${CMAKE_CURRENT_LIST_DIR}/kernels_cuda_test.cc
    ${CMAKE_CURRENT_LIST_DIR}/kernels_test.cc
    ${CMAKE_CURRENT_LIST_DIR}/optimizers_test.cc
  DEPS tessera::kernels)
