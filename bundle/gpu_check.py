"""Checks Tessera on this machine's GPU; gpu_check.sh starts it in the bundle's environment and has its help.

Parts, in this order, until the time is up: tests (those with ctest's label gpu; those labelled gpu_ranks in every world of
WORLDS), a training by the command line, the bandwidths of bench_kernels, and step times with PyTorch's rows beside ours and memory
beside the formula. What every program wrote lies in --out.
"""
import argparse
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tables

BUNDLE = Path(os.environ["TESSERA_BUNDLE_DIR"])
# (backend, ranks) on one device. A world whose backend this build does not have is left out.
WORLDS = {"cuda": [("nccl", 1), ("staged", 2), ("staged", 4)], "cpu": [("auto", 1), ("shm", 2)]}
LONGEST = 300  # seconds of one program

SHAPES = {
    "cuda": [{"layers": 12, "dim": 768, "heads": 12, "micro-batch": 16, "sequence": 1024, "vocabulary": 50304, "steps": 20, "largest_world": 4},
             {"layers": 24, "dim": 2048, "heads": 16, "micro-batch": 8, "sequence": 1024, "vocabulary": 50304, "steps": 10, "largest_world": 1}],
    "cpu": [{"layers": 2, "dim": 64, "heads": 2, "micro-batch": 2, "sequence": 32, "vocabulary": 256, "steps": 3, "largest_world": 2}]}
STAGES = [f"stage_{stage}" for stage in range(4)]


def finish(command, variables, limit):
    """(exit code, output) of a program that may take `limit` seconds; the code is None where it took longer. Its ranks end with it."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            for number in (signal.SIGTERM, signal.SIGKILL):  # the launcher ends its ranks at the first
                if process.poll() is None:
                    os.killpg(process.pid, number)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(10)
        output.seek(0)
        return code, output.read().decode(errors="replace")


class Check:
    """Runs programs within the time that is left, and keeps what they reported."""

    def __init__(self, args):
        self.device, self.out = "cpu" if args.cpu else "cuda", args.out
        self.end = time.monotonic() + 60 * args.minutes
        self.out.mkdir(parents=True, exist_ok=True)
        self.results = {"device": self.device, "tests": [], "steps": [], "kernels": []}

    def run(self, name, command, **environment):
        """(exit code, output, seconds) of a program; the exit code is None where the time was up."""
        start = time.monotonic()
        limit = min(LONGEST, self.end - start)
        if limit < 1:
            return None, "", 0
        variables = {**os.environ, **environment}
        if self.device == "cpu":
            variables["OMP_NUM_THREADS"] = "1"
        code, text = finish(list(map(str, command)), variables, limit)
        (self.out / (re.sub(r"\W+", "_", name) + ".log")).write_text(text, encoding="utf-8")
        return code, text, time.monotonic() - start

    def worlds(self):
        """Those of WORLDS whose backend configs/schema.json names."""
        schema = json.loads((BUNDLE / "configs" / "schema.json").read_text(encoding="utf-8"))
        known = schema["properties"]["comm"]["properties"]["backend"]["examples"]
        return [(backend, ranks) for backend, ranks in WORLDS[self.device] if backend in known]

    def in_world(self, backend, ranks, command):
        return command if ranks == 1 else ["tessera", "launch", "-n", ranks, "--", *command]

    def tests_backend(self, backend):
        return {"TESSERA_TEST_DEVICE": self.device, "TESSERA_TEST_BACKEND": backend}

    # ------------------------------------------------------------------------------------------- tests

    def note(self, name, code, text, seconds, passed, what):
        status = "no time" if code is None else "passed" if passed else "FAILED"
        self.results["tests"].append({"name": name, "status": status, "what": what, "seconds": round(seconds, 1)})
        print(f"  {status:8} {name} ({what}, {seconds:.1f} s)", flush=True)
        if status == "FAILED":
            print("\n".join("    " + line for line in text.splitlines()[-15:]), flush=True)

    def google_test(self, name, command, **environment):
        """Cases that were skipped do not count as passed: a program of which none ran has failed."""
        code, text, seconds = self.run(name, command, **environment)
        num_passed, num_skipped = (sum(map(int, re.findall(rf"^\[  {word} +\] (\d+) tests?", text, re.MULTILINE))) for word in ("PASSED", "SKIPPED"))
        self.note(name, code, text, seconds, code == 0 and num_passed > 0, f"{num_passed} cases" + (f", {num_skipped} skipped" if num_skipped else ""))

    def tests(self):
        print("tests", flush=True)
        for test in json.loads((BUNDLE / "lib" / "tests.json").read_text(encoding="utf-8")):
            if "gpu_ranks" in test["labels"]:
                for backend, ranks in self.worlds():
                    self.google_test(f"{test['name']} {backend} x {ranks}", self.in_world(backend, ranks, test["command"]), **self.tests_backend(backend))
            elif self.device == "cuda":  # the others have nothing to do without a device
                self.google_test(test["name"], test["command"])
        self.train()

    def train(self):
        """One epoch, and a second one resumed, from the command line."""
        runs = self.out / "run"
        common = ["tessera", "train", BUNDLE / "configs" / "fashion_mnist.json", "--set", f"trainer.device={self.device}", "--set",
                  f"data.path={BUNDLE / 'data' / 'fashion-mnist'}", "--set", f"trainer.output_dir={runs}"]
        for name, more in (("tessera train", ["--set", "trainer.epochs=1"]), ("tessera train --resume", ["--set", "trainer.epochs=2", "--resume"])):
            code, text, seconds = self.run(name, [*common, *more])
            accuracy = re.findall(r"accuracy[ :=]+([\d.]+)", text)
            self.note(name, code, text, seconds, code == 0 and bool(accuracy) and float(accuracy[-1]) > 0.6,
                      f"accuracy {accuracy[-1] if accuracy else 'unknown'}")

        if self.device == "cuda":
            self.out_of_memory(common)

    def out_of_memory(self, training):
        """A training whose GPU has some MB ends with one line."""
        name = "out of memory"
        code, text, seconds = self.run(name, [*training, "--set", "trainer.max_steps=2", "--set", "model.hidden=4096",
                                               "--set", f"trainer.output_dir={self.out / 'no_room'}"],
                                       PYTORCH_CUDA_ALLOC_CONF="per_process_memory_fraction:0.0002")
        errors = [line for line in text.splitlines() if line.startswith("error: ")]
        self.note(name, code, text, seconds, code not in (0, None) and len(errors) == 1 and "out of memory" in errors[0],
                  errors[0][:80] if errors else "no error")

    # ------------------------------------------------------------------------------------------- step times

    def rows(self, name, command):
        """The JSON lines that a program printed, with the median in place of all times; where it failed, one that says so."""
        code, text, _ = self.run(name, command)
        rows = [json.loads(line) for line in text.splitlines() if line.startswith('{"')]
        for row in rows:
            row.update({key: statistics.median(value) for key, value in row.items() if key.endswith("_ms")})
            if "losses" in row:
                row["loss"] = row.pop("losses")[0]
        if code != 0:
            last = next((line for line in reversed(text.splitlines()) if line.strip() and not line.startswith('{"')), "")
            rows.append({"way": "further ways", "error": "no time was left" if code is None else f"exit code {code}: {last[:200]}"})
        return rows

    def steps(self):
        for shape in SHAPES[self.device]:
            title = f"GPT {shape['layers']} x {shape['dim']}, micro-batch {shape['micro-batch']}, sequence {shape['sequence']}, vocabulary {shape['vocabulary']}"
            print(f"step times, {title}", flush=True)
            arguments = ["--device", self.device]
            for key in ("layers", "dim", "heads", "sequence", "vocabulary", "steps"):
                arguments += [f"--{key}", shape[key]]
            found = []
            for backend, ranks in self.worlds():
                if ranks > shape["largest_world"]:
                    continue
                # They share the device, so that they share the batch, too.
                ways = ["--micro-batch", shape["micro-batch"] // ranks, "--ways", *(["forward_backward"] if ranks == 1 else []), *STAGES]
                command = self.in_world(backend, ranks, ["step_rank", *arguments, "--backend", backend, *ways])
                for row in self.rows(f"step_rank {title} {backend} {ranks}", command):
                    found.append({"engine": "Tessera", "backend": backend, "ranks": ranks, **row})
            ways = ["forward_backward", "ddp", "fsdp2", "bf16", *(["bf16_compiled"] if self.device == "cuda" else [])]
            command = [sys.executable, "-B", BUNDLE / "lib" / "step_peer.py", *arguments, "--micro-batch", shape["micro-batch"], "--ways", *ways]
            for row in self.rows(f"step_peer {title}", command):
                found.append({"engine": "PyTorch", "backend": "", "ranks": 1, **row})
            self.results["steps"].append({"title": title, "rows": found})

    # ------------------------------------------------------------------------------------------- kernels

    def kernels(self):
        print("bandwidths", flush=True)
        _, listed, _ = self.run("bench_kernels list", ["bench_kernels", "--benchmark_list_tests"])
        on_device = [name for name in listed.split() if re.search("cuda", name, re.IGNORECASE)]
        if self.device == "cuda" and not on_device:
            print("  bench_kernels has no rows on the device: the CPU's follow", flush=True)
        chosen = "[cC][uU][dD][aA]" if on_device and self.device == "cuda" else "^(memcpy|copy|update_AdamW|squared_norm/Float)"
        report = self.out / "bench_kernels.json"
        command = ["bench_kernels", f"--benchmark_filter={chosen}", f"--benchmark_out={report}", "--benchmark_out_format=json"]
        code, text, seconds = self.run("bench_kernels", command)
        found = json.loads(report.read_text(encoding="utf-8"))["benchmarks"] if code == 0 else []
        for one in found:
            self.results["kernels"].append({"name": one["name"].split("/iterations")[0], "GB_per_s": one.get("GB_per_s"),
                                            "x_copy": one.get("x_copy", one.get("x_memcpy"))})
        self.note("bench_kernels", code, text, seconds, bool(found), f"{len(found)} rows")


def parse_arguments():
    parser = argparse.ArgumentParser(prog="gpu_check.sh", description="Checks Tessera on this machine's GPU")
    parser.add_argument("--cpu", action="store_true", help="small shapes on the CPU, to try the check itself")
    parser.add_argument("--minutes", type=float, default=9.5, help="what is not done by then is left out, and said to be (default: 9.5)")
    parser.add_argument("--only", choices=("tests", "kernels", "steps"), help="one part")
    parser.add_argument("--out", type=Path, default=Path("gpu_check"), help="a folder for the programs' output and results.json (default: gpu_check)")
    return parser.parse_args()


def machine():
    """What `tessera doctor` finds out about this host."""
    done = subprocess.run(["tessera", "doctor", "--json"], capture_output=True, text=True, check=False)
    if not done.stdout.startswith("{"):
        sys.exit(f"gpu_check: tessera doctor: exit code {done.returncode}: {done.stderr.strip()}")
    return json.loads(done.stdout)["hosts"][0]["facts"]


def main():
    args = parse_arguments()
    facts = machine()
    if not args.cpu and not facts["gpus"]:
        print(f"gpu_check: no GPU: {facts['no_gpu']}; --cpu tries the check with small shapes on the CPU", file=sys.stderr)
        sys.exit(2)
    check = Check(args)
    check.results["machine"] = facts
    start = time.monotonic()
    for part in ("tests", "kernels", "steps"):
        if args.only in (None, part):
            getattr(check, part)()
    check.results["seconds"] = round(time.monotonic() - start, 1)
    (args.out / "results.json").write_text(json.dumps(check.results, indent=1) + "\n", encoding="utf-8")
    print(tables.render(check.results))
    sys.exit(1 if tables.failures(check.results) else 0)


if __name__ == "__main__":
    main()
