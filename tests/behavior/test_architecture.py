"""A package imports only from packages below its own, and there are no import cycles between modules."""

from __future__ import annotations

import ast
import functools
import io
import tokenize
from pathlib import Path

import pytest

from docs import packages
from docs.packages import MODULES, ROOT, arrows, module_name, module_order, package, with_picture

# From the bottom up.
PACKAGES = [
    *("_C", "_build", "_version"),
    *("core", "report", "problem", "sharding", "structure", "engines", "verdict", "diagnosis", "checks"),
    *(
        "lowprecision",
        "functional",
        "api",
        "model",
        "variants",
        "distributed",
        "testing",
        "tools",
        "fastgrad",
        "__main__",
    ),
]


ARROWS = arrows()
imports = functools.cache(packages.imports)


@pytest.mark.parametrize("name", sorted(ARROWS))
def test_imports_go_down(name: str) -> None:
    assert ARROWS[name] <= set(PACKAGES[: PACKAGES.index(name)])


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert len(module_order()) >= len(MODULES)


def test_the_picture_is_what_imports_say() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert with_picture(text) == text, "python -m docs.packages draws it"


def test_only_native_imports_the_compiled_module() -> None:
    assert {module_name(path) for path in MODULES if "fastgrad._C" in imports(path)} == {"fastgrad.core.native"}


def test_only_one_module_uses_private_torch_names() -> None:
    def private(path: Path) -> bool:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                root = node
                while isinstance(root, ast.Attribute):
                    root = root.value
                if isinstance(root, ast.Name) and root.id == "torch":
                    return True
        return False

    assert {module_name(path) for path in MODULES if private(path)} == {"fastgrad.core.torch_private"}


def test_no_verdict_comes_from_torch() -> None:
    def modules_with(*words: str) -> set[str]:
        return {module_name(path) for path in MODULES if any(word in path.read_text() for word in words)}

    assert modules_with("autograd.gradcheck(", "autograd.gradgradcheck(") == {"fastgrad.testing.torch_reference"}
    # The demo shows both verdicts side by side, and `patch` compares them on request.
    users = {module_name(path) for path in MODULES if "fastgrad.testing.torch_reference" in imports(path)}
    assert users == {"fastgrad.tools.demo", "fastgrad.testing.patch"}
    assert {package(name) for name in modules_with("ask_both")} == {"testing", "tools"}
    # Torch's own, while it is patched: for torch's gradgradcheck, which calls gradcheck.
    assert modules_with(".original(") == {"fastgrad.testing.patch"}


def lines_of_code(text: str, tree: ast.Module) -> set[int]:
    """The numbers of lines with code: no blank ones, comments or docstrings."""
    layout = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    code = {line for token in tokens if token.type not in layout for line in range(token.start[0], token.end[0] + 1)}
    strings = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    )
    return code.difference(*(range(node.lineno, (node.end_lineno or 0) + 1) for node in strings))


@pytest.mark.parametrize("path", [pytest.param(path, id=module_name(path)) for path in MODULES])
def test_no_function_is_longer_than_50_lines_of_code_and_no_class_than_250(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    code = lines_of_code(text, tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            most = 250 if isinstance(node, ast.ClassDef) else 50
            assert len(code.intersection(range(node.lineno, (node.end_lineno or 0) + 1))) <= most, node.name
