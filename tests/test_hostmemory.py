"""A machine's memory as it is asked for, and who is let in."""

import random

import psutil
import pytest

from farm.bench import Card, Needs
from farm.hostmemory import Host, Ledger, Room, room
from farm.records import Reason, Verdict
from farm.scheduler import Assignment, Scheduler, Task
from farm.tiers import GIB, NOTHING, Claim


def tier(gib, *, pinned=False):
    return Claim(gib * GIB, 0 if pinned else gib * GIB)


def host(memory=100, free=None, shm=50, shm_free=None, machine="m", node="n", store=0):
    """Of these GiB."""
    sizes = (memory, memory if free is None else free, shm, shm if shm_free is None else shm_free)
    return Host(node, int(store * GIB), Room(machine, f"host-{machine}", *(int(size * GIB) for size in sizes)))


def ledger(*hosts):
    """Cards c0, c1, … on these hosts."""
    made = Ledger()
    for number, one in enumerate(hosts):
        made.join(f"c{number}", one)
    return made


# --- who is let in ------------------------------------------------------------------------------


@pytest.mark.parametrize(("on", "claims", "count"), [
    (host(shm=50), tier(12), 4),
    (host(shm=48), tier(12), 4),
    (host(shm=47.9), tier(12), 3),
    (host(shm=50, shm_free=30), tier(12), 2),
    (host(memory=40, shm=50), tier(12), 3),  # 2 of them stay free
    (host(memory=100, free=40, shm=50), tier(12), 2),  # 5 stay free
    (host(shm=50, store=3), tier(12), 3),
    (host(memory=42, shm=0, store=2), tier(12, pinned=True), 3),
    (host(shm=0), NOTHING, 9),
], ids=["shm", "shm-exactly", "shm-nearly", "shm-in-use", "memory", "memory-in-use", "object-store", "pinned", "nothing"])
def test_as_many_as_fit(on, claims, count):
    made = ledger(on)
    let_in = 0
    while let_in < 9 and made.admits("c0", claims):
        made.admit("c0", f"cell-{let_in}", claims)
        let_in += 1
    assert let_in == count


def test_what_ends_makes_room():
    made = ledger(host(shm=20))
    made.admit("c0", "a", tier(12))
    assert not made.admits("c0", tier(12)) and made.admits("c0", tier(8))
    made.release("a")
    made.release("a")
    assert made.admits("c0", tier(20))


def test_cards_of_a_machine_share_it_and_those_of_another_do_not():
    made = ledger(host(shm=20), host(shm=20), host(shm=20, machine="other"))
    made.admit("c0", "a", tier(12))
    assert [made.admits(card, tier(12)) for card in ("c0", "c1", "c2", "unheard-of")] == [False, False, True, True]


def test_each_node_of_a_machine_has_an_object_store_once():
    made = ledger(host(shm=20, store=3), host(shm=20, store=3), host(shm=20, store=4, node="n2"))
    assert [made.admits("c0", tier(size)) for size in (13, 14)] == [True, False]


def test_a_desk_that_opens_again_while_servers_end_takes_nothing_away():
    made = ledger(host(shm=20))
    made.admit("c0", "a", tier(12))
    made.join("c0", host(shm=20, shm_free=8))  # the actor died, and `a` is still there
    made.release("a")
    made.join("c0", host(shm=20, shm_free=8))  # and even now
    assert made.admits("c0", tier(20))


def test_what_others_have_given_back_counts_when_a_desk_opens_again():
    made = ledger(host(shm=20, shm_free=5))
    made.join("c0", host(shm=20, shm_free=15))
    assert made.admits("c0", tier(12))


@pytest.mark.parametrize(("on", "claim", "passing", "says"), [
    (host(shm=8, store=0.2), tier(12), False,
     "of /dev/shm for its CPU tier, host host-m has 7.8 GiB (0.2 GiB for Ray's object store taken off)"),
    (host(memory=10), tier(12), False,
     "of memory for its CPU tier, host host-m has 9.5 GiB (0 MiB for Ray's object store and 0.5 GiB to stay free taken off)"),
    (host(shm=50, shm_free=10), tier(12), True,
     "of /dev/shm for its CPU tier, host host-m had 10.0 GiB of its 50.0 GiB free when the run began (0 MiB for Ray's object "
     "store taken off)"),
], ids=["shm", "memory", "in-use"])
def test_what_can_never_fit_says_both_values(on, claim, passing, says):
    made = ledger(on)
    never = made.never("c0", claim)
    assert (never.words, never.passing) == (f"needs 12.0 GiB {says}", passing)
    assert made.never("c0", tier(1)) is made.never("c0", NOTHING) is made.never("unheard-of", claim) is None


# --- the schedule -------------------------------------------------------------------------------


CARDS = [Card(f"g{i}", f"card {i}", "cuda", "h") for i in range(4)]


def scheduler(claims, on, cards=CARDS):
    made = Scheduler([Task(f"t{i}", Needs(), (), claim) for i, claim in enumerate(claims)], attempts=2)
    for card in cards:
        made.add_card(card, on)
    return made


def given(made, cards=CARDS):
    return [got and got.cell for got in (made.next(card.uuid) for card in cards)]


def test_cells_that_do_not_fit_wait_and_others_go_before_them():
    made = scheduler([tier(12), tier(12), tier(12), NOTHING, tier(12)], host(shm=30, store=1))
    assert given(made) == ["t0", "t1", "t3", None]
    assert made.waits() == [("g2", "fewer cells with a CPU tier at a time: t2 (12.0 GiB), t4 (12.0 GiB) wait for t0 (12.0 "
                             "GiB), t1 (12.0 GiB) to end; tiers can have 29.0 GiB of /dev/shm (1.0 GiB for Ray's object store "
                             "taken off) on host host-m")]
    assert made.waits() == [] and made.unplaced() == []
    made.finished("t0", Verdict.PASS)
    assert made.next("g0") == Assignment("t2", "g0", 1)
    assert given(made) == [None] * 4 and made.waits() == []  # said once
    made.finished("t1", Verdict.ERROR)  # its second attempt has to wait as well
    assert given(made) == ["t1", None, None, None]  # on a card that has not had it


def test_an_attempt_that_ends_error_gives_its_memory_back():
    made = scheduler([tier(12)], host(shm=12), CARDS[:2])
    assert given(made, CARDS[:2]) == ["t0", None]
    assert made.finished("t0", Verdict.ERROR) is False
    assert given(made, CARDS[:2]) == [None, "t0"]


@pytest.mark.parametrize(("on", "verdict", "reason", "says"), [
    (host(shm=8), Verdict.SKIP, Reason.NEEDS_UNMET, "needs 12.0 GiB of /dev/shm for its CPU tier, host host-m has 8.0 GiB ("),
    (host(shm=50, shm_free=8), Verdict.ERROR, Reason.NO_CARD,
     "no card is left that can run it: card 0, card 1, card 2, card 3: needs 12.0 GiB of /dev/shm for its CPU tier, host "
     "host-m had 8.0 GiB of its 50.0 GiB free when the run began"),
], ids=["too-small", "in-use"])
def test_a_cell_that_could_never_fit_ends(on, verdict, reason, says):
    made = scheduler([tier(12), NOTHING], on)
    assert given(made) == ["t1", None, None, None]
    (end,) = made.unplaced()
    assert (end.cell, end.verdict, end.reason) == ("t0", verdict, reason)
    assert end.why.startswith(says)
    assert made.waits() == []  # it waits for nobody


def test_a_cell_goes_to_the_machine_that_has_room():
    made = Scheduler([Task("t0", Needs(), (), tier(12))], attempts=2)
    made.add_card(CARDS[0], host(shm=8))
    made.add_card(CARDS[1], host(shm=16, machine="large"))
    assert given(made, CARDS[:2]) == [None, "t0"]


@pytest.mark.parametrize("seed", range(10))
def test_no_machine_is_ever_overcommitted_and_every_cell_ends(seed):
    rng = random.Random(seed)
    claims = [rng.choice([NOTHING, tier(1), tier(4), tier(12), tier(6, pinned=True)]) for _ in range(120)]
    hosts = [host(memory=30, shm=20, machine="a", store=1), host(memory=64, shm=14, machine="b")]
    cards = [Card(f"g{i}", f"card {i}", "cuda", "h") for i in range(12)]
    made = Scheduler([Task(f"t{i}", Needs(), (), claim) for i, claim in enumerate(claims)], attempts=2)
    for i, card in enumerate(cards):
        made.add_card(card, hosts[i % 2])
    busy, most, ended = {}, 0, set()
    while not made.done:
        for i, card in enumerate(cards):
            if card.uuid not in busy and (got := made.next(card.uuid)):
                busy[card.uuid] = (got.cell, i % 2)
        for machine, (shm, memory) in enumerate([(19, 30 * 0.95 - 1), (14, 64 * 0.95)]):
            here = [claims[int(cell[1:])] for cell, on in busy.values() if on == machine]
            assert sum(c.shm_bytes for c in here) <= shm * GIB
            assert sum(c.memory_bytes for c in here) <= memory * GIB
        most = max(most, len(busy))
        uuid = rng.choice(sorted(busy))  # there is one: a cell that waits has somebody to wait for
        cell, _ = busy.pop(uuid)
        if made.finished(cell, rng.choice([Verdict.PASS, Verdict.PASS, Verdict.ERROR])):
            ended.add(cell)
    assert len(ended) == 120 and most > 6


# --- what there is ------------------------------------------------------------------------------


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(str(text) + "\n")


def v2(folder, limit, used, cache):
    write(folder, memory__max=limit, memory__current=used, memory__stat=f"anon 5\ninactive_file {cache}\nactive_file 9")


MIB = 2**20


@pytest.mark.parametrize(("lines", "build", "total", "free"), [
    ("0::/\n", lambda root: v2(root, 900 * MIB, 500 * MIB, 100 * MIB), 900 * MIB, 500 * MIB),
    ("0::/a/b\n", lambda root: (v2(root / "a/b", "max", 1, 0), v2(root / "a", 800 * MIB, 300 * MIB, 0)), 800 * MIB, 500 * MIB),
    ("0::/a/b\n", lambda root: (v2(root / "a/b", 700 * MIB, 100 * MIB, 0), v2(root / "a", 800 * MIB, 300 * MIB, 0)),
     700 * MIB, 500 * MIB),
    ("0::/../outside\n", lambda root: v2(root, 900 * MIB, 500 * MIB, 0), 900 * MIB, 400 * MIB),
    ("5:cpu,memory:/docker/x\n1:name=systemd:/y\n", lambda root: write(
        root / "memory", memory__limit_in_bytes=600 * MIB, memory__usage_in_bytes=500 * MIB,
        memory__stat=f"inactive_file 1\ntotal_inactive_file {50 * MIB}"), 600 * MIB, 150 * MIB),
    ("0::/\n", lambda root: v2(root, 100 * MIB, 200 * MIB, 0), 100 * MIB, 0),
], ids=["v2", "v2-of-the-parent", "v2-the-tighter", "v2-outside-the-root", "v1-in-a-container", "over-its-limit"])
def test_a_control_group_bounds_the_memory(tmp_path, lines, build, total, free):
    build(tmp_path / "cgroup")
    (tmp_path / "own").write_text(lines)
    seen = room(control_groups=tmp_path / "cgroup", own=tmp_path / "own")
    assert (seen.memory_bytes, seen.memory_free_bytes) == (total, free)


@pytest.mark.parametrize("lines", [None, "", "0::/a\n", "3:memory:/a\n"])
def test_without_a_limit_it_is_the_machines(tmp_path, lines):
    v2(tmp_path / "cgroup" / "a", "max", 1, 0)
    write(tmp_path / "cgroup" / "memory" / "a", memory__limit_in_bytes=2**63 - 4096, memory__usage_in_bytes=1)
    if lines is not None:
        (tmp_path / "own").write_text(lines)
    assert room(control_groups=tmp_path / "cgroup", own=tmp_path / "own").memory_bytes == psutil.virtual_memory().total


def test_this_machine():
    one, other = room(), room()
    assert one.machine == other.machine and 0 < one.memory_free_bytes <= one.memory_bytes
    assert 0 < one.shm_free_bytes <= one.shm_bytes


def test_without_shm(tmp_path):
    seen = room(shm=tmp_path / "none")
    assert (seen.shm_bytes, seen.shm_free_bytes) == (0, 0)
