# SPDX-License-Identifier: Apache-2.0
"""The kernels between GPUs as 2 to 8 ranks of a single one, each on a stream of its own: the reference's bits.

For machines of one GPU, and for numbers of ranks that no machine at hand has. What this does not show is memory of
another GPU and its order, nor time.
"""

import random
from collections.abc import Callable, Sequence

import pytest
import torch

from llm_quant_rocm import reference
from llm_quant_rocm.formats import fp8
from llm_quant_rocm.formats.norm_quant import Norm, Quantization, ScaleLayout, Target
from llm_quant_rocm.formats.wire import CODECS
from llm_quant_rocm.hardware import detect
from llm_quant_rocm.kernels import quick_reduce, reduce_norm_quant
from llm_quant_rocm.kernels.quick_reduce import CALL, STATE_WORDS, Mailbox
from llm_quant_rocm.reference import quick_reduce as all_reduce_reference
from tests.inputs import assert_same, nasty_rows, random_rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

PATIENCE = 10_000_000  # looks; ten seconds
SHOTS = ("one_shot", "two_shot")
TARGETS = {
    "norm": Target(),
    "per token": Target(Quantization.FP8_PER_TOKEN, normed=False),
    "static": Target(Quantization.FP8_STATIC),
    "NVFP4": Target(Quantization.NVFP4, normed=False),
    "NVFP4 128x4": Target(Quantization.NVFP4, layout=ScaleLayout.SWIZZLED_128X4, normed=False),
    "NVFP4 8x4": Target(Quantization.NVFP4, layout=ScaleLayout.SWIZZLED_8X4),
}


class Ranks:
    """The memory and the streams of several ranks on the current GPU.

    What waits for another rank's kernel must run beside it: calls have few programs, those that pad scales included,
    which PDL starts early, and no kernel is loaded between, for which CUDA would wait until others end.
    """

    def __init__(self, world: int, phase_bytes: int = 4 << 20, max_tiles: int = 64, lamport_bytes: int = 0) -> None:
        size = quick_reduce.region_bytes(world, phase_bytes, max_tiles, lamport_bytes)
        self.regions = [torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(world)]
        peers = torch.tensor([region.data_ptr() for region in self.regions], device="cuda")
        self.boxes = [
            Mailbox(
                peers, torch.zeros(STATE_WORDS, dtype=torch.int32, device="cuda"),
                torch.zeros(1, dtype=torch.int64, device="cuda"), rank, phase_bytes, max_tiles, lamport_bytes
            )
            for rank in range(world)
        ]  # fmt: skip
        self.streams = [torch.cuda.Stream() for _ in range(world)]
        self.calls, self.delays = 0, random.Random(world)
        torch.cuda._sleep(1)

    def together(self, calls: Sequence[Callable[[int, Mailbox], None]], ranks: int | None = None) -> None:
        """Every rank, or the first `ranks`, makes these calls one after another, late at random; done when all are."""
        torch.cuda.synchronize()
        for call in calls:
            for rank, stream in list(enumerate(self.streams))[:ranks]:
                with torch.cuda.stream(stream):
                    if self.delays.random() < 0.3:
                        torch.cuda._sleep(self.delays.randrange(1_000_000))
                    call(rank, self.boxes[rank])
        torch.cuda.synchronize()
        self.calls += len(calls)

    def check(self) -> None:
        """Every call was counted, no rank was lost, and no word is left where words are awaited."""
        for region, box in zip(self.regions, self.boxes, strict=True):
            assert box.lost() is None
            state = box.state.cpu()
            assert state[CALL.value :][:2].view(torch.int64).item() == self.calls and not state[2:].any()
            assert not region[box.lamport_at :].any()


def draw(world: int, rows: int, width: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """x of every rank: nasty rows, other ones beside each other, and random ones."""
    pool = [
        torch.cat([nasty_rows(width, dtype).roll(5 * rank + seed, 0), random_rows(4, width, dtype, 100 * seed + rank)])
        for rank in range(world)
    ]
    return [x.repeat(-(-rows // x.shape[0]), 1)[:rows].cuda() for x in pool]


@pytest.mark.parametrize(
    ("world", "codec", "dtype"),
    [(world, "FP4", torch.bfloat16) for world in range(2, 9)]
    + [
        (world, codec, (torch.bfloat16, torch.float16)[world % 2])
        for world, codec in zip(range(2, 9), ("INT8", "INT6", "FP8", "INT4", "INT3", "FP", "FP"), strict=True)
    ],
)
def test_all_reduce(world: int, codec: str, dtype: torch.dtype) -> None:
    """Ragged sizes, as one value and as tiles that take every slot more than once, with no pause between calls."""
    ranks, hardware = Ranks(world), detect(torch.device("cuda"))
    calls, outs, expected = [], [], []
    for seed, count in enumerate((1, 31, 4097, 20_003, world * 40_000)):
        # Two programs have tiles for every slot, and more than one buffer in each.
        for shot in SHOTS:
            inputs = [x.flatten()[:count] for x in draw(world, count // 64 + 1, 64, dtype, seed)]
            default = quick_reduce.default_config(hardware, world, 1 + (shot == "two_shot"))
            config = quick_reduce.Config(default.blocks, 2, default.num_warps, 2, registers=default.registers)
            outs.append([torch.empty_like(x) for x in inputs])
            expected.append(getattr(all_reduce_reference, shot)(inputs, CODECS[codec]))

            def call(rank, box, shot=shot, x=inputs, out=outs[-1], config=config):  # type: ignore[no-untyped-def]
                getattr(quick_reduce, shot)(x[rank], out[rank], box, CODECS[codec], config, PATIENCE)

            calls.append(call)
    ranks.together(calls)
    ranks.check()
    for found, whole in zip(outs, expected, strict=True):
        for out in found:
            assert_same(out, whole)


@pytest.mark.parametrize(
    ("world", "width", "target", "codec"),
    [
        (8, 8192, "per token", "FP"),
        (8, 8192, "per token", "FP4"),
        (8, 7168, "NVFP4 8x4", "INT4"),
        (7, 272, "NVFP4", "INT3"),
        (6, 12800, "NVFP4 8x4", "FP"),
        (5, 5120, "norm", "FP8"),
        (4, 2880, "static", "FP"),
        (3, 784, "NVFP4 128x4", "INT6"),
        (2, 4096, "per token", "INT8"),
        (2, 7168, "static", "FP"),
    ],
)
@pytest.mark.parametrize("lamport_bytes", [0, 1 << 18], ids=["flags", "no flags where rows are few"])
def test_fused(world: int, width: int, target: str, codec: str, lamport_bytes: int) -> None:
    """Calls of one row, of few and of rows that programs take in turn, by either shot, with no pause between."""
    if lamport_bytes and CODECS[codec].quantizes:
        pytest.skip("rows that are encoded travel with flags")
    ranks, hardware, bias = Ranks(world, lamport_bytes=lamport_bytes), detect(torch.device("cuda")), float(world % 2)
    dtype = (torch.bfloat16, torch.float16)[world % 2]
    kind = TARGETS[target]
    kind = Target(kind.quantization, fp8.for_device(torch.device("cuda")), kind.layout, kind.normed)
    given = {Quantization.FP8_STATIC: 0.0137, Quantization.NVFP4: 321.7}.get(kind.quantization)
    weight = (1 - bias + random_rows(1, width, torch.float32, 7)[0].clamp(-4, 4) / 8).to(dtype).cuda()
    norm = Norm(weight, 1e-5, bias, None if given is None else torch.tensor([given], device="cuda"))
    calls, outs, expected = [], [], []
    for seed, rows in enumerate((1, 4, 1, 40, 7, 3 * world + 1, 2)):
        for shot in SHOTS:
            xs = draw(world, rows, width, dtype, seed)
            residual = None if seed % 3 == 2 else random_rows(rows, width, dtype, seed + 50).cuda()
            default = reduce_norm_quant.default_config(rows, width, CODECS[codec], hardware)
            config = reduce_norm_quant.Config(default.threads, 7)
            outs.append([kind.empty(x) for x in xs])
            for part in (part for out in outs[-1] for part in out if part is not None):
                part.view(torch.uint8).fill_(0xA5)
            shots = 1 + (shot == "two_shot")
            expected.append(reference.reduce_norm_quant(xs, residual, norm, kind, CODECS[codec], shots))

            def call(rank, box, shot=shot, x=xs, added=residual, out=outs[-1], config=config):  # type: ignore[no-untyped-def]
                getattr(reduce_norm_quant, shot)(
                    x[rank], added, norm, kind, out[rank], box, CODECS[codec], config, PATIENCE
                )

            calls.append(call)
    ranks.together(calls)
    ranks.check()
    for found, whole in zip(outs, expected, strict=True):
        for out in found:
            for name, part, right in zip(whole._fields, out, whole, strict=True):
                assert (part is None) == (right is None), name
                if part is not None:
                    assert_same(part, right)


@pytest.mark.parametrize("lamport_bytes", [0, 1 << 18], ids=["flags", "no flags"])
@pytest.mark.parametrize("shot", SHOTS)
def test_the_last_of_eight_does_not_come(shot: str, lamport_bytes: int) -> None:
    """The others say so and end, and so do their later calls."""
    ranks, width = Ranks(8, lamport_bytes=lamport_bytes), 2880
    xs = draw(8, 3, width, torch.bfloat16, 0)
    norm, outs = Norm(torch.ones(width, device="cuda").bfloat16(), 1e-5), [Target().empty(x) for x in xs]
    config = reduce_norm_quant.Config(512, 3)

    def call(rank: int, box: Mailbox) -> None:
        getattr(reduce_norm_quant, shot)(xs[rank], None, norm, Target(), outs[rank], box, CODECS["FP"], config, 300_000)

    ranks.together([call, call], ranks=7)
    assert [box.lost() for box in ranks.boxes] == [(1, 7, 0)] * 7 + [None]
