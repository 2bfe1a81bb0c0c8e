"""Runs a script that was written for DeepSpeed as it is, unedited:

    python -m tessera.deepspeed train.py --deepspeed_config ds_config.json
    tessera launch -n 4 -- python -m tessera.deepspeed -m package.train
"""
import os
import runpy
import sys

import tessera.deepspeed  # noqa: F401  from here on `import deepspeed` gives it


def main(words):
    """`words`: the script and its arguments, or -m, a module and its arguments."""
    is_module = words[:1] == ["-m"]
    words = words[1:] if is_module else words
    if not words or words[0].startswith("-"):
        sys.exit(f"error: python -m tessera.deepspeed: found {words[0] if words else 'nothing'!r}; expected SCRIPT.py or -m MODULE, and its arguments")
    sys.argv = words
    if is_module:
        sys.path[0] = os.getcwd()
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        return
    if not os.path.isfile(words[0]):
        sys.exit(f"error: {words[0]}: no such file; expected a Python script")
    sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
