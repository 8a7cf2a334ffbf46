# SPDX-License-Identifier: Apache-2.0
"""Two ranks hold the bytes and scales of one: of linear layers, of experts, and of experts distributed whole."""

import subprocess
from pathlib import Path

import engines
import fake_quantized
import forks
import ports
import pytest
import torch
from conftest import succeed

EXPERTS = "model.layers.1.mlp.experts.routed_experts"


@pytest.fixture(scope="module")
def two_ranks(folder: Path, moe_checkpoint: Path) -> engines.Result:
    return succeed(
        engines.run(
            folder / "moe-tp2", moe_checkpoint, quantization="ptpc_fp8", dtype="float16", tensor_parallel_size=2
        )
    )


@pytest.fixture(scope="module")
def expert_parallel(folder: Path, moe_checkpoint: Path) -> engines.Result:
    return succeed(
        engines.run(
            folder / "moe-ep2",
            moe_checkpoint,
            quantization="ptpc_fp8",
            dtype="float16",
            tensor_parallel_size=2,
            enable_expert_parallel=True,
        )
    )


def whole(shards: list[torch.Tensor], dim: int, parts: tuple[int, ...] = (1,)) -> torch.Tensor:
    """The tensor of which `shards` are the ranks' shares along `dim`; fused of parts of these relative sizes."""
    unit = shards[0].shape[dim] // sum(parts)
    split = [shard.split([part * unit for part in parts], dim) for shard in shards]
    return torch.cat([share for shares in zip(*split, strict=True) for share in shares], dim)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("model.layers.0.self_attn.qkv_proj.weight", (2, 1, 1)),
        ("model.layers.0.mlp.gate_up_proj.weight", (1, 1)),
    ],
)
def test_layers_with_sharded_rows(
    moe: engines.Result, two_ranks: engines.Result, name: str, parts: tuple[int, ...]
) -> None:
    for tensor in (name, f"{name}_scale"):
        assert torch.equal(whole([rank[tensor] for rank in two_ranks.weights], 0, parts), moe.weights[0][tensor])


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.o_proj.weight", "model.layers.0.mlp.down_proj.weight"])
def test_layers_with_sharded_inputs_have_the_scales_of_whole_rows(
    moe: engines.Result, two_ranks: engines.Result, name: str
) -> None:
    for rank in two_ranks.weights:
        assert torch.equal(rank[f"{name}_scale"], moe.weights[0][f"{name}_scale"])
    assert torch.equal(whole([rank[name] for rank in two_ranks.weights], 1), moe.weights[0][name])


def test_sharded_experts(moe: engines.Result, two_ranks: engines.Result) -> None:
    one, ranks = moe.weights[0], two_ranks.weights
    for tensor in ("w13_weight", "w13_weight_scale"):
        shards = [rank[f"{EXPERTS}.{tensor}"] for rank in ranks]
        assert torch.equal(whole(shards, 1, (1, 1)), one[f"{EXPERTS}.{tensor}"])
    for rank in ranks:
        assert torch.equal(rank[f"{EXPERTS}.w2_weight_scale"], one[f"{EXPERTS}.w2_weight_scale"])
    assert torch.equal(whole([rank[f"{EXPERTS}.w2_weight"] for rank in ranks], 2), one[f"{EXPERTS}.w2_weight"])


def test_ranks_that_load_in_opposite_orders(moe: engines.Result, moe_checkpoint: Path, tmp_path: Path) -> None:
    """As they may where threads read the files (enable_multithread_load)."""
    files = [tmp_path / f"{rank}.pt" for rank in range(2)]
    program, port = str(Path(__file__).with_name("order_process.py")), str(ports.free())
    environment = engines.environment(VLLM_DIST_IDENT=port)  # which vLLM's executor gives its workers
    processes = [
        subprocess.Popen([forks.python(), program, str(moe_checkpoint), str(rank), port, str(file)], env=environment)
        for rank, file in enumerate(files)
    ]
    assert [process.wait(engines.LIMIT) for process in processes] == [0, 0]
    for file in files:
        scales = torch.load(file)
        for name in ("self_attn.o_proj.weight_scale", "mlp.down_proj.weight_scale"):
            assert torch.equal(scales[f"model.layers.0.{name}"], moe.weights[0][f"model.layers.0.{name}"])
        assert torch.equal(scales[f"{EXPERTS}.w2_weight_scale"], moe.weights[0][f"{EXPERTS}.w2_weight_scale"])


def test_experts_distributed_whole(moe: engines.Result, expert_parallel: engines.Result) -> None:
    for tensor in ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale"):
        ranks = [rank[f"{EXPERTS}.{tensor}"] for rank in expert_parallel.weights]
        assert torch.equal(whole(ranks, 0), moe.weights[0][f"{EXPERTS}.{tensor}"])


@pytest.mark.parametrize("run", ["two_ranks", "expert_parallel"])
def test_logprobs(moe: engines.Result, moe_checkpoint: Path, run: str, request: pytest.FixtureRequest) -> None:
    result = request.getfixturevalue(run)
    # Activations of a layer with sharded inputs have one scale a rank, so logprobs are close, not equal.
    assert (result.logprobs - moe.logprobs).abs().mean() < 0.2
    correlation, error = fake_quantized.explains(result.logprobs, moe_checkpoint, result.prompt_token_ids)
    assert correlation > 0.6
    assert error < 0.85
