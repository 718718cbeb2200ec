"""One boot's part of a server's log: earlier boots may have written to the same file."""

from __future__ import annotations

from pathlib import Path

from farm import bootlog

TAIL_LINES = 60


class ServerLog:
    """What is appended to `path` from now on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._start = path.stat().st_size if path.exists() else 0

    def size(self) -> int:
        """Bytes so far."""
        return self.path.stat().st_size - self._start if self.path.exists() else 0

    def lines(self, since: int = 0) -> list[str]:
        """Every line from a size on, the last one as far as it goes."""
        with self.path.open("rb") as log:
            log.seek(self._start + since)
            return log.read().decode("utf-8", "replace").splitlines()

    def tail(self, lines: int = TAIL_LINES) -> str:
        """The last lines, newest last."""
        return "\n".join(line.rstrip("\n") for line in self.lines()[-lines:])

    def last_words(self) -> str:
        """The text of the last line that says anything."""
        said = [line.text for line in bootlog.split(self.lines()[-20:]) if line.text.strip()]
        return said[-1].strip()[:160] if said else "nothing yet"

    def cause(self) -> str:
        """Why the server ended, as far as its log knows."""
        return bootlog.failure(self.lines()) or self.last_words()
