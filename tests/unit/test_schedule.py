"""Which lessons run together: longest first, within the memory; how they are cut into shards."""

import asyncio
import json
import shutil

import pytest
from conftest import GOOD
from rich.console import Console

from course import schedule
from course.cache import KEPT, RECORDED, Cache, Cost, Executed, Record, cache_key
from course.catalog import read_catalog
from course.schedule import Schedule, run_lessons, shard

SECONDS = {"unit/a": 5, "unit/b": 9, "unit/c": 7, "unit/d": 2, "unit/e": 4}


@pytest.fixture
def planned(project):
    """A project with five lessons whose costs are recorded, and its cache."""
    root = project(dict.fromkeys(SECONDS, GOOD))
    (root / "docs/data").mkdir(parents=True, exist_ok=True)
    costs = {
        name: {"seconds": s, "cpu_seconds": s, "peak_mb": 100 * s} for name, s in SECONDS.items()
    }
    (root / RECORDED).write_text(json.dumps(costs))
    return read_catalog(root), Cache(root / ".cache")


def executed(lesson_id: str) -> Executed:
    record = Record(
        date="2026-12-03", seconds=1, cpu_seconds=1, peak_mb=7, python="3", torch="2", machine="m"
    )
    return Executed(
        lesson_id=lesson_id, key="k", outputs={}, starter_errors={}, cell_seconds={}, record=record
    )


@pytest.mark.parametrize(("slots", "memory"), [(2, 10_000), (3, 1_250), (4, 100), (1, 10_000)])
def test_memory_and_cores_are_kept(planned, monkeypatch, slots, memory):
    catalog, cache = planned
    running, started, most = set(), [], []

    async def fake(lesson, root, folder):
        running.add(lesson.id)
        started.append(lesson.id)
        most.append((len(running), sum(100 * SECONDS[name] for name in running)))
        await asyncio.sleep(SECONDS[lesson.id] / 200)
        running.remove(lesson.id)
        return executed(lesson.id)

    monkeypatch.setattr(schedule, "run_lesson", fake)
    plan = Schedule(catalog, list(catalog.lessons.values()), cache, Console(quiet=True))
    plan.slots, plan.memory_mb = slots, memory
    plan.finish()
    assert sorted(started) == sorted(SECONDS) and set(plan.done) == set(SECONDS)
    assert started[0] == "unit/b", "the longest first"
    for together, used in most:
        assert together <= slots and (used <= memory or together == 1)
    if slots == 3:
        assert started[1] != "unit/c", "9 + 7 is too much memory: a shorter one goes first"


def test_costs_of_own_runs_come_before_the_recorded(planned):
    catalog, cache = planned
    cache.store(executed("unit/a"))
    costs = cache.costs(catalog.root)
    assert costs["unit/a"] == Cost(seconds=1, cpu_seconds=1, peak_mb=7)
    assert costs["unit/b"].seconds == 9
    assert cache.costs(catalog.root, own=False)["unit/a"].seconds == 5


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_shards_are_a_partition_and_even(planned, count):
    catalog, cache = planned
    lessons = list(catalog.lessons.values())
    cache.store(executed("unit/b"))  # what ran on one machine must not change the cut
    parts = [shard(catalog, lessons, cache, i + 1, count) for i in range(count)]
    names = [lesson.id for part in parts for lesson in part]
    assert sorted(names) == sorted(SECONDS)
    longest = max(sum(SECONDS[lesson.id] for lesson in part) for part in parts)
    at_best = max(max(SECONDS.values()), sum(SECONDS.values()) / count)
    assert longest <= 4 / 3 * at_best


def test_few_old_results_are_kept(planned):
    _, cache = planned
    for number in range(9):
        cache.store(executed("unit/a").model_copy(update={"key": f"k{number}"}))
    assert cache.load("unit/a", "k8") and not cache.load("unit/a", "k0")
    assert len(list((cache.folder / "runs").iterdir())) == KEPT


def test_caches_of_shards_merge_by_copying_files(planned, monkeypatch, tmp_path):
    catalog, _ = planned
    lessons = list(catalog.lessons.values())
    ran, quiet = {}, Console(quiet=True)

    async def fake(lesson, root, folder):
        key = cache_key(lesson, root)
        ran[lesson.id] = executed(lesson.id).model_copy(update={"key": key})
        return ran[lesson.id]

    monkeypatch.setattr(schedule, "run_lesson", fake)
    for number in (1, 2, 3):
        cache = Cache(tmp_path / str(number))
        run_lessons(catalog, shard(catalog, lessons, cache, number, 3), cache, quiet)
    for number in (2, 3, 1):
        shutil.copytree(tmp_path / str(number), tmp_path / "all", dirs_exist_ok=True)
    monkeypatch.setattr(schedule, "run_lesson", None)
    together = run_lessons(catalog, lessons, Cache(tmp_path / "all"), quiet)
    assert together == ran and list(together) == list(SECONDS)
    assert set(Cache(tmp_path / "all").costs(catalog.root)) == set(SECONDS)
