# SPDX-License-Identifier: Apache-2.0
"""Routed experts in FP8 on AMD GPUs: tiles of few slots, which share their weights among all compute units."""

from importlib.util import find_spec

import pytest

if not find_spec("triton"):
    pytest.skip("needs Triton", allow_module_level=True)

from llm_quant_rocm import hardware
from llm_quant_rocm.kernels.ptpc_moe import MoeConfig, batch_invariant, default_config
from llm_quant_rocm.kernels.sizes import cdiv
from llm_quant_rocm.tune.shapes import WELL_KNOWN_EXPERTS

WHOLE = MoeConfig(16, 128, 128, 2, 4)


@pytest.mark.parametrize(
    ("model", "tokens", "w13", "w2"),
    [
        ("qwen3-30b-a3b", 1, MoeConfig(16, 32, 512, 2, 2), MoeConfig(16, 32, 256, 2, 2)),
        ("qwen3-30b-a3b", 2, MoeConfig(16, 64, 256, 2, 4), MoeConfig(16, 64, 256, 2, 4)),
        ("qwen3-30b-a3b", 4, WHOLE, WHOLE),
        ("deepseek-v3/8", 4, MoeConfig(16, 32, 512, 2, 2), WHOLE),
        ("deepseek-v3/8", 8, MoeConfig(16, 64, 256, 2, 4), WHOLE),
        ("mixtral-8x7b", 1, WHOLE, MoeConfig(16, 32, 512, 2, 2)),
    ],
)
def test_few_tokens_on_an_mi300x(model: str, tokens: int, w13: MoeConfig, w2: MoeConfig) -> None:
    experts, topk, hidden, inner = WELL_KNOWN_EXPERTS[model]
    found = default_config(hardware.amd("gfx942"), tokens * topk, experts, hidden, inner)
    assert (found.w13, found.w2) == (w13, w2)


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx950"])
def test_tiles_are_narrower_only_where_units_are_idle(arch: str) -> None:
    device = hardware.amd(arch)
    widest = 128 if device.fp8_units else 64
    for experts, topk, hidden, inner in WELL_KNOWN_EXPERTS.values():
        for tokens in range(1, 65):
            pair = default_config(device, tokens * topk, experts, hidden, inner)
            for config, n, k in ((pair.w13, 2 * inner, hidden), (pair.w2, hidden, inner)):
                chosen = min(tokens * topk, experts)
                assert config.block_n == widest or chosen * cdiv(n, 2 * config.block_n) < device.units
                assert config.block_n == 32 or chosen * cdiv(n, config.block_n) >= device.units
                assert k % config.block_k == 0
                assert config.block_n * config.block_k <= widest * 128, "more bytes than a whole tile's step"


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx950"])
def test_where_tokens_are_their_own_one_configuration_serves_any_number(arch: str) -> None:
    device = hardware.amd(arch)
    shape = (128, 2048, 768)
    configs = [default_config(device, slots, *shape) for slots in (8, 800, 4000, 40000)]
    assert len(set(configs)) > 1
    assert len({batch_invariant(config, device, *shape) for config in configs}) == 1
