# SPDX-License-Identifier: Apache-2.0
"""Which tokens have no experts because they only fill up a batch, by what vLLM says of a forward pass."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import override_forward_context

from llm_quant_rocm_vllm import padding

PLACES = torch.tensor([17, 0, -1])


def found(mode: CUDAGraphMode, slot_mapping: Any) -> torch.Tensor | None:
    context: Any = SimpleNamespace(cudagraph_runtime_mode=mode, slot_mapping=slot_mapping)
    with override_forward_context(context):
        return padding.places(3)


@pytest.mark.parametrize("mode", [CUDAGraphMode.FULL, CUDAGraphMode.NONE])
def test_padding_has_no_place_in_the_cache(mode: CUDAGraphMode) -> None:
    # vLLM gives all layers of one group of caches one tensor.
    assert found(mode, {"first": PLACES, "second": PLACES}) is PLACES


@pytest.mark.parametrize(
    ("mode", "slot_mapping"),
    [
        (CUDAGraphMode.PIECEWISE, {"first": PLACES}),
        (CUDAGraphMode.FULL, {}),
        (CUDAGraphMode.FULL, {"first": PLACES, "other": PLACES.clone()}),
        (CUDAGraphMode.FULL, {"first": PLACES.repeat(2)}),
        (CUDAGraphMode.FULL, [{"first": PLACES}] * 2),
    ],
    ids=["in pieces", "no cache yet", "several kinds of cache", "other tokens", "microbatches"],
)
def test_where_vllm_does_not_say(mode: CUDAGraphMode, slot_mapping: Any) -> None:
    assert found(mode, slot_mapping) is None


def test_outside_of_a_forward_pass() -> None:
    assert padding.places(3) is None


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({}, True),
        ({"cuda_alike": False}, False),
        ({"skipped_by_vllm": True}, False),
        ({"decode_context_parallel_size": 2}, False),
        ({"prefill_context_parallel_size": 2}, False),
        ({"kv_sharing_fast_prefill": True}, False),
        ({"is_hybrid": True}, False),
        ({"is_attention_free": True}, False),
    ],
    ids=str,
)
def test_when_it_is_to_find(change: dict[str, Any], wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1, "kv_sharing_fast_prefill": False}
    facts |= {"cuda_alike": True, "skipped_by_vllm": False, "is_hybrid": False, "is_attention_free": False} | change
    monkeypatch.setattr(padding, "envs", SimpleNamespace(VLLM_MOE_SKIP_PADDING=facts["skipped_by_vllm"]))
    monkeypatch.setattr(padding, "current_platform", SimpleNamespace(is_cuda_alike=lambda: facts["cuda_alike"]))
    parts = ("model_config", "parallel_config", "cache_config")
    config: Any = SimpleNamespace(**dict.fromkeys(parts, SimpleNamespace(**facts)))
    assert padding.is_to_find(config) is wanted
