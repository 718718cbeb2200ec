"""Work on each arm, in turn and side by side."""

import threading

import pytest

from jobs.armwise import each

ARMS = ("baseline", "patched", "other")


def test_in_turn_each_result_comes_before_the_next_arm_is_asked_for():
    begun = []
    found = list(each(ARMS, lambda arm: begun.append(arm) or arm.upper(), at_once=1))
    assert (begun, found) == (list(ARMS), [(arm, arm.upper()) for arm in ARMS])


def test_side_by_side_they_meet_and_come_in_the_arms_order():
    meeting = threading.Barrier(3, timeout=10)  # broken unless all three are in work at once
    assert [arm for arm, _ in each(ARMS, lambda arm: meeting.wait(), at_once=3)] == list(ARMS)


@pytest.mark.parametrize("failing", ARMS)
def test_what_one_raises_is_raised_and_what_had_not_begun_is_left(failing):
    begun = []

    def work(arm):
        begun.append(arm)
        if arm == failing:
            raise ZeroDivisionError(arm)

    with pytest.raises(ZeroDivisionError, match=failing):
        list(each(ARMS, work, at_once=1))
    assert begun == list(ARMS[:ARMS.index(failing) + 1])


def test_side_by_side_the_other_is_waited_for():
    ended, meeting, raised = [], threading.Barrier(2, timeout=10), threading.Event()

    def work(arm):
        meeting.wait()
        if arm == "baseline":
            raised.set()
            raise ZeroDivisionError
        raised.wait(10)
        ended.append(arm)

    with pytest.raises(ZeroDivisionError):
        list(each(ARMS[:2], work, at_once=2))
    assert ended == ["patched"]
