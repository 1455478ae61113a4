"""Limits of the code as tests: sizes, import cycles, and how many files read a field of a plan."""

from __future__ import annotations

import ast
import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from gems.plans.plan import Plan
from tests.ratchet import check, limit

ROOT = Path(__file__).resolve().parent.parent
FILES = {path: str(path.relative_to(ROOT)) for path in sorted((ROOT / "gems").rglob("*.py"))}

FILE_LINES, CLASS_LINES, FUNCTION_LINES = 500, 300, 60
FIELD_FILES = 6
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


# --- sizes ---------------------------------------------------------------------------------------


def named(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.AST]]:
    """Every class and function below a node, under the names of those around it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (*FUNCTIONS, ast.ClassDef)):
            name = f"{prefix}{child.name}"
            yield name, child
            yield from named(child, f"{name}.")
        else:
            yield from named(child, prefix)


def lengths(kinds: tuple[type, ...]) -> dict[str, int]:
    """Lines of every definition of these kinds: `gems/plans/plan.py:Plan.explain`."""
    return {
        f"{shown}:{name}": node.end_lineno - node.lineno + 1  # type: ignore[attr-defined]
        for path, shown in FILES.items()
        for name, node in named(tree(path), "")
        if isinstance(node, kinds)
    }


@limit("lines of a file")
def long_files() -> Mapping[str, int]:
    counts = {shown: len(path.read_text().splitlines()) for path, shown in FILES.items()}
    return {name: n for name, n in counts.items() if n > FILE_LINES}


@limit("lines of a class")
def long_classes() -> Mapping[str, int]:
    return {name: n for name, n in lengths((ast.ClassDef,)).items() if n > CLASS_LINES}


@limit("lines of a function")
def long_functions() -> Mapping[str, int]:
    return {name: n for name, n in lengths(FUNCTIONS).items() if n > FUNCTION_LINES}


def test_files_are_short():
    check("lines of a file")


def test_classes_are_short():
    check("lines of a class")


def test_functions_are_short():
    check("lines of a function")


# --- imports -------------------------------------------------------------------------------------


def module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module(path): path for path in FILES}


def imports(name: str) -> set[str]:
    """The modules of ours that one imports, wherever the import stands, for types only included."""
    path, found = MODULES[name], set()
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = parents[: len(parents) - node.level + 1] if node.level else []
            base = ".".join([*base, *([node.module] if node.module else [])])
            inside = {f"{base}.{alias.name}" for alias in node.names}
            found |= {full if full in MODULES else base for full in inside}
    return {target for target in found if target in MODULES and target != name}


@cache
def import_graph() -> dict[str, set[str]]:
    return {name: imports(name) for name in MODULES}


def cycles(graph: Mapping[str, set[str]]) -> list[set[str]]:
    """The sets of nodes that reach each other."""
    reach = {node: reached(graph, node) for node in graph}
    groups = {frozenset(b for b in reach[a] if a in reach[b]) for a in graph if a in reach[a]}
    return [set(group) for group in groups]


def reached(graph: Mapping[str, set[str]], start: str) -> set[str]:
    found, open_ = set(), [start]
    while open_:
        for target in graph.get(open_.pop(), set()) - found:
            found.add(target)
            open_.append(target)
    return found


def children(package: str) -> dict[str, set[str]]:
    """The modules and packages directly in a package, and which of them import which."""
    depth, inside = package.count(".") + 1, f"{package}."
    graph: dict[str, set[str]] = defaultdict(set)
    for source, targets in import_graph().items():
        if not source.startswith(inside):
            continue
        here = source.split(".")[depth]
        there = {target.split(".")[depth] for target in targets if target.startswith(inside)}
        graph[here] |= there - {here}
    return graph


def packages() -> list[str]:
    return sorted({name.rpartition(".")[0] for name in MODULES if "." in name})


@limit("modules in import cycles")
def cyclic_modules() -> Mapping[str, int]:
    """Each with the number of modules of its cycle that it imports."""
    graph = import_graph()
    return {name: len(graph[name] & group) for group in cycles(graph) for name in group}


@limit("packages in import cycles")
def cyclic_packages() -> Mapping[str, int]:
    """What lies side by side in one package and imports each other, with how many it imports."""
    found = {}
    for package in packages():
        graph = children(package)
        for group in cycles(graph):
            found |= {f"{package}.{name}": len(graph[name] & group) for name in group}
    return found


def test_no_modules_import_each_other():
    check("modules in import cycles")


def test_imports_have_one_direction_in_every_package():
    check("packages in import cycles")


def test_cycles_are_found():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": set()}
    assert cycles(graph) == [{"a", "b", "c"}]
    assert cycles({"a": {"b"}, "b": set()}) == []


# --- fields of a plan ----------------------------------------------------------------------------

FIELDS = {field.name for field in dataclasses.fields(Plan)}


def is_plan(node: ast.expr, known: set[str]) -> bool:
    """`plan`, `some.plan`, `a_plan`, or a parameter that is annotated as a Plan."""
    if isinstance(node, ast.Attribute):
        return node.attr == "plan" or node.attr.endswith("_plan")
    return isinstance(node, ast.Name) and (
        node.id == "plan" or node.id.endswith("_plan") or node.id in known
    )


def fields_read(source: ast.AST) -> set[str]:
    """The fields of plans that a file reads."""
    known = {
        node.arg
        for node in ast.walk(source)
        if isinstance(node, ast.arg)
        and node.annotation is not None
        and ast.unparse(node.annotation) in ("Plan", "Plan | None", "gems.Plan")
    }
    return {
        node.attr
        for node in ast.walk(source)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Load)
        and node.attr in FIELDS
        and is_plan(node.value, known)
    }


def readers() -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for path, shown in FILES.items():
        for field in fields_read(tree(path)):
            found[field].append(shown)
    return found


@limit("files that read a plan field")
def widely_read_fields() -> Mapping[str, int]:
    return {name: len(files) for name, files in readers().items() if len(files) > FIELD_FILES}


def test_a_plan_field_is_read_in_few_files():
    check(
        "files that read a plan field", lambda name: f"Plan.{name} in {', '.join(readers()[name])}"
    )


def test_reads_of_fields_are_found():
    source = "def f(p: Plan, q):\n    return p.zero, q.stream, self.plan.offload, plan.depth"
    assert fields_read(ast.parse(source)) == {"zero", "offload"}
    assert not fields_read(ast.parse("plan.zero = 1"))
