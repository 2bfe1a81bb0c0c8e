// TESSERA_EVERY_CPU before a function compiles it once for each x86-64 level; the best that the machine has
// is chosen when the program is loaded. For loops over blocks: such a function is not inlined, nor are loops
// vectorised beyond it. The bits are the same everywhere, since -ffp-contract=off (cmake/Targets.cmake)
// rounds every operation by itself. Nothing under the sanitizers, whose run-time libraries are not there yet
// when the choice is made, and with compilers that don't know the levels by name (clang 14, GCC 11).
#pragma once

#ifdef TESSERA_EVERY_CPU
// A test compiles the loops for one level at a time.
#elif defined(__x86_64__) && defined(__GNUC__) && __GNUC__ >= 12 && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define TESSERA_EVERY_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define TESSERA_EVERY_CPU
#endif
