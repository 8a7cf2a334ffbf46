# SPDX-License-Identifier: Apache-2.0
"""Sums of known values before anything is served: what passes, and what is said where a GPU sees stale memory."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from llm_quant_rocm.comm import proof
from llm_quant_rocm.comm.policy import Algorithm
from llm_quant_rocm.comm.quick_reduce import QuickReduce
from llm_quant_rocm.comm.setup_errors import NoPeerMemory
from llm_quant_rocm.formats.wire import Codec
from llm_quant_rocm.hardware import amd
from llm_quant_rocm.reference.quick_reduce import one_shot
from tests.amd import tritons
from tests.amd.isolated import call
from tests.amd.operators.quick_reduce import SMALL
from tests.amd.operators.reduce_norm_quant import Ranks
from tests.amd.virtual_gpu import activate
from tests.inputs import engine_defaults

WORLD, RANK = 3, 1


class Memory:
    """Adds up what the other ranks would send too, by flags or without; what is wrong is a test's."""

    def __init__(self, stale: int | None = None, lost: bool = False) -> None:
        self.device, self.max_spins = torch.device("cpu"), 7
        self.mailbox = SimpleNamespace(world=WORLD, rank=RANK)
        self.sums: list[torch.Tensor] = []
        self.rows: list[int] = []
        self._stale, self._lost = stale, lost
        self._drawn = torch.Generator("cpu").manual_seed(0)

    def add(self, x: torch.Tensor, codec: Codec) -> torch.Tensor:
        """The sum, or in the call `stale` that of the call before the last one."""
        assert codec.name == "FP"
        every = torch.randn((WORLD, *x.shape), generator=self._drawn, device="cpu", dtype=torch.float32).bfloat16()
        assert torch.equal(x, every[RANK])
        self.rows.append(len(x))
        self.sums.append(one_shot(list(every), codec))
        return self.sums[-3 if len(self.sums) == self._stale else -1]

    def all_reduce(self, x: torch.Tensor, codec: Codec, algorithm: Algorithm) -> torch.Tensor:
        assert algorithm is Algorithm.ONE_SHOT
        return self.add(x, codec)

    def check(self) -> None:
        if self._lost:
            raise RuntimeError("rank 2 of the group did not arrive\nin call 1")


def prove(memory: Any) -> None:
    def rows(x: torch.Tensor, residual: Any, norm: Any, target: Any, out: Any, box: Any, *rest: Any) -> None:
        codec, _, most = rest
        assert residual is None and box is memory.mailbox and most == memory.max_spins
        out.residual.copy_(memory.add(x, codec))

    with patch.object(proof.norms, "one_shot", rows), patch.object(proof, "detect", lambda device: amd("gfx942")):
        proof.prove(memory)


def test_right_sums_pass() -> None:
    memory = Memory()
    with engine_defaults():  # a model may be being built
        prove(memory)
    assert memory.rows == [256] * 6 + [64] * 6


@pytest.mark.parametrize("call", [3, 6, 9, 12])
def test_what_an_earlier_call_left_is_no_sum(call: int) -> None:
    with pytest.raises(NoPeerMemory, match=f"^a sum of known values is wrong, in call {call} of 12$"):
        prove(Memory(stale=call))


def test_a_rank_that_is_not_heard() -> None:
    with pytest.raises(NoPeerMemory, match="^rank 2 of the group did not arrive$"):
        prove(Memory(lost=True))


def on_the_virtual_gpu() -> None:
    """Two ranks' kernels pass."""
    activate("gfx942")
    with patch.multiple(proof, _ROWS=4, _FEW_ROWS=2):
        ranks = Ranks(2)
        members = [
            QuickReduce(box, region, 1_000_000, SMALL) for box, region in zip(ranks.boxes, ranks.regions, strict=True)
        ]
        with ranks.gpu.together():
            sums = []
            for rank, member in enumerate(members):
                ranks.gpu.stream = rank
                sums.append(proof.sums_of_known_values(member))
        for member, known in zip(members, sums, strict=True):
            proof.compare(member, known)
        kernels = [launch.kernel for launch in ranks.gpu.launches]
        assert {name: kernels.count(name) for name in kernels} == {
            "one_shot_kernel": 12, "reduce_norm_lamport_kernel": 12
        }  # fmt: skip
        sums[1][4][1][0] += 1
        with pytest.raises(NoPeerMemory, match="in call 5 of 12"):
            proof.compare(members[1], sums[1])


def test_on_the_virtual_gpu() -> None:
    call(tritons.VERSIONS[-1], on_the_virtual_gpu)
