# SPDX-License-Identifier: Apache-2.0
"""What backends are given: kernels read contiguous rows, vectors and scales, and nothing of size 0."""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from llm_quant_rocm import hardware, ops
from llm_quant_rocm.backends import Backend, Choice
from llm_quant_rocm.formats import fp8
from llm_quant_rocm.formats.routed import RoutedTokens
from tests import moe_inputs, nvfp4_inputs

Calls = list[tuple[Any, tuple[Any, ...]]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Calls]:
    """The (call, arguments) that backends of an operator have been given, from now on; the choice is the usual one."""

    def record(operator: str) -> Calls:
        module, seen = import_module(f"llm_quant_rocm.ops.{operator}"), []
        usual = module._choose

        def choose(call: Any) -> Choice:
            chosen = usual(call).backend

            def run(*args: Any) -> Any:
                seen.append((call, args))
                return chosen.run(*args)

            return Choice(Backend(chosen.name, chosen.refusal, run), ())

        monkeypatch.setattr(module, "_choose", choose)
        return seen

    return record


def every_other(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, with strides."""
    wide = torch.stack([tensor, torch.full_like(tensor.float(), torch.nan).to(tensor.dtype)], dim=-1)
    return wide[..., 0]


def assert_contiguous(args: tuple[Any, ...], rows: int) -> None:
    """Argument 0 has contiguous rows, `rows` of them, and every other tensor is contiguous."""
    assert args[0].dim() == 2 and args[0].shape[0] == rows and args[0].stride(-1) == 1
    assert all(tensor.is_contiguous() for tensor in args[1:] if isinstance(tensor, torch.Tensor))


def test_row_operators(calls: Callable[[str], Calls]) -> None:
    x, weight = every_other(torch.randn(2, 3, 32)), every_other(torch.randn(32))
    recorded = calls("rms_norm_quant"), calls("per_token_quant"), calls("act_and_mul_quant")
    ops.rms_norm_quant_fp8(x, weight)
    ops.per_token_quant_fp8(x)
    ops.act_and_mul_quant_fp8(x)
    for seen in recorded:
        assert len(seen) == 1
        assert_contiguous(seen[0][1], 6)


def test_products(calls: Callable[[str], Calls]) -> None:
    ptpc, nvfp4 = calls("ptpc_gemm"), calls("nvfp4_gemm")
    xq, xscale = fp8.quantize_rows(torch.randn(2, 3, 32), fp8.OCP)
    wq, wscale = fp8.quantize_rows(torch.randn(8, 32), fp8.OCP)
    bias = every_other(torch.randn(8))
    ops.ptpc_gemm(xq, every_other(xscale), wq, every_other(wscale), bias)
    ops.nvfp4_gemm(every_other(torch.randn(2, 3, 32)).bfloat16(), nvfp4_inputs.nasty_weight(8, 32), bias)
    for seen in (ptpc, nvfp4):
        assert len(seen) == 1
        assert_contiguous(seen[0][1], 6)


@pytest.mark.parametrize("operator", ["ptpc_moe", "nvfp4_moe"])
def test_tokens_of_experts(calls: Callable[[str], Calls], operator: str) -> None:
    seen, inputs = calls(operator), moe_inputs if operator == "ptpc_moe" else nvfp4_inputs
    given = inputs.experts(6, 4, 2, 64, 32)
    strided = {name: every_other(given[name]) for name in ("x", "topk_weights", "topk_ids")}
    strided |= {name: every_other(torch.arange(count)) for name, count in (("expert_map", 4), ("padding", 6))}
    found = getattr(ops, operator)(**given | strided)
    assert torch.equal(found, getattr(ops, operator)(**given))
    (tokens, *weights), _ = (arguments for _, arguments in seen)
    assert all(
        tensor.is_contiguous() and len(tensor) == (4 if name == "expert_map" else 6)
        for name, tensor in tokens._asdict().items()
    )


def test_the_wider_side_of_an_expert_decides(calls: Callable[[str], Calls]) -> None:
    """Both inputs are quantized by the row, and rows of too many columns are not for the kernels."""
    seen = calls("ptpc_moe")
    for hidden, inner in ((64, 32), (32, 64)):
        ops.ptpc_moe(**moe_inputs.experts(4, 2, 1, hidden, inner))
    assert [call.columns for call, _ in seen] == [64, 64]


@pytest.mark.parametrize("shape", [(0, 4, 2, 32, 16), (3, 4, 2, 32, 0), (3, 4, 0, 32, 16)], ids=str)
def test_nothing_to_do_is_nobodys_business(calls: Callable[[str], Calls], shape: tuple[int, ...]) -> None:
    tokens, count, topk, hidden, inner = shape
    seen = calls("nvfp4_moe")
    arguments = nvfp4_inputs.experts(tokens, count, max(topk, 1), hidden, max(inner, 16))
    if not inner:
        for name, (n, k) in (("w13", (0, hidden)), ("w2", (hidden, 0))):
            arguments[name] = ops.PreparedNvFp4Weight.in_rows(nvfp4_inputs.nasty_weight(n, k, count))
    for name in ("topk_ids", "topk_weights"):
        arguments[name] = arguments[name][:, :topk]
    assert torch.equal(ops.nvfp4_moe(**arguments), torch.zeros(tokens, hidden).bfloat16())
    assert not seen


class Asked(Exception):
    """For how many slots a configuration was asked."""


@pytest.mark.skipif(not find_spec("triton"), reason="needs Triton")
@pytest.mark.parametrize("operator", ["ptpc_moe", "nvfp4_moe"])
@pytest.mark.parametrize(("everywhere", "slots"), [(None, 30), (4, 30), (8, 15), (7, 18)])
def test_slots_of_experts_elsewhere_choose_no_configuration(
    operator: str, everywhere: int | None, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank of 4 experts out of `everywhere` has that part of 15 tokens' 30 slots, if the router is fair."""
    module = import_module(f"llm_quant_rocm.ops.{operator}")

    def ask(device: hardware.Hardware, slots: int, *shape: int) -> None:
        raise Asked(slots)

    monkeypatch.setattr(module, "_config", ask)
    monkeypatch.setattr(hardware, "detect", lambda device: hardware.nvidia(9, 0))
    expert_map = None if everywhere is None else torch.arange(everywhere, dtype=torch.int32) % 4
    inputs = moe_inputs if operator == "ptpc_moe" else nvfp4_inputs
    given = inputs.experts(15, 4, 2, 64, 32)
    tokens = RoutedTokens(*(given.pop(name) for name in ("x", "topk_weights", "topk_ids")), expert_map)
    last: Any = fp8.OCP
    if operator == "nvfp4_moe":
        given |= {name: ops.PreparedNvFp4Weight.in_rows(given[name]) for name in ("w13", "w2")}
        last = module.MoeCall(hardware.nvidia(9, 0), 4, 64, 32, ("", ""))
    with pytest.raises(Asked, match=f"^{slots}$"):
        module.BACKENDS[0].run(tokens, *given.values(), "silu", last)
