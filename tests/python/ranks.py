"""Starts Python programs as the ranks of one group. ctest gives the paths: PYTHONPATH (the package), TESSERA (the command)."""
import getpass
import os
import re
import signal
import subprocess
import sys
import tempfile
import unittest
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
from tool import TESSERA, free_port  # noqa: E402, F401  for the tests, too

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).resolve().parent / "programs"
WARM = Path(__file__).resolve().parent / "warm.py"
_COMPILED = Path(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")  # torch's own folder: what is compiled is kept between tests
_RANK_VARIABLES = re.compile(r"RANK|WORLD_SIZE|LOCAL_|GROUP_|ROLE_|MASTER_|TORCHELASTIC_|TESSERA_")


def environment(**changes):
    """This process's, without a place in a group; one thread a rank."""
    variables = {name: value for name, value in os.environ.items() if not _RANK_VARIABLES.match(name)}
    variables.update(OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    variables.update({name: str(value) for name, value in changes.items()})
    return variables


def python():
    """The first words of a rank's command."""
    return [sys.executable, "-S", WARM, os.environ["TESSERA_WARM"], "run"] if "TESSERA_WARM" in os.environ else [sys.executable]


class RanksTest(unittest.TestCase):
    """Each test has a folder, in which its programs run, and one for their temporary files; none of them outlives it."""

    maxDiff = None

    def setUp(self):
        self.folder, self._temporary = self._make_folder("python"), self._make_folder("tmp")
        self._started = []
        self.addCleanup(self._kill)

    def _make_folder(self, name):
        return Path(self.enterContext(tempfile.TemporaryDirectory(prefix=f"tessera_{name}_")))

    def _kill(self):
        for process in self._started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        self._started.clear()

    def start(self, *command, **variables):
        """A program, in a process group of its own, with stdout and stderr together."""
        variables = {"TMPDIR": self._temporary, "TORCHINDUCTOR_CACHE_DIR": _COMPILED, **variables}
        process = subprocess.Popen(list(map(str, command)), cwd=self.folder, env=environment(**variables), text=True,
                                   stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
        self._started.append(process)
        return process

    def program(self, text):
        """The first words of the command that runs this text as a rank's program."""
        path = self._make_folder("program") / "program.py"
        path.write_text(text)
        return [*python(), path]

    def start_ranks(self, world, script, *arguments, **variables):
        """One process a rank; `script` is one of PROGRAMS. They are forks of the warm process of this run of ctest, if there is one."""
        port = free_port()
        place = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        if world == 1:
            place = {}
        return [self.start(*python(), PROGRAMS / script, *arguments, **place, **({"RANK": rank, "LOCAL_RANK": rank} if place else {}),
                           **variables) for rank in range(world)]

    def finish(self, processes, timeout_s=240):
        """Waits for all; asserts that each has succeeded. Returns what they wrote, by rank."""
        outputs = self.outcome(processes, timeout_s)
        said = "\n".join(f"--- rank {rank}: exit code {code}\n{text}" for rank, (code, text) in enumerate(outputs))
        self.assertTrue(all(code == 0 for code, _ in outputs), said)
        return [text for _, text in outputs]

    def outcome(self, processes, timeout_s=240):
        """[(exit code, output)] by rank. All are read at once: a rank that writes 64 KiB would wait for its reader."""
        def ended(process):
            text, _ = process.communicate(timeout=timeout_s)
            return process.returncode, text

        with ThreadPoolExecutor(len(processes)) as readers:
            return list(readers.map(ended, processes))

    def run_ranks(self, world, script, *arguments, timeout_s=240, **variables):
        return self.finish(self.start_ranks(world, script, *arguments, **variables), timeout_s)

    def run_checks(self, world, script, *arguments, checks=(), **variables):
        """Runs a program of checks.main(). Each check is a test of its own: after one that fails, new ranks run those that follow it."""
        report = self._make_folder("report") / "rank"
        while True:
            ranks = self.start_ranks(world, script, *arguments, *checks, TESSERA_TEST_REPORT=report, **variables)
            try:
                outcome = self.outcome(ranks)
            except subprocess.TimeoutExpired as error:
                self._kill()
                outcome = [("none", str(error))]
            reports = [path.read_text().splitlines() for path in report.parent.iterdir()]
            for path in report.parent.iterdir():
                path.unlink()
            names = reports[0][0].split() if reports else []
            num_passed = min(map(len, reports)) - 1 if len(reports) == world else 0
            for name, seconds in zip(names[:num_passed], reports[0][1:] if reports else []):
                print(f"    passed  {name}  {seconds} s")
            if all(code == 0 for code, _ in outcome) and num_passed == len(names) > 0:
                return
            failed = (names + ["after the checks" if names else "before the checks"])[num_passed]
            print(f"    FAILED  {failed}")
            with self.subTest(f"{script} {' '.join(map(str, arguments))} on {world} ranks: {failed}"):
                self.fail("\n".join(f"--- rank {rank}: exit code {code}\n{text}" for rank, (code, text) in enumerate(outcome)))
            checks = names[num_passed + 1:]
            if not checks:
                return
