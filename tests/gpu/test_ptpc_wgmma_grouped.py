# SPDX-License-Identifier: Apache-2.0
"""The grouped FP8 product on Hopper: every tile, edge and dtype, exactly; and experts under every configuration."""

from dataclasses import replace

import pytest
import torch

from llm_quant_rocm import hardware, reference
from llm_quant_rocm.formats import fp8
from tests.inputs import assert_same, integer_product, product64
from tests.moe_inputs import EXPERTS, experts, for_kernels, moe64, relative_error

CUDA = torch.device("cuda")
HOPPER = torch.cuda.is_available() and hardware.detect(CUDA).arch == "sm_90"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]

TILES = [(m, n) for m in (8, 16, 32, 64, 128) for n in (128, 256)]
# Experts, tokens, N and K: one tile and many, more tiles than multiprocessors, edges of N and of K.
SHAPES = [(1, 3, 16, 16), (3, 40, 144, 400), (5, 200, 528, 272), (16, 30, 2048, 768), (9, 700, 336, 1040)]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("config", TILES, ids=str)
def test_exact_on_integers(config: tuple[int, int], shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    from llm_quant_rocm.kernels.ptpc_wgmma_grouped import Config, grouped_gemm
    from llm_quant_rocm.kernels.routing import schedule

    count, tokens, n, k = shape
    device = hardware.detect(CUDA)
    x, x_scale, w, w_scale, _ = (tensor.cuda() for tensor in integer_product(tokens, count * n, k, device.fp8_dtype))
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(-1, count, (tokens, 2), generator=generator, dtype=torch.int32).cuda()
    weights = 2.0 ** torch.randint(-2, 3, (tokens, 2), generator=generator).float().cuda()
    routing = schedule(ids, None, count, config[0], device, weights)
    used = routing.row_map >= 0
    slot = routing.row_map.clamp_min(0).long()
    rows, scales = x.view(torch.uint8)[slot // 2].view(x.dtype), x_scale[slot // 2]
    grouped = w.view(count, n, k), w_scale.view(count, n, 1)
    for weight in (None, routing.row_weight):
        found = grouped_gemm(rows, scales, *grouped, routing, weight, None, dtype, device, Config(*config))
        whole = product64(x, x_scale, w, w_scale, None).view(tokens, count, n).cuda()
        expert = ids.flatten()[slot].clamp_min(0).long()
        expected = whole[slot // 2, expert]
        if weight is not None:
            expected = expected * weight.double()[:, None]
        assert_same(found[used], expected[used].float().to(dtype))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("w2", [128, 256])
@pytest.mark.parametrize("w13", [128, 256])
@pytest.mark.parametrize("block_m", [8, 32, 128])
def test_experts(block_m: int, w13: int, w2: int, activation: str) -> None:
    """Under every pair of tiles, with the activation in the epilogue and apart, the same bits each time."""
    from llm_quant_rocm.kernels.pair_config import PairConfig
    from llm_quant_rocm.kernels.ptpc_moe_hopper import ptpc_moe
    from llm_quant_rocm.kernels.ptpc_wgmma_grouped import Config

    given = experts(90, 5, 3, 272, 144, seed=block_m)
    expected = moe64(given, activation)
    tokens, weights = for_kernels({name: tensor.cuda() for name, tensor in given.items()})
    config = PairConfig(Config(block_m, w13), Config(block_m, w2))
    settings = (activation, fp8.for_device(CUDA), hardware.detect(CUDA), config)
    found = ptpc_moe(tokens, *weights, *settings)
    assert relative_error(found.cpu(), expected) < 0.02
    for _ in range(5):
        assert torch.equal(found, ptpc_moe(tokens, *weights, *settings))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("here", [[], [1, 2, 4], [0, 1, 2, 3, 4, 5]], ids=["none", "some", "all"])
def test_absent_experts_and_padding(here: list[int]) -> None:
    """Nothing is read of rows that no slot has, and no tile at all where no expert is here."""
    from llm_quant_rocm.kernels.pair_config import PairConfig
    from llm_quant_rocm.kernels.ptpc_moe_hopper import ptpc_moe
    from llm_quant_rocm.kernels.ptpc_wgmma_grouped import Config

    given = experts(300, 6, 3, 272, 144)
    expert_map = torch.full((6,), -1, dtype=torch.int32)
    expert_map[here] = torch.arange(len(here), dtype=torch.int32)
    padding = torch.arange(300, dtype=torch.int32) % 7 - 3
    weights = [given[name][here or [0]] for name in EXPERTS]
    ids = torch.where(padding[:, None] < 0, -1, expert_map[given["topk_ids"].long()])
    expected = reference.ptpc_moe(given["x"], *weights, given["topk_weights"], ids, "silu", fp8.OCP)
    given |= {"expert_map": expert_map, "padding": padding} | dict(zip(EXPERTS, weights, strict=True))
    tokens, weights = for_kernels({name: tensor.cuda() for name, tensor in given.items()})
    config = PairConfig(Config(64, 256), Config(64, 128))
    settings = ("silu", fp8.for_device(CUDA), hardware.detect(CUDA), config)
    found = ptpc_moe(tokens, *weights, *settings).cpu()
    assert (found[(ids < 0).all(dim=1)] == 0).all()
    assert not here or relative_error(found, expected.double()) < 0.02


def test_scales_and_schedule_are_those_of_this_call() -> None:
    """Kernels begin before the ones that they depend on end, in the memory of the call before: what does not wait finds
    that call's scales there, or its tiles, which here are of all experts and of one in turns."""
    from llm_quant_rocm.kernels.pair_config import PairConfig
    from llm_quant_rocm.kernels.ptpc_moe_hopper import ptpc_moe
    from llm_quant_rocm.kernels.ptpc_wgmma_grouped import Config

    given = experts(4000, 16, 4, 1024, 512)
    tokens, weights = for_kernels({name: tensor.cuda() for name, tensor in given.items()})
    x, ids = tokens.x, tokens.ids
    apart, config = replace(hardware.detect(CUDA), pdl=False), PairConfig(Config(128, 256), Config(128, 128))

    def run(x: torch.Tensor, ids: torch.Tensor, device: hardware.Hardware) -> torch.Tensor:
        return ptpc_moe(tokens._replace(x=x, ids=ids), *weights, "silu", fp8.for_device(CUDA), device, config)

    inputs = [(x, ids), (x * 64.0, ids), (x, torch.full_like(ids, 5)), (x[:100], ids[:100])]
    expected = [run(*one, apart) for one in inputs]
    for _ in range(20):
        for one, result in zip(inputs, expected, strict=True):
            assert torch.equal(run(*one, hardware.detect(CUDA)), result)


@pytest.mark.parametrize(
    ("hidden", "inner", "dtype"),
    [(264, 144, torch.bfloat16), (272, 136, torch.float16), (272, 144, torch.float32)],
    ids=str,
)
def test_what_the_other_kernel_serves(hidden: int, inner: int, dtype: torch.dtype) -> None:
    from llm_quant_rocm import ops

    arguments = experts(50, 5, 3, hidden, inner, dtype)
    found = ops.ptpc_moe(**{name: tensor.cuda() for name, tensor in arguments.items()})
    assert relative_error(found.cpu(), moe64(arguments)) < 0.02
