"""Which state of the project measured."""

import subprocess

import pytest

from farm.project import content_hash, project_state


@pytest.fixture
def project(tmp_path):
    for name in ("farm/a.py", "jobs/b.py", "patches/series", "configs/pins/p.yaml", "README.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


def git(root, *args):
    subprocess.run(["git", "-C", str(root), "-c", "user.name=n", "-c", "user.email=e@x.example", *args], check=True,
                   capture_output=True)


def test_outside_a_repository_the_content_speaks(project):
    said, dirty = project_state(project / "patches")
    assert (said, dirty) == (f"content-{content_hash(project)}", None)
    (project / "README.md").write_text("prose changes no result")
    (project / "farm/__pycache__").mkdir()
    (project / "farm/__pycache__/a.pyc").write_text("x")
    assert project_state(project / "patches")[0] == said
    (project / "patches/series").write_text("other")
    assert project_state(project / "patches")[0] != said


def test_in_a_repository_the_commit_and_whether_files_differ(project):
    git(project, "init", "-q")
    git(project, "add", "-A")
    git(project, "commit", "-qm", "x")
    commit, dirty = project_state(project / "patches")
    assert (len(commit), dirty) == (40, False)
    (project / "farm/a.py").write_text("changed")
    assert project_state(project / "patches") == (commit, True)


def test_a_series_that_the_repository_around_it_does_not_keep_is_not_that_repositorys(project):
    git(project, "init", "-q")
    (project / ".gitignore").write_text("patches/\n")
    git(project, "add", "-A")
    git(project, "commit", "-qm", "x")
    assert project_state(project / "patches")[0].startswith("content-")
