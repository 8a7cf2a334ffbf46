# SPDX-License-Identifier: Apache-2.0
"""Which tokens have no experts because they only fill up a batch, by what vLLM says of a forward pass."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import override_forward_context

from llm_quant_rocm_vllm import padding

IDS = torch.tensor([[3, 1], [0, 2], [5, 4]], dtype=torch.int32)
PLACES = torch.tensor([17, 0, -1])


def found(mode: CUDAGraphMode = CUDAGraphMode.FULL, **slot_mapping: Any) -> torch.Tensor:
    context: Any = SimpleNamespace(cudagraph_runtime_mode=mode, slot_mapping=slot_mapping)
    with override_forward_context(context):
        return padding.without_padding(IDS)


@pytest.mark.parametrize("mode", [CUDAGraphMode.FULL, CUDAGraphMode.NONE])
def test_a_token_without_a_place_in_the_cache_has_no_experts(mode: CUDAGraphMode) -> None:
    # vLLM gives all layers of one group of caches one tensor.
    assert found(mode, first=PLACES, second=PLACES).tolist() == [[3, 1], [0, 2], [-1, -1]]
    assert found(mode, first=PLACES).dtype == IDS.dtype


@pytest.mark.parametrize(
    ("mode", "slot_mapping"),
    [
        (CUDAGraphMode.PIECEWISE, {"first": PLACES}),
        (CUDAGraphMode.FULL, {}),
        (CUDAGraphMode.FULL, {"first": PLACES, "mamba": PLACES.clone()}),
        (CUDAGraphMode.FULL, {"first": PLACES.repeat(2)}),
    ],
    ids=["in pieces", "no cache yet", "a hybrid model", "other tokens"],
)
def test_where_it_is_not_said_all_keep_theirs(mode: CUDAGraphMode, slot_mapping: dict[str, torch.Tensor]) -> None:
    assert found(mode, **slot_mapping) is IDS


def test_microbatches_and_no_forward_pass_keep_theirs() -> None:
    context: Any = SimpleNamespace(cudagraph_runtime_mode=CUDAGraphMode.FULL, slot_mapping=[{"first": PLACES}] * 2)
    with override_forward_context(context):
        assert padding.without_padding(IDS) is IDS
    assert padding.without_padding(IDS) is IDS


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({}, True),
        ({"cuda_alike": False}, False),
        ({"skipped_by_vllm": True}, False),
        ({"decode_context_parallel_size": 2}, False),
        ({"prefill_context_parallel_size": 2}, False),
        ({"kv_sharing_fast_prefill": True}, False),
    ],
    ids=str,
)
def test_when_it_is_to_find(change: dict[str, Any], wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1, "kv_sharing_fast_prefill": False}
    facts |= {"cuda_alike": True, "skipped_by_vllm": False} | change
    monkeypatch.setattr(padding, "envs", SimpleNamespace(VLLM_MOE_SKIP_PADDING=facts["skipped_by_vllm"]))
    monkeypatch.setattr(padding, "current_platform", SimpleNamespace(is_cuda_alike=lambda: facts["cuda_alike"]))
    config: Any = SimpleNamespace(parallel_config=SimpleNamespace(**facts), cache_config=SimpleNamespace(**facts))
    assert padding.is_to_find(config) is wanted
