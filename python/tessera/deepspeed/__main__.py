"""Runs a script that was written for DeepSpeed as it is, unedited, in this process or on ranks of DeepSpeed's command line:

    python -m tessera.deepspeed train.py --deepspeed_config ds_config.json
    tessera launch -n 4 -- python -m tessera.deepspeed -m package.train
    python -m tessera.deepspeed --num_gpus 4 train.py --deepspeed_config ds_config.json
    python -m tessera.deepspeed --ds_report
"""
import os
import runpy
import sys

import tessera.deepspeed  # noqa: F401  from here on `import deepspeed` gives it
from tessera.deepspeed import env_report
from tessera.deepspeed.launcher import runner


def main(words):
    """`words`: the script and its arguments, or -m, a module and its arguments. Flags of `deepspeed` before them start ranks."""
    if words == ["--ds_report"]:
        env_report.main()
        return
    is_module = words[:1] == ["-m"]
    if words and words[0].startswith("-") and not is_module:
        runner.main(words)
    words = words[1:] if is_module else words
    if not words:
        sys.exit("error: python -m tessera.deepspeed: found nothing; expected SCRIPT.py or -m MODULE, and its arguments")
    if os.environ.pop("TESSERA_PASS_LOCAL_RANK", None):
        words = [words[0], f"--local_rank={os.environ['LOCAL_RANK']}", *words[1:]]
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
