"""`deepspeed.env_report`, what `ds_report` prints: `python -m tessera.deepspeed --ds_report`."""
import subprocess
import sys

import torch

import tessera
from tessera.deepspeed import git_version_info
from tessera.launch import command_path, environment_of_child


def main(hide_operator_status: bool = False, hide_errors_and_warnings: bool = False) -> None:
    """Print versions, and what `tessera doctor` says of this host. No operator is compiled at run time, so the arguments hide nothing."""
    rows = (("tessera", tessera.__version__), ("tessera from", tessera.__path__[0]), ("deepspeed", f"{git_version_info.version}, whose interface this is"),
            ("torch", torch.__version__), ("torch from", torch.__path__[0]), ("torch's CUDA", torch.version.cuda or "none"),
            ("GPUs", str(torch.cuda.device_count())), ("python", sys.version.split()[0]))
    for name, value in rows:
        print(f"{name:.<24} {value}")
    sys.stdout.flush()
    subprocess.run(["tessera", "doctor"], executable=command_path(), env=environment_of_child(), check=False)


cli_main = main
