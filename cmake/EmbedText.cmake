# Makes a C++ source with the text of a file as a constant: cmake -DFROM=page.html -DTO=page.cc -DNAME=tessera::train::kPage -P EmbedText.cmake
file(READ "${FROM}" _text)
string(REGEX REPLACE "::[^:]*$" "" _namespace "${NAME}")
string(REGEX REPLACE "^.*::" "" _constant "${NAME}")
get_filename_component(_file "${FROM}" NAME)
file(WRITE "${TO}" "// Made of ${_file} by cmake/EmbedText.cmake.\n#include <string_view>\n\nnamespace ${_namespace} {\nextern const std::string_view ${_constant};\n"
  "const std::string_view ${_constant} = R\"embedded(" "${_text}" ")embedded\";\n}  // namespace ${_namespace}\n")
