"""The launch files of the lessons: their syntax, and a job on three network namespaces."""

import ast
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FILES = ROOT / "docs" / "downloads" / "distributed"
LESSON = ROOT / "notebooks" / "distributed" / "grow-back.py"


@pytest.mark.parametrize("name", ["torchrun.sh", "job.slurm"])
def test_shell_syntax(name: str) -> None:
    subprocess.run(["bash", "-n", FILES / name], check=True)


def test_kubernetes_manifest() -> None:
    objects = list(yaml.safe_load_all((FILES / "trainjob.yaml").read_text()))
    assert [one["kind"] for one in objects] == ["Service", "Deployment", "TrainJob"]
    service, deployment, job = objects
    assert all(one["apiVersion"] and one["metadata"]["name"] for one in objects)
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"] == labels
    script = job["spec"]["trainer"]["args"][0]
    assert f"MASTER_ADDR={service['metadata']['name']}" in script
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_loop_is_that_of_the_lesson() -> None:
    lesson, loop = LESSON.read_text(), (FILES / "elastic.py").read_text()
    for name in ("Group", "Elastic", "hand_over"):
        node = next(n for n in ast.parse(loop).body if getattr(n, "name", "") == name)
        assert ast.get_source_segment(loop, node) in lesson, f"{name} differs from the lesson's"


def test_three_machines_lose_one_and_take_it_back() -> None:
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("network namespaces need root, iproute2 and util-linux")
    inside = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    done = subprocess.run(
        [*inside, sys.executable, Path(__file__).with_name("machines.py"), FILES],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    first, second, lost, replacement = map("".join, json.loads(done.stdout.splitlines()[-1]))
    assert "members [0, 1]\n" in first and "members [0, 1]\n" in second, "two went on"
    assert "members [0, 1, 4]" in first, "and took in a member with a new number"
    assert "exitcode: -9" in lost and "done" not in lost
    ends = {out.rsplit("weights ", 1)[1].strip() for out in (first, second, replacement)}
    assert len(ends) == 1 and math.isfinite(float(ends.pop())), "the same weights everywhere"
