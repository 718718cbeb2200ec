"""Several pins as one table."""

from types import SimpleNamespace

from farm.report.pins import digest


def cell(pin, column, verdict="PASS", reason="as-expected", job="unit"):
    return SimpleNamespace(pin=pin, column=column, verdict=verdict, reason=reason, job=job)


def boot(pin, pool=72247, block=640, padding=None, ok=True):
    return {"pin": pin, "pool_tokens": pool, "block_size": block, "mamba_padding_percent": padding, "ok": ok}


def test_one_pin_needs_no_table():
    assert digest([cell("0.29.0-cpu", "unit")], []) is None


def test_pins_by_version_and_triage_first():
    table = digest([cell("0.30.0-cpu", "unit", "FAIL", "tests-broken"), cell("0.9.0-cpu", "unit"),
                    cell("0.30.0-cpu", "triage", job="triage"), cell("0.30.0-cpu", "control", "PASS", "control-held")], [])
    assert table.columns == ("triage", "control", "unit")
    assert table.rows == (("0.9.0-cpu", ("-", "-", "PASS"), "-"),
                          ("0.30.0-cpu", ("PASS", "PASS control-held", "FAIL tests-broken"), "-"))


def test_geometry_of_equal_boots_reads_as_one_and_differing_boots_show():
    table = digest([cell("a", "unit"), cell("b", "unit")],
                   [boot("a"), boot("a"), boot("b", padding=0.5), boot("b", pool=9, block=16), boot("b", pool=1, ok=False)])
    assert [g for _, _, g in table.rows] == ["pool 72,247 tokens, block 640",
                                             "pool 72,247 tokens or pool 9 tokens, block 16 or block 640, padding 0.5 %"]
