# The trainer's part of the configuration. Without libtorch.
tessera_library(train_config SOURCES ${CMAKE_CURRENT_LIST_DIR}/trainer_config.cc DEPS tessera::config)
