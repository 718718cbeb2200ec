"""What a file has at the place that is most like a hunk's expected lines.  Pure; its work is bounded whatever the input."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from difflib import SequenceMatcher

MOST_WANTED = 120  # lines of a hunk that are compared
MOST_PLACES = 40  # places in the file at which one line is looked at
CANDIDATES = 12


class Places:
    """The lines of one file, and where each stands."""

    def __init__(self, lines: Sequence[bytes]) -> None:
        self.lines = lines
        self._at: dict[bytes, list[int]] = defaultdict(list)
        for number, line in enumerate(lines):
            if (bare := line.strip()) and len(places := self._at[bare]) < MOST_PLACES:
                places.append(number)

    def nearest(self, wanted: Sequence[bytes], start: int) -> tuple[int, tuple[bytes, ...]]:
        """(line from 1, lines) most like `wanted`; `start` is the line (from 1) where they should be, for the case of a tie.

        Of a file without lines: (1, ()).
        """
        wanted = wanted[:MOST_WANTED]
        hint = max(0, min(start - 1, len(self.lines) - len(wanted)))
        votes: Counter[int] = Counter()
        for offset, line in enumerate(wanted):
            places = self._at.get(line.strip(), ())
            for place in places:
                votes[max(0, place - offset)] += 1 / len(places)
        best = sorted(votes, key=lambda at: (-votes[at], abs(at - hint)))[:CANDIDATES]
        begin = max([hint, *best], key=lambda at: (self._score(wanted, at), -abs(at - hint)))
        return self._fitted(wanted, begin)

    def _score(self, wanted: Sequence[bytes], at: int) -> int:
        """How many wanted lines stand about here, in any order."""
        slack = len(wanted) // 4 + 2
        around = Counter(line.strip() for line in self.lines[max(0, at - slack):at + len(wanted) + slack])
        return sum((Counter(line.strip() for line in wanted if line.strip()) & around).values())

    def _fitted(self, wanted: Sequence[bytes], begin: int) -> tuple[int, tuple[bytes, ...]]:
        """The window about `begin`, cut where the first and the last wanted line that it has say."""
        if tuple(self.lines[begin:begin + len(wanted)]) == tuple(wanted):
            return begin + 1, tuple(wanted)
        slack = len(wanted) // 4 + 2
        low = max(0, begin - slack)
        window = self.lines[low:begin + len(wanted) + slack]
        same = [m for m in SequenceMatcher(None, window, wanted, autojunk=False).get_matching_blocks() if m.size]
        if not same:
            return begin + 1, tuple(self.lines[begin:begin + len(wanted)])
        first, last = same[0], same[-1]
        top = max(0, low + first.a - first.b)
        end = low + last.a + last.size + len(wanted) - (last.b + last.size)
        return top + 1, tuple(self.lines[top:end])
