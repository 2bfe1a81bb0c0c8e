"""A training step in Python, of Tessera and others, same model, same data, in turns.

    .deps/venv/bin/python benchmarks/python/train_step.py models|activations|offload [--rounds N] [--only REGEX] [--json FILE] [--write]

models.py, activations.py and offload.py say what is measured and what the columns are. Each row is measured once in every round, so that a
busy machine disturbs all alike; its ranks are forked for that from one process that has imported all of it. A row that fails is left out
and named. --write replaces the tables of the command's document.
"""
import os
import sys

# Read on import: threads (of gpt2 and resnet18 one a rank), and what the profiler says when it has looked for a GPU.
os.environ.update(OMP_NUM_THREADS="1" if "models" in sys.argv[1:2] else "2", DS_ACCELERATOR="cpu", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false",
                  KINETO_LOG_LEVEL="5")
import argparse  # noqa: E402
import importlib.util  # noqa: E402
import logging  # noqa: E402
import warnings  # noqa: E402
from pathlib import Path  # noqa: E402

import models  # noqa: E402
import offload  # noqa: E402
import tessera  # noqa: E402

import activations  # noqa: E402

sys.path.append(str(Path(__file__).resolve().parents[1] / "peers"))
import document  # noqa: E402
import peer  # noqa: E402
import ranks  # noqa: E402
import results  # noqa: E402

DOCS = Path(__file__).resolve().parents[2] / "docs"
PACKAGES = ("torch", "transformers", "torchvision", "deepspeed")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True, metavar="models|activations|offload")
    for module, rounds in ((models, 3), (activations, 3), (offload, 1)):
        command = commands.add_parser(module.__name__, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        command.set_defaults(module=module)
        command.add_argument("--rounds", type=int, default=rounds)
        command.add_argument("--only", default="", metavar="REGEX", help="rows whose names match")
        command.add_argument("--json", type=Path, metavar="FILE", help="where the numbers go")
        command.add_argument("--write", action="store_true", help=f"puts the tables into docs/{module.DOCUMENT}")
        module.add_arguments(command)
    args = parser.parse_args()
    if args.write and (args.only or args.module.is_special(args)):
        parser.error("--write: found --only, or a setting of its own; expected all rows in a document, as they are by default")
    return args


def load_peers():
    """Before ranks are forked. Whether DeepSpeed is there."""
    warnings.simplefilter("ignore")
    models.transformers.logging.set_verbosity_error()
    if importlib.util.find_spec("deepspeed") is None:
        return False
    peer.load_deepspeed()
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    return True


def main():
    args = parse_arguments()
    module, command, page = args.module, args.module.COMMAND, DOCS / args.module.DOCUMENT
    if args.write:
        document.surroundings(page, command)  # before minutes of runs
    rows = module.rows(args, load_peers())
    measured = ranks.take_turns(results.chosen(args.only, rows), args.rounds, lambda row: module.measure(args, *rows[row]))
    if args.write and (missing := set(rows) - set(measured)):
        sys.exit(f"error: --write: no results of {', '.join(sorted(missing))}; expected all rows in a document")
    found = results.stamp(tessera.__version__, PACKAGES)
    text = results.surroundings(found) + "\n"
    for title, about, table in module.tables(args, measured):
        print(f"\n{about}{document.text_table(title, table, module.COLUMNS)}")
        text += f"\n{about}\n\n{document.markdown_table(title, table, module.COLUMNS)}"
    if args.json:
        args.json.write_text(results.text({**found, "rounds": measured}), encoding="utf-8")
    if args.write:
        document.replace_table(page, command, text)


if __name__ == "__main__":
    main()
