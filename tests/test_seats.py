"""What a lost actor is said to have died of; opening, losing and closing seats is in test_dispatch.py and faults/."""

import pytest
from ray.exceptions import ActorDiedError

from farm.seats import words

KILLED = """The actor died unexpectedly before finishing this task.
	class_name: Bare
	pid: 17719
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR"""
GONE = """The actor died unexpectedly before finishing this task.
	class_name: Bare
The actor died because its node has died. Node Id: dfe7"""
CREATION = """The actor died because of an error raised in its creation task, ray::Bare.__init__() (pid=1, ip=192.0.2.2)
  File "/x/farm/cards.py", line 3, in gpu
farm.errors.FarmError: NVML does not answer; try nvidia-smi
"""


@pytest.mark.parametrize(("error", "said"), [
    (KILLED, "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR"),
    (GONE, "The actor died because its node has died. Node Id: dfe7"),
    (CREATION, "farm.errors.FarmError: NVML does not answer; try nvidia-smi"),
    ("something new", "something new"),
    (ActorDiedError(), "The actor died unexpectedly before finishing this task."),
    ("", "str"),
], ids=["killed", "node", "creation", "other", "bare", "empty"])
def test_words(error, said):
    assert words(error) == said
