# SPDX-License-Identifier: Apache-2.0
"""Whether GPUs see what others write to their memory: sums of known values, on AMD before anything is served.

Each GPU caches what is written to it over a link, and the instructions by which kernels order that were read about, but
have run on NVIDIA's GPUs alone. Where one does not do what is documented, a kernel waits until its ranks count as lost,
or adds up what an earlier call left, and nobody hears of it. So ranks add up what all of them know, some calls in a row
in which all memory is used again, and a group whose sums are wrong is served by the engine.
"""

from typing import TYPE_CHECKING

import torch

from llm_quant_rocm.comm.policy import Algorithm
from llm_quant_rocm.comm.setup_errors import NoPeerMemory, first_line
from llm_quant_rocm.formats.norm_quant import Norm, Target
from llm_quant_rocm.formats.wire import CODECS
from llm_quant_rocm.hardware import detect
from llm_quant_rocm.kernels import reduce_norm_quant as norms
from llm_quant_rocm.reference.quick_reduce import one_shot

if TYPE_CHECKING:
    from llm_quant_rocm.comm.quick_reduce import QuickReduce

# That a kernel waits for ranks that have just met, and may have to compile it first.
SECONDS = 60.0
# Memory is used again in the call after the next one.
CALLS = 6
# Tiles for a good part of a GPU, and rows that are long and few enough to travel without flags.
_ROWS, _COLUMNS = 256, 1024
_FEW_ROWS = 64


def prove(memory: "QuickReduce") -> None:
    """Returns where sums over all ranks of `memory`, which all call at the same time, are right.

    Raises:
        NoPeerMemory: they are not, or a rank was not heard.
    """
    compare(memory, sums_of_known_values(memory))


def sums_of_known_values(memory: "QuickReduce") -> list[tuple[list[torch.Tensor], torch.Tensor]]:
    """Every rank's values, on the CPU, and the sums that kernels make of them: the host awaits none."""
    device, box = memory.device, memory.mailbox
    generator = torch.Generator("cpu").manual_seed(0)

    def draw(rows: int) -> list[torch.Tensor]:
        # An engine that builds a model has other defaults of device and type.
        shape = box.world, rows, _COLUMNS
        return list(torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32).bfloat16())

    def by_flags(x: torch.Tensor) -> torch.Tensor:
        return memory.all_reduce(x, CODECS["FP"], Algorithm.ONE_SHOT)

    norm, target = Norm(torch.ones(_COLUMNS, dtype=torch.bfloat16, device=device)), Target()

    def without_flags(x: torch.Tensor) -> torch.Tensor:
        out, config = target.empty(x), norms.default_config(len(x), _COLUMNS, CODECS["FP"], detect(device))
        norms.one_shot(x, None, norm, target, out, box, CODECS["FP"], config, memory.max_spins)
        return out.residual

    calls = [(by_flags, draw(_ROWS)) for _ in range(CALLS)] + [(without_flags, draw(_FEW_ROWS)) for _ in range(CALLS)]
    return [(values, add(values[box.rank].to(device))) for add, values in calls]


def compare(memory: "QuickReduce", sums: list[tuple[list[torch.Tensor], torch.Tensor]]) -> None:
    """Raises what `prove` raises of what `sums_of_known_values` gave."""
    found = [total.cpu() for _, total in sums]
    try:
        memory.check()
    except RuntimeError as error:
        raise NoPeerMemory(first_line(error)) from error
    for call, ((values, _), total) in enumerate(zip(sums, found, strict=True), 1):
        if not torch.equal(total, one_shot(values, CODECS["FP"])):
            raise NoPeerMemory(f"a sum of known values is wrong, in call {call} of {len(sums)}")
