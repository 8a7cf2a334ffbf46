# SPDX-License-Identifier: Apache-2.0
"""Engines build a model with the GPU as torch's default device and 16 bits as its default type: nothing here depends on
either, but for parameters, which are where the engine wants them."""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from llm_quant_rocm import backends, hardware, ops, reference
from llm_quant_rocm.formats import fp8, nvfp4, wire
from llm_quant_rocm.ops import _aiter
from tests.inputs import assert_same, engine_defaults, finite_rows, random_rows
from tests.moe_inputs import experts
from tests.nvfp4_inputs import nasty_weight

ROOT = Path(__file__).parent.parent
FOLDERS = [
    *(Path("llm_quant_rocm", name) for name in ("checkpoint", "comm", "formats", "kernels", "ops", "reference")),
    *(Path("plugins", name) for name in ("vllm", "sglang")),
]
OF_ANY_TYPE = {f"torch.{name}" for name in ("zeros", "ones", "empty", "full", "tensor", "rand", "randn", "linspace")}
OF_INTEGERS = {"torch.arange", "torch.randint", "torch.randperm"}
# Parameters of the engine's model, which it places and types: the functions that make them.
ENGINES_OWN = {"add", "add_matrix", "add_optional_scalars", "add_refused", "add_scalars"}


def factories(tree: ast.Module) -> list[tuple[str, ast.Call]]:
    """(the function it stands in, the call) of every call that makes a tensor from nothing."""
    found = []

    def visit(node: ast.AST, inside: str) -> None:
        if isinstance(node, ast.FunctionDef):
            inside = node.name
        if isinstance(node, ast.Call) and ast.unparse(node.func) in OF_ANY_TYPE | OF_INTEGERS:
            found.append((inside, node))
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    visit(tree, "")
    return found


@pytest.mark.parametrize("folder", FOLDERS, ids=str)
def test_every_new_tensor_says_where_it_is_and_of_which_type(folder: Path) -> None:
    seen = 0
    for file in sorted((ROOT / folder).rglob("*.py")):
        for function, call in factories(ast.parse(file.read_text())):
            seen += 1
            given = {keyword.arg for keyword in call.keywords}
            if None in given or function in ENGINES_OWN:  # None: **options
                continue
            integers = ast.unparse(call.func) in OF_INTEGERS
            missing = {"device"} | (set() if integers else {"dtype"})
            assert missing <= given, f"{file.relative_to(ROOT)}:{call.lineno} leaves {missing - given} to the engine"
    assert seen or folder.parts[0] == "plugins"


def there_and_back(rows: torch.Tensor, codec: wire.Codec) -> Any:
    sent = wire.encode(rows, codec)
    return sent, wire.decode(sent, codec, rows.dtype)


def norms(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
    return ops.rms_norm_quant_fp8(x, weight, 1e-6, residual), ops.reduce_norm_quant(x, weight, residual)


def in_the_layout_of(arch: str, weight: nvfp4.NvFp4Weight) -> Any:
    with patch.object(hardware, "CPU", hardware.amd(arch)), patch.object(backends, "missing", lambda module: None):
        return ops.prepare_nvfp4_weight(weight)


def routed(arguments: dict[str, Any]) -> Any:
    return ops.ptpc_moe(**arguments)


ROWS, WIDE = random_rows(6, 64, torch.bfloat16), torch.cat([finite_rows(256, torch.bfloat16)] * 2)
WEIGHT, W8 = nasty_weight(32, 64), fp8.quantize_rows(random_rows(32, 64, torch.bfloat16), fp8.OCP)
CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "per token": (fp8.quantize_rows, (WIDE, fp8.OCP)),
    "nvfp4": (nvfp4.quantize, (ROWS,)),
    "nvfp4 activation": (nvfp4.quantize_activation, (ROWS, torch.full((), 3.5))),
    "prepared for gfx942": (in_the_layout_of, ("gfx942", WEIGHT)),
    "nvfp4_gemm": (ops.nvfp4_gemm, (ROWS, ops.prepare_nvfp4_weight(WEIGHT))),
    "ptpc_linear": (ops.ptpc_linear, (ROWS, *W8)),
    "norms": (norms, (*ROWS.chunk(2), random_rows(1, 64, torch.bfloat16)[0])),
    "ptpc_moe": (routed, (experts(5, 4, 2, 64, 32),)),
    **{f"{name} on the wire": (there_and_back, (WIDE, codec)) for name, codec in wire.CODECS.items()},
}


def tensors(value: Any) -> list[torch.Tensor]:
    """Those of a nest of tuples and objects."""
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value if isinstance(value, tuple) else vars(value).values() if hasattr(value, "__dict__") else ()
    return [tensor for part in parts for tensor in tensors(part)]


@pytest.mark.parametrize("name", CALLS)
def test_results_are_the_same(name: str) -> None:
    function, arguments = CALLS[name]
    expected = tensors(function(*arguments))
    with engine_defaults():
        found = tensors(function(*arguments))
    assert len(found) == len(expected) > 0
    for part, whole in zip(found, expected, strict=True):
        assert_same(part, whole)


def test_aiter_proves_itself_while_a_model_is_built() -> None:
    def product(*arguments: Any) -> torch.Tensor:
        return reference.ptpc_gemm(*arguments)

    with (
        patch.object(_aiter, "gemm", product),
        patch.object(_aiter, "shuffle_weight", lambda wq: wq),
        engine_defaults(),
    ):
        assert _aiter._trial_refusal(torch.device("cpu")) is None
