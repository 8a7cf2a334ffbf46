# SPDX-License-Identifier: Apache-2.0
"""Imports go one way, and importing the library touches no GPU, no Triton and no engine."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = "llm_quant_rocm"
PLUGINS = (f"{PACKAGE}_vllm", f"{PACKAGE}_sglang")
# DESIGN rule 1, from the top down: a layer imports itself and what stands below. `None` is the package's own file.
LAYERS: tuple[tuple[str | None, ...], ...] = (
    ("plugins", "cli"),
    ("tune",),
    ("measure",),
    ("ops", "comm", "checkpoint"),
    ("backends", "tuning"),
    ("kernels", "reference"),
    ("formats",),
    ("hardware", "provenance", "timing"),
    ("environment", "json_files", "versions"),
    (None,),
)
DEPTH = {name: depth for depth, layer in enumerate(LAYERS) for name in layer}
ENGINES = {"vllm", "sglang"}


def layer(module: str) -> str | None:
    """The layer of a dotted module name of ours."""
    first, *rest = module.split(".")
    if first != PACKAGE:
        return "plugins"
    return rest[0] if rest else None


def modules(root: Path) -> Iterator[tuple[str, Path]]:
    """(dotted name, file) of every module of the library and its plugins."""
    for package in (PACKAGE, *PLUGINS):
        for file in sorted((root / package).rglob("*.py")):
            parts = file.relative_to(root).with_suffix("").parts
            yield ".".join(part for part in parts if part != "__init__"), file


def imports(tree: ast.Module, top_level: bool = False) -> Iterator[str]:
    """Dotted names that a module imports; with `top_level` only those that importing it runs."""
    nodes: list[ast.AST] = list(tree.body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        later = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if for_types or (top_level and later):
            continue
        nodes.extend(ast.iter_child_nodes(node))


def violations(root: Path) -> list[str]:
    """Every import against the direction, as "module imports module"."""
    found = []
    for name, file in modules(root):
        tree = ast.parse(file.read_text())
        own = layer(name)
        if own not in DEPTH:
            found.append(f"{name} stands in no layer")
            continue
        for imported in imports(tree):
            if imported.split(".")[0] in ENGINES and own not in ("plugins", "cli"):
                found.append(f"{name} imports {imported}")
            if imported.split(".")[0] not in (PACKAGE, *PLUGINS):
                continue
            other = layer(imported)
            if other in DEPTH and DEPTH[own] > DEPTH[other]:
                found.append(f"{name} imports {imported}")
        for imported in imports(tree, top_level=True):
            if imported.split(".")[0] == "triton" and own != "kernels":
                found.append(f"{name} imports triton at import")
            if imported.split(".")[0] in ENGINES and own == "cli":
                found.append(f"{name} imports {imported} at import")
    return found


def test_imports_go_one_way() -> None:
    assert violations(ROOT) == []


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("formats/bad.py", "from llm_quant_rocm.ops import ptpc_gemm"),
        ("kernels/bad.py", "def f():\n    from llm_quant_rocm import backends"),
        ("ops/bad.py", "import vllm"),
        ("ops/bad.py", "import triton.language as tl"),
        ("ops/bad.py", "import llm_quant_rocm_vllm"),
        ("cli/bad.py", "import vllm"),
        ("__init__.py", "from llm_quant_rocm import ops"),
        ("unheard_of.py", ""),
    ],
)
def test_a_wrong_import_is_found(tmp_path: Path, file: str, text: str) -> None:
    target = tmp_path / PACKAGE / file
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text + "\n")
    assert len(violations(tmp_path)) >= 1


def test_a_right_import_is_not_found(tmp_path: Path) -> None:
    target = tmp_path / PACKAGE / "cli" / "good.py"
    target.parent.mkdir(parents=True)
    target.write_text("from llm_quant_rocm.ops import ptpc_gemm\n\n\ndef f():\n    import vllm\n")
    assert violations(tmp_path) == []


def test_importing_the_library_touches_nothing() -> None:
    program = f"""
import sys
sys.modules["vllm"] = sys.modules["sglang"] = sys.modules["triton"] = None  # importing them fails
import {PACKAGE}, {PACKAGE}.ops, {PACKAGE}.comm.policy, {PACKAGE}.comm.process_group, torch
import {PACKAGE}.backends, {PACKAGE}.tuning, {PACKAGE}.cli
assert not torch.cuda.is_initialized()
assert "{PACKAGE}.kernels" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
