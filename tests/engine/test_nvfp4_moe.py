# SPDX-License-Identifier: Apache-2.0
"""Mixture-of-experts NVFP4 checkpoints without a flag, against their own values in BF16."""

from pathlib import Path

import engines
import nvfp4_checkpoints
import pytest
import torch
from conftest import succeed

EXPERTS = "model.layers.1.mlp.experts"
IGNORE = ("lm_head", "mlp.gate")


@pytest.fixture(scope="module")
def values(folder: Path, nvfp4_moe: nvfp4_checkpoints.Quantized) -> engines.Result:
    return succeed(engines.run(folder / "nvfp4-moe-values-run", nvfp4_moe.write_values(folder / "nvfp4-moe-values")))


@pytest.fixture(scope="module")
def modelopt(folder: Path, nvfp4_moe: nvfp4_checkpoints.Quantized) -> Path:
    """ModelOpt's layout and its older configuration file."""
    return nvfp4_moe.write_modelopt(folder / "nvfp4-moe", ignore=IGNORE, legacy=True)


@pytest.fixture(scope="module")
def served(folder: Path, modelopt: Path) -> engines.Result:
    return succeed(engines.run(folder / "nvfp4-moe-run", modelopt))


def test_modelopt_is_exact(served: engines.Result, values: engines.Result) -> None:
    # Within experts vLLM's kernel for BF16 on the CPU rounds at other places than the operator does.
    assert (served.logprobs - values.logprobs).abs().mean() < 0.02
    assert "6 linear layers" in served.log
    assert f"1 mixture-of-experts layers ({EXPERTS})" in served.log
    assert "2 layers left to vLLM (model.layers.1.mlp.gate, lm_head)" in served.log


def test_every_expert_keeps_the_scales_of_gate_and_up(
    served: engines.Result, nvfp4_moe: nvfp4_checkpoints.Quantized
) -> None:
    weights = {name.rpartition(".")[2]: tensor for name, tensor in served.weights[0].items() if EXPERTS in name}
    assert weights["w13_weight"].shape == (8, 192, 64)
    for expert in range(8):
        gate, up, down = (nvfp4_moe.layers[f"{EXPERTS}.{expert}.{name}_proj"] for name in ("gate", "up", "down"))
        assert gate.divisor != up.divisor
        for stem, shards in (("w13", (gate, up)), ("w2", (down,))):
            assert torch.equal(weights[f"{stem}_weight"][expert], torch.cat([layer.packed for layer in shards]))
            scales = torch.cat([layer.scale.view(torch.uint8) for layer in shards])
            assert torch.equal(weights[f"{stem}_weight_scale"][expert], scales)
            rows = [layer.divisor.reciprocal().expand(layer.packed.shape[0]) for layer in shards]
            assert torch.equal(weights[f"{stem}_weight_global_scale"][expert], torch.cat(rows))


def test_compressed_tensors_on_two_ranks(
    folder: Path, nvfp4_moe: nvfp4_checkpoints.Quantized, served: engines.Result
) -> None:
    checkpoint = nvfp4_moe.write_compressed_tensors(folder / "nvfp4-moe-ct", activations=True, ignore=IGNORE)
    result = succeed(engines.run(folder / "nvfp4-moe-ct-run", checkpoint, tensor_parallel_size=2))
    name = f"{EXPERTS}.routed_experts.w2_weight"
    assert torch.equal(torch.cat([rank[name] for rank in result.weights], 2), served.weights[0][name])
    # The ranks' sums are rounded before they are added, which may flip an expert's choice.
    assert (result.logprobs - served.logprobs).abs().mean() < 0.1


def test_experts_distributed_whole(folder: Path, modelopt: Path, served: engines.Result) -> None:
    result = succeed(
        engines.run(folder / "nvfp4-moe-ep-run", modelopt, tensor_parallel_size=2, enable_expert_parallel=True)
    )
    for tensor in ("w13_weight", "w13_weight_scale", "w13_weight_global_scale", "w2_weight_global_scale"):
        name = f"{EXPERTS}.routed_experts.{tensor}"
        assert torch.equal(torch.cat([rank[name] for rank in result.weights]), served.weights[0][name])
    assert (result.logprobs - served.logprobs).abs().mean() < 0.1


def test_compiled(folder: Path, modelopt: Path, served: engines.Result) -> None:
    """Without --enforce-eager: torch.compile traces the model, its NVFP4 layers and experts included."""
    variables = {"VLLM_CACHE_ROOT": str(folder / "cache"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    result = succeed(engines.run(folder / "nvfp4-moe-compiled", modelopt, variables, enforce_eager=False))
    assert "AOT compiled function" in result.log
    # Compiled norms round elsewhere, which may flip an expert's choice.
    assert (result.logprobs - served.logprobs).abs().mean() < 0.05


def test_nvfp4_activations(folder: Path, modelopt: Path, served: engines.Result) -> None:
    """tests/ops/test_nvfp4_moe.py has the numbers."""
    variables = {"LLM_QUANT_ROCM_NVFP4_ACTIVATIONS": "nvfp4"}
    result = succeed(engines.run(folder / "nvfp4-moe-a4", modelopt, variables))
    assert "activations: nvfp4" in result.log
    for stem in ("w13", "w2"):
        scales = result.weights[0][f"{EXPERTS}.routed_experts.{stem}_input_global_scale"]
        assert torch.equal(scales, torch.full((8,), nvfp4_checkpoints.INPUT_DIVISOR))
    assert 0.05 < (result.logprobs - served.logprobs).abs().mean() < 1
