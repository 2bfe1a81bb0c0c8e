// CMake wants a source file beside a precompiled header.
