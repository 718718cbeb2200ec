"""configs/cluster: what `ray up` itself would say of it."""

from pathlib import Path

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

EXAMPLES = sorted((Path(__file__).parents[1] / "configs" / "cluster").glob("*.yaml"))


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda f: f.name)
def test_ray_takes_the_example_and_the_token_stays_on(file):
    said = yaml.safe_load(file.read_text(encoding="utf-8"))
    validate_config(prepare_config(said))
    starts = [*said["head_start_ray_commands"], *said["worker_start_ray_commands"]]
    assert all("RAY_AUTH_MODE=token" in c and "RAY_worker_niceness=0" in c for c in starts if "ray start" in c)
    assert "~/.ray/auth_token" in said["file_mounts"]
