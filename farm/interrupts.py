"""Ctrl-C, SIGTERM (`ray job stop`, a batch system) and a closed terminal: the first ends a run in order, the second at once.

The first raises KeyboardInterrupt, one time only, so that what tidies up is not interrupted itself.  The second leaves
without another word: lifelines and the guard (farm/lifeline.py, farm/guard.py) end what is left, and the run's row is
found to have lost its driver.  Standard library only: it is there before anything else is imported.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType

INTERRUPTED_EXIT = 130
ONE_PRESS_S = 0.4  # a terminal and a wrapper may both pass on the same Ctrl-C
NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LAST_WORDS = b"\nfarm: interrupted twice: left at once; what was finished is kept, see: farm runs\n"

_Handler = Callable[[int, FrameType | None], object] | int | None


@dataclass
class Interrupts:
    """The signals of one run.  Entered again it takes them back from a library that has set handlers of its own."""

    clock: Callable[[], float] = time.monotonic
    leave: Callable[[int], None] = os._exit
    first: float | None = None  # when the first one came
    held: bool = False
    _before: list[dict[int, _Handler]] = field(default_factory=list)

    def __enter__(self) -> Interrupts:
        taken = [n for n in NUMBERS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]  # else: nohup
        self._before.append({number: signal.signal(number, self._heard) for number in taken})
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.pop().items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Whatever the block does to the handlers (Ray's shutdown sets SIGTERM to its default), they are ours after it."""
        ours = {number: signal.getsignal(number) for number in NUMBERS}
        try:
            yield
        finally:
            for number, handler in ours.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def later(self) -> Iterator[None]:
        """The first signal is raised when the block has ended: an import that is cut in two may fail in any way."""
        self.held = True
        try:
            with self:
                yield
        finally:
            self.held = False
        if self.first is not None:
            raise KeyboardInterrupt

    def _heard(self, _number: int, _frame: FrameType | None) -> None:
        now = self.clock()
        if self.first is None:
            self.first = now
            if not self.held:
                raise KeyboardInterrupt
        elif now - self.first > ONE_PRESS_S:
            with contextlib.suppress(OSError):
                os.write(2, _LAST_WORDS)
            self.leave(INTERRUPTED_EXIT)


def deaf_at_the_end() -> None:
    """While Python takes itself apart a signal would put its own number in the exit code's place: by then none is heard.

    Call it before anything else asks for a last word: what was registered first is called last.
    """
    for number in NUMBERS:
        atexit.register(signal.signal, number, signal.SIG_IGN)
