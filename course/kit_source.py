"""The parts of course/kit.py that a lesson uses: for its notebook, and for its cache key."""

import ast
import functools
import symtable
from collections.abc import Iterator
from pathlib import Path

from course.errors import Problem
from course.lesson import Lesson

KIT = Path(__file__).parent / "kit.py"


def imported_kit_names(lesson: Lesson) -> list[str]:
    """The names that the lesson imports from course.kit."""
    names: list[str] = []
    for cell in lesson.cells:
        if cell.kind == "code" and "course.kit" in cell.source:  # parse no other: it takes long
            for node in ast.walk(ast.parse(cell.source)):
                if isinstance(node, ast.ImportFrom) and node.module == "course.kit":
                    names += [alias.name for alias in node.names]
    return names


def used_kit_source(lesson: Lesson) -> str:
    """The kit's source, cut down to what the lesson imports and what that needs in turn."""
    return kit_source(imported_kit_names(lesson), KIT.read_text(encoding="utf-8"))


def shadowed_kit_names(lesson: Lesson) -> Iterator[Problem]:
    """Names that the lesson gives to something else than the part of the kit that it needs.

    On the site the kit is a module of its own; in the notebook it stands in the same namespace.
    """
    kit = {name for node in ast.parse(used_kit_source(lesson)).body for name in _defines(node)}
    for cell in (cell for cell in lesson.cells if cell.kind == "code"):
        symbols = symtable.symtable(cell.source, lesson.shown, "exec").get_symbols()
        bound = {s.get_name() for s in symbols if s.is_assigned() and not s.is_imported()}
        for name in sorted(bound & kit):
            message = f"'{name}' is a name of course/kit.py, which the notebook needs: rename yours"
            yield lesson.problem(cell, message)


@functools.cache
def _needs(kit: str) -> tuple[ast.Module, dict[str, set[str]]]:
    """The parsed kit, and for each name that it defines the names of the kit that this uses."""
    tree = ast.parse(kit)
    defined = {name: statement for statement in tree.body for name in _defines(statement)}
    return tree, {
        name: {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
        & defined.keys()
        for name, statement in defined.items()
    }


def kit_source(names: list[str], kit: str) -> str:
    """The statements of `kit` that define `names` or that those need, in the kit's order."""
    tree, needs = _needs(kit)
    wanted, waiting = set(), [name for name in names if name in needs]
    while waiting:
        name = waiting.pop()
        if name not in wanted:
            wanted.add(name)
            waiting += needs[name]
    lines = kit.splitlines()
    imports, rest = [], []
    for statement in tree.body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            kept = [alias for alias in statement.names if _bound(alias) in wanted]
            if kept:
                short = ast.parse(ast.unparse(statement)).body[0]
                short.names = kept
                imports.append(ast.unparse(short))
        elif wanted & set(_defines(statement)):
            first = min([statement.lineno, *(d.lineno for d in _decorators(statement))])
            while lines[first - 2].startswith("#"):
                first -= 1
            rest.append("\n".join(lines[first - 1 : statement.end_lineno]))
    return "\n".join(imports) + "\n\n" + "\n\n\n".join(rest) + "\n" if rest else ""


def _bound(alias: ast.alias) -> str:
    return (alias.asname or alias.name).split(".")[0]


def _decorators(statement: ast.stmt) -> list[ast.expr]:
    return getattr(statement, "decorator_list", [])


def _defines(statement: ast.stmt) -> list[str]:
    """The names that a top-level statement binds."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return [statement.name]
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return [_bound(alias) for alias in statement.names]
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return [n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)]


@functools.cache
def kit_colours() -> dict[str, str]:
    """The colours of the kit, name -> hex, read from its text: its import costs a second."""
    found = {}
    for node in ast.parse(KIT.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
            names = [name.id for name in node.targets[0].elts]
            found |= dict(zip(names, ast.literal_eval(node.value), strict=True))
    return found
