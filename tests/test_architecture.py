"""The layering: a module imports only from floors below its own, or listed neighbors."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "fastgrad"

# The module map, also of rooms that are not built yet.
FLOORS = {
    0: ["_build", "_native", "_torch", "_version", "errors", "memory", "precision", "report", "stopwatch"],
    1: ["coloring", "coordinates", "directions", "graphs", "problem", "progress", "sparsity", "tolerances"],
    2: ["attributes", "certify", "compare", "engines", "engines.compressed", "engines.dense", "engines.sketch"],
    3: ["check", "evidence", "exact", "fast", "matrices", "second_order", "small"],
    4: ["api", "differences", "forms", "jacobians", "messages", "numerical", "reference"],
    5: ["__init__", "__main__", "cli", "demo", "functional", "patching", "pytest_plugin", "render"],
}
FLOORS[1] += ["arguments", "batched", "caller", "linear_map", "trial"]
FLOORS[2] += ["confirm", "diagnose", "locate", "opinions", "patterns", "places", "plan", "rearranged", "refine"]
FLOORS[2] += ["analytical_certificate", "numerical_certificate"]
FLOORS[5] += ["bench", "doctor", "specs"]
FLOOR = {module: floor for floor, modules in FLOORS.items() for module in modules}

# Imports within a floor: what each module may use of its neighbors.
NEIGHBORS = {
    "_native": {"_build"},
    "errors": {"report"},
    "_torch": {"memory", "stopwatch"},
    "precision": {"_torch"},
    "graphs": {"coordinates", "problem", "tolerances", "trial"},
    "problem": {"arguments", "coordinates", "directions", "progress", "tolerances"},
    "caller": {"arguments", "coordinates"},
    "batched": {"coordinates", "problem", "tolerances", "trial"},
    "certify": {"compare", "engines"},
    "analytical_certificate": {
        *("certify", "compare", "engines", "engines.compressed", "locate", "numerical_certificate", "plan"),
    },
    "numerical_certificate": {"compare", "confirm", "engines.compressed", "engines.sketch"},
    "compare": {"refine"},
    "engines.compressed": {"engines"},
    "engines.dense": {"engines"},
    "engines.sketch": {"compare", "engines"},
    "check": {"evidence", "exact", "fast", "small"},
    "exact": {"fast"},
    "diagnose": {"places", "rearranged"},
    "confirm": {"compare", "locate", "refine"},
    "linear_map": {"coordinates", "directions"},
    "patterns": {"plan"},
    "sparsity": {"coloring", "coordinates"},
    "trial": {"directions", "problem"},
    "api": {"messages"},
    "numerical": {"differences", "forms"},
    "__main__": {"cli"},
    "__init__": {"functional", "patching"},
    "patching": {"patching"},
    "cli": {"bench", "demo", "doctor", "specs"},
    "bench": {"patching"},
    "doctor": {"demo", "patching"},
    "pytest_plugin": {"patching"},
}

# Imports within functions, of what presents the data: methods of a report that nothing else here calls.
LATE = {"report": {"errors", "messages", "render"}}

MODULES = sorted(path for path in PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


def imported_names(path: Path) -> set[str]:
    names = set()
    tree = ast.parse(path.read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    inside = {id(node) for function in functions for node in ast.walk(function)}
    late = LATE.get(module_name(path), set())
    for node in ast.walk(tree):
        if id(node) in inside and isinstance(node, ast.ImportFrom) and {alias.name for alias in node.names} <= late:
            continue
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            module = node.module or ""
            if module == "fastgrad":
                names |= {alias.name for alias in node.names}
            elif module.startswith("fastgrad."):
                inner = module.removeprefix("fastgrad.")
                submodules = {f"{inner}.{alias.name}" for alias in node.names} & set(FLOOR)
                names |= submodules or {inner}
        elif isinstance(node, ast.Import):
            names |= {
                alias.name.removeprefix("fastgrad.") for alias in node.names if alias.name.startswith("fastgrad.")
            }
    return names


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_imports_go_down(path: Path) -> None:
    name = module_name(path)
    for imported in imported_names(path) - {"_C"}:
        assert imported in FLOOR, f"{imported} is in no room of the map"
        below = FLOOR[imported] < FLOOR[name]
        assert below or imported in NEIGHBORS.get(name, set()), f"{name} imports {imported}"


def test_only_native_imports_the_compiled_module() -> None:
    users = {module_name(path) for path in MODULES if "fastgrad._C" in path.read_text()}
    assert users == {"_native"}


def test_only_torch_room_uses_private_torch_names() -> None:
    def private(path: Path) -> bool:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                root = node
                while isinstance(root, ast.Attribute):
                    root = root.value
                if isinstance(root, ast.Name) and root.id == "torch":
                    return True
        return False

    assert {module_name(path) for path in MODULES if private(path)} == {"_torch"}


def test_no_verdict_comes_from_torch() -> None:
    def modules_with(*words: str) -> set[str]:
        return {module_name(path) for path in MODULES if any(word in path.read_text() for word in words)}

    assert modules_with("autograd.gradcheck(", "autograd.gradgradcheck(") == {"reference"}
    # To show both side by side; patching is asked to by those who compare.
    assert {module_name(path) for path in MODULES if "reference" in imported_names(path)} == {"demo", "patching"}
    assert modules_with("ask_both") == {"bench", "patching", "pytest_plugin"}
    # Torch's own, while it is patched: for torch's gradgradcheck, which calls gradcheck.
    assert modules_with(".original(") == {"patching"}
