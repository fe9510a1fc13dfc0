"""Units and their order (mkdocs.yml), features and claims (docs/data), and their cross-checks."""

import datetime
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from course.errors import CourseError, Problem, did_you_mean, read_text
from course.kit_source import shadowed_kit_names
from course.lesson import LESSON_ID, Coverage, Lesson, read_lesson

STRENGTH: list[Coverage] = ["runs", "stand-in", "inspect", "hardware"]
FEATURES, CLAIMS, SETTINGS = "docs/data/features.yml", "docs/data/claims.yml", "mkdocs.yml"


class Feature(BaseModel):
    """One feature, fix or removal of the release. How it is covered is said by the lessons."""

    model_config = ConfigDict(extra="forbid")
    id: str = Field(pattern=r"^[a-z0-9-]+$")
    title: str
    area: str
    hardware: str
    status: str
    source: str
    prs: list[int]
    summary: str
    before_after: str | None = None
    heading: str | None = None
    lesson: str = Field(pattern=LESSON_ID.pattern)  # its home, planned or there


class DatedSource(BaseModel):
    """A public source with the day it was published or read."""

    model_config = ConfigDict(extra="forbid")
    title: str
    url: str = Field(pattern=r"^https://")
    date: datetime.date


class Claim(BaseModel):
    """What somebody says about the release, our verdict, and the proof."""

    model_config = ConfigDict(extra="forbid")
    id: str = Field(pattern=r"^[a-z0-9-]+$")
    who: Literal[
        "news article", "release text", "release notes", "Q&A", "documentation", "pull request"
    ]
    says: str
    about: str | None = None
    verdict: Literal["right", "partly", "wrong", "not-testable-here"]
    why: str
    lesson: str | None = None  # with a `claim` cell of this id: the proof
    source: DatedSource | None = None
    planned: str | None = None

    @model_validator(mode="after")
    def _one_proof(self) -> "Claim":
        if sum(x is not None for x in (self.lesson, self.source, self.planned)) != 1:
            raise ValueError("needs exactly one of 'lesson', 'source' (with a date), 'planned'")
        return self


@dataclass(frozen=True)
class Unit:
    """A group of lessons, in reading order."""

    title: str
    lessons: list[str]


@dataclass(frozen=True)
class Repository:
    """Where the course lives. The one setting is `repo_url` in mkdocs.yml, with `extra.branch`."""

    url: str
    branch: str
    site_url: str

    @property
    def name(self) -> str:
        """owner/name"""
        return self.url.removeprefix("https://github.com/").strip("/")

    def colab(self, lesson_id: str) -> str:
        """The address that opens a lesson's notebook in Colab."""
        base = "https://colab.research.google.com/github"
        return f"{base}/{self.name}/blob/{self.branch}/notebooks/{lesson_id}.ipynb"

    def kaggle(self, lesson_id: str) -> str:
        """The address that opens a lesson's notebook in Kaggle."""
        return f"https://kaggle.com/kernels/welcome?src={self.blob(f'{lesson_id}.ipynb')}"

    def blob(self, file: str) -> str:
        """The address of a file under notebooks/ on GitHub."""
        return f"{self.url}/blob/{self.branch}/notebooks/{file}"

    def edit(self, lesson_id: str) -> str:
        """The address that edits a lesson's source."""
        return f"{self.url}/edit/{self.branch}/notebooks/{lesson_id}.py"


@dataclass
class Catalog:
    """The whole course: what there is, in which order, and what covers what."""

    root: Path
    repository: Repository
    units: list[Unit]
    lessons: dict[str, Lesson] = field(default_factory=dict)
    features: dict[str, Feature] = field(default_factory=dict)
    claims: dict[str, Claim] = field(default_factory=dict)

    def coverage(self, feature_id: str) -> tuple[Coverage, list[str]] | None:
        """The strongest way in which lessons cover a feature, and those lessons; None: none yet."""
        found = {
            lesson.id: lesson.meta.features[feature_id]
            for lesson in self.lessons.values()
            if feature_id in lesson.meta.features
        }
        if not found:
            return None
        return min(found.values(), key=STRENGTH.index), list(found)


class _Loader(yaml.SafeLoader):
    """mkdocs.yml has !!python/name: and !ENV tags, which mean nothing to us."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, tag, node: tag)
_Loader.add_multi_constructor("!", lambda loader, tag, node: tag)


def read_settings(root: Path) -> dict[str, Any]:
    """The settings in mkdocs.yml."""
    try:
        return yaml.load(read_text(root / SETTINGS, SETTINGS), _Loader)
    except yaml.YAMLError as error:
        raise CourseError(Problem(SETTINGS, _mark(error), f"not valid YAML: {error}")) from None


def _mark(error: yaml.YAMLError) -> int:
    mark = getattr(error, "problem_mark", None)
    return mark.line + 1 if mark else 1


def line_of(text: str, word: str) -> int:
    """The first line that holds `word` as a whole word, else 1."""
    found = re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", text)
    return text.count("\n", 0, found.start()) + 1 if found else 1


def read_catalog(root: Path) -> Catalog:
    """Read everything and check that nav, files, features, claims and lessons agree.

    Raises CourseError with every problem of every file.
    """
    settings = read_settings(root)
    repository = Repository(
        settings["repo_url"].rstrip("/"),
        settings.get("extra", {}).get("branch", "main"),
        settings.get("site_url", "").rstrip("/"),
    )
    catalog = Catalog(root, repository, list(_units(settings.get("nav") or [])))
    problems: list[Problem] = []
    for model, name, into in (
        (Feature, FEATURES, catalog.features),
        (Claim, CLAIMS, catalog.claims),
    ):
        problems += _read_entries(root, name, model, into)
    files = {
        path.relative_to(root / "notebooks").with_suffix("").as_posix(): path
        for path in sorted((root / "notebooks").glob("*/*.py"))
    }
    settings_text = read_text(root / SETTINGS, SETTINGS)
    problems += _check_nav(catalog.units, files, settings_text)
    for unit in catalog.units:
        for lesson_id in unit.lessons:
            if lesson_id in files and lesson_id not in catalog.lessons:
                try:
                    catalog.lessons[lesson_id] = read_lesson(files[lesson_id], root)
                except CourseError as error:
                    problems += error.problems
    problems += _cross_check(catalog)
    if problems:
        raise CourseError(problems)
    return catalog


def _units(nav: list[Any]) -> Iterator[Unit]:
    """The nav's groups that hold lesson pages, at any depth."""
    for entry in nav:
        for title, value in entry.items() if isinstance(entry, dict) else ():
            if isinstance(value, list):
                pages = [next(iter(i.values())) if isinstance(i, dict) else i for i in value]
                lessons = [
                    page.removeprefix("lessons/").removesuffix(".md")
                    for page in pages
                    if isinstance(page, str) and re.match(r"lessons/[^/]+/[^/]+\.md$", page)
                ]
                if lessons:
                    yield Unit(title, lessons)
                yield from _units([item for item in value if isinstance(item, dict)])


def _check_nav(units: list[Unit], files: dict[str, Path], text: str) -> Iterator[Problem]:
    listed = [lesson_id for unit in units for lesson_id in unit.lessons]
    for lesson_id in dict.fromkeys(listed):
        line = line_of(text, f"lessons/{lesson_id}.md")
        if lesson_id not in files:
            message = f"nav names lesson '{lesson_id}', but notebooks/{lesson_id}.py is no file"
            yield Problem(SETTINGS, line, message + did_you_mean(lesson_id, files))
        if listed.count(lesson_id) > 1:
            yield Problem(SETTINGS, line, f"nav names lesson '{lesson_id}' twice: drop one")
    for lesson_id in files.keys() - set(listed):
        message = f"the lesson is not in nav: add 'lessons/{lesson_id}.md' to mkdocs.yml"
        yield Problem(f"notebooks/{lesson_id}.py", 1, message)
    slugs = Counter(lesson_id.split("/")[1] for lesson_id in files)
    for slug in (slug for slug, count in slugs.items() if count > 1):
        twins = sorted(lesson_id for lesson_id in files if lesson_id.endswith(f"/{slug}"))
        message = f"slug '{slug}' is also used by {twins[0]}: lesson file names are unique"
        yield Problem(f"notebooks/{twins[-1]}.py", 1, message)


def _read_entries(
    root: Path, name: str, model: type[Feature] | type[Claim], into: dict[str, Any]
) -> Iterator[Problem]:
    """Fill `into` from a data file whose only key holds the list of entries."""
    text = read_text(root / name, name)
    try:
        (entries,) = yaml.load(text, _FastLoader).values()
    except yaml.YAMLError as error:
        raise CourseError(Problem(name, _mark(error), f"not valid YAML: {error}")) from None
    for entry in entries:
        entry_id = str(entry.get("id"))
        if entry_id in into:
            yield Problem(name, line_of(text, f"id: {entry_id}"), f"id '{entry_id}' occurs twice")
        try:
            into[entry_id] = model.model_validate(entry)
        except ValidationError as error:
            line = line_of(text, f"id: {entry_id}")
            for item in error.errors():
                where = ".".join(str(part) for part in item["loc"])
                yield Problem(name, line, f"'{entry_id}' {where}: {item['msg']}")


_FastLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _cross_check(catalog: Catalog) -> Iterator[Problem]:
    """Features, claims and lessons name each other, both ways."""
    proofs: dict[str, str] = {}
    for lesson in catalog.lessons.values():
        text = lesson.path.read_text(encoding="utf-8")
        for name in lesson.meta.features.keys() - catalog.features.keys():
            hint = did_you_mean(name, catalog.features)
            message = f"feature '{name}' is not in {FEATURES}{hint}"
            yield Problem(lesson.shown, line_of(text, name), message)
        for name in lesson.meta.prerequisites:
            if name not in catalog.lessons:
                hint = did_you_mean(name, catalog.lessons)
                message = f"prerequisite '{name}' is no lesson{hint}"
                yield Problem(lesson.shown, line_of(text, name), message)
        if set(lesson.meta.features.values()) == {"hardware"}:
            message = "a lesson needs something that runs everywhere, not only 'hardware'"
            yield Problem(lesson.shown, line_of(text, "features"), message)
        yield from shadowed_kit_names(lesson)
        for cell in lesson.cells:
            for claim_id in cell.claims:
                claim = catalog.claims.get(claim_id)
                if claim is None:
                    hint = did_you_mean(claim_id, catalog.claims)
                    yield lesson.problem(cell, f"claim '{claim_id}' is not in {CLAIMS}{hint}", -1)
                elif claim.lesson != lesson.id:
                    message = f"claim '{claim_id}' should say 'lesson: {lesson.id}' in {CLAIMS}"
                    yield lesson.problem(cell, message, -1)
                elif "assert" not in cell.source and "expect_error" not in cell.source:
                    yield lesson.problem(cell, "a claim cell proves by an assert: add one")
                proofs[claim_id] = lesson.id
    features, claims = (read_text(catalog.root / n, n) for n in (FEATURES, CLAIMS))
    for feature in catalog.features.values():
        home = catalog.lessons.get(feature.lesson)
        if home and feature.id not in home.meta.features:
            message = f"'{feature.id}' names {feature.lesson}, whose metadata does not list it"
            yield Problem(FEATURES, line_of(features, f"id: {feature.id}"), message)
    for claim in catalog.claims.values():
        for message in _claim_faults(claim, catalog, proofs):
            yield Problem(CLAIMS, line_of(claims, f"id: {claim.id}"), f"'{claim.id}'{message}")


def _claim_faults(claim: Claim, catalog: Catalog, proofs: dict[str, str]) -> Iterator[str]:
    if claim.about and claim.about not in catalog.features:
        yield f" is about unknown '{claim.about}'{did_you_mean(claim.about, catalog.features)}"
    if claim.lesson and proofs.get(claim.id) != claim.lesson:
        yield f': {claim.lesson} has no cell with claim="{claim.id}"'
    if claim.planned in catalog.lessons:
        yield f" is planned for {claim.planned}, which exists: prove it there"
