"""The generated pages of all features and all claims."""

from pathlib import Path

from course.catalog import Catalog, Claim, Feature
from course.markdown import inline_html

VERDICTS = {
    "right": "right",
    "partly": "partly right",
    "wrong": "wrong",
    "not-testable-here": "not testable here",
}


def table_pages(catalog: Catalog, folder: Path) -> dict[Path, str]:
    """The files of the two pages, path -> content."""
    return {
        folder / "features.md": _features(catalog),
        folder / "claims.md": _claims(catalog),
    }


def _lesson_link(catalog: Catalog, lesson_id: str) -> str:
    return f"[{catalog.lessons[lesson_id].meta.title}]({lesson_id}.md)"


def _coverage(catalog: Catalog, feature: Feature) -> str:
    covered = catalog.coverage(feature.id)
    if covered is None:
        return "planned"
    how, lessons = covered
    links = ", ".join(_lesson_link(catalog, lesson_id) for lesson_id in lessons)
    return f'<span class="badge badge--{how}">{how}</span> {links}'


def _cell(text: str) -> str:
    return inline_html(text)


def _features(catalog: Catalog) -> str:
    covered = sum(catalog.coverage(name) is not None for name in catalog.features)
    lines = [
        "---",
        "title: All features",
        "description: Every feature, fix and removal of PyTorch 2.14, and the lesson for it.",
        "---",
        "# All features",
        "",
        f"{len(catalog.features)} entries; {covered} are covered by the lessons that exist.",
        "",
    ]
    by_area: dict[str, list[Feature]] = {}
    for feature in catalog.features.values():
        by_area.setdefault(feature.area, []).append(feature)
    for area, features in by_area.items():
        lines += [f"## {area} {{ #area-{area.replace(' ', '-')} }}", ""]
        lines += ['<div class="filterable" markdown>', ""]
        lines += [
            "| feature | status | hardware | covered | pull requests |",
            "|---|---|---|---|---|",
        ]
        for feature in features:
            prs = " ".join(f"#{number}" for number in feature.prs[:4])
            more = f" +{len(feature.prs) - 4}" if len(feature.prs) > 4 else ""
            lines.append(
                f'| <span id="{feature.id}">**{_cell(feature.title)}**</span>'
                f"<br>{_cell(feature.summary)} "
                f"| {feature.status} | {feature.hardware} | {_coverage(catalog, feature)} "
                f"| {prs}{more} |"
            )
        lines += ["", "</div>", ""]
    return "\n".join(lines)


def _proof(catalog: Catalog, claim: Claim) -> str:
    if claim.lesson:
        return f"a cell in {_lesson_link(catalog, claim.lesson)}"
    if claim.source:
        return f"[{claim.source.title}]({claim.source.url}), {claim.source.date}"
    return f"planned: {claim.planned}"


def _claims(catalog: Catalog) -> str:
    planned = sum(claim.planned is not None for claim in catalog.claims.values())
    lines = [
        "---",
        "title: Claims, checked",
        "description: What is said about PyTorch 2.14, by whom, and what ran when we tried it.",
        "---",
        "# Claims, checked",
        "",
        "What is said about the release, our verdict, and the proof: a cell or a dated source.",
        f"For {planned} of the {len(catalog.claims)} claims the proof is still planned: until the "
        "lesson named there exists, take the verdict as ours, not as shown.",
        "",
    ]
    by_source: dict[str, list[Claim]] = {}
    for claim in catalog.claims.values():
        by_source.setdefault(claim.who, []).append(claim)
    for who, claims in by_source.items():
        lines += [
            f"## {who[0].upper()}{who[1:]} {{ #{who.lower().replace(' ', '-').replace('&', '')} }}",
            "",
        ]
        lines += ['<div class="filterable" markdown>', ""]
        lines += ["| claim | verdict | why | proof |", "|---|---|---|---|"]
        for claim in claims:
            verdict = f'<span class="badge badge--{claim.verdict}">{VERDICTS[claim.verdict]}</span>'
            lines.append(
                f'| <span id="{claim.id}">{_cell(claim.says)}</span> | {verdict} '
                f"| {_cell(claim.why)} | {_proof(catalog, claim)} |"
            )
        lines += ["", "</div>", ""]
    return "\n".join(lines)
