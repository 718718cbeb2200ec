"""A matrix run with other arms than its own: `farm matrix FILE --arms patched,patched`.  Pure.

An arm that is named twice is run as two arms of one tree (A/A), the second called NAME-again: what differs between
them is what the card and the farm make of nothing.  What a cell expects of an arm by name goes with the arm; rules that
compare two arms are left out of an A/A, where there is no effect to expect.  A control keeps its own arms.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from farm.errors import UsageError

if TYPE_CHECKING:
    from farm.config import CellConfig, MatrixConfig

AGAIN = "-again"


def rearm(matrix: MatrixConfig, chosen: tuple[str, ...]) -> MatrixConfig:
    """The matrix whose cells run these of its arms, in this order.

    Raises UsageError for an arm that the matrix does not have, and for one that is named more than twice.
    """
    of: dict[str, str] = {}
    for name in chosen:
        if name not in matrix.arms:
            raise UsageError(f"--arms: the matrix has no arm {name!r}; it has: {', '.join(matrix.arms)}")
        if name in of and name + AGAIN in of:
            raise UsageError(f"--arms: {name} is named more than twice; an A/A needs it twice")
        if name in of and name + AGAIN in matrix.arms:
            raise UsageError(f"--arms: the matrix has an arm {name + AGAIN} of its own; rename it")
        of[name + AGAIN if name in of else name] = name
    arms = {**matrix.arms, **{arm: matrix.arms[source] for arm, source in of.items()}}
    cells = tuple(cell if cell.control is not None else _cell(cell, of, matrix.arms) for cell in matrix.cells)
    return matrix.model_copy(update={"arms": arms, "cells": cells})


def words(chosen: tuple[str, ...]) -> str:
    """What is run instead, for whoever started it."""
    twice = len(set(chosen)) < len(chosen)
    return (f"arms {', '.join(chosen)} instead of the cells' own; controls keep theirs"
            f"{'. An A/A: rules that compare two arms are left out' if twice else ''}")


def _cell(cell: CellConfig, of: Mapping[str, str], known: Collection[str]) -> CellConfig:
    expect = _expect(cell.expect, of, known)
    if isinstance(expect, (list, tuple)) and len(of) > len(set(of.values())):
        expect = [rule for rule in expect if isinstance(rule, Mapping) and rule.get("probe")]  # compares no arms
    return cell.model_copy(update={"arms": tuple(of), "expect": expect or None})


def _expect(found: Any, of: Mapping[str, str], known: Collection[str]) -> Any:
    """What is expected by an arm's name, wherever it stands, under the names that the arms have now."""
    if not isinstance(found, Mapping):
        return found
    if found and all(name in known for name in found):
        return {arm: found[source] for arm, source in of.items() if source in found}
    renamed = {name: _expect(value, of, known) for name, value in found.items()}
    return {name: value for name, value in renamed.items() if value != {} or found[name] == {}}
