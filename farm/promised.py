"""What a run has promised, cell by cell, in words that can be compared later.  Pure.

The runs row keeps it, so that a resume whose matrix, profile, pin, patch or test file has changed meanwhile is refused
by the name of what changed.  Secret-looking values are kept as `set`, as everywhere.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from farm import jsontext
from farm.childenv import redact, redact_argv
from farm.plan import ArmSpec, Cell

_LONG = 120  # a longer value is kept as its beginning and a digest
_NAMED = 5  # differences that a message lists

Facts = Mapping[str, str]


def promise(cells: Sequence[Cell], only: Sequence[str], rules: Mapping[str, Any]) -> str:
    """JSON: `rules` of the matrix that bear on every verdict, and each cell's facts by its id."""
    return json.dumps({"only": list(only), "rules": {k: str(v) for k, v in rules.items()},
                       "cells": {cell.id: facts(cell) for cell in cells}}, sort_keys=True)


def facts(cell: Cell) -> dict[str, str]:
    """What a cell's id is a digest of, one short value a key, the keys being what a message calls them."""
    found: dict[str, str] = {}
    for part, value in cell.identity.items():
        if part == "arms":
            for arm in cell.arms:
                found |= _arm(arm)
        elif part == "releases":
            found |= {f"patch {p.name} of the series for pin {r.pin.name}": _sha(p.sha256)
                      for r in cell.releases for p in r.series.patches}
        elif part == "tests":
            found |= {f"test file {name}": _sha(digest) for name, digest in value.items()}
        elif part == "pin":
            found |= _flat(f"pin {cell.pin.name}", cell.pin.config.model_dump(mode="json"))
        elif part == "profile":
            found |= _flat(f"profile {cell.profile}", value)
        else:
            found |= _flat({"options": "with"}.get(part, part), value)
    return found


def promised_cells(promise: str) -> frozenset[str]:
    """Ids of the cells."""
    return frozenset(json.loads(promise)["cells"])


def differences(before: str, now: str) -> list[str]:
    """Sentences, the most telling first; empty where both promise the same."""
    new = json.loads(now)
    try:
        old = _plan(before)
    except (KeyError, TypeError, ValueError):
        return ["what it promised cannot be read any more (column plan of its row in the table runs)"]
    told = [f"{name} {change}" for name, change in _changes(old["rules"], new["rules"])]
    gone = {i: f for i, f in old["cells"].items() if i not in new["cells"]}
    come = {i: f for i, f in new["cells"].items() if i not in old["cells"]}
    where: dict[str, list[str]] = {}
    for was, becomes in _pairs(gone, come):
        changes = list(_changes(gone.pop(was), come.pop(becomes)))
        for name, change in changes or [("something that is not recorded, like a secret's value,", "has changed")]:
            where.setdefault(f"{name} {change}", []).append(was)
    told += [f"{sentence} ({_cells(ids)})" for sentence, ids in where.items()]
    if old["only"] != new["only"] and (gone or come):
        told.append(f"the run was started {_only(old['only'])}, this is {_only(new['only'])}")
    elif gone:
        told.append(f"{_cells(list(gone))} of the run is not in this matrix any more")
    elif come:
        told.append(f"{_cells(list(come))} is new in this matrix")
    return told


def _plan(text: str) -> Mapping[str, Any]:
    """Raises KeyError, TypeError, ValueError where it is none of `promise`."""
    said = jsontext.loads(text)
    return {"only": [jsontext.text(word) for word in said["only"]], "rules": _facts(said["rules"]),
            "cells": {cell: _facts(found) for cell, found in dict(said["cells"]).items()}}


def _facts(said: Any) -> dict[str, str]:
    return {name: jsontext.text(value) for name, value in dict(said).items()}


def listed(sentences: Sequence[str]) -> str:
    """The first few, and how many more."""
    more = f"; and {len(sentences) - _NAMED} more" if len(sentences) > _NAMED else ""
    return "; ".join(sentences[:_NAMED]) + more


def _arm(arm: ArmSpec) -> dict[str, str]:
    found = {f"patch {p.name} of arm {arm.name}": _sha(p.sha256) for p in arm.patches}
    found[f"the order of patches of arm {arm.name}"] = _short(" ".join(p.name for p in arm.patches))
    found |= _flat(f"arm {arm.name}", {"env": dict(arm.env), "args": list(arm.args)})
    return found


def _flat(name: str, value: Any) -> dict[str, str]:
    """Nested mappings as one level of `name: key key`; what is empty is left out."""
    if isinstance(value, Mapping):
        inner = redact({str(k): v for k, v in value.items()}) if _is_environment(name) else value
        parts = (_flat(f"{name}: {k}" if ":" not in name else f"{name} {k}", v) for k, v in inner.items())
        return {k: v for part in parts for k, v in part.items()}
    if value in (None, [], (), ""):
        return {}
    if isinstance(value, (list, tuple)) and isinstance(value[0], str) and value[0].startswith("--"):
        return _arguments(name, redact_argv([str(word) for word in value]))
    return {name: _short(value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str))}


def _arguments(name: str, words: Sequence[str]) -> dict[str, str]:
    """One fact an option, so that a message names the one that changed."""
    found: dict[str, str] = {}
    key = name
    for word in words:
        option, _, value = word.partition("=") if word.startswith("--") else ("", "", word)
        key = f"{name} {option}" if option else key
        found[key] = " ".join(filter(None, (found.get(key, ""), value)))
    return {key: _short(value or "given") for key, value in found.items()}


def _is_environment(name: str) -> bool:
    return name.endswith(("env", "environment"))


def _short(text: str) -> str:
    if "://" in text and "@" in text:  # an index of packages with its password
        return _sha(hashlib.sha256(text.encode()).hexdigest())
    return text if len(text) <= _LONG else f"{text[:_LONG]}… (sha256 {hashlib.sha256(text.encode()).hexdigest()[:12]})"


def _sha(digest: str) -> str:
    return f"sha256 {digest[:12]}"


def _changes(old: Facts, new: Facts) -> Iterator[tuple[str, str]]:
    for name in dict.fromkeys([*old, *new]):
        if name not in new:
            yield name, f"is gone, it was {old[name]}"
        elif name not in old:
            yield name, f"is new: {new[name]}"
        elif old[name] != new[name]:
            yield name, f"was {old[name]}, is {new[name]}"


def _pairs(gone: Mapping[str, Facts], come: Mapping[str, Facts]) -> list[tuple[str, str]]:
    """Cells of the same job, name, profile and pin, whose digest alone differs; of several the most alike."""
    pairs: list[tuple[str, str]] = []
    for words, ids in itertools.groupby(sorted(gone, key=_words), key=_words):
        free = [i for i in come if _words(i) == words]
        for was in ids:
            if free:
                nearest = min(free, key=lambda i, was=was: sum(1 for _ in _changes(gone[was], come[i])))
                free.remove(nearest)
                pairs.append((was, nearest))
    return pairs


def _words(cell: str) -> str:
    return cell.rpartition("-")[0]


def _cells(ids: Sequence[str]) -> str:
    return f"cell {ids[0]}" if len(ids) == 1 else f"{len(ids)} cells, the first {ids[0]}"


def _only(words: Sequence[str]) -> str:
    return f"with --only {','.join(words)}" if words else "without --only"
