"""Objects that people save, and a program that saves each in every way: python torch_file_zoo.py FOLDER PROTOCOL…

Runs with any torch from 2.0 on: torch_file_library_test.py has it run by each that is installed. Names of files:
NAME.zip.PROTOCOL.pt, NAME.legacy.PROTOCOL.pt and, where there are no tensors, NAME.PROTOCOL.pkl.
"""
import argparse
import array
import collections
import datetime
import decimal
import enum
import fractions
import pathlib
import pickle
import random
import re
import sys
import types
import uuid

import numpy as np
import torch

FIRST_PROTOCOLS = {"keywords": 4}  # before, functools.partial is called for keyword arguments


class Stage(enum.IntEnum):
    DISABLED = 0
    WEIGHTS = 3


class Strategy(str, enum.Enum):  # noqa: UP042, as people write it
    NO = "no"
    STEPS = "steps"


class Settings:
    def __init__(self, **options):
        self.__dict__.update(options)

    def __eq__(self, other):
        return type(self) is type(other) and self.__dict__ == other.__dict__

    __hash__ = None


class Slotted:
    __slots__ = ("left", "right")

    def __init__(self, left, right):
        self.left, self.right = left, right

    def __eq__(self, other):
        return (self.left, self.right) == (other.left, other.right)

    __hash__ = None


class Attributes(dict):
    """As Lightning's AttributeDict."""


class Numbers(list):
    pass


class Keyworded:
    """Is made by NEWOBJ_EX."""

    def __new__(cls, *, size):
        made = super().__new__(cls)
        made.size = size
        return made

    def __getnewargs_ex__(self):
        return (), {"size": self.size}

    def __eq__(self, other):
        return self.size == other.size

    __hash__ = None


Point = collections.namedtuple("Point", "x y")


class TaggedParameter(torch.nn.Parameter):
    pass


class TaggedTensor(torch.Tensor):
    pass


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3))
        self.head = torch.nn.Linear(3, 4)
        self.register_buffer("steps", torch.tensor(7))


def random_numbers(shape, dtype, seed):
    source = random.Random(seed)
    count = int(np.prod(shape, dtype=np.int64))
    if dtype == torch.bool:
        return torch.tensor([source.random() < 0.5 for _ in range(count)], dtype=dtype).reshape(shape)
    return torch.frombuffer(bytearray(source.randbytes(count * dtype.itemsize)) or bytearray(16), dtype=dtype)[:count].reshape(shape)


def types_of_torch():
    names = ("float64 float32 bfloat16 float16 int64 int32 int16 int8 uint8 bool uint16 uint32 uint64 complex32 complex64 complex128 "
             "float8_e5m2 float8_e4m3fn float8_e5m2fnuz float8_e4m3fnuz float8_e8m0fnu").split()
    return [getattr(torch, name) for name in names if hasattr(torch, name)]


def without_tensors():
    nested = {"a": [1, (2.5, None), {"b": {"c": [[], {}, ()]}}]}
    shared = [1, 2]
    cyclic = [1]
    cyclic.append({"itself": cyclic})
    ordered = collections.OrderedDict([("z", 1), ("a", 2)])
    ordered.extra = "attribute"
    return {
        "none": None,
        "booleans": [True, False, {True: False}],
        "integers": [0, 1, 255, 256, 65535, 65536, -1, -128, -129, 2**31 - 1, 2**31, -2**31, -2**31 - 1, 2**63 - 1, 2**63, -2**63, -2**63 - 1,
                     2**64, 10**40, -10**40, 2**2040 + 1, -2**2047, 2**8000 - 3, 255 << 56, -(1 << 15), 1 << 15],
        "floats": [0.0, -0.0, 1.5, -2.25e-300, 1.7976931348623157e308, 5e-324, float("inf"), float("-inf"), float("nan"), 0.1],
        "texts": ["", "a", "größe", "重み", "🙂", "line\nbreak", "back\\slash \\u0041 \\\\u0041", "quote ' \"", "nul \0", "x" * 300, "y" * 70_000, "\x7f\x80\xff"],
        "bytes": [b"", b"\0\xff", b"z" * 300, bytes(range(256)), b"w" * 70_000, bytearray(b"array"), bytearray()],
        "lists": [[], [[]], list(range(3000)), [[i] for i in range(1200)]],
        "tuples": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), ((((),),),)],
        "dicts": [{}, {"a": 1}, {1: "a", "1": "b", (1, 2): 3, None: 4, 2.5: 5, b"b": 6}, {i: str(i) for i in range(2500)}],
        "sets": [set(), {1, 2, 3}, frozenset(), frozenset({"a"}), set(range(1500))],
        "nested": nested,
        "shared": [shared, shared, {"again": shared}],
        "cyclic": cyclic,
        "ordered": [collections.OrderedDict(), ordered, collections.defaultdict(list, {"a": [1]}), collections.Counter("hello"), collections.deque([1, 2], 5)],
        "namespace": argparse.Namespace(lr=0.1, name="run", betas=(0.9, 0.95), inner=argparse.Namespace(x=1)),
        "simple_namespace": types.SimpleNamespace(a=1),
        "enums": [Stage.WEIGHTS, Strategy.STEPS, {"stage": Stage.DISABLED}, Stage],
        "objects": [Settings(a=1, b=[2]), Attributes(a=1), Attributes(), Numbers([1, 2]), Point(1, 2)],
        "slots": Slotted(1, "b"),
        "keywords": Keyworded(size=3),
        "names": [Settings, collections.OrderedDict, torch.nn.Linear, torch.nn.functional.relu, len, int],
        "dates": [datetime.datetime(2024, 1, 2, 3, 4, 5, 6), datetime.date(2024, 1, 2), datetime.timedelta(1, 2, 3), datetime.UTC],
        "standard": [decimal.Decimal("1.50"), fractions.Fraction(1, 3), uuid.UUID(int=5), pathlib.PurePosixPath("/a/b"), 1 + 2j, slice(1, 2, None), range(3),
                     re.compile("a+"), type(None), array.array("d", [1.5])],
        "numpy": [np.float64(1.5), np.int64(-3), np.float32(2), np.bool_(True), np.arange(6).reshape(2, 3), np.zeros((0, 3), np.float16),
                  np.asfortranarray(np.arange(6.).reshape(2, 3)),
                  np.array(["ab", "c"]), np.dtype("float32"), np.datetime64("2024-01-02"), np.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")])],
        "random": [random.Random(1).getstate(), np.random.RandomState(1).get_state()],
        "torch_names": [torch.float32, torch.bfloat16, torch.Size([1, 2]), torch.Size([]), torch.device("cpu"), torch.device("cuda", 1), torch.strided],
    }


def with_tensors():
    newer = torch.storage._new_dtypes()
    base = random_numbers((6, 5), torch.float32, 1)
    parameter = torch.nn.Parameter(random_numbers((3, 2), torch.bfloat16, 2), requires_grad=False)
    parameter.tag = "python's"
    tagged = TaggedParameter(torch.ones(2, 3))
    tagged.level = 3
    subclass = random_numbers((4,), torch.float32, 3).as_subclass(TaggedTensor)
    subclass.note = "kept"
    torch.manual_seed(5)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.head(model.body(torch.ones(2, 4))).sum().backward()
    optimizer.step()
    return {
        "types": {str(dtype): random_numbers((3, 5), dtype, i) for i, dtype in enumerate(types_of_torch()) if dtype not in newer},
        "newer_types": {str(dtype): random_numbers((3, 5), dtype, i) for i, dtype in enumerate(types_of_torch()) if dtype in newer},
        "scalars": [torch.tensor(1.5), torch.tensor(3), torch.tensor(True), random_numbers((), torch.bfloat16, 9)],
        "empty": [torch.zeros(0), torch.zeros(0, 4, dtype=torch.int64), torch.zeros(4, 0, 3, dtype=torch.bfloat16), base[6:], base[:, 5:]],
        "strided": [base.t(), base[1:4, ::2], base[2], base[:, 3], base.flatten()[7:], torch.zeros(1).expand(3, 4), base.reshape(2, 3, 5).permute(2, 0, 1),
                    base.unfold(0, 3, 1), base.unsqueeze(1)],
        "shared": {"whole": base, "again": base, "part": base[1:], "twice": [base, base.view(-1)]},
        "parameters": [torch.nn.Parameter(torch.ones(2)), parameter, tagged, subclass, torch.nn.Parameter(base)],
        "requires_grad": torch.ones(3, requires_grad=True),
        "large": random_numbers((200, 301), torch.float32, 4).t(),
        "state_dict": model.state_dict(),
        "checkpoint": {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "args": argparse.Namespace(lr=0.1), "stage": Stage.WEIGHTS},
        "numpy_and_tensors": {"a": np.float32(1), "b": torch.ones(1), "random": torch.get_rng_state()},
    }


def main(folder, protocols=range(2, 6)):
    for name, value in {**without_tensors(), **with_tensors()}.items():
        has_tensors = name in with_tensors()
        for protocol in protocols:
            if protocol < FIRST_PROTOCOLS.get(name, 2):
                continue
            torch.save(value, f"{folder}/{name}.zip.{protocol}.pt", pickle_protocol=protocol)
            if name != "newer_types":  # torch writes them, and cannot load them
                torch.save(value, f"{folder}/{name}.legacy.{protocol}.pt", pickle_protocol=protocol, _use_new_zipfile_serialization=False)
            if not has_tensors:
                with open(f"{folder}/{name}.{protocol}.pkl", "wb") as file:
                    pickle.dump(value, file, protocol)
                with open(f"{folder}/{name}.python.{protocol}.pkl", "wb") as file:  # Python's own code writes other opcodes
                    pickle._Pickler(file, protocol).dump(value)


if __name__ == "__main__":
    import torch_file_zoo  # so that the classes have the names of this module, not of __main__

    torch_file_zoo.main(sys.argv[1], [int(word) for word in sys.argv[2:]])
