"""What a patch says of itself: fields of its preamble, as Debian's DEP-3 names them.  Pure.

One field counts here.  `Applied-Upstream: 0.30.0, vllm-project/vllm#55450` is a person's word that the change is in
that release and in all later ones.  Source: https://dep-team.pages.debian.net/deps/dep3/
"""

from __future__ import annotations

import re

from packaging.version import InvalidVersion, Version

from farm.series import PatchFile

_FIELD = re.compile(rb"^Applied-Upstream:[ \t]*(\S+)", re.IGNORECASE | re.MULTILINE)


def applied_upstream(patch: PatchFile) -> Version | None:
    """The first release that carries the patch's change by its own header; None where it names none."""
    preamble = patch.data[:_first_diff(patch.data)]
    for found in _FIELD.finditer(preamble):
        try:
            return Version(found[1].decode("ascii", errors="replace").strip(",;").removeprefix("v"))
        except InvalidVersion:
            continue  # a commit or a URL: no release is named
    return None


def carried(patch: PatchFile, version: str) -> bool:
    """Whether the patch's own header says that this release carries its change."""
    first = applied_upstream(patch)
    return first is not None and Version(version) >= first


def _first_diff(data: bytes) -> int:
    found = re.search(rb"^(?:diff --git |--- \S+.*\n\+\+\+ )", data, re.MULTILINE)
    return found.start() if found else len(data)
