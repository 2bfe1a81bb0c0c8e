"""Makes the bundle of a build: a folder, and an archive of it, that runs on a machine with nothing but Python and torch.

    .deps/venv/bin/python -B bundle/make_bundle.py [--build build] [--out dist]

    run.sh, gpu_check.sh   what is called
    bin/                   tessera, the CUDA plugin, the tests with ctest's label gpu, step_rank, bench_kernels: stripped
    lib/                   shared libraries that are neither torch's nor every Linux's; the scripts; tests.json: the tests
    configs/, data/        configurations, and what they train on
    licenses/              of what is linked statically, copied or brought along

Programs look for libraries in $ORIGIN/../lib and in the folders that run.sh puts into LD_LIBRARY_PATH: no path of the machine that
built them stays in them.
"""
import argparse
import gzip
import json
import re
import shutil
import struct
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST_BYTES = 60 << 20
# What every Linux with Python has, and what torch's wheels bring.
SYSTEM = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libgcc_s.so.1", "libstdc++.so.6", "ld-linux-x86-64.so.2"}
TORCH = {"libtorch.so", "libtorch_cpu.so", "libtorch_cuda.so", "libc10.so", "libc10_cuda.so", "libgomp.so.1", "libcudart.so.13"}
PROGRAMS = ["tessera", "step_rank", "bench_kernels", "comm_test_rank"]  # the last: comm_gpu_test starts it
SCRIPTS = ["bundle/find_torch.py", "bundle/gpu_check.py", "bundle/tables.py", "benchmarks/peers/step_peer.py", "benchmarks/peers/peer.py"]
CONFIGS = ["ds_config_zero2.json", "fashion_mnist.json", "gpt_110m.json", "gpt_33m.json", "minimal.json", "schema.json", "segmentation.json"]
FASHION_MNIST, GPL = Path("/usr/share/datasets/fashion-mnist"), Path("/usr/share/common-licenses/GPL-3")
NUM_IMAGES = {"train": 6000, "t10k": 1000}
RPATH = "$ORIGIN/../lib"
LICENSES = ["zlib1g-dev", "libpng-dev", "libjpeg62-turbo-dev", "libutf8proc-dev", "libspdlog-dev", "libfmt-dev", "nlohmann-json3-dev", "libcli11-dev",
            "libxxhash-dev", "libsodium-dev", "libgtest-dev", "libbenchmark-dev", "dataset-fashion-mnist"]


def fail(message):
    sys.exit(f"error: {message}")


def output_of(*command):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        fail(f"{' '.join(map(str, command))}: exit code {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def gpu_tests(build):
    """[{"name", "command", "labels"}] of ctest's label gpu; the command's program is a name in bin/."""
    found = []
    for test in json.loads(output_of("ctest", "--test-dir", build, "-N", "--show-only=json-v1", "-L", "^gpu$"))["tests"]:
        properties = {one["name"]: one["value"] for one in test["properties"]}
        if "command" not in test:
            fail(f"the test {test['name']}, labelled gpu, is not built: scripts/build.sh release bundle_programs")
        program, *arguments = test["command"]
        if Path(program).resolve().parent != build.resolve():
            fail(f"the test {test['name']}, labelled gpu, runs {program}: expected a program of {build}, which the bundle can take along")
        found.append({"name": test["name"], "command": [Path(program).name, *arguments], "labels": properties["LABELS"]})
    return found


def needed(path):
    return set(re.findall(r"\(NEEDED\) +Shared library: \[(.*)\]", output_of("readelf", "-d", path)))


def copy_binary(source, target):
    shutil.copyfile(source, target)
    target.chmod(0o755)
    output_of("strip", *(["--strip-unneeded"] if ".so" in target.name else []), target)
    script = target.with_name("rpath.cmake")
    # RPATH_SET of a file without an RPATH fails.
    if re.search(r"\((RPATH|RUNPATH)\)", output_of("readelf", "-d", target)):
        script.write_text(f'file(RPATH_SET FILE "{target}" NEW_RPATH [[{RPATH}]])\n', encoding="utf-8")
        output_of("cmake", "-P", script)
        script.unlink()


def copy_libraries(build, programs, lib):
    """The libraries that `programs` need, and those that these need, but for SYSTEM and TORCH."""
    places = {}
    for program in programs:
        places.update(re.findall(r"^\t(\S+) => (/\S+)", output_of("ldd", build / program), re.MULTILINE))
    todo = set().union(*(needed(build / program) for program in programs))
    copied = set()
    while todo := todo - copied - SYSTEM - TORCH:
        name = min(todo)
        if name not in places:
            fail(f"the library {name} was not found by ldd")
        copy_binary(Path(places[name]), lib / name)
        copied.add(name)
        todo |= needed(lib / name)


def copy_images(target):
    """The first images of both splits. An IDX file: a magic number, the sizes (big-endian int32 each), then bytes."""
    target.mkdir(parents=True)
    for split, num in NUM_IMAGES.items():
        for kind, header, size in (("images-idx3", 16, 28 * 28), ("labels-idx1", 8, 1)):
            name = f"{split}-{kind}-ubyte.gz"
            data = gzip.decompress((FASHION_MNIST / name).read_bytes())
            few = data[:4] + struct.pack(">i", num) + data[8:header] + data[header:header + num * size]
            (target / name).write_bytes(gzip.compress(few, mtime=0))


def copy_configs(folder):
    """Their data are the bundle's; its folder is the working directory then."""
    (folder / "configs").mkdir()
    for name in CONFIGS:
        text = (ROOT / "configs" / name).read_text(encoding="utf-8")
        if name != "schema.json":
            text = text.replace(str(FASHION_MNIST), "data/fashion-mnist").replace(str(GPL), "data/gpl-3.txt")
        (folder / "configs" / name).write_text(text, encoding="utf-8")


def copy_licenses(folder):
    folder.mkdir()
    shutil.copy(ROOT / "LICENSE", folder / "tessera")
    if (ROOT / ".deps/hdf5/COPYING").exists():
        shutil.copy(ROOT / ".deps/hdf5/COPYING", folder / "hdf5")
    for package in LICENSES:
        source = Path("/usr/share/doc") / package / "copyright"
        if source.exists():
            shutil.copy(source, folder / package.removesuffix("-dev"))


def torch_version(build):
    """That of the build's libtorch: ("2.11", "2.11.0")."""
    full = re.search(r"^TESSERA_TORCH_VERSION:INTERNAL=(.*)$", (build / "CMakeCache.txt").read_text(encoding="utf-8"), re.MULTILINE)[1]
    return full.rpartition(".")[0], full


def copy_scripts(build, folder):
    minor, full = torch_version(build)
    for name in ("run.sh", "gpu_check.sh", "README.md"):
        text = (ROOT / "bundle" / name).read_text(encoding="utf-8")
        (folder / name).write_text(text.replace("@TORCH_FULL@", full).replace("@TORCH@", minor), encoding="utf-8")
        (folder / name).chmod(0o755 if name.endswith(".sh") else 0o644)
    for name in SCRIPTS:
        shutil.copy(ROOT / name, folder / "lib")


def fill(build, folder):
    for name in ("bin", "lib", "data"):
        (folder / name).mkdir(parents=True)
    tests = gpu_tests(build)
    programs = sorted({*PROGRAMS, *(test["command"][0] for test in tests)})
    if missing := [name for name in programs if not (build / name).exists()]:
        fail(f"{', '.join(missing)} not built: scripts/build.sh release bundle_programs")
    for name in programs:
        copy_binary(build / name, folder / "bin" / name)
    (folder / "bin" / "zero_to_fp32").symlink_to("tessera")
    if (build / "libtessera_cuda.so").exists():
        copy_binary(build / "libtessera_cuda.so", folder / "bin" / "libtessera_cuda.so")
    else:
        print("note: this build has no CUDA plugin, so the bundle is for the CPU only: nvcc 13 was not found", file=sys.stderr)
    copy_libraries(build, programs, folder / "lib")
    (folder / "lib" / "tests.json").write_text(json.dumps(tests, indent=1) + "\n", encoding="utf-8")
    copy_scripts(build, folder)
    copy_configs(folder)
    copy_images(folder / "data" / "fashion-mnist")
    shutil.copy(GPL, folder / "data" / "gpl-3.txt")
    copy_licenses(folder / "licenses")


def pack(folder, archive):
    """The same bytes for the same files."""
    def plain(entry):
        entry.uid = entry.gid = entry.mtime = 0
        entry.uname = entry.gname = ""
        return entry

    with archive.open("wb") as file, gzip.GzipFile("", "wb", 6, file, mtime=0) as packed, tarfile.open(fileobj=packed, mode="w") as tar:
        tar.add(folder, folder.name, recursive=False, filter=plain)
        for path in sorted(folder.rglob("*")):
            tar.add(path, f"{folder.name}/{path.relative_to(folder)}", recursive=False, filter=plain)


def main():
    parser = argparse.ArgumentParser(description="Makes the bundle of a build")
    parser.add_argument("--build", type=Path, default=ROOT / "build")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    args = parser.parse_args()
    version = output_of(args.build / "tessera", "--version").strip()
    folder = args.out / f"tessera-{version}+torch{torch_version(args.build)[0]}-linux_x86_64"
    shutil.rmtree(folder, ignore_errors=True)
    fill(args.build, folder)
    archive = args.out / f"{folder.name}.tar.gz"
    pack(folder, archive)
    size = archive.stat().st_size
    print(f"{archive}: {size / 2**20:.1f} MiB")
    if size > MOST_BYTES:
        fail(f"{archive} has {size} bytes; expected at most {MOST_BYTES}")


if __name__ == "__main__":
    main()
