"""What a cell's matrix expected of it: in words, and which figures it judged.  Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from farm.stats import percent


def words(text: str | None) -> str:
    """The column `expect` of a cell, for a reader; empty where the matrix expected nothing."""
    found = _parsed(text)
    if _are_rules(found):
        return "; ".join(map(_rule, found))
    if isinstance(found, Mapping):
        return "; ".join(f"{name}: {_plainly(value)}" for name, value in found.items())
    return "" if found is None else _plainly(found)


def judged(text: str | None, metric: str, tokens: int | None, scenario: str, *, cached: int = 0, probe: bool = False) -> bool:
    """Whether a rule looked at a figure.  `scenario` is its name; a metric of it counts as judged with it.

    `cached` tokens of the prompt came from the cache (0: it was fresh); `probe`: the figure is of boots with the probe.
    """
    found = _parsed(text)
    if _are_rules(found):
        return any(r["metric"] == metric and (not r.get("at") or tokens in r["at"])
                   and (r.get("prefix", 0) >= cached > 0 or r.get("prefix", 0) == cached == 0)
                   and (bool(r.get("probe")) or not probe) for r in found)
    return isinstance(found, Mapping) and scenario in found


def _parsed(text: str | None) -> Any:
    try:
        return json.loads(text) if text else None
    except ValueError:
        return text


def _are_rules(found: Any) -> bool:
    return isinstance(found, list) and bool(found) and all(isinstance(r, Mapping) and "metric" in r for r in found)


def _rule(rule: Mapping[str, Any]) -> str:
    way, margin = str(rule.get("direction", "")), rule.get("margin")
    limit = "" if margin is None else f" {'within' if way == 'unchanged' else 'by at least'} {percent(margin)}"
    at = f" at {', '.join(f'{n:,}' for n in rule['at'])} tokens" if rule.get("at") else ""
    after = f" after a prefix of {rule['prefix']:,}" if rule.get("prefix") else ""
    probe = " on boots with the probe against those without" if rule.get("probe") else ""
    return f"{rule['metric']} {way}{limit}{at}{after}{probe}"


def _plainly(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_plainly(inner)}" for name, inner in value.items())
    if isinstance(value, list):
        return ", ".join(map(_plainly, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "nothing" if value is None else str(value)
