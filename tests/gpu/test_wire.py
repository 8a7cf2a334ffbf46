# SPDX-License-Identifier: Apache-2.0
"""The all-reduce's codecs in torch on a GPU, and the process group of several: the bytes and bits of the CPU."""

import pytest
import torch

from llm_quant_rocm.comm.process_group import all_reduce
from llm_quant_rocm.formats import wire
from llm_quant_rocm.formats.wire import CODECS, Codec
from llm_quant_rocm.reference import quick_reduce
from tests.comm.processes import run_ranks
from tests.inputs import assert_same, nasty_rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a GPU")]


@pytest.mark.parametrize("dtype", wire.DTYPES, ids=["bf16", "fp16"])
@pytest.mark.parametrize("codec", CODECS.values(), ids=list(CODECS))
def test_bytes_are_those_of_the_cpu(codec: Codec, dtype: torch.dtype) -> None:
    every_value = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    x = torch.cat([nasty_rows(256, dtype).flatten(), every_value, every_value.view(256, 256).t().flatten()])
    sent = wire.encode(x, codec)
    assert torch.equal(wire.encode(x.cuda(), codec).cpu(), sent)
    assert_same(wire.decode(sent.cuda(), codec, dtype), wire.decode(sent, codec, dtype))


def compare_with_reference(rank: int, world: int) -> None:
    torch.cuda.set_device(rank)
    for codec in CODECS.values():
        for count in (1, 1000, 100_000):
            inputs = [torch.linspace(-3, 3 + other, count).bfloat16() for other in range(world)]
            assert_same(all_reduce(inputs[rank].cuda(), codec), quick_reduce.two_shot(inputs, codec))


def test_process_group_of_gpus() -> None:
    world = min(torch.cuda.device_count(), 8)
    if world < 2:
        pytest.skip("needs two GPUs")
    run_ranks(world, compare_with_reference, world, backend="nccl")
