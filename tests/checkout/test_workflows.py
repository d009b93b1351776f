"""What the workflows may do, and whose code they run."""

import re
from pathlib import Path

import pytest
import yaml

FOLDER = Path(__file__).parents[2] / ".github" / "workflows"
WORKFLOWS = sorted(FOLDER.glob("*.yml"))


def jobs(path: Path) -> dict[str, dict]:
    return yaml.safe_load(path.read_text())["jobs"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_commits(path):
    """A tag can be moved to other code by whoever takes an account over; a commit can't."""
    for line in re.findall(r"uses: (.*)", path.read_text()):
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v[\d.]+", line), line


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_permissions(path):
    """No workflow has more than to read the repository, except in jobs that say so; no token stays in a checkout."""
    assert yaml.safe_load(path.read_text())["permissions"] == {"contents": "read"}
    for job in jobs(path).values():
        for step in job["steps"]:
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_tools_are_locked(path):
    """What a job runs, and what it installs, has a hash."""
    for job in jobs(path).values():
        assert "container" not in job or re.fullmatch(r"[\w./]+:[\w.-]+@sha256:[0-9a-f]{64}", job["container"])
        for step in job["steps"]:
            for line in step.get("run", "").splitlines():
                assert "pip install" not in line or "--require-hashes" in line, line
                assert not re.search(r"\b(pixi|conda|pipx|npx|curl|wget) ", line), line


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_what_publishes_builds_nothing(path):
    """A job that may write or sign has no code of the repository, whose build runs the code of all that it depends on."""
    for name, job in jobs(path).items():
        if "write" in job.get("permissions", {}).values():
            assert not any("make " in step.get("run", "") for step in job["steps"]), name
            for step in job["steps"]:
                if step.get("uses", "").startswith("actions/checkout@"):
                    assert step["with"]["sparse-checkout"] == "locked", name  # Versions and hashes alone.


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_what_others_choose_is_no_code(path):
    """The name of a branch or tag is text that others write: a script has it as a variable, never as part of itself."""
    for job in jobs(path).values():
        for step in job["steps"]:
            assert "${{" not in step.get("run", "")
