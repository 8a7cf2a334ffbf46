# SPDX-License-Identifier: Apache-2.0
"""Routed experts in FP8 on Hopper: which kernel multiplies, of which files, and what goes back to the other one."""

from dataclasses import asdict
from importlib.util import find_spec

import pytest
import torch

if not find_spec("triton"):
    pytest.skip("needs Triton", allow_module_level=True)

from llm_quant_rocm import hardware
from llm_quant_rocm.formats import fp8
from llm_quant_rocm.kernels import ptpc_moe, ptpc_moe_hopper
from llm_quant_rocm.kernels.pair_config import PairConfig
from llm_quant_rocm.kernels.ptpc_moe import MoeConfig
from llm_quant_rocm.kernels.ptpc_wgmma_grouped import Config
from tests.moe_inputs import experts, for_kernels

HOPPER = hardware.nvidia(9, 0)
PAIR = PairConfig(Config(128, 256), Config(128, 256))


@pytest.mark.parametrize(
    ("slots", "shape", "w13", "w2"),
    [
        # Qwen3-30B-A3B with one token, eight and 256, Mixtral with one, 32 and 128.
        (8, (128, 2048, 768), MoeConfig(16, 128, 256, 5, 8), MoeConfig(16, 128, 128, 3, 8)),
        (64, (128, 2048, 768), MoeConfig(16, 128, 256, 3, 8), MoeConfig(16, 128, 128, 3, 8)),
        (2048, (128, 2048, 768), MoeConfig(32, 128, 128, 3, 4), MoeConfig(32, 128, 128, 3, 4)),
        (2, (8, 4096, 14336), MoeConfig(16, 128, 256, 3, 8), MoeConfig(16, 128, 256, 5, 8)),
        (64, (8, 4096, 14336), MoeConfig(16, 128, 256, 3, 8), MoeConfig(16, 128, 256, 3, 8)),
        (256, (8, 4096, 14336), MoeConfig(64, 128, 128, 3, 4), MoeConfig(64, 128, 256, 4, 4)),
    ],
)
def test_few_rows_are_the_kernel_of_all_gpus(
    slots: int, shape: tuple[int, int, int], w13: MoeConfig, w2: MoeConfig
) -> None:
    assert ptpc_moe_hopper.default_config(HOPPER, slots, *shape) == PairConfig(w13, w2)


def test_many_rows_are_the_kernel_for_hopper() -> None:
    assert isinstance(ptpc_moe_hopper.default_config(HOPPER, 60 * 8, 8, 4096, 4096).w13, MoeConfig)
    assert ptpc_moe_hopper.default_config(HOPPER, 60 * 8 + 1, 8, 4096, 4096) == PAIR


@pytest.mark.parametrize(
    "config",
    [
        PairConfig(Config(64, 256), Config(64, 128)),
        PairConfig(MoeConfig(16, 128, 256, 3, 8), MoeConfig(16, 64, 256, 3, 4)),
    ],
)
def test_a_file_says_which_kernel(config: PairConfig) -> None:
    assert ptpc_moe_hopper.config_of(asdict(config)) == config


def test_the_epilogue_has_the_activation_where_a_consumer_has_gate_and_up() -> None:
    assert Config(64, 256).fuses and not Config(64, 128).fuses


def test_where_tokens_are_their_own_the_epilogue_has_no_activation() -> None:
    """Its bits are others than those of the kernel behind."""
    shape = (HOPPER, 8, 64, 64)
    few = PairConfig(MoeConfig(16, 128, 128, 3, 4), MoeConfig(16, 64, 256, 5, 4))
    assert ptpc_moe_hopper.batch_invariant(few, *shape) == few
    found = ptpc_moe_hopper.batch_invariant(PairConfig(Config(128, 256), Config(128, 256)), *shape)
    assert found == PairConfig(Config(128, 128), Config(128, 256))


def off_by_a_byte(weight: torch.Tensor) -> torch.Tensor:
    storage = torch.empty(weight.numel() + 1, dtype=torch.uint8)
    return storage[1:].view(weight.dtype).view(weight.shape).copy_(weight)


@pytest.mark.parametrize(
    ("hidden", "inner", "dtype", "moved"),
    [
        (64, 32, torch.float32, False),
        (72, 32, torch.bfloat16, False),
        (64, 40, torch.float16, False),
        (64, 32, torch.bfloat16, True),
    ],
    ids=["fp32", "hidden", "inner", "weights that do not begin at lines of 16 bytes"],
)
def test_what_bulk_copies_cannot_read_goes_to_the_other_kernel(
    hidden: int, inner: int, dtype: torch.dtype, moved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []
    monkeypatch.setattr(ptpc_moe, "ptpc_moe", lambda *arguments: taken.append(arguments[-1]))
    given = experts(5, 4, 2, hidden, inner, dtype)
    if moved:
        given["w2"] = off_by_a_byte(given["w2"])
    tokens, weights = for_kernels(given)
    ptpc_moe_hopper.ptpc_moe(tokens, *weights, "silu", fp8.OCP, HOPPER, PAIR)
    assert taken == [ptpc_moe.default_config(HOPPER, 10, 4, hidden, inner)]
