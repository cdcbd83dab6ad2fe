"""The packages of fastgrad and their imports: the diagram in CONTRIBUTING.md.

`python -m docs.packages` draws it again; tests/behavior/test_architecture.py fails if it is out of date.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODULES = sorted((ROOT / "fastgrad").rglob("*.py"))


def module_name(path: Path) -> str:
    """The name of a module, for example fastgrad.core.native; of an __init__ file, the name of the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {module_name(path) for path in MODULES} | {"fastgrad._C"}


def imports(path: Path) -> set[str]:
    """The modules of fastgrad that a file imports, also inside functions and only for types."""
    return set(_imports(ast.parse(path.read_text()))) - {module_name(path)}


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in NAMES)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if inner in NAMES or node.module in NAMES:
                    yield inner if inner in NAMES else str(node.module)


def package(module: str) -> str:
    """The package of a module; for a module directly in fastgrad, the module itself."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def arrows() -> dict[str, set[str]]:
    """The packages that each package imports."""
    found: dict[str, set[str]] = {}
    for path in MODULES:
        own = package(module_name(path))
        found.setdefault(own, set()).update(package(module) for module in imports(path) if package(module) != own)
    return found


def module_order() -> list[str]:
    """All modules, each after those that it imports; raises graphlib.CycleError if there is a cycle."""
    return list(TopologicalSorter({module_name(path): imports(path) for path in MODULES}).static_order())


def picture() -> str:
    """The packages as a Mermaid flowchart, without the arrows that follow from others."""
    found = arrows()
    sides = {name for name in found if name.startswith("_")} | {"fastgrad", "_C"}
    direct = {name: found[name] - sides for name in TopologicalSorter(found).static_order() if name in found}
    below: dict[str, set[str]] = {}
    for name, packages in direct.items():
        below[name] = packages.union(*(below[other] for other in packages))
    lines = []
    for name in sorted(set(direct) - sides):
        implied = set().union(*(below[other] for other in direct[name]))
        lines += [f"    {name} --> {other}" for other in sorted(direct[name] - implied)]
    return "```mermaid\nflowchart TD\n" + "\n".join(lines) + "\n```"


def with_picture(text: str) -> str:
    """The text of CONTRIBUTING.md with the present diagram."""
    return re.sub(r"```mermaid\n.*?```", lambda _: picture(), text, count=1, flags=re.DOTALL)


if __name__ == "__main__":
    page = ROOT / "CONTRIBUTING.md"
    page.write_text(with_picture(page.read_text()))
