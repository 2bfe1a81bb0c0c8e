"""What a measurement was made on: processor, memory, system and versions. No host names and no paths."""
import importlib.metadata
import importlib.util
import os
import platform
import re
from pathlib import Path


def num_cores():
    """The processors this process may run on."""
    return len(os.sched_getaffinity(0))


def cpu_name():
    """As /proc/cpuinfo names it; empty where it does not."""
    found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    return found.group(1).strip() if found else ""


def memory_gib():
    return int(re.search(r"^MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text(encoding="utf-8"), re.MULTILINE).group(1)) / 2**20


def describe():
    return {"cpu": cpu_name(), "cores": num_cores(), "memory_gib": round(memory_gib(), 1),
            "system": platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())}


def versions(packages):
    """{package: version} of those that are installed."""
    return {name: importlib.metadata.version(name) for name in packages if importlib.util.find_spec(name)}
