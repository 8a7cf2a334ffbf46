# SPDX-License-Identifier: Apache-2.0
"""The codecs of the quantized all-reduce in AMD's machine code: the bytes and the numbers of formats.wire."""

import pytest
import torch

from llm_quant_rocm.formats import wire
from llm_quant_rocm.formats.wire import CODECS, DTYPES, GROUP, Codec
from llm_quant_rocm.kernels.wire_units import constants
from tests.amd import kernels
from tests.amd.budget import LDS
from tests.amd.launcher import run_on
from tests.inputs import assert_same, nasty_rows

GROUPS = 16
# Both types on every architecture, and every codec with both.
CASES = [
    pytest.param(arch, codec, DTYPES[(i + j) % 2], id=f"{arch}-{codec.name}-{str(DTYPES[(i + j) % 2])[6:]}")
    for i, arch in enumerate(LDS)
    for j, codec in enumerate(CODECS.values())
]


def groups(dtype: torch.dtype) -> torch.Tensor:
    """Nasty groups, groups of every size, groups full of ties, and groups of neighbouring and of distant bit patterns,
    which together are all values of the type."""
    generator = torch.Generator().manual_seed(0)
    every_value = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    sizes = torch.randint(-140, 127, (1024, 1), generator=generator).double().exp2()
    random = torch.randn(1024, GROUP, generator=generator, dtype=torch.float64) * sizes
    limit = torch.finfo(dtype).max
    ties = torch.randint(-96, 97, (512 * GROUP,), generator=generator) / 8
    return torch.cat(
        [
            nasty_rows(256, dtype).flatten(),
            random.clamp(-limit, limit).to(dtype).flatten(),
            ties.to(dtype),
            every_value,
            every_value.view(GROUP, -1).t().flatten(),
        ]
    )


@pytest.mark.parametrize(("arch", "codec", "dtype"), CASES)
def test_bytes_and_numbers(arch: str, codec: Codec, dtype: torch.dtype) -> None:
    x = groups(dtype).view(-1, GROUPS * GROUP)
    found = torch.zeros(x.shape[0], GROUPS * codec.group_bytes, dtype=torch.uint8)
    numbers = torch.zeros_like(x)
    run_on(
        arch, kernels.there_and_back, (x.shape[0],), x, found, numbers, PIECE_BYTES=found.shape[1], GROUPS=GROUPS,
        **constants(codec, dtype), num_warps=2, enable_fp_fusion=False,
    )  # fmt: skip
    expected = wire.encode(x, codec)
    wrong = (found != expected).nonzero()
    assert not len(wrong), f"{len(wrong)} bytes differ, first at {wrong[0].tolist()}"
    assert_same(numbers, wire.decode(expected, codec, dtype).to(dtype))
