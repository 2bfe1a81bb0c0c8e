"""`deepspeed.launcher.runner`: the command line of `deepspeed`, of which `tessera launch` is started, and names that other launchers read.

    python -m tessera.deepspeed --num_gpus 2 train.py --deepspeed_config ds_config.json
"""
import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch

from tessera.launch import command_path, with_torch_found

DLTS_HOSTFILE = "/job/hostfile"
EXPORT_ENVS = ["MLFLOW", "PYTHON", "MV2", "UCX"]
DEEPSPEED_ENVIRONMENT_NAME = os.environ.get("DS_ENV_FILE") or ".deepspeed_env"
DEEPSPEED_ENVIRONMENT_PATHS = [os.path.expanduser("~"), "."]
_LAUNCHERS = ("pdsh", "openmpi", "slurm", "ssh")


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """DeepSpeed's flags, the script and its arguments."""
    parser = argparse.ArgumentParser(prog="python -m tessera.deepspeed", description="Starts ranks of a script that was written for DeepSpeed, "
                                     "by `tessera launch`.", allow_abbrev=False)
    parser.add_argument("-H", "--hostfile", default=DLTS_HOSTFILE, help="lines HOST slots=N")
    parser.add_argument("-i", "--include", default="", help="host1@host2:0,2")
    parser.add_argument("-e", "--exclude", default="", help="as --include")
    parser.add_argument("--num_nodes", type=int, default=-1, help="the first hosts of the hostfile")
    parser.add_argument("--num_gpus", "--num_accelerators", type=int, default=-1, help="ranks on each host; by default its GPUs, or 1")
    parser.add_argument("--master_port", type=int, default=29500)
    parser.add_argument("--master_addr", default="")
    parser.add_argument("--node_rank", type=int, default=-1, help="this host's number, with --no_ssh")
    parser.add_argument("--launcher", default="pdsh", type=str.lower, help=", ".join(_LAUNCHERS))
    parser.add_argument("--launcher_args", default="")
    parser.add_argument("-m", "--module", action="store_true", help="the script is a module, as of python -m")
    parser.add_argument("--no_python", action="store_true", help="the script is a program; needs --no_local_rank")
    parser.add_argument("--no_local_rank", action="store_true", help="no --local_rank=N is given to the script")
    parser.add_argument("--no_ssh", action="store_true", help="this command runs on each host; needs --node_rank and --master_addr")
    parser.add_argument("--no_ssh_check", action="store_true", help="no effect: nothing is checked before")
    parser.add_argument("--force_multi", action="store_true", help="the hostfile counts for one host, too, as it does without it")
    parser.add_argument("--enable_each_rank_log", default="None", help="a folder for the output of each rank")
    parser.add_argument("--bind_cores_to_rank", action="store_true")
    parser.add_argument("--bind_core_list", default=None)
    parser.add_argument("--ssh_port", type=int, default=None)
    parser.add_argument("user_script")
    parser.add_argument("user_args", nargs=argparse.REMAINDER)
    return parser.parse_args(args)


def command_of(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """(words of `tessera launch`, changes of the environment) that do what the flags say. SystemExit for what there is not."""
    words, environment = ["tessera", "launch"], {}
    has_hosts = os.path.isfile(args.hostfile)
    if not has_hosts and args.hostfile != DLTS_HOSTFILE:
        sys.exit(f"error: --hostfile {args.hostfile}: no such file; expected lines HOST slots=N")
    if args.include and args.exclude:
        sys.exit("error: --include and --exclude: expected one of the two")
    if args.launcher not in _LAUNCHERS:
        sys.exit(f"error: --launcher {args.launcher}: expected one of {', '.join(_LAUNCHERS)}")
    if args.no_ssh and (args.node_rank < 0 or not args.master_addr):
        sys.exit("error: --no_ssh needs --node_rank and --master_addr")
    nproc, options = args.num_gpus, {}  # flags of `tessera launch`, those with a value
    if has_hosts:
        options = {"--hostfile": args.hostfile, "--launcher": args.launcher, "--include": args.include, "--exclude": args.exclude,
                   "--launcher-args": args.launcher_args, "--ssh-port": args.ssh_port}
    elif args.exclude:
        sys.exit("error: --exclude needs --hostfile; on this host alone, --include localhost:0,1 names the GPUs")
    elif args.include:
        host, _, slots = args.include.partition(":")
        if host not in ("localhost", "127.0.0.1") or not all(slot.isdigit() for slot in slots.split(",")):
            sys.exit(f"error: --include {args.include}: without --hostfile expected localhost:0,1, the GPUs of this host")
        environment["CUDA_VISIBLE_DEVICES"] = slots
        nproc = len(slots.split(","))
        if args.num_gpus not in (-1, nproc):
            sys.exit(f"error: --num_gpus {args.num_gpus}: --include {args.include} has {nproc}; expected one of the two flags")
    if nproc <= 0 and not has_hosts:
        nproc = max(1, torch.cuda.device_count())
    has_port = has_hosts or args.node_rank >= 0 or args.master_port != 29500  # on one host a free one will do
    options |= {"--nproc": nproc if nproc > 0 else None, "--nnodes": args.num_nodes if args.num_nodes > 0 else None,
                "--node-rank": args.node_rank if args.node_rank >= 0 else None, "--master-addr": args.master_addr,
                "--master-port": args.master_port if has_port else None,
                "--log-dir": args.enable_each_rank_log if args.enable_each_rank_log != "None" else None, "--bind-core-list": args.bind_core_list}
    words += [word for flag, value in options.items() if value not in (None, "") for word in (flag, str(value))]
    if args.bind_cores_to_rank or args.bind_core_list:
        words.append("--bind-cores")
    files = [os.path.join(folder, DEEPSPEED_ENVIRONMENT_NAME) for folder in DEEPSPEED_ENVIRONMENT_PATHS]
    words += [word for path in dict.fromkeys(map(os.path.realpath, files)) if os.path.isfile(path) for word in ("--env-file", path)]
    if args.no_python:
        if not args.no_local_rank:
            sys.exit("error: --no_python needs --no_local_rank here; the program finds its number in LOCAL_RANK")
        return [*words, "--", args.user_script, *args.user_args], environment
    script = [*(["-m"] if args.module else []), args.user_script]
    if not args.no_local_rank:
        environment["TESSERA_PASS_LOCAL_RANK"] = "1"
    return [*words, "--", sys.executable, "-u", "-m", "tessera.deepspeed", *script, *args.user_args], environment


def main(args: Sequence[str] | None = None) -> NoReturn:
    """The command `deepspeed`: this process becomes `tessera launch`."""
    words, changes = command_of(parse_args(args))
    os.execve(Path(command_path()), words, with_torch_found({**os.environ, **changes}))
