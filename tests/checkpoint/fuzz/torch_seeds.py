"""Seeds for the fuzzers of pickles and of torch.save's files: torch_seeds.py FOLDER_OF_PICKLES FOLDER_OF_FILES."""
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "formats"))
import torch_file_zoo as zoo


def main(pickles, files):
    torch.serialization.set_crc32_options(False)  # a changed byte would be refused by its checksum
    with tempfile.TemporaryDirectory() as folder:
        zoo.main(folder)
        for path in sorted(Path(folder).iterdir()):
            if path.stat().st_size < 6000:
                (Path(pickles if path.suffix == ".pkl" else files) / path.name).write_bytes(path.read_bytes())


main(*sys.argv[1:])
