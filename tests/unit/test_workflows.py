"""The workflows are valid, pin every action by commit and ask for no more than they need."""

import re
import subprocess
import sys
from pathlib import Path

import yaml
from conftest import ROOT

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def test_actions_are_pinned_and_permissions_least():
    assert WORKFLOWS
    for file in WORKFLOWS:
        workflow = yaml.safe_load(file.read_text())
        assert workflow["permissions"] == {"contents": "read"}
        for name, job in workflow["jobs"].items():
            assert job.get("permissions") is None or name == "publish"
            for step in job["steps"]:
                if "uses" in step:
                    assert re.search(r"@[0-9a-f]{40}$", step["uses"]), step


def test_actionlint_finds_nothing(tmp_path):
    actionlint = Path(sys.executable).with_name("actionlint")
    done = subprocess.run([actionlint, *WORKFLOWS], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    wrong = tmp_path / "wrong.yml"
    wrong.write_text(WORKFLOWS[0].read_text().replace("ubuntu-24.04", "ubuntu-24.40"))
    done = subprocess.run([actionlint, wrong], capture_output=True, text=True)
    assert 'label "ubuntu-24.40" is unknown' in done.stdout
