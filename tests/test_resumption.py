"""How long a run's earlier lives were: what its row says, but never less than what is committed."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone

import pytest

from farm.resumption import resumed
from farm.store import Store

BEGAN = datetime(2026, 12, 2, 16, 0, tzinfo=timezone.utc)
PLAN = json.dumps({"only": [], "rules": {}, "cells": {"c1": {}, "c2": {}}})


@pytest.mark.parametrize(("wall_s", "before_s"), [(None, 70.0), (0.5, 70.0), (85.0, 85.0)],
                         ids=["none", "killed", "interrupted"])
def test_a_killed_life_lasted_at_least_as_long_as_what_it_committed(tmp_path, wall_s, before_s):
    store = Store.open(tmp_path)
    for cell, start, end in (("c1", 0, 40), ("c2", 30, 70)):  # side by side for ten seconds
        store.commit("r", cell, 1, {"cells": [{
            "schema_version": 2, "run": "r", "cell": cell, "attempt": 1, "verdict": "PASS", "reason": "ok", "final": True,
            "started_utc": BEGAN + timedelta(seconds=start), "ended_utc": BEGAN + timedelta(seconds=end)}]})
    store.commit_run("r", {"status": "running", "plan": PLAN, "started_utc": BEGAN, "wall_s": wall_s})
    assert resumed(store, "r", PLAN, None).before_s == before_s
