"""The launch files of the lessons: their syntax, and a job on three network namespaces."""

import ast
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from course.catalog import read_catalog

ROOT = Path(__file__).parents[2]
FILES = ROOT / "docs" / "downloads" / "distributed"
LESSON = ROOT / "notebooks" / "distributed" / "grow-back.py"


@pytest.mark.parametrize("name", ["torchrun.sh", "job.slurm", "launch.sh", "launch.slurm"])
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


def test_kubernetes_manifest_of_the_lessons_jobs() -> None:
    job = yaml.safe_load((FILES / "launch.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert job["spec"]["runtimeRef"]["name"] == "torch-distributed"
    assert job["spec"]["trainer"]["command"][0] == "torchrun"
    (pods,) = job["spec"]["podTemplateOverrides"]
    (container,), (volume,) = pods["spec"]["containers"], pods["spec"]["volumes"]
    (mount,) = container["volumeMounts"]
    assert mount["name"] == volume["name"]
    assert job["spec"]["trainer"]["command"][-1] == f"{mount['mountPath']}/job.py"


ON_SEVERAL = """
ip link set lo up
trap 'cat node*; exit 1' TERM
for node in $(seq 0 $((NODES - 1))); do
  (NODE_RANK=$node bash "$1" "$2" > "node$node" 2>&1 || kill $$) &
done
wait
cat node*
"""


def lessons_with_a_job() -> list[str]:
    """Lessons whose page offers their job as a file."""
    lessons = read_catalog(ROOT).lessons.values()
    return [lesson.id for lesson in lessons if lesson.meta.job]


@pytest.mark.parametrize("lesson_id", lessons_with_a_job())
def test_the_job_of_a_lesson_runs_under_torchrun(lesson_id, catalog, tmp_path) -> None:
    """A torchrun for each process, as on several machines, without this course installed."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("a network namespace needs root, iproute2 and util-linux")
    job = catalog.lessons[lesson_id].meta.job
    file = ROOT / "docs" / "lessons" / lesson_id / f"{job.function}.py"
    program = file.read_text()
    assert "course.kit" not in program
    if job.arguments.get("steps"):  # as long as it takes, on a cluster
        program = program.replace(f"steps={job.arguments['steps']}", "steps=4")
    (tmp_path / "job.py").write_text(program)
    inside = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    hidden = ("PYTHONPATH", "TORCHINDUCTOR_CACHE_DIR")
    done = subprocess.run(
        [*inside, "bash", "-c", ON_SEVERAL, "nodes", FILES / "launch.sh", "job.py"],
        capture_output=True,
        text=True,
        timeout=180,
        cwd=tmp_path,
        env={k: v for k, v in os.environ.items() if k not in hidden}
        | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        | {"FIRST": "127.0.0.1", "NODES": str(job.ranks), "GLOO_SOCKET_IFNAME": "lo"},
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    # within a line it is a log: of an agent that leaves after the one that had the store
    assert not re.search(r"^Traceback", done.stdout, re.M), done.stdout
    if "report(" in program.rpartition("__main__")[0].partition(f"def {job.function}")[2]:
        assert done.stdout.count("\x1e") >= 1, "it reported what it did"


def test_a_hook_on_an_open_group_crashes_the_process_at_its_end(tmp_path) -> None:
    """Why the jobs end with destroy_process_group(), as the page of the unit says."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("a network namespace needs root, iproute2 and util-linux")
    file = ROOT / "docs/lessons/distributed/timeouts-and-hooks/logged_training.py"
    open_end, _, _ = file.read_text().partition("    if dist.is_initialized()")
    (tmp_path / "job.py").write_text(open_end)
    settings = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}
    settings["GLOO_SOCKET_IFNAME"] = "lo"
    # a namespace of its own: the store of init_process_group listens on all interfaces
    alone = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    command = [*alone, sys.executable, "job.py"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | settings)
    assert done.returncode == -signal.SIGSEGV


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
