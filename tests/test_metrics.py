"""Prometheus text: exact names, sums, twins, differences, and a gauge sampled in time."""

import threading
import time
from pathlib import Path

import httpx
import pytest

from farm import metrics
from farm.errors import InvalidMeasurement, ServerLost

REAL = (Path(__file__).parent / "data" / "metrics" / "cpu-0.29.0.txt").read_text(encoding="utf-8")
GAUGE = "vllm:kv_cache_usage_perc"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vllm:prompt_tokens_total", 165_776.0),
        ("vllm:generation_tokens_total", 27.0),
        ("vllm:request_success_total", 12.0),  # summed over finish reasons
        ("vllm:time_to_first_token_seconds_count", 12.0),
        ("vllm:time_to_first_token_seconds_sum", 47.870007038116455),
        (GAUGE, 0.0),
    ],
)
def test_a_real_scrape(name, value):
    assert metrics.scrape(REAL)[name] == value


def test_timestamps_and_buckets_are_left_out():
    values = metrics.scrape(REAL).values
    assert [name for name in values if name.endswith(("_created", "_bucket"))] == []


def test_an_unknown_name_is_never_a_similar_one():
    with pytest.raises(KeyError, match="vllm:prompt_tokens_total"):
        metrics.scrape(REAL)["vllm:prompt_token_total"]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        pytest.param('a_total{engine="0"} 3\na_total{engine="1"} 4\n', {"a_total": 7.0}, id="summed over engines"),
        pytest.param('vllm:num_drafts_total 2\nvllm:num_draft_tokens_total 6\n',
                     {"vllm:num_drafts_total": 2.0, "vllm:num_draft_tokens_total": 6.0}, id="names that share a stem"),
        pytest.param("a_total NaN\nb_total 1.5e+03\nc +Inf\n", {"b_total": 1500.0, "c": float("inf")},
                     id="NaN is no value, exponents are"),
        pytest.param('vllm:kv_offload_store_bytes_total{engine="0"} 100\n'
                     'vllm:kv_offload_total_bytes_total{engine="0",transfer_type="GPU_to_CPU"} 100\n'
                     'vllm:kv_offload_total_bytes_total{engine="0",transfer_type="CPU_to_GPU"} 40\n'
                     'vllm:kv_offload_load_bytes_total{engine="0"} 40\n',
                     {"vllm:kv_offload_store_bytes_total": 100.0, "vllm:kv_offload_load_bytes_total": 40.0},
                     id="the deprecated twin counts once"),
        pytest.param('vllm:kv_offload_total_bytes_total{engine="0",transfer_type="GPU_to_CPU"} 5\n'
                     'vllm:kv_offload_total_bytes_total{engine="1",transfer_type="GPU_to_CPU"} 6\n',
                     {"vllm:kv_offload_store_bytes_total": 11.0}, id="the twin alone stands under the new name"),
        pytest.param("# TYPE vllm:kv_offload_load_bytes_total counter\n# TYPE vllm:kv_offload_total_bytes_total counter\n"
                     "# TYPE g gauge\n# TYPE h histogram\n",
                     {"vllm:kv_offload_load_bytes_total": 0.0}, id="a counter without a series has counted nothing"),
        pytest.param('# TYPE vllm:kv_offload_load_bytes_total counter\n'
                     'vllm:kv_offload_total_bytes_total{transfer_type="CPU_to_GPU"} 7\n',
                     {"vllm:kv_offload_load_bytes_total": 7.0}, id="a declared counter's twin is heard"),
        pytest.param("", {}, id="empty"),
    ],
)
def test_scrape(text, values):
    assert metrics.scrape(text).values == values


@pytest.mark.parametrize("text", ["<html>busy</html>", "a_total 1 2 3 4 five"])
def test_what_is_no_metrics_text_is_refused(text):
    with pytest.raises(ValueError):
        metrics.scrape(text)


def test_gauge_value_takes_the_exact_name_alone():
    text = f'{GAUGE}{{engine="0"}} 0.25\n{GAUGE}{{engine="1"}} 0.5\n{GAUGE}_other{{engine="0"}} 9\n'
    assert metrics.gauge_value(text, GAUGE) == 0.75
    assert metrics.gauge_value(text, "vllm:kv_cache") is None


def test_delta_is_growth_of_what_only_grows():
    before = {"a_total": 5.0, "t_sum": 1.5, "gauge": 9.0}
    after = {"a_total": 8.0, "t_sum": 2.0, "new_total": 2.0, "gauge": 1.0}
    assert metrics.delta(before, after) == {"a_total": 3.0, "t_sum": 0.5, "new_total": 2.0}


@pytest.mark.parametrize(
    ("before", "after"),
    [({"a_total": 5.0}, {"a_total": 4.0}), ({"a_total": 5.0}, {"b_total": 1.0})], ids=["shrunk", "gone"])
def test_a_restart_between_scrapes_is_no_evidence(before, after):
    with pytest.raises(InvalidMeasurement, match="a_total"):
        metrics.delta(before, after)


# --- sampling -------------------------------------------------------------------------------


class Fetch:
    """Answers each scrape with the next of `answers`, then with the last for ever."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = 0
        self.enough = threading.Event()

    def __call__(self) -> str:
        answer = self.answers[min(self.asked, len(self.answers) - 1)]
        self.asked += 1
        if self.asked >= len(self.answers):
            self.enough.set()
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, str) else f'{GAUGE}{{engine="0"}} {answer}\n'


def sample(fetch: Fetch, **options):
    with metrics.GaugeSampler(GAUGE, 0.005, fetch, **options) as sampling:
        assert fetch.enough.wait(5.0)
    return sampling.trace()


def test_the_peak_between_two_idle_scrapes_is_seen():
    trace = sample(Fetch(0.0, 0.2, 0.7, 0.1, 0.0))
    assert trace.peak == 0.7
    assert [value for _, value in trace.points][:5] == [0.0, 0.2, 0.7, 0.1, 0.0]
    assert trace.missed == 0


@pytest.mark.parametrize(
    "answer",
    [httpx.ReadTimeout("late"), ServerLost("gone"), "other 1\n", "<html>", f"{GAUGE} NaN\n"],
    ids=["timeout", "lost", "gauge not there", "no metrics", "NaN"],
)
def test_a_scrape_without_the_gauge_is_missed_not_zero(answer):
    trace = sample(Fetch(0.5, answer, 0.5))
    assert trace.missed >= 1
    assert {value for _, value in trace.points} == {0.5}


def test_the_achieved_interval_is_recorded_not_the_wanted_one():
    def slow() -> str:
        time.sleep(0.03)
        return f"{GAUGE} 0.5\n"

    with metrics.GaugeSampler(GAUGE, 0.001, slow) as sampling:
        time.sleep(0.2)
    assert sampling.trace().interval_s >= 0.03


def test_the_shortest_block_has_a_scrape_at_its_end():
    with metrics.GaugeSampler(GAUGE, 60.0, Fetch(0.25)) as sampling:
        pass
    assert len(sampling.trace().points) >= 1


def test_points_are_bounded():
    trace = sample(Fetch(*[0.1] * 10), limit=3)
    assert len(trace.points) == 3
    assert trace.missed >= 7


def test_the_sampler_ends_when_the_block_raises():
    fetch = Fetch(0.1)
    with pytest.raises(RuntimeError), metrics.GaugeSampler(GAUGE, 0.001, fetch):
        raise RuntimeError
    asked = fetch.asked
    time.sleep(0.05)
    assert fetch.asked == asked
