"""Writes DIST/simple, a package index (https://packaging.python.org/specifications/simple-repository-api) with the wheels that lie in DIST.

The folder holds all that it names (the wheels are hard links), so that it can be copied to any web server. Beside each wheel lies its
metadata, by which pip finds the wheel for the torch at hand without downloading the others.
"""
import argparse
import hashlib
import html
import os
import re
import shutil
import sys
import zipfile
from email.parser import Parser
from pathlib import Path
from urllib.parse import quote

PAGE = '<!DOCTYPE html>\n<html><head><meta name="pypi:repository-version" content="1.0"><title>{}</title></head><body>\n{}\n</body></html>\n'


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def metadata_of(wheel):
    """The bytes of a wheel's METADATA."""
    with zipfile.ZipFile(wheel) as files:
        (name,) = [name for name in files.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)]
        return files.read(name)


def add(wheel, folder):
    """Puts a wheel and its metadata into the folder; returns its line of the page."""
    os.link(wheel, folder / wheel.name)
    metadata = metadata_of(wheel)
    (folder / f"{wheel.name}.metadata").write_bytes(metadata)
    python = html.escape(Parser().parsestr(metadata.decode())["Requires-Python"])
    return (f'<a href="{quote(wheel.name)}#sha256={sha256(wheel.read_bytes())}" data-requires-python="{python}" '
            f'data-core-metadata="sha256={sha256(metadata)}" data-dist-info-metadata="sha256={sha256(metadata)}">{wheel.name}</a><br>')


def main():
    parser = argparse.ArgumentParser(description="Writes DIST/simple, a package index of DIST's wheels")
    parser.add_argument("dist", type=Path)
    dist = parser.parse_args().dist
    wheels = sorted(dist.glob("tessera-*.whl"))
    if not wheels:
        sys.exit(f"error: {dist}: found no tessera-*.whl; expected at least one: make wheels")
    shutil.rmtree(dist / "simple", ignore_errors=True)
    folder = dist / "simple" / "tessera"
    folder.mkdir(parents=True)
    (folder / "index.html").write_text(PAGE.format("tessera", "\n".join(add(wheel, folder) for wheel in wheels)), encoding="utf-8")
    (dist / "simple" / "index.html").write_text(PAGE.format("index", '<a href="tessera/">tessera</a>'), encoding="utf-8")
    print(f"{dist}/simple: an index of {len(wheels)} wheels; pip install -i file://{(dist / 'simple').resolve()} tessera takes the one for the torch "
          "that is installed")


if __name__ == "__main__":
    main()
