"""One matrix on one card and then on four, as a user runs it: the same said by both, and the schedule as it was foreseen."""

import pytest
from toyrun import Toy

pytestmark = [pytest.mark.faults, pytest.mark.ray]
LONG = "  - {job: toy, name: long, with: {number: 100, seconds: 6}}\n"  # the last of the matrix


@pytest.fixture
def toy(tmp_path):
    made = Toy.make(tmp_path / "project", tmp_path / "cache", cells=8, seconds=1.5, slots=1)
    matrix = made.root / "configs/matrix/m.yaml"
    matrix.write_text(matrix.read_text() + LONG)
    yield made
    made.close()


def on_four_cards(toy):
    matrix = toy.root / "configs/matrix/m.yaml"
    matrix.write_text(matrix.read_text().replace("cpu_slots: 1", "cpu_slots: 4"))


def plain(out):
    """Without the breaks of a page."""
    return " ".join(out.split())


def test_four_cards_say_what_one_card_says(toy):
    alone = toy.finish()
    assert alone.code == 1, alone.out  # every fourth toy is made to fail
    assert "no estimate for 9 cells on 1 card" in alone.out
    on_four_cards(toy)
    four = toy.finish()
    assert four.code == 1, four.out
    estimate = next(line for line in four.out.splitlines() if line.startswith("estimate: "))
    assert "for 9 cells on 4 cards" in estimate and "long cells go first, which saves" in estimate
    runs = sorted(toy.store.read("runs").to_pylist(), key=lambda row: row["started_utc"])
    assert [row["estimate_s"] is None for row in runs] == [True, False]
    first, second = (row["run"] for row in runs)

    began = [row["cell"] for row in sorted(toy.store.read("cells", second).to_pylist(), key=lambda row: row["started_utc"])]
    assert "toy-long" in "".join(began[:4])  # it is the matrix's last

    said = plain(toy.farm("report", second).out)
    section = said[said.index("Schedule"):said.index("Unproven")]
    print(f"\n{estimate}\n{section}")
    assert f"estimated {runs[1]['estimate_s']:,.1f} s, took" in section
    assert section.count("cpu slot") == 4 and "9 cells on 4 cards" in section

    same = toy.farm("compare", first, second)
    print(same.out)
    assert same.code == 0, same.out
    assert "the same: all 9 verdicts, and all 45 peaks to the last digit" in same.out
    assert f"{first}: 1 card, wall" in same.out and f"{second}: 4 cards, wall" in same.out
