// TESSERA_EVERY_CPU before a function compiles it for each x86-64 level; the dynamic loader chooses the best
// one for the machine. For functions with loops over blocks: they are not inlined. All versions give the same
// bits, because -ffp-contract=off (cmake/Targets.cmake) rounds every operation separately. Expands to nothing
// under the sanitizers, whose run-time libraries are not loaded when the version is chosen, and with
// compilers that do not know the level names (clang 14, GCC 11).
#pragma once

#ifdef TESSERA_EVERY_CPU
// A test compiles the loops for one level at a time.
#elif defined(__x86_64__) && defined(__GNUC__) && __GNUC__ >= 12 && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define TESSERA_EVERY_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define TESSERA_EVERY_CPU
#endif
