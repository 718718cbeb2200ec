"""Prometheus text of a vLLM server: scrape, difference of counters, and a gauge sampled in time.

`scrape`, `gauge_value` and `delta` are pure; `GaugeSampler` is a thread over a function that fetches the text.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

from farm.bench import GaugeTrace
from farm.errors import InvalidMeasurement, ServerLost

# The same bytes under a deprecated name with a direction label (DOMAIN.md 2): (old name, direction) -> new name.
_TWINS = {
    ("vllm:kv_offload_total_bytes_total", "GPU_to_CPU"): "vllm:kv_offload_store_bytes_total",
    ("vllm:kv_offload_total_bytes_total", "CPU_to_GPU"): "vllm:kv_offload_load_bytes_total",
    ("vllm:kv_offload_total_time_total", "GPU_to_CPU"): "vllm:kv_offload_store_time_total",
    ("vllm:kv_offload_total_time_total", "CPU_to_GPU"): "vllm:kv_offload_load_time_total",
}
_TWIN_NAMES = frozenset(name for name, _ in _TWINS)
_CUMULATIVE = ("_total", "_sum", "_count")  # endings of what only ever grows


@dataclass(frozen=True)
class Scrape:
    """One scrape: value per exact sample name, summed over engines and any other label.

    Left out: `_created` twins (timestamps), histogram buckets, NaN, and the deprecated offload
    counters, whose bytes stand under the new names whichever of the two the server exports.
    A counter that is declared and has no series yet has counted nothing: 0 (vLLM makes the
    offload counters' series at their first transfer).
    """

    values: Mapping[str, float]

    def __getitem__(self, name: str) -> float:
        """Raises KeyError with the nearest known names."""
        try:
            return self.values[name]
        except KeyError:
            stem = name.removesuffix("_total")
            near = sorted(n for n in self.values if n.startswith(stem[: max(6, len(stem) - 8)]))[:5]
            raise KeyError(f"the server exports no metric {name!r}; near it: {', '.join(near) or 'none'}") from None


def scrape(text: str) -> Scrape:
    """Read Prometheus text.  Raises ValueError where it is none."""
    values: dict[str, float] = {}
    twins: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        name = f"{family.name}_total"
        if family.type == "counter" and not family.samples and name not in _TWIN_NAMES:
            twins.setdefault(name, 0.0)
        for sample in family.samples:
            if sample.name.endswith(("_created", "_bucket")) or math.isnan(sample.value):
                continue
            if sample.name in _TWIN_NAMES:
                name = _TWINS.get((sample.name, sample.labels.get("transfer_type", "")))
                if name is not None:
                    twins[name] = twins.get(name, 0.0) + sample.value
                continue
            values[sample.name] = values.get(sample.name, 0.0) + sample.value
    return Scrape({**twins, **values})


def gauge_value(text: str, name: str) -> float | None:
    """One gauge of a scrape, summed over engines; None where the text does not have it.

    Reads only the lines that begin with the name: a whole scrape takes tens of
    milliseconds of the core that the server may be sharing.
    """
    lines = [line for line in text.splitlines() if line.startswith(name)]
    return scrape("\n".join(lines) + "\n").values.get(name)


def delta(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Growth of every cumulative metric between two scrapes of one server.

    Raises InvalidMeasurement where one shrank or vanished: the server restarted in between.
    """
    grown = {}
    for name, value in after.items():
        if name.endswith(_CUMULATIVE):
            grown[name] = value - before.get(name, 0.0)
    lost = [name for name in before if name.endswith(_CUMULATIVE) and name not in after]
    shrunk = [name for name, growth in grown.items() if growth < 0]
    if lost or shrunk:
        raise InvalidMeasurement(
            f"counter {min(lost + shrunk)} went back between two scrapes: the server restarted in between; "
            "look for a second start in its log"
        )
    return grown


class GaugeSampler:
    """Samples one gauge in a thread from `with` to its end; `trace()` afterwards.

        with GaugeSampler("vllm:kv_cache_usage_perc", 0.05, fetch) as sampling:
            ...
        peak = sampling.trace().peak

    `fetch` returns the server's metrics text, or raises an httpx error or ServerLost, which
    counts as a missed scrape; so does a text without the gauge.  There is one scrape at either
    end, so that the shortest block has two points.  After `limit` points scrapes are
    counted as missed and not kept.
    """

    def __init__(self, gauge: str, interval_s: float, fetch: Callable[[], str], *, limit: int = 200_000) -> None:
        self._gauge, self._interval, self._fetch, self._limit = gauge, interval_s, fetch, limit
        self._points: list[tuple[float, float]] = []
        self._missed = 0
        self._begun = 0.0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._loop, name=f"sampler {gauge}", daemon=True)

    def __enter__(self) -> GaugeSampler:
        self._begun = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._done.set()
        self._thread.join()
        self._sample()

    def wait(self, seconds: float) -> None:
        """Go on sampling for so long, with nothing else to do meanwhile."""
        self._done.wait(seconds)

    def trace(self) -> GaugeTrace:
        """What was sampled.  The interval is the median spacing of scrapes that came back, None below two."""
        times = [t for t, _ in self._points]
        spacings = [later - earlier for earlier, later in zip(times, times[1:], strict=False)]
        return GaugeTrace(self._gauge, tuple(self._points), statistics.median(spacings) if spacings else None,
                          self._missed)

    def _loop(self) -> None:
        due = self._begun
        while not self._done.wait(max(0.0, due - time.monotonic())):
            self._sample()
            # A slow scrape moves the next one; it is not made up for by a burst.
            due = max(due + self._interval, time.monotonic())

    def _sample(self) -> None:
        value = None
        with contextlib.suppress(httpx.HTTPError, ServerLost, ValueError):
            value = gauge_value(self._fetch(), self._gauge)
        if value is None or len(self._points) >= self._limit:
            self._missed += 1
        else:
            self._points.append((time.monotonic() - self._begun, value))
