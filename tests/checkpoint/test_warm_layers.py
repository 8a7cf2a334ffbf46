# SPDX-License-Identifier: Apache-2.0
"""Which layers are compiled for, and with what."""

from typing import Any

import pytest
import torch

from llm_quant_rocm.checkpoint import warm_layers
from llm_quant_rocm.checkpoint.warm_layers import warm_experts, warm_linear


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Of the layers that are warmed up, each called with five rows."""
    found: list[Any] = []

    def warm_up(call: Any, most_rows: int, device: torch.device, kind: Any, name: str) -> None:
        assert (most_rows, device, name) == (7, torch.device("cpu"), "layer")
        call(5)
        found.append(kind)

    monkeypatch.setattr(warm_layers, "warm_up", warm_up)
    return found


def test_linear_layers_that_are_alike_are_one_kind(kinds: list[Any]) -> None:
    given = []

    def product(x: torch.Tensor, bias: torch.Tensor | None) -> None:
        given.append((tuple(x.shape), x.dtype, bias is not None))

    layers = [torch.nn.Linear(4, 8, bias) for bias in (False, False, True, True)]
    layers[3].skip_bias_add = True  # the model adds it
    for layer in layers:
        warm_linear(layer, product, torch.bfloat16, 4, 7, "layer")
    warm_linear(layers[0], product, torch.float16, 4, 7, "layer")
    assert kinds[0] == kinds[1] and len(set(kinds)) == 4
    assert [bias for *_, bias in given] == [False, False, True, False, False]
    assert {(shape, dtype) for shape, dtype, _ in given} == {((5, 4), torch.bfloat16), ((5, 4), torch.float16)}


def test_experts_have_all_rows_of_the_router(kinds: list[Any]) -> None:
    given = []

    def product(*arguments: torch.Tensor) -> None:
        given.append([(tuple(each.shape), each.dtype) for each in arguments])

    warm_experts(torch.nn.Linear(4, 8), product, torch.bfloat16, 4, 3, 7, "layer")
    assert given == [[((5, 4), torch.bfloat16), ((5, 3), torch.float32), ((5, 3), torch.int32)]]
    assert len(kinds) == 1
