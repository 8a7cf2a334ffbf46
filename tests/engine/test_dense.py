# SPDX-License-Identifier: Apache-2.0
"""A dense checkpoint under `--quantization ptpc_fp8`, against transformers and against vLLM's own fp8_per_channel."""

from pathlib import Path

import engines
import fake_quantized
import pytest
import torch
from conftest import succeed


def test_every_linear_layer_is_quantized_and_lm_head_is_not(dense: engines.Result) -> None:
    weights = dense.weights[0]
    codes = {name for name, tensor in weights.items() if tensor.dtype == torch.uint8}
    leaves = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    assert codes == {f"model.layers.{layer}.{leaf}.weight" for layer in range(2) for leaf in leaves}
    for name in codes:
        assert weights[f"{name}_scale"].dtype == torch.float32
        assert weights[f"{name}_scale"].shape == (weights[name].shape[0], 1)
    assert "quantizing 8 linear layers" in dense.log
    assert "lm_head" in dense.log


def test_logprobs_are_those_of_the_quantized_checkpoint(dense: engines.Result, dense_checkpoint: Path) -> None:
    correlation, error = fake_quantized.explains(dense.logprobs, dense_checkpoint, dense.prompt_token_ids)
    assert correlation > 0.6
    assert error < 0.85


@pytest.fixture(scope="module")
def upstream(folder: Path, dense_checkpoint: Path) -> engines.Result:
    return succeed(engines.run(folder / "dense-upstream", dense_checkpoint, quantization="fp8_per_channel"))


def test_bytes_and_scales_are_those_of_fp8_per_channel(dense: engines.Result, upstream: engines.Result) -> None:
    ours, theirs = dense.weights[0], upstream.weights[0]
    compared = 0
    for name, scale in ours.items():
        if not name.endswith("weight_scale"):
            continue
        weight = name.removesuffix("_scale")
        assert torch.equal(scale, theirs[name]), name
        assert torch.equal(ours[weight], theirs[weight].t()), weight
        compared += 1
    assert compared == 8


def test_logprobs_are_close_to_those_of_fp8_per_channel(dense: engines.Result, upstream: engines.Result) -> None:
    # The same bytes and the same roundings between layers; only the order of sums differs.
    assert (dense.logprobs - upstream.logprobs).abs().mean() < 0.08
