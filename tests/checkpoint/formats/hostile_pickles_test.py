"""Files that attack whoever unpickles them: each is refused with the name of what is wrong, nothing runs, and no time or memory is lost.

The attacks are those of public collections (picklescan's, fickling's, marshalsec's ideas), rebuilt: they make a file, and the test
is that the file is not there. ctest gives TORCH_FILE_TOOL.
"""
import io
import json
import os
import pickle
import struct
import subprocess
import sys
import tempfile
import time
import unittest
import zipfile
from pathlib import Path

TOOL = os.environ["TORCH_FILE_TOOL"]
MARKER = "tessera_was_here"
# What attacks call, as MODULE:NAME.
HARM = """
os:system posix:system nt:system os:popen os:execv os:remove subprocess:Popen subprocess:check_output subprocess:call pty:spawn commands:getoutput runpy:_run_code
runpy:run_path webbrowser:open shutil:rmtree importlib:import_module imp:load_source marshal:loads pickle:loads _pickle:loads socket:create_connection ctypes:CDLL
http.client:HTTPSConnection urllib.request:urlopen requests.api:get aiohttp.client:request asyncio:run asyncio.unix_events:_UnixSubprocessTransport._start
multiprocessing:Process threading:Thread code:InteractiveInterpreter codeop:compile_command pdb:run bdb:Bdb.run timeit:timeit timeit:Timer cProfile:run cProfile:runctx
profile:Profile.run doctest:debug_script trace:Trace.run lib2to3.pgen2.pgen:ParserGenerator.make_label functools:partial functools:reduce operator:attrgetter
operator:methodcaller itertools:starmap types:FunctionType types:CodeType builtins:eval builtins:exec builtins:compile builtins:open builtins:__import__ builtins:map
builtins:globals builtins:setattr builtins:apply io:open _io:FileIO pathlib:Path.write_text logging.config:listen uuid:_get_command_stdout distutils.file_util:write_file
pip:main pydoc:pipepager venv:create ensurepip._bootstrap:_run_pip idlelib.run:Executive.runcode idlelib.autocomplete:AutoComplete.get_entity tempfile:mktemp
sqlite3:connect zipimport:zipimporter smtplib:SMTP signal:alarm gc:get_objects sys:exit atexit:register weakref:finalize torch:load torch.hub:load torch.jit:load
torch.serialization:load torch.storage:_load_from_bytes torch.serialization:os.system torch:serialization.os.system torch.utils.collect_env:run
torch.utils._config_module:ConfigModule.load_config torch._dynamo.guards:GuardBuilder.get torch._inductor.codecache:compile_file
torch.fx.experimental.symbolic_shapes:ShapeEnv.evaluate_guards_expression torch.package:PackageImporter torch.utils.data.datapipes.utils.decoder:basichandlers
numpy.testing._private.utils:runstring numpy.f2py.crackfortran:getlincoef numpy.load:x numpy:fromfile numpy.core.multiarray:_reconstruct.__globals__
joblib._memmapping_reducer:os.system cloudpickle.cloudpickle:_builtin_type dill._dill:_create_function pandas.core.computation.eval:eval pandas:read_pickle
sympy.core.sympify:sympify keras.src.models.model:Lambda.subprocess.Popen mypackage.tools:Popen mypackage:os.system mypackage.sys:modules mypackage:Thing.__init__
collections.abc:Thing torch.serialization:os.Thing numpy.testing:Thing mypackage:_function mypackage:__class__.Thing mypackage:1Thing builtins:Thing
dill._dill:Thing datetime:datetime.now mypackage:helper __main__:run collections:OrderedDict.__init__.__globals__ collections:OrderedDict.fromkeys antigravity:geohash
""".split()


def text(word):
    data = word.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def name(module, attribute):
    return b"c" + module.encode() + b"\n" + attribute.encode() + b"\n"


def stack_name(module, attribute):
    return text(module) + text(attribute) + b"\x93"


def call(callable_, *arguments):
    return callable_ + b"(" + b"".join(arguments) + b"tR"


def proto(body, number=2):
    return b"\x80" + bytes([number]) + body + b"."


def harm(folder):
    """A call's argument: the command of a shell, which would make the marker."""
    return text(f"touch {folder}/{MARKER}")


class Reduced:
    """What __reduce__ of a class says is called."""

    def __init__(self, *reduced):
        self.reduced = reduced

    def __reduce__(self):
        return self.reduced


def calls(folder):
    """{what: (pickle, words of the message)}: calls of what is no data."""
    h = harm(folder)
    python = text(f"open({str(folder / MARKER)!r}, 'w')")
    found = {}
    for word in HARM:
        module, attribute = word.split(":")
        words = "subprocess.getoutput" if module == "commands" else f"{module}.{attribute}"
        found[word] = (proto(call(name(module, attribute), h)), f"the pickle calls {words}: that is no data")
    return found | variations(folder, h, python)


def variations(folder, h, python):
    """The same by other opcodes, by names in other forms, and by values that become callables."""
    system = name("os", "system")
    refused = "the pickle calls os.system: that is no data"
    value = "that is no data; expected the name of a class"
    thing = name("mypackage", "Thing")
    found = {
        "stacked": (call(stack_name("os", "system"), h), refused),
        "stacked, dotted": (call(stack_name("torch", "serialization.os.system"), h), "the pickle calls torch.serialization.os.system"),
        "stacked, a module in the name": (call(stack_name("torch.serialization", "os.system"), h), "torch.serialization.os.system: that is no data"),
        "no module": (call(stack_name("", "os.system"), h), "a name of 0 and 9 bytes"),
        "a name with a space": (call(stack_name("os ", "system"), h), "that is no data"),
        "a name with a line break": (call(stack_name("mypackage\nos", "Thing"), h), "that is no data"),
        "dots": (call(stack_name("mypackage..os", "Thing"), h), "that is no data"),
        "python 2's words": (call(name("__builtin__", "eval"), python), "the pickle calls builtins.eval"),
        "python 2's import": (call(name("__builtin__", "__import__"), text("os")), "the pickle calls builtins.__import__"),
        "obj": (b"(" + system + h + b"o", refused),
        "newobj": (system + h + b"\x85\x81", refused),
        "newobj_ex": (system + h + b"\x85}\x92", refused),
        "newobj of a class": (name("subprocess", "Popen") + h + b"\x85\x81", "the pickle calls subprocess.Popen"),
        "newobj of torch's function": (name("torch", "load") + h + b"\x85\x81", "the pickle calls torch.load"),
        "from the memo": (system + b"q\x050" + h + b"q\x060" + call(b"h\x05", b"h\x06"), refused),
        "memo swapped": (name("collections", "OrderedDict") + b"q\x00" + b"0" + system + b"q\x000" + call(b"h\x00", h), refused),
        "memo far away": (system + b"r\xff\xff\xff\xff0" + call(b"j\xff\xff\xff\xff", h), refused),
        "memoize": (system + b"\x940" + call(b"h\x00", h), refused),
        "duplicated": (system + b"2" + h + b"\x85R", refused),
        "below what is returned": (system + h + b"\x85R0N", refused),
        "after a pop of the mark": (b"((1" + call(system, h), refused),
        "getattr": (call(name("builtins", "getattr"), name("os", "path"), text("os")), "the pickle calls builtins.getattr with the name os.path"),
        "getattr of a module": (call(name("builtins", "getattr"), name("torch", "serialization"), text("os")), "calls builtins.getattr with the name torch.serialization"),
        "getattr's chain": (call(call(name("builtins", "getattr"), call(name("builtins", "getattr"), thing, text("Other")), text("__subclasses__"))),
                            "calls builtins.getattr with the name mypackage.Thing.Other and the text '__subclasses__'"),
        "getattr, called": (call(call(name("builtins", "getattr"), thing, text("run")), h), "the pickle calls mypackage.Thing.run"),
        "getattr of a list": (call(name("builtins", "getattr"), b"]", text("append")), "calls builtins.getattr with a list of 0"),
        "getattr of os": (call(name("builtins", "getattr"), thing, text("os")) + b"0" + call(name("mypackage", "Thing.os.system"), h),
                          "the pickle calls mypackage.Thing.os.system"),
        "a result called": (call(call(thing), h), f"the pickle calls mypackage.Thing, at byte 81: {value}"),
        "a text called": (call(text("os.system"), h), value),
        "a dict called": (call(b"}", h), value),
        "a persistent id called": (call(text("os.system") + b"Q", h), value),
        "a module's class called": (call(b"(" + text("module") + system + b"NNtQ", h), refused),
        "attributes of a module": (name("mypackage", "settings") + b"}" + text("x") + h + b"sb", "the pickle sets attributes of the name mypackage.settings"),
        "attributes of a class": (thing + b"}" + text("__init__") + system + b"sb", "the pickle sets attributes of the name mypackage.Thing"),
        "keys of a module": (name("os", "environ") + text("PATH") + h + b"s", "the pickle sets keys of the name os.environ"),
        "items of a name": (name("sys", "path") + h + b"a", "the pickle appends to the name sys.path"),
        "attributes of a list": (b"]}b", "the pickle sets attributes of a list of 0"),
        "attributes of an id": (text("x") + b"Q}b", "the pickle sets attributes of a persistent id"),
        "torch's builder of a function": (call(name("torch._tensor", "_rebuild_from_type_v2"), system, thing, b"(" + h + b"t", b"}"), refused),
        "torch's old builder of a function": (call(name("torch.tensor", "_rebuild_from_type"), name("builtins", "eval"), thing, b"(" + python + b"t", b"}"),
                                              "the pickle calls builtins.eval"),
        "torch's builder of itself": (call(name("torch._tensor", "_rebuild_from_type_v2"), name("torch._tensor", "_rebuild_from_type_v2"), thing,
                                           b"(" + system + thing + b"(" + h + b"t}t", b"}"), refused),
        "torch's builder of nothing": (call(name("torch._tensor", "_rebuild_from_type_v2"), name("torch._tensor", "_rebuild_from_type_v2"), thing, b")", b"}"), "with 0 arguments"),
        "numpy's random state": (call(name("numpy.random._pickle", "__randomstate_ctor"), h, system), refused),
        "numpy's old random state": (call(name("numpy.random", "__RandomState_ctor"), h, system), refused),
        "numpy's generator": (call(name("numpy.random._pickle", "__bit_generator_ctor"), name("subprocess", "Popen")), "the pickle calls subprocess.Popen"),
        "numpy's array": (call(name("numpy._core.multiarray", "_reconstruct"), name("subprocess", "Popen"), b"K\x00\x85", b"C\x01b"), "the pickle calls subprocess.Popen"),
        "copyreg": (call(name("copyreg", "__newobj__"), name("subprocess", "Popen"), h), "the pickle calls subprocess.Popen"),
        "copyreg in copyreg": (call(name("copyreg", "__newobj__"), name("copyreg", "__newobj__"), system, h), "the pickle calls copyreg.__newobj__"),
        "copyreg with keywords": (call(name("copyreg", "__newobj_ex__"), name("subprocess", "Popen"), b"(" + h + b"t", b"}"), "the pickle calls subprocess.Popen"),
        "copyreg's constructor": (call(name("copy_reg", "_reconstructor"), name("subprocess", "Popen"), name("__builtin__", "object"), b"N"), "the pickle calls subprocess.Popen"),
        "copyreg's base": (call(name("copy_reg", "_reconstructor"), thing, system, h), refused),
        "copyreg's table": (call(name("copyreg", "add_extension"), text("os"), text("system"), b"K\x01"), "the pickle calls copyreg.add_extension"),
        "type": (call(name("builtins", "type"), text("X"), b")", b"}"), "the pickle calls builtins.type with"),
        "a codec": (call(name("_codecs", "encode"), h, text("rot13")), "the pickle calls _codecs.encode with"),
        "a codec that decodes": (call(name("_codecs", "decode"), h, text("zlib")), "the pickle calls _codecs.decode"),
        "bytes of a size": (call(name("builtins", "bytearray"), b"J\xff\xff\xff\x7f"), "the pickle calls builtins.bytearray with 2147483647"),
        "a list of a range": (call(name("builtins", "list"), call(name("builtins", "range"), b"J\xff\xff\xff\x7f")), "the pickle calls builtins.list with builtins.range"),
        "defaultdict of a call": (call(name("collections", "defaultdict"), call(name("functools", "partial"), system, h)), "the pickle calls functools.partial"),
        "no tuple": (thing + b"]R", "the pickle calls mypackage.Thing with a list of 0"),
        "keywords that are none": (thing + b")]\x92", "the pickle has a list of 0 as keyword arguments"),
        "extension 1": (b"\x82\x01)R", "the pickle calls for an extension by its number (EXT1"),
        "extension 2": (b"\x83\x01\x01)R", "by its number (EXT2"),
        "extension 4": (b"\x84\x01\0\0\0)R", "by its number (EXT4"),
        "a buffer": (b"\x97", "keeps data outside of itself (NEXT_BUFFER"),
        "a read-only buffer": (b"N\x98", "READONLY_BUFFER"),
    }
    return {what: (proto(body, 4), words) for what, (body, words) in found.items()}


def bombs():
    """Small files that would be large values, and texts that are no pickles."""
    laughs = b"]q\x00" + b"".join(b"](" + b"h" + bytes([i]) + (b"h" + bytes([i])) * 9 + b"eq" + bytes([i + 1]) for i in range(100))
    deep = b"]" * 5000 + b"a" * 4999
    deep_after = b"]q\x00" + b"".join(b"h" + bytes([i]) + b"]q" + bytes([i + 1]) + b"a0" for i in range(250)) + b"h\x00"
    items = 40_000
    copied = (b"](" + b"N" * items + b"eq\x00" + call(name("builtins", "tuple"), b"h\x00") + b"q\x01"
              + b"".join(call(name("builtins", "tuple"), b"h\x01") + b"0" for _ in range(3000)))
    return {
        "a billion laughs": (laughs + b"0", None),
        "deep lists": (deep, "values in values more than 200 deep"),
        "deep tuples": (b")" + b"\x85" * 100_000, "values in values more than 200 deep"),
        "deep, put together from outside": (deep_after, "values in values more than 200 deep"),
        "deep states": ((name("mypackage", "Thing") + b")\x81") * 300 + b"b" * 299, "values in values more than 200 deep"),
        "marks": (b"(" * 100_000 + b"N", None),
        "copies of copies": (copied, "bytes of memory, at byte"),
        "a text of 2^63 bytes": (b"\x8d" + b"\0" * 7 + b"\x80", "9223372036854775808 bytes are to follow"),
        "a text of 4 GB": (b"X\xff\xff\xff\xff", "4294967295 bytes are to follow"),
        "bytes of 2^64 bytes": (b"\x8e" + b"\xff" * 8, "18446744073709551615 bytes are to follow"),
        "a bytearray of 2^40 bytes": (b"\x96" + struct.pack("<Q", 1 << 40), "1099511627776 bytes are to follow"),
        "an integer of 2 GB": (b"\x8b\xff\xff\xff\x7f", "2147483647 bytes are to follow"),
        "an integer of -1 bytes": (b"\x8b\xff\xff\xff\xff", "an integer of -1 bytes"),
        "a long integer": (b"\x8b" + struct.pack("<I", 1_000_000) + b"\x7f" * 1_000_000, "an integer of 1,000,000 bytes"),
        "a text of -1 bytes": (b"T\xff\xff\xff\xff", "a text of -1 bytes"),
        "a frame of 2^60": (b"\x95" + struct.pack("<Q", 1 << 60), "a frame of 1152921504606846976 bytes"),
        "duplicates": (b"]" + b"2" * 200_000, None),
        "itself": (b"]q\x00" + b"h\x00a" * 1000, None),
        "the memo's end": (b"Nr\xff\xff\xff\xff", None),
        "what is not in the memo": (b"h\x07", "it gets value 7 of the memo"),
        "an empty stack": (b"", "it needs a value"),
        "no mark": (b"t", "it needs a mark"),
        "below the mark": (b"N(\x85t", "it needs a value"),
        "reduce of nothing": (b"R", "it needs a value"),
        "digits": (b"I" + b"9" * 5000 + b"\n", "a line of more than"),
        "no integer": (b"I1x\n", "'1x' is no integer"),
        "an unknown opcode": (b"\xff", "opcode 255 is none of protocols 2 to 5"),
        "a key without a value": (b"}(Nu", "a key without a value"),
        "a key twice": (b"}" + text("a") + b"Ns" + text("a") + b"K\x01s", "a dict with the key the text 'a' twice"),
        "a key twice, by a call": (call(name("collections", "OrderedDict"), b"](" + b"](K\x01Ne" + b"](K\x01Nee"), "a dict with the key 1 twice"),
        "a dict of no pairs": (call(name("builtins", "dict"), b"](Ne"), "a list of 1 that has None"),
        "keys of a list": (b"]NNs", "sets keys of a list"),
        "items of a tuple": (b")Na", "appends to a tuple"),
        "items of a dict": (b"}Na", "appends to a dict"),
        "items of a set": (b"]\x8fa0\x8fNa", "appends to a set"),
        "keys, then items": (name("mypackage", "Thing") + b")\x81NNsNa", "appends to mypackage.Thing"),
        "a name of numbers": (b"K\x01K\x02\x93", "makes a name of 1 and 2"),
        "a long name": (name("m" * 600, "n" * 600), "a name of 600 and 600 bytes"),
        "no utf-8": (b"X\x02\0\0\0\xff\xfe", "a text that is no UTF-8"),
        "a name of no utf-8": (b"c\xff\n\xfe\n", "a name that is no UTF-8"),
        "attributes twice": (name("mypackage", "Thing") + b")\x81}b}b", "sets the attributes of mypackage.Thing twice"),
    }


def archive(data, storages=None, entries=(), compression=zipfile.ZIP_STORED, folder="archive", version=b"3\n"):
    """A zip as torch.save writes it."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as file:
        file.writestr(f"{folder}/data.pkl", data)
        for key, content in (storages or {}).items():
            file.writestr(f"{folder}/data/{key}", content)
        file.writestr(f"{folder}/version", version)
        for entry, content in entries:
            file.writestr(entry, content)
    return out.getvalue()


def integer(number):
    return pickle.dumps(number, 2)[2:-1]


def numbers(values):
    return b"(" + b"".join(map(integer, values)) + b"t"


def storage(numel=4, key="0", kind="FloatStorage", module="torch", location="cpu", view=b""):
    return b"(" + text("storage") + name(module, kind) + text(key) + text(location) + integer(numel) + view + b"tQ"


def tensor(offset=0, size=(4,), stride=(1,), stored=None, more=b""):
    return call(name("torch._utils", "_rebuild_tensor_v2"), stored or storage(), integer(offset), numbers(size), numbers(stride), b"\x89", b"}", more)


def tensors():
    """{what: (bytes of the file, words)}: files of torch.save whose tensors are not in them."""
    found = {
        "outside by its offset": (tensor(offset=1), "from element 1 on lies outside of storage '0', which has 4 elements"),
        "outside by its size": (tensor(size=(5,)), "lies outside of storage '0'"),
        "outside by its stride": (tensor(size=(2,), stride=(4,)), "lies outside of storage '0'"),
        "an offset of 2^62": (tensor(offset=1 << 62), "lies outside"),
        "an offset that overflows": (tensor(offset=(1 << 63) - 1, size=(2,), stride=((1 << 63) - 1,)), "lies outside"),
        "sizes that overflow": (tensor(size=(1 << 32, 1 << 32), stride=(0, 0)), "has more than 2^63 bytes"),
        "sizes that overflow twice": (tensor(size=(1 << 62,) * 64, stride=(0,) * 64), "has more than 2^63 bytes"),
        "an integer of 2^64": (tensor(size=(1 << 64,)), "a tensor's size is 18446744073709551616"),
        "a size below 0": (tensor(size=(-1,)), "a tensor's size is -1"),
        "a stride below 0": (tensor(stride=(-1,)), "a tensor's stride is -1"),
        "an offset below 0": (tensor(offset=-4), "a tensor's offset is -4"),
        "sizes and strides": (tensor(size=(2, 2)), "a tensor has 2 sizes and 1 strides"),
        "65 dimensions": (tensor(size=(1,) * 65, stride=(1,) * 65), "a tensor's size is a tuple of 65"),
        "a storage larger than its entry": (tensor(stored=storage(5), size=(5,)), "storage '0' is of 5 elements of 4 bytes, and the file has 16 bytes of it"),
        "a storage smaller than its entry": (tensor(stored=storage(2), size=(2,)), "storage '0' is of 2 elements"),
        "a storage of 2^62": (tensor(stored=storage(1 << 62)), "storage '0' is of 4611686018427387904 elements"),
        "a storage below 0": (tensor(stored=storage(-1)), "a tensor's storage's size is -1"),
        "a storage that is missing": (tensor(stored=storage(key="7")), "storage '7' of a tensor is not in the file"),
        "a storage elsewhere": (tensor(stored=storage(key="../../etc/passwd")), "storage '../../etc/passwd' of a tensor is not in the file"),
        "a storage of another type": (tensor(stored=storage(kind="QInt8Storage")), "the type of a storage is the name torch.QInt8Storage"),
        "a storage of no type": (tensor(stored=storage(module="os", kind="system")), "the type of a storage is the name os.system"),
        "a storage on meta": (tensor(stored=storage(location="meta")), 'a tensor is on "meta"'),
        "an id of a text": (tensor(stored=text("0") + b"Q"), "a storage is the text '0'"),
        "an id of two": (tensor(stored=b"(" + text("storage") + text("0") + b"tQ"), "a storage is a tuple of 2"),
        "an id of another kind": (tensor(stored=b"(" + text("file") + name("torch", "FloatStorage") + text("/etc/passwd") + text("cpu") + b"K\x04tQ"), "a storage is a tuple of 5"),
        "a view outside": (tensor(stored=storage(view=b"(" + text("1") + b"K\x03K\x02t")), "has a view of 2 from element 3 on"),
        "no storage": (tensor(stored=b"N"), "a storage is None"),
        "too many arguments": (tensor(more=b"}}"), "has 8 arguments"),
        "a parameter of a parameter of": (b"".join(name("torch._utils", "_rebuild_parameter") + b"(" for _ in range(9)) + tensor() + b"\x89}tR" * 9,
                                          "a tensor is in more than 8 others"),
        "a parameter of nothing": (call(name("torch._utils", "_rebuild_parameter"), b"N", b"\x89", b"}"), "a parameter is of None"),
        "a tensor's type": (call(name("torch._utils", "_rebuild_tensor_v3"), storage(16, kind="UntypedStorage"), b"K\x00",
                              numbers((4,)), numbers((1,)), b"\x89", b"}", name("torch", "quint8")),
                            "a tensor's type is the name torch.quint8"),
        "a subclass by another function": (call(name("torch._tensor", "_rebuild_from_type_v2"), name("mypackage", "Thing"), name("mypackage", "Thing"), b")", b"}"),
                                           "a tensor is made by mypackage.Thing"),
    }
    return {what: (archive(proto(body), {"0": b"\0" * 16}), words) for what, (body, words) in found.items()}


def patched(content, signature, offset, data, last=False):
    at = content.rindex(signature) if last else content.index(signature)
    return content[:at + offset] + data + content[at + offset + len(data):]


def archives(folder):
    """{what: (bytes, words)}: archives that readers would not agree on, and what is in them."""
    good = proto(tensor())
    whole = archive(good, {"0": b"\0" * 16})
    evil = proto(call(name("os", "system"), harm(folder)))
    central, end = b"PK\1\2", b"PK\5\6"
    return {
        "an attack": (archive(evil), "the pickle calls os.system"),
        "an attack behind the pickle": (archive(good + evil, {"0": b"\0" * 16}), "the pickle ends at byte"),
        "an archive in an archive": (archive(good, {"0": b"\0" * 16}) + archive(evil), "the zip archive is damaged"),
        "a nested archive as a storage": (archive(evil, {"0": whole}), "the pickle calls os.system"),
        "data.pkl twice": (archive(good, {"0": b"\0" * 16}, [("archive/data.pkl", evil)]), "has entry 'archive/data.pkl' twice"),
        "two archives' data.pkl": (archive(good, {"0": b"\0" * 16}, [("other/data.pkl", evil)]), "'archive/data.pkl' and 'other/data.pkl'; expected one"),
        "an entry outside": (archive(good, {"0": b"\0" * 16}, [("evil.py", b"x")]), "entry 'evil.py' of the archive is outside of archive/"),
        "a name that leads up": (archive(good, {"0": b"\0" * 16}, [("archive/../../evil", b"x")]), "entry 'archive/../../evil' of the zip archive leads out of it"),
        "an absolute name": (archive(good, {"0": b"\0" * 16}, [("/etc/evil", b"x")]), "leads out of it"),
        "windows' name": (archive(good, {"0": b"\0" * 16}, [("archive\\..\\evil", b"x")]), "leads out of it"),
        "compressed": (archive(good, {"0": b"\0" * 16}, compression=zipfile.ZIP_DEFLATED), "is compressed (method 8)"),
        "encrypted": (patched(whole, central, 8, b"\1\0"), "is encrypted"),
        "big-endian": (archive(good, {"0": b"\0" * 16}, [("archive/byteorder", b"big")]), "byte order 'big'; expected little"),
        "a later version": (archive(good, {"0": b"\0" * 16}, version=b"99\n"), "the archive's version is '99"),
        "no version": (archive(good, {"0": b"\0" * 16}, version=b"x"), "the archive's version is 'x'"),
        "a long version": (archive(good, {"0": b"\0" * 16}, version=b"3" * 1000), "has 1000 bytes; expected a word"),
        "torchscript": (archive(good, {"0": b"\0" * 16}, [("archive/code/x.py", b"x")]), "is a TorchScript program"),
        "cut off": (whole[:-30], "the file is cut off"),
        "cut off by one": (whole[:-1], "the zip archive is damaged"),
        "bytes at the end": (whole + b"x", "its end is at byte"),
        "bytes at the start": (b"PK\3\4" + whole, "the zip archive is damaged"),
        "a name of its own": (patched(whole, b"PK\3\4", 30, b"Archive"), "has the name 'Archive/data.pkl' in its own header"),
        "a size of its own": (patched(whole, b"PK\3\4", 18, b"\1\0\0\0\1\0\0\0"), "has 1 bytes in its own header"),
        "a size beyond": (patched(whole, central, 20, b"\xff\xff\0\0\xff\xff\0\0"), "lies outside"),
        "a place beyond": (patched(whole, central, 42, b"\xff\xff\xff\0"), "lies outside"),
        "a place of another": (patched(whole, central, 42, whole[whole.rindex(central) + 42:whole.rindex(central) + 46]),
                               "entry 'archive/data.pkl' of 102 bytes at byte 208 lies outside"),
        "a checksum of its own": (patched(whole, central, 16, b"\1\2\3\4"), "entry 'archive/data.pkl'"),
        "fewer entries": (patched(whole, end, 8, b"\2\0\2\0"), "the directory has 3 entries, and the archive's end says 2"),
        "more entries": (patched(whole, end, 8, b"\4\0\4\0"), "the directory has 3 entries"),
        "two disks": (patched(whole, end, 4, b"\1\0"), "it is a part of several"),
        "a directory elsewhere": (patched(whole, end, 16, b"\0\0\0\0"), "expected to end at byte"),
        "a comment": (whole[:-2] + b"\3\0abc", "its end is at byte"),
        "no data.pkl": (archive(good, folder="a/b"), "without a data.pkl"),
        "a damaged pickle": (whole.replace(b"_rebuild_tensor_v2", b"_rebuild_tensor_v1"), "entry 'archive/data.pkl' is damaged: its CRC-32 is"),
        "a tar": (b"storages".ljust(257, b"\0") + b"ustar".ljust(400, b"\0"), "is a tar archive"),
    }


def legacy(root, storages=(), keys=None, magic=0x1950a86a20f9469cfc6c, version=1001, little=True):
    parts = [pickle.dumps(magic, 2), pickle.dumps(version, 2), pickle.dumps({"protocol_version": version, "little_endian": little}, 2), root,
             pickle.dumps([key for key, _, _ in storages] if keys is None else keys, 2)]
    return b"".join(parts) + b"".join(struct.pack("<q", numel) + data for _, numel, data in storages)


def legacies(folder):
    good, data = proto(tensor()), [("0", 4, b"\0" * 16)]
    whole = legacy(good, data)
    return {
        "legacy: an attack": (legacy(proto(call(name("os", "system"), harm(folder))), data), "the pickle calls os.system"),
        "legacy: an attack in the keys": (whole[:len(whole) - 24 - len(pickle.dumps(["0"], 2))] + proto(call(name("os", "system"), harm(folder))), "the pickle calls os.system"),
        "legacy: another version": (legacy(good, data, version=1002), "the version of the format is 1002"),
        "legacy: big-endian": (legacy(good, data, little=False), '"little_endian" is False'),
        "legacy: another magic number": (legacy(good, data, magic=5), "torch.save did not write it"),
        "legacy: a storage of 2^62": (legacy(proto(tensor(stored=storage(1 << 62))), [("0", 1 << 62, b"")]), "lies outside of the file"),
        "legacy: a storage below 0": (legacy(good, [("0", -1, b"")]), "has -1 elements; expected 4"),
        "legacy: a storage of another size": (legacy(good, [("0", 3, b"\0" * 12)]), "has 3 elements; expected 4"),
        "legacy: a storage that no tensor has": (legacy(good, [*data, ("1", 4, b"\0" * 16)]), "storage '1' is in the file, and no tensor has it"),
        "legacy: a storage twice": (legacy(good, data * 2), "storage '0' is in the file twice"),
        "legacy: a storage that is missing": (legacy(good, []), "storage '0' of a tensor is not in the file"),
        "legacy: cut off": (whole[:-1], "lies outside of the file"),
        "legacy: cut off before the size": (whole[:-17], "the file ends early, before storage '0'"),
        "legacy: bytes at the end": (whole + b"x", "expected at the file's end"),
        "legacy: keys that are none": (legacy(good, data, keys={"0": 1}), "the keys of the storages are a dict of 1"),
        "legacy: an id of a text": (legacy(proto(text("0") + b"Q"), []), "a storage is the text '0'"),
        "legacy: cut off in the pickle": (whole[:80], "the pickle ends early"),
    }


class Hostile(unittest.TestCase):
    maxDiff = None

    def setUp(self):
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory(prefix="tessera_hostile_")))

    def check(self, what, cases, seconds=20):
        """Each is refused with its words; where there are none, it is read, or too large to be shown."""
        paths = []
        for i, (content, _) in enumerate(cases.values()):
            paths.append(self.folder / f"{what}{i}")
            paths[-1].write_bytes(content)
        start = time.monotonic()
        result = subprocess.run([TOOL, what, *map(str, paths)], capture_output=True, text=True, check=False, timeout=120, cwd=self.folder)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertLess(time.monotonic() - start, seconds)
        for (case, (_, words)), path, line in zip(cases.items(), paths, result.stdout.splitlines(), strict=True):
            with self.subTest(case=case):
                tree = json.loads(line)
                self.assertLess(tree["peak_kib"], 1 << 20)
                if words is None:
                    self.assertEqual(tree.get("error", "the dump is too large"), "the dump is too large")
                    continue
                self.assertIn("error", tree)
                self.assertIn(words, tree["error"])
                self.assertTrue(tree["error"].startswith(f"{path}: "), tree["error"])
                self.assertNotIn("\n", tree["error"])
                self.assertLess(len(tree["error"]), 1600)  # sizes of 64 dimensions
        self.assertFalse((self.folder / MARKER).exists())

    def test_what_is_called(self):
        cases = calls(self.folder)
        self.assertGreater(len(cases), 150)
        self.check("pickle", cases)

    def test_the_attacks_work(self):
        """On Python: else the test above would show nothing."""
        for case in ("os:system", "stacked", "stacked, dotted", "obj", "memo swapped", "from the memo", "below what is returned"):
            content, _ = calls(self.folder)[case]
            subprocess.run([sys.executable, "-c", "import pickle, sys\npickle.load(sys.stdin.buffer)"], input=content, capture_output=True, check=False)
            self.assertTrue((self.folder / MARKER).exists(), case)
            (self.folder / MARKER).unlink()

    def test_reduce_of_pickle_itself(self):
        cases = {}
        for protocol in range(2, 6):
            for callable_, words in ((os.system, f"calls {os.name}.system: that is no data"),
                                              (eval, "calls builtins.eval: that is no data"), (subprocess.Popen, "calls subprocess.Popen: that is no data")):
                reduced = Reduced(callable_, (f"touch {self.folder}/{MARKER}",))
                cases[f"{callable_} {protocol}"] = (pickle.dumps({"weights": [1, reduced]}, protocol), words)
        self.check("pickle", cases)

    def test_bombs(self):
        cases = {what: (proto(body), words) for what, (body, words) in bombs().items()}
        cases |= {"nothing": (b"", "the pickle ends early"), "no stop": (b"\x80\x02N", "the pickle ends early"),
                  "text": (b"<html>", "no pickle of protocol 2 to 5: it begins with byte 60"),
                  "protocol 6": (b"\x80\x06N.", "protocol 6; expected 2 to 5"), "no line break": (b"\x80\x02cos", "the pickle ends early, within the line")}
        self.assertGreater(len(cases), 40)
        self.check("pickle", cases)

    def test_tensors(self):
        self.check("torch", tensors())

    def test_archives(self):
        self.check("torch", archives(self.folder))

    def test_legacy_files(self):
        self.check("torch", legacies(self.folder))

    def test_what_is_refused_is_otherwise_read(self):
        """The same files without the fault, so that it is the fault that is refused."""
        good = proto(tensor())
        self.check("torch", {"archive": (archive(good, {"0": b"\0" * 16}), None), "legacy": (legacy(good, [("0", 4, b"\0" * 16)]), None),
                             "a view": (legacy(proto(tensor(size=(2,), stored=storage(view=b"(" + text("1") + b"K\x01K\x03t"))), [("0", 4, b"\0" * 16)]), None),
                             "empty": (archive(proto(tensor(offset=9, size=(1 << 62, 0, 1 << 62), stride=(1, 1, 1))), {"0": b"\0" * 16}), None)})


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    unittest.main()
