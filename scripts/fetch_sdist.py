"""Downloads a source package from the package index without building it:  fetch_sdist.py PROJECT VERSION SHA256 FILE

`pip download` runs the setup.py of what it downloads, to read its metadata. This asks the same index in the same way (pip's
configuration, certificates and proxies count), and keeps the file only when its digest is the one expected.
"""
import hashlib
import os
import sys

from pip._internal.commands.index import IndexCommand
from pip._internal.exceptions import CommandError


class FetchCommand(IndexCommand):
    def run(self, options, args):
        project, version, digest, name = args
        with self._build_session(options) as session:
            candidates = self._build_package_finder(options, session).find_all_candidates(project)
            links = [candidate.link for candidate in candidates if str(candidate.version) == version and not candidate.link.is_wheel]
            if not links:
                raise CommandError(f"{project} {version}: the package index has no source package of it")
            response = session.get(links[0].url_without_fragment)
            response.raise_for_status()
        found = hashlib.sha256(response.content).hexdigest()
        if found != digest:
            raise CommandError(f"{links[0].filename}: has the SHA-256 {found}; expected {digest}")
        with open(name + ".part", "wb") as file:
            file.write(response.content)
        os.replace(name + ".part", name)
        return 0


if __name__ == "__main__":
    sys.exit(FetchCommand("fetch", "downloads a source package").main(sys.argv[1:]))
