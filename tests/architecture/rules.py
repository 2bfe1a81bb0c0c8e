"""The rules of docs/architecture.md that a program can check. Each returns complaints: "file:line: what is wrong"."""
import ast
import re
from pathlib import Path, PurePosixPath

from source_tree import CPP_SUFFIXES, code_of, project_files

# Folder -> the folders it may include from, itself excepted. The order is the order of the layers.
CHAIN = ["core", "comm", "zero", "activations", "checkpoint", "engine", "train", "examples"]
MAY_INCLUDE = {folder: set(CHAIN[:i]) for i, folder in enumerate(CHAIN)}
MAY_INCLUDE["checkpoint"] = {"core", "zero"}  # of zero only the layout: CHECKPOINT_FROM_ZERO
MAY_INCLUDE["launcher"] = MAY_INCLUDE["monitor"] = {"core"}
for folder in ("train", "examples"):
    MAY_INCLUDE[folder].add("monitor")  # the engine does not know where a run's numbers go
MAY_INCLUDE["cmake"] = set()  # the precompiled header
MAY_INCLUDE["tessera.h"] = MAY_INCLUDE["train"] | {"engine"}  # what a program of one's own includes
MAY_INCLUDE["python"] = set(MAY_INCLUDE) - {"examples", "cmake"}
for top in ("tools", "tests", "benchmarks"):
    MAY_INCLUDE[top] = set(MAY_INCLUDE) - {"python"} | {"tools", "tests", "benchmarks"}

# Folder -> its sub-folders, each of which may include from those before it. "." stands for the folder's own files.
SUB_FOLDERS = {
    "core": [".", "json", "files", "environment", "memory", "async_io"],
    "comm": ["sockets", "memory", "control", ".", "rendezvous", "shm", "gloo", "nccl", "hybrid", "staged", "init"],
    "zero": ["plan", "kernels", "memory", "operators", "deferred", "offload", "unit", "gather", "reduce", "optimizer", "model", "."],
    "checkpoint": [".", "hdf5", "formats", "foreign", "sharded", "read", "consolidate"],
    "engine": ["config/document", "config", "optimizer", "profile", "checkpoint", "."],
    "train": ["task", "data", "report", "run", "memory", "."],
    "launcher": ["environment", "process", "failure", "."],
    "tools": ["common", "launch", "memory", "doctor", "."],
}

CHECKPOINT_FROM_ZERO = re.compile(r"zero/plan/layout\w*\.h")
# Files that must be usable, and testable, without libtorch.
TORCH_FREE = re.compile(r"core/|launcher/|checkpoint/|monitor/|zero/plan/layout\w*\.(h|cc)$|zero/plan/stage\.h$")
TORCH_HEADER = re.compile(r"(torch|ATen|c10|caffe2)/")

STAGE_POLICY = "zero/plan/stage.h"
STAGES_OF_OTHERS = "checkpoint/foreign/"  # DeepSpeed's files differ by its stage
_STAGE = r"\b(?:\w+(?:\.|->|::))*(?:zero_)?stage_?(?:\(\))?"
_COMPARISON = r"(?:==|!=|<=|>=|(?<!<)<(?!<)|(?<!>)>(?!>))"  # neither << nor >>
_SPACED_COMPARISON = rf"(?<=\s){_COMPARISON}\s+"  # before a name, "<" and ">" are often a template's
STAGE_COMPARED = re.compile(
    rf"{_STAGE}\s*{_COMPARISON}|{_SPACED_COMPARISON}{_STAGE}(?![\w(])|\bswitch\s*\(\s*{_STAGE}\s*\)")
STAGE_NAMED = re.compile(r"\b(?:class|struct|namespace)\s+\w*[sS]tage_?[0-3]\w*")

JSON_READER = "core/json/"
JSON_PARSED = re.compile(r"json\s*::\s*(?:sax_)?parse\s*\(")

MAX_LINES = 900
LINE_LIMITED = CPP_SUFFIXES | {".py", ".sh", ".cmake"}

SETS = {"set", "frozenset", "WeakSet"}
SET_METHODS = {"union", "difference", "intersection", "symmetric_difference"}
ORDER_FREE = {"sorted", "any", "all", "min", "max", "sum", "set", "frozenset"}  # what they give is the same in any order
ITERATING = {"list", "tuple", "iter", "enumerate", "map", "filter", "zip", "join", "fromkeys", "extend"}

_INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')


class Source:
    """One C++ file: its path from the root, its code without comments and strings, its includes."""

    def __init__(self, root, path):
        self.path = path.as_posix()
        self.folder = path.parts[0]
        self.code = code_of((Path(root) / path).read_text(encoding="utf-8", errors="replace")).splitlines()
        # (line number, '"' or '<', the included name)
        self.includes = [(number, *match.groups()) for number, line in enumerate(self.code, 1)
                         if (match := _INCLUDE.match(line))]


def sources(root):
    return [Source(root, path) for path in project_files(root) if path.suffix in CPP_SUFFIXES]


def include_direction(root):
    complaints = []
    for source in sources(root):
        if source.folder not in MAY_INCLUDE:
            complaints.append(f"{source.path}:1: folder {source.folder}/ has no place in the include direction; "
                              "give it one in tests/architecture/rules.py and docs/architecture.md")
            continue
        for number, bracket, name in source.includes:
            complaint = _include_complaint(root, source, bracket, name)
            if complaint:
                complaints.append(f"{source.path}:{number}: {complaint}")
    return complaints


def _include_complaint(root, source, bracket, name):
    target = PurePosixPath(name).parts[0]
    ours = (Path(root) / name).is_file()
    # examples/project is a program outside of this tree: its own files stand beside each other.
    if source.path.startswith("examples/project/") and ((Path(root) / source.path).parent / name).is_file():
        return None
    if bracket == '"' and not ours:
        return f'"{name}" is no file of ours: our includes are paths from the root, those of others stand in <>'
    if not ours:
        return None
    if re.fullmatch(r"examples/[^/]+/model\.h", source.path):
        return f"includes {name}; a model.h includes nothing of ours: models need no change"
    if target != source.folder and target not in MAY_INCLUDE[source.folder]:
        allowed = ", ".join(sorted(MAY_INCLUDE[source.folder])) or "nothing"
        return f"includes {name}; {source.folder}/ may include only {allowed}"
    if source.folder == "checkpoint" and target == "zero" and not CHECKPOINT_FROM_ZERO.fullmatch(name):
        return f"includes {name}; of zero/ the checkpoint knows only the layout"
    return None


def sub_folder_direction(root):
    complaints = []
    for source in sources(root):
        order = SUB_FOLDERS.get(source.folder)
        if order is None:
            continue
        mine = _sub_folder(source.path, order)
        if mine not in order:
            complaints.append(f"{source.path}:1: folder {source.folder}/{mine}/ has no place in the include direction; "
                              "give it one in tests/architecture/rules.py and docs/architecture.md")
            continue
        for number, _, name in source.includes:
            if not name.startswith(source.folder + "/") or not (Path(root) / name).is_file():
                continue
            target = _sub_folder(name, order)
            if target in order and order.index(target) > order.index(mine):
                allowed = ", ".join(order[:order.index(mine)]) or "nothing else of its folder"
                complaints.append(f"{source.path}:{number}: includes {name}; {source.folder}/{mine} may include only {allowed}")
    return complaints


def _sub_folder(path, order):
    """The longest of `order` that the file lies in, or else the folder's own first sub-folder."""
    folder = "/".join(PurePosixPath(path).parts[1:-1])
    inside = [one for one in order if folder == one or folder.startswith(one + "/")]
    return max(inside, key=len) if inside else folder.split("/")[0] or "."


def torch_headers(root):
    complaints = []
    for source in sources(root):
        for number, _, name in source.includes:
            if TORCH_FREE.match(source.path) and TORCH_HEADER.match(name):
                complaints.append(f"{source.path}:{number}: includes {name}, but is to work without libtorch")
            if name == "torch/torch.h":
                complaints.append(f"{source.path}:{number}: torch/torch.h takes seconds to compile; "
                                  "include what is used")
            # The wheel's newer fmt/ breaks Debian's spdlog where both are on the include path.
            if name.startswith(("spdlog/", "fmt/")) and source.path != "core/log.cc":
                complaints.append(f"{source.path}:{number}: includes {name}; only core/log.cc does, see core/log.h")
    return complaints


def stage_comparisons(root):
    complaints = []
    for source in sources(root):
        if re.search(r"stage_?[0-3]", source.path):
            complaints.append(f"{source.path}:1: named after a stage; a stage is a value")
        if source.path == STAGE_POLICY or source.path.startswith(STAGES_OF_OTHERS) or source.folder in ("tests", "benchmarks"):
            continue
        for number, line in enumerate(source.code, 1):
            if STAGE_COMPARED.search(line):
                complaints.append(f"{source.path}:{number}: compares a stage; only {STAGE_POLICY} does, "
                                  "others ask zero::Sharding")
            if STAGE_NAMED.search(line):
                complaints.append(f"{source.path}:{number}: a type named after a stage; a stage is a value")
    return complaints


def json_readers(root):
    complaints = []
    for source in sources(root):
        if source.path.startswith(JSON_READER) or source.folder in ("tests", "benchmarks"):
            continue
        for number, line in enumerate(source.code, 1):
            if JSON_PARSED.search(line):
                complaints.append(f"{source.path}:{number}: reads JSON with nlohmann's parser; {JSON_READER} reads all JSON, with limits")
    return complaints


def order_of_sets(root):
    """Ranks iterate a set in different orders (of addresses, of hashes of texts); what follows may be collective."""
    complaints = []
    for path in project_files(root):
        if path.suffix == ".py" and path.parts[0] == "python":
            tree = ast.parse((Path(root) / path).read_text(encoding="utf-8"))
            complaints += [f"{path.as_posix()}:{line}: iterates a set, in another order on each rank; expected sorted(...) of it, or a list or "
                           "dict in an order that all ranks have" for line in sorted(set(_iterated_sets(tree)))]
    return complaints


def _iterated_sets(tree):
    """The lines where one is iterated, otherwise than by what asks for no order."""
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    inside = {id(node) for function in functions for node in ast.walk(function) if node is not function}
    attributes = {name for name in _names_of_sets(ast.walk(tree), set()) if name.startswith(".")}
    everywhere = _names_of_sets((node for node in ast.walk(tree) if id(node) not in inside), attributes)
    for scope in (tree, *functions):
        nodes = [node for node in ast.walk(scope) if scope is not tree or id(node) not in inside]
        known = _names_of_sets(nodes, everywhere)
        free = {id(given) for node in nodes if isinstance(node, ast.Call) and _last_name(node.func) in ORDER_FREE for given in node.args}
        for node in nodes:
            iterated = []
            if isinstance(node, ast.For):
                iterated = [node.iter]
            elif isinstance(node, (ast.ListComp, ast.GeneratorExp, ast.DictComp)) and id(node) not in free:
                iterated = [part.iter for part in node.generators]
            elif isinstance(node, ast.Starred) and id(node) not in free:
                iterated = [node.value]
            elif isinstance(node, ast.Call) and _last_name(node.func) in ITERATING:
                iterated = node.args
            yield from (one.lineno for one in iterated if _is_set(one, known))


def _names_of_sets(nodes, known):
    """Names, and attributes with a dot before them, that somewhere among the nodes get a set."""
    nodes, known, before = list(nodes), set(known), None
    while before != len(known):
        before = len(known)
        for node in nodes:
            pairs = []
            if isinstance(node, ast.Assign):
                pairs = [(target, node.value) for target in node.targets]
                if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = zip(node.targets[0].elts, node.value.elts)
            elif isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.NamedExpr)):
                pairs = [(node.target, node.value)]
            elif isinstance(node, ast.arg):
                pairs = [(ast.Name(node.arg), None)]
            annotation = getattr(node, "annotation", None)
            is_annotated = annotation is not None and _last_name(getattr(annotation, "value", annotation)) in SETS
            known |= {_name_of(target) for target, value in pairs if is_annotated or (value is not None and _is_set(value, known))}
    return known - {""}


def _name_of(node):
    return f".{node.attr}" if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _last_name(node):
    return _name_of(node).removeprefix(".")


def _is_set(node, known):
    if isinstance(node, (ast.Set, ast.SetComp)):
        return True
    if isinstance(node, ast.Call):
        return _last_name(node.func) in SETS or (_last_name(node.func) in SET_METHODS and _is_set(node.func.value, known))
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, (ast.BitAnd, ast.BitOr, ast.BitXor, ast.Sub)) and (_is_set(node.left, known) or _is_set(node.right, known))
    if isinstance(node, ast.IfExp):
        return _is_set(node.body, known) or _is_set(node.orelse, known)
    return _name_of(node) in known


def file_lengths(root):
    complaints = []
    for path in project_files(root):
        if path.suffix in LINE_LIMITED or path.name == "CMakeLists.txt":
            num_lines = (Path(root) / path).read_bytes().count(b"\n")
            if num_lines > MAX_LINES:
                complaints.append(f"{path.as_posix()}:{num_lines}: more than {MAX_LINES} lines")
    return complaints


ALL_RULES = [include_direction, sub_folder_direction, torch_headers, stage_comparisons, json_readers, order_of_sets, file_lengths]
