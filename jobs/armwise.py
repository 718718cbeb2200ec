"""The same work on each arm: one after the other, or side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


def each(arms: Sequence[str], do: Callable[[str], Result], *, at_once: int) -> Iterator[tuple[str, Result]]:
    """(arm, what `do` made of it) in the arms' order; up to `at_once` are in work.

    Raises what `do` raises, once those that had begun are through; arms that had not begun are left.
    """
    if at_once <= 1:
        yield from ((arm, do(arm)) for arm in arms)
        return
    pool = ThreadPoolExecutor(at_once)
    try:
        for arm, result in zip(arms, [pool.submit(do, arm) for arm in arms], strict=True):
            yield arm, result.result()
    finally:
        pool.shutdown(cancel_futures=True)
