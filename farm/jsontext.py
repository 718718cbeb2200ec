"""JSON that somebody else may have written, by hand or in malice: whatever it holds, the only error is ValueError.

The standard reader raises RecursionError for what nests too deep, and says nothing of types: a record is believed only
once each of its values is what its writer would have written.
"""

from __future__ import annotations

import json
import math
from datetime import datetime
from typing import Any


def loads(text: str | bytes) -> Any:
    """As json.loads.  Raises ValueError."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def word(said: Any) -> str:
    """One line that a terminal can be shown.  Raises ValueError."""
    if not isinstance(said, str) or not said.isprintable():
        raise ValueError(f"no line of text: {said!r:.80}")
    return said


def text(said: Any) -> str:
    """Raises ValueError."""
    if not isinstance(said, str):
        raise ValueError(f"no text: {said!r:.80}")
    return said


def whole(said: Any) -> int:
    """A whole number, as large as a counter can be.  Raises ValueError."""
    if not isinstance(said, int) or isinstance(said, bool) or abs(said) >= 2**63:
        raise ValueError(f"no whole number: {said!r:.80}")
    return said


def number(said: Any) -> float:
    """A finite number.  Raises ValueError."""
    if isinstance(said, float) and math.isfinite(said):
        return said
    return float(whole(said))


def moment(said: Any) -> datetime:
    """A time that says its zone: another one cannot be compared.  Raises ValueError."""
    found = datetime.fromisoformat(text(said))
    if found.tzinfo is None:
        raise ValueError(f"a time without a zone: {said}")
    return found
