"""Which part of the project imports which, read from the sources' own import statements.

A part is a top-level package, or a subpackage or module of the core (``lowrank_kv.stores``, ``lowrank_kv.codec``).
Nothing is imported to find out.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

CORE = "lowrank_kv"
PACKAGES = (
    CORE,
    "dynakv",
    "ojakv",
    "lowrank_kv_auto",
    "training",
    "evaluation",
    "lowrank_kv_vllm",
    "lowrank_kv_cli",
    "benchmarks",
    "scripts",
)

Graph = dict[str, set[str]]  # name → the names it imports


def modules(root: Path) -> dict[str, Path]:
    """Module name → file of every module in :data:`PACKAGES` below `root`."""
    return {
        module_name(path.relative_to(root)): path
        for package in PACKAGES
        for path in sorted((root / package).rglob("*.py"))
    }


def module_name(path: Path) -> str:
    """``lowrank_kv/hf/rope.py`` → ``lowrank_kv.hf.rope``; a package's ``__init__.py`` → the package."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(name: str, path: Path) -> Iterator[str]:
    """Every name that a file's import statements mention, absolute: modules, and what is taken from modules."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            assert node.level <= len(parts), f"{path}: a relative import beyond the package"
            above = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            base = ".".join(filter(None, [above, node.module]))
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def module_graph(root: Path) -> Graph:
    """Module → the project's modules that it imports."""
    files = modules(root)
    return {
        name: {other for other in imported_names(name, path) if other in files} - {name} for name, path in files.items()
    }


def part_of(module: str) -> str:
    """The part that a module belongs to."""
    parts = module.split(".")
    if parts[0] != CORE:
        return parts[0]
    return ".".join(parts[:2])


def part_graph(root: Path) -> Graph:
    """Part → the parts that it imports."""
    graph: Graph = {}
    for module, others in module_graph(root).items():
        part = part_of(module)
        if part != CORE:  # the core's own __init__ is its map, and imports nothing
            graph.setdefault(part, set()).update(part_of(other) for other in others)
    return {part: others - {part, CORE} for part, others in graph.items()}


def circles(graph: Graph) -> list[list[str]]:
    """Groups of names that import one another, directly or by way of others; empty where imports flow one way."""
    return [sorted(group) for group in _strongly_connected(graph) if len(group) > 1]


def floors(graph: Graph) -> dict[str, int]:
    """Name → 0 where it imports nothing, else one more than the highest of what it imports.

    Raises:
        ValueError: names import one another in a circle.
    """
    if found := circles(graph):
        raise ValueError(f"these import one another: {found}; let one of them not")
    heights: dict[str, int] = {}

    def height(name: str) -> int:
        if name not in heights:
            heights[name] = max((height(other) + 1 for other in graph[name]), default=0)
        return heights[name]

    return {name: height(name) for name in graph}


def without_shortcuts(graph: Graph) -> Graph:
    """The same without imports that a longer way through other imports implies (the transitive reduction)."""

    def reachable(name: str) -> set[str]:
        return graph[name].union(*(reachable(other) for other in graph[name]))

    return {
        name: {other for other in others if not any(other in reachable(via) for via in others - {other})}
        for name, others in graph.items()
    }


def _strongly_connected(graph: Graph) -> list[set[str]]:
    """Tarjan's algorithm (SIAM J. Comput. 1, 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[set[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in graph[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            start = stack.index(name)
            groups.append(set(stack[start:]))
            del stack[start:]

    for name in graph:
        if name not in index:
            visit(name)
    return groups
