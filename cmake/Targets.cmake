# tessera_library(core SOURCES a.cc DEPS ...): one static library a folder, with the warnings we keep clean.
# TORCH compiles it against libtorch with the shared precompiled header.
# __FILE__ is the path in the tree or in libtorch's headers, and no folder of the machine that builds.
set(TESSERA_CXX_FLAGS -Wall -Wextra -Wno-unused-parameter -ffp-contract=off
  -fmacro-prefix-map=${PROJECT_SOURCE_DIR}/= -fmacro-prefix-map=${TESSERA_TORCH_DIR}/include/=)
function(tessera_compile_options target)
  target_compile_features(${target} PUBLIC cxx_std_20)
  target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:${TESSERA_CXX_FLAGS}>")
  target_include_directories(${target} PUBLIC "$<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}>" "$<INSTALL_INTERFACE:include>")
  if(TESSERA_SANITIZE)
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${TESSERA_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all>)
    target_link_options(${target} PUBLIC -fsanitize=${TESSERA_SANITIZE})
  endif()
endfunction()

# A header that is compiled once, cmake/NAME.h, for tessera_use_torch.
function(tessera_precompiled_header name)
  add_library(tessera_${name} STATIC EXCLUDE_FROM_ALL cmake/empty.cc)
  tessera_compile_options(tessera_${name})
  target_link_libraries(tessera_${name} PUBLIC tessera::torch)
  target_compile_options(tessera_${name} PRIVATE -fPIC -fpch-preprocess)
  target_precompile_headers(tessera_${name} PRIVATE cmake/${name}.h)
endfunction()

# Most of what a file costs to compile is what the headers of libtorch, nlohmann_json and CLI11 leave to instantiate, so several
# files of a target are compiled as one: always those of a test, and those of the product if TESSERA_JOIN_SOURCES says so. (Files with
# options of their own are left out by CMake.)
function(tessera_join_sources target)
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 12)
endfunction()
function(tessera_join_product_sources target)
  if(TESSERA_JOIN_SOURCES)
    tessera_join_sources(${target})
  endif()
endfunction()

# libtorch, with the precompiled header torch_pch, or nn_pch for what uses torch::nn.
function(tessera_use_torch target)
  set(header torch_pch)
  if("NN" IN_LIST ARGN)
    set(header nn_pch)
  endif()
  target_link_libraries(${target} PUBLIC tessera::torch)
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-fpch-preprocess>)  # ccache needs it
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-fPIC>)  # programs too, or the header is not reused
  target_precompile_headers(${target} REUSE_FROM tessera_${header})
endfunction()

function(tessera_library name)
  cmake_parse_arguments(ARG "TORCH" "" "SOURCES;DEPS" ${ARGN})
  set(target tessera_${name})
  add_library(${target} STATIC ${ARG_SOURCES})
  add_library(tessera::${name} ALIAS ${target})
  tessera_join_product_sources(${target})
  set_property(GLOBAL APPEND PROPERTY TESSERA_LIBRARIES ${target})  # for cmake/Install.cmake
  set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE ON EXPORT_NAME ${name})
  tessera_compile_options(${target})
  target_link_libraries(${target} PUBLIC ${ARG_DEPS})
  if(ARG_TORCH)
    tessera_use_torch(${target})
  endif()
endfunction()

# Compiles the text of FILE into TARGET, as the std::string_view NAME (with its namespace).
function(tessera_embed_text target file name)
  set(made "${CMAKE_CURRENT_BINARY_DIR}/${file}.cc")
  add_custom_command(OUTPUT "${made}"
    COMMAND ${CMAKE_COMMAND} "-DFROM=${CMAKE_CURRENT_SOURCE_DIR}/${file}" "-DTO=${made}" "-DNAME=${name}" -P "${PROJECT_SOURCE_DIR}/cmake/EmbedText.cmake"
    DEPENDS "${file}" "${PROJECT_SOURCE_DIR}/cmake/EmbedText.cmake" VERBATIM)
  target_sources(${target} PRIVATE "${made}")
  set_source_files_properties("${made}" PROPERTIES SKIP_PRECOMPILE_HEADERS ON SKIP_UNITY_BUILD_INCLUSION ON)
endfunction()

# What tests are built of is compiled with -O1: less to compile; what is tested has -O2.
function(tessera_test_options target)
  cmake_parse_arguments(PARSE_ARGV 1 ARG "TORCH;NN" "" "")
  tessera_join_sources(${target})
  tessera_compile_options(${target})
  target_compile_options(${target} PRIVATE $<$<CONFIG:Release>:-O1>)
  if(ARG_NN)
    tessera_use_torch(${target} NN)
  elseif(ARG_TORCH)
    tessera_use_torch(${target})
  endif()
endfunction()

# Helpers of several tests.
function(tessera_test_library name)
  cmake_parse_arguments(ARG "NN" "" "SOURCES;DEPS" ${ARGN})
  add_library(${name} STATIC EXCLUDE_FROM_ALL ${ARG_SOURCES})
  target_link_libraries(${name} PUBLIC ${ARG_DEPS})
  if(ARG_NN)
    tessera_test_options(${name} NN)
  else()
    tessera_test_options(${name} TORCH)
  endif()
endfunction()

# A program that tests start: tessera_test_program(name [TORCH|NN] SOURCES a.cc DEPS ...).
function(tessera_test_program name)
  cmake_parse_arguments(PARSE_ARGV 1 ARG "" "" "SOURCES;DEPS")
  add_executable(${name} ${ARG_SOURCES})
  tessera_test_options(${name} ${ARG_UNPARSED_ARGUMENTS})
  target_link_libraries(${name} PRIVATE ${ARG_DEPS})
endfunction()

# add_test() for all of the suite. A test keeps a core busy, of which ctest counts two halves (scripts/test.sh); with WAITS one half:
# it waits for time-outs, for ranks that were killed or for servers most of the time, and needs little of a core. LONG ones take
# longest: ctest starts them first, so that none runs alone at the end; of those that wait two at a time where cores are few, which would
# be idle otherwise. OpenMP's threads sleep where they wait: beside other
# tests those that spin take the cores from the thread that they wait for, and a small operator takes a hundred times as long.
function(tessera_add_test)
  cmake_parse_arguments(PARSE_ARGV 0 ARG "WAITS;LONG" "NAME" "")
  add_test(NAME ${ARG_NAME} ${ARG_UNPARSED_ARGUMENTS})
  set(halves 2)
  if(ARG_WAITS)
    set(halves 1)
  endif()
  set_tests_properties(${ARG_NAME} PROPERTIES PROCESSORS ${halves} ENVIRONMENT_MODIFICATION OMP_WAIT_POLICY=set:passive)
  if(ARG_LONG)
    set_tests_properties(${ARG_NAME} PROPERTIES COST 60)
  endif()
  if(ARG_WAITS AND ARG_LONG)
    get_property(lock GLOBAL PROPERTY TESSERA_WAITING_LOCK)
    math(EXPR lock "1 - 0${lock}")
    set_property(GLOBAL PROPERTY TESSERA_WAITING_LOCK ${lock})
    cmake_host_system_information(RESULT cores QUERY NUMBER_OF_LOGICAL_CORES)
    if(cores LESS 5)
      set_tests_properties(${ARG_NAME} PROPERTIES RESOURCE_LOCK waiting_${lock})
    endif()
  endif()
endfunction()

# tessera_test(name SOURCES a_test.cc DEPS ...): one GoogleTest binary; ctest runs it as one test, with the ranks in shared memory; with
# BACKENDS gloo hybrid also as NAME_gloo, over the network, and as NAME_hybrid, on two hosts (tests/support/backend.h). FULL_BACKENDS are
# those that only `make test-full` has; with staged the device is host memory. FULL_CASES: GoogleTest's pattern of cases that only it has.
# PARTS n: the cases are n tests of ctest, NAME_1 to NAME_n, which may run side by side. WAITS, LONG: see above.
function(tessera_test name)
  cmake_parse_arguments(ARG "TORCH;NN;WAITS;LONG" "FULL_CASES;PARTS" "SOURCES;DEPS;BACKENDS;FULL_BACKENDS" ${ARGN})
  set(torch)
  if(ARG_NN)
    set(torch NN)
  elseif(ARG_TORCH)
    set(torch TORCH)
  endif()
  tessera_test_program(${name} ${torch} SOURCES ${ARG_SOURCES} DEPS ${ARG_DEPS} GTest::gtest GTest::gmock GTest::gtest_main)
  set(schedule)
  foreach(word WAITS LONG)
    if(ARG_${word})
      list(APPEND schedule ${word})
    endif()
  endforeach()
  set(command ${name})
  if(ARG_FULL_CASES)
    list(APPEND command --gtest_filter=-${ARG_FULL_CASES})
    tessera_add_test(NAME ${name}_full ${schedule} CONFIGURATIONS Full COMMAND ${name} --gtest_filter=${ARG_FULL_CASES})
    set_tests_properties(${name}_full PROPERTIES LABELS full TIMEOUT 6000)
  endif()
  if(ARG_PARTS)
    foreach(part RANGE 1 ${ARG_PARTS})
      math(EXPR index "${part} - 1")
      tessera_add_test(NAME ${name}_${part} ${schedule} COMMAND ${command})
      set_tests_properties(${name}_${part} PROPERTIES ENVIRONMENT "GTEST_TOTAL_SHARDS=${ARG_PARTS};GTEST_SHARD_INDEX=${index}")
    endforeach()
  else()
    tessera_add_test(NAME ${name} ${schedule} COMMAND ${command})
  endif()
  foreach(backend ${ARG_BACKENDS})
    tessera_add_test(NAME ${name}_${backend} ${schedule} COMMAND ${name})
    set_tests_properties(${name}_${backend} PROPERTIES ENVIRONMENT TESSERA_TEST_BACKEND=${backend})
  endforeach()
  foreach(backend ${ARG_FULL_BACKENDS})
    tessera_add_test(NAME ${name}_${backend} ${schedule} CONFIGURATIONS Full COMMAND ${name})
    set_tests_properties(${name}_${backend} PROPERTIES LABELS full TIMEOUT 6000 ENVIRONMENT TESSERA_TEST_BACKEND=${backend})
  endforeach()
endfunction()

# tessera_gpu_test(NAME PROGRAM [gpu_ranks]): ctest's test NAME, which runs PROGRAM, needs a GPU; it skips its cases where there is
# none. `make bundle` takes it along. gpu_ranks: it runs in every world that bundle/gpu_check.py lists, not on one rank alone.
function(tessera_gpu_test name program)
  set_tests_properties(${name} PROPERTIES LABELS "${ARGN};gpu" SKIP_REGULAR_EXPRESSION "\\[  SKIPPED \\]")
  if(TARGET bundle_programs)
    add_dependencies(bundle_programs ${program})
  endif()
endfunction()
