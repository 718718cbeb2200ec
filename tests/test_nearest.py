"""The place of a file that is most like a hunk's lines."""

import time

import pytest

from farm.nearest import Places

LINES = [f"line {n}".encode() for n in range(1, 41)]


@pytest.mark.parametrize(("lines", "wanted", "start", "at", "stands"), [
    pytest.param(LINES, LINES[9:14], 10, 10, LINES[9:14], id="where-it-says"),
    pytest.param(LINES, LINES[29:34], 3, 30, LINES[29:34], id="elsewhere"),
    pytest.param(LINES, [LINES[9], b"no", LINES[11]], 10, 10, LINES[9:12], id="one-line-differs"),
    pytest.param(LINES[:10] + [b"in", b"between"] + LINES[10:], LINES[8:12], 9, 9, LINES[8:10] + [b"in", b"between"]
                 + LINES[10:12],
                 id="lines-were-added"),
    pytest.param(LINES[:10] + LINES[12:], LINES[8:14], 9, 9, LINES[8:10] + LINES[12:14], id="lines-were-removed"),
    pytest.param([b"  " + line for line in LINES], LINES[9:14], 10, 10, [b"  " + line for line in LINES[9:14]],
                 id="indented-anew"),
    pytest.param(LINES, [b"other", b"words"], 10, 10, LINES[9:11], id="nothing-alike"),
    pytest.param(LINES, [b"other", b"words"], 900, 39, LINES[38:], id="nothing-alike-past-the-end"),
    pytest.param([], LINES[:3], 5, 1, [], id="empty-file"),
    pytest.param(LINES, [], 5, 5, [], id="nothing-wanted"),
    pytest.param([b"a", b"b"] * 20, [b"a", b"b"], 21, 21, [b"a", b"b"], id="the-nearest-of-many"),
])
def test_nearest(lines, wanted, start, at, stands):
    assert Places(lines).nearest(wanted, start) == (at, tuple(stands))


@pytest.mark.parametrize("lines", [[b"x"] * 100_000, [b""] * 100_000, [b"%d" % (n % 5) for n in range(100_000)]],
                         ids=["all-one", "all-blank", "five"])
def test_bounded(lines):
    began = time.monotonic()
    places = Places(lines)
    for start in range(0, 5000, 100):
        places.nearest(lines[:400], start)
    assert time.monotonic() - began < 5
