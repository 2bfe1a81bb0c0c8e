"""`deepspeed.launcher.runner`: the names that other launchers read."""
import os

from tessera.errors import Error

DLTS_HOSTFILE = "/job/hostfile"
EXPORT_ENVS = ["MLFLOW", "PYTHON", "MV2", "UCX"]
DEEPSPEED_ENVIRONMENT_NAME = os.getenv("DS_ENV_FILE", ".deepspeed_env")
DEEPSPEED_ENVIRONMENT_PATHS = [os.path.expanduser("~"), "."]


def main(args: list[str] | None = None) -> None:
    """Raises Error: the command is `tessera launch`."""
    raise Error("deepspeed.launcher.runner.main(): ranks are started by `tessera launch -n 2 -- python script.py …`, which has the flags "
                "--hostfile, --include, --exclude, --num_nodes and --launcher")
