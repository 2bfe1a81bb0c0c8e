"""Markdown of a public C++ header: what it declares for callers, each with the comment before it. Tree-sitter parses the header."""
import re
from itertools import groupby, takewhile

import tree_sitter_cpp
from tree_sitter import Language, Parser

_PARSER = Parser(Language(tree_sitter_cpp.language()))
_WITH_BODY = {"class_specifier", "struct_specifier", "enum_specifier"}
_DECLARATIONS = _WITH_BODY | {"declaration", "field_declaration", "function_definition", "template_declaration", "alias_declaration"}
_SPECIAL = re.compile(r"~|= (delete|default);?$|^(template <.*>\n)?(class|struct) \w+;?$")  # is left out where it has no comment
# Of types in the signatures of what tessera.h includes.
_BESIDE = ["comm/communicator.h", "engine/config/config.h", "engine/load_weights.h"]


def public_headers(root):
    """What tessera.h includes, and what its comment names."""
    text = (root / "tessera.h").read_text(encoding="utf-8")
    return sorted({*re.findall(r'^#include "(.*)"', text, re.MULTILINE), *re.findall(r"<tessera/(.*?)>", text), *_BESIDE})


def page(root, header):
    source = (root / header).read_text(encoding="utf-8")
    about = takewhile(lambda line: line.startswith("//"), source.splitlines())
    return "\n".join([f"# {header}", "", *_prose(about), *_code(f"#include <tessera/{header}>"), *_scope(_PARSER.parse(source.encode()).root_node, 2)])


def _code(text):
    return ["", "```cpp", text, "```", ""]


def _prose(comments):
    """Lines of a comment as Markdown: those that are indented are code."""
    lines = [re.sub(r"^/{2,3}<? ?", "", line) for line in comments]
    for is_code, part in groupby(lines, lambda line: line.startswith("  ")):
        if is_code:
            yield from _code("\n".join(line[2:] for line in part))
        else:
            for line in part:
                spans = line.split("`")
                spans[::2] = [re.sub(r"([*\\])", r"\\\1", span.replace("&", "&amp;").replace("<", "&lt;")) for span in spans[::2]]
                yield "`".join(spans)


def _scope(scope, level):
    """The declarations of a file, namespace or class: a heading, their source without bodies, and the comment, for each comment."""
    groups, comment, is_public, row = [], [], scope.parent is None or scope.parent.type != "class_specifier", -1
    for node in scope.children:
        text = node.text.decode()
        if node.type == "access_specifier":
            is_public = text == "public"
        elif node.type == "namespace_definition":
            groups.append((None, _scope(node.child_by_field_name("body"), level), []))
        elif not is_public:
            continue
        elif node.type == "comment":
            if text.startswith("///<") and groups:
                groups[-1][1][-1] += f"  {text}"
            elif text.startswith("///"):
                comment.append(text)
        elif node.type in _DECLARATIONS:
            name, code, members = _declaration(node)
            if comment or not _SPECIAL.search(code):
                if not comment and groups and groups[-1][0] and row == node.start_point.row - 1:  # has the comment of the one before
                    groups[-1][1].append(code)
                else:
                    groups.append((name, [code], [*_prose(comment), "", *(_scope(members, level + 1) if members else [])]))
            comment, row = [], node.end_point.row
    for name, code, rest in groups:
        if name is None:
            yield from code
        else:
            yield from (f"{'#' * level} `{name}`", *_code("\n".join(code)), *rest)


def _declaration(node):
    """(name, source, the members that have entries of their own or None). A class has them; a struct is shown with its members."""
    inner = node
    while inner.type == "template_declaration":
        inner = inner.named_children[-1]
    body = inner.child_by_field_name("body") if inner.type in ("class_specifier", "function_definition") else None
    end = body.start_byte if body else node.end_byte
    for child in inner.children:
        if child.type == "field_initializer_list":  # of a constructor
            end = min(end, child.start_byte)
    code = node.text[:end - node.start_byte].decode().strip()
    code = re.sub(rf"^ {{0,{node.start_point.column}}}", "", code, flags=re.MULTILINE)
    code += "" if code.endswith(";") or (body and inner.type == "class_specifier") else ";"
    name = inner
    while not name.type.endswith("identifier") and name.type not in ("operator_name", "destructor_name"):
        found = name.child_by_field_name("name") or name.child_by_field_name("declarator") or name.child_by_field_name("type")
        name = found or next(child for child in name.named_children if child.type != "type_qualifier")
    return name.text.decode(), code, body if inner.type == "class_specifier" else None
