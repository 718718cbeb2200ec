"""The self-contained page."""

import re
from html.parser import HTMLParser

from sample_run import RUN

from farm.report.contrasts import ArmValues, Contrast
from farm.report.html import charts, html

VOID = {"meta", "br", "rect", "line", "link", "img", "input"}


class Page(HTMLParser):
    """Elements in order; asserts that every one that opens is closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.texts = [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.append(dict(attrs))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.append(dict(attrs))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data.strip())


def test_the_page_is_well_formed_and_needs_nothing_else(store):
    text = html(store, RUN)
    page = Page(text)
    assert {"script", "link", "img", "iframe"} & set(page.tags) == set()
    assert not [a for some in page.attributes for a in some if a.startswith("on") or a in ("src", "href")]
    assert not re.search(r"https?://|@import|url\(", text)


def test_texts_of_others_are_escaped(store):
    text = html(store, RUN)
    assert "<script" not in text
    assert "&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;" in text


def test_every_part_is_there(store):
    page = Page(html(store, RUN))
    heads = [t for t in page.texts if t in ("Verdicts", "Unproven", "A/B", "Tests", "Conditions", "Patches", "Time")]
    assert heads == ["Verdicts", "Unproven", "A/B", "Tests", "Conditions", "Patches", "Time"]
    assert page.tags.count("svg") == 5  # kv_peak and ttft of two cells, retained states of one
    assert page.texts.count("no evidence") == 2  # on the figures of the INVALID cell
    assert "wall 100.0 s: vLLM 88.0 s, ours 12.0 s (12.0 %)" in page.texts


def test_a_run_without_anything_is_a_page(author):
    author.run(cells=1, started_utc=None, command=None)
    page = Page(html(author.store, RUN))
    assert "svg" not in page.tags and "INVALID" in page.texts


def contrast(tokens, *arms, metric="kv_peak"):
    named = tuple(ArmValues(name, values) for name, values in zip(("baseline", "patched"), arms, strict=False))
    return Contrast("c", metric, "ratio", tokens, "", named, True)


def test_bars_share_a_scale_from_zero_and_tick_each_boot():
    (chart,) = charts([contrast(2048, (0.2, 0.4), (0.1, 0.1)), contrast(4096, (0.8, 0.8), (0.4, 0.4))])
    (first, second), full = (group.bars for group in chart.groups), chart.width - 90
    assert [round(b.width / full, 3) for b in (*first, *second)] == [0.375, 0.125, 1.0, 0.5]
    assert [round(x / full, 3) for x in first[0].ticks] == [0.25, 0.5]
    assert [b.y for b in (*first, *second)] == sorted({b.y for b in (*first, *second)})
    assert [g.label for g in chart.groups] == ["2,048", "4,096"] and second[0].label == "0.8"
    assert all(b.end > max(b.ticks) for b in (*first, *second)) and chart.height > second[1].y + chart.bar


def test_each_metric_has_its_chart_and_zero_is_no_division():
    found = charts([contrast(1, (0.0,), (0.0,)), contrast(1, (5.0,), metric="ttft")])
    assert [(c.metric, [b.width for g in c.groups for b in g.bars]) for c in found] == [
        ("kv_peak", [0.0, 0.0]), ("ttft", [470.0])]
