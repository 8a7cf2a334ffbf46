# SPDX-License-Identifier: Apache-2.0
"""The quantized all-reduce of GPUs that reach each other's memory, over torch's symmetric memory."""

import time
from collections.abc import Callable
from typing import Self, TypeVar

import torch
import torch.distributed as dist

from llm_quant_rocm.comm.policy import MAX_WORLD_SIZE, WORLD_SIZES, Algorithm
from llm_quant_rocm.comm.proof import SECONDS, prove
from llm_quant_rocm.comm.setup_errors import NoPeerMemory, first_line, first_refusal, refusal_of
from llm_quant_rocm.formats.wire import CODECS, DTYPES, Codec
from llm_quant_rocm.hardware import detect
from llm_quant_rocm.kernels import quick_reduce as kernels
from llm_quant_rocm.kernels.quick_reduce import Config, Mailbox

INBOX_BYTES = 100 * 1024 * 1024  # pieces of full size for 1 GiB of codecs of 4.5 bits, between two ranks and four
TIMEOUT_SECONDS = 600.0  # as torch for NCCL: ranks that compile wait for each other in their first calls
MAX_TILES = 32768
LAMPORT_BYTES = 1024 * 1024  # 64 rows of 8192 columns
_MAX_SPINS = 2**31 - 2
_REHEARSED_SPINS = 50_000  # some 50 ms
_ALIGNMENT = 16
T = TypeVar("T")
_KERNELS = {Algorithm.ONE_SHOT: kernels.one_shot, Algorithm.TWO_SHOT: kernels.two_shot}


class QuickReduce:
    """All-reduces of one group of ranks. All ranks make the same calls in the same order, on one stream at a time.

    A call allocates nothing but its result, waits for nothing on the host, and may be captured in a graph. So it cannot
    say that a rank is lost: let a `comm.watch.Watch` call `check`, or call it yourself.

    Attributes:
        mailbox: for other kernels on the same memory, whose calls count among these.
        region: this rank's part of the memory.
        max_spins: looks at a flag until its rank counts as lost.
        device: where the memory is.
    """

    def __init__(
        self, mailbox: Mailbox, region: torch.Tensor, max_spins: int = _MAX_SPINS, config: Config | None = None
    ) -> None:
        """
        Args:
            region: the memory behind `mailbox`, kept alive; zeros on all ranks by now.
            config: how messages are cut, on all ranks alike; None for the default of their algorithm.
        """
        self.mailbox, self.region, self.max_spins, self._config = mailbox, region, max_spins, config
        self.device = region.device
        self._hardware = detect(self.device)

    @classmethod
    def over(
        cls,
        group: dist.ProcessGroup,
        device: torch.device,
        inbox_bytes: int = INBOX_BYTES,
        timeout: float | None = None,
    ) -> Self:
        """For the ranks of `group`, which all call, over NCCL with `device` as their current one.

        Takes four times `inbox_bytes` of every GPU's memory, 2 MiB for each rank, and some.

        Torch numbers the meetings of a process, not of a group (pytorch#196082): ranks that have met in as
        many groups may meet, as those of tensor-parallel groups have; others wait for ever.

        Args:
            inbox_bytes: room for encoded values on their way, a multiple of 16. With less, pieces of the largest
                messages are smaller: 128 MiB of values fill 36 MiB in FP4.
            timeout: seconds that a call's kernel waits for a rank until it counts as lost, at most 2**31 looks; longer,
                never shorter, where many flags are looked at, as how long a look takes is measured here, on this GPU,
                for one. None: TIMEOUT_SECONDS.

        Raises:
            ValueError: a group of other than 2 to 8 ranks.
            NoPeerMemory: on all ranks; torch's symmetric memory gave one of them none, as where its GPU is full, or
                does not connect the GPUs, or, on AMD, sums of known values over it are wrong (`comm.proof`).
        """
        import torch.distributed._symmetric_memory as symmetric_memory

        timeout = TIMEOUT_SECONDS if timeout is None else timeout
        world = dist.get_world_size(group)
        if world not in WORLD_SIZES:
            raise ValueError(f"the quantized all-reduce serves 2 to {MAX_WORLD_SIZE} ranks, the group has {world}")
        size = kernels.region_bytes(world, inbox_bytes, MAX_TILES, LAMPORT_BYTES)
        region = _on_all_ranks(
            group, f"torch's symmetric memory gave a rank no {size >> 20} MiB: %s", first_line,
            lambda: symmetric_memory.empty(size, dtype=torch.uint8, device=device),
        )  # fmt: skip
        handle = _on_all_ranks(
            group, "torch's symmetric memory does not connect the GPUs: %s", first_line,
            lambda: symmetric_memory.rendezvous(region, group),
        )  # fmt: skip
        region.zero_()
        # Nobody sets a flag that somebody clears afterwards. Without a limit a rank that died would be waited for.
        handle.barrier(timeout_ms=int(timeout * 1000))
        offset = region.data_ptr() - handle.buffer_ptrs[handle.rank]  # of the tensor in its buffer, on all ranks
        peers = torch.tensor([pointer + offset for pointer in handle.buffer_ptrs], dtype=torch.int64, device=device)
        box = Mailbox(peers, *_own_memory(device), handle.rank, inbox_bytes, MAX_TILES, LAMPORT_BYTES)
        look = _on_all_ranks(
            group, "its kernel does not run: %s", refusal_of, lambda: seconds_of_a_look(device, world)
        )  # fmt: skip
        # Ranks would go on with wrong sums, or wait for each other until they count as lost. That NVIDIA's GPUs do not,
        # tests on them show; on AMD's nobody has run any.
        if torch.version.hip:
            _on_all_ranks(
                group, "GPUs do not see what others write to their memory: %s", refusal_of,
                lambda: prove(cls(box, region, min(_MAX_SPINS, int(SECONDS / look)))),
            )  # fmt: skip
        return cls(box, region, min(_MAX_SPINS, int(timeout / look)))

    def all_reduce(
        self,
        x: torch.Tensor,
        codec: Codec,
        algorithm: Algorithm = Algorithm.TWO_SHOT,
        cast_bf16_to_fp16: bool = False,
    ) -> torch.Tensor:
        """The sum of x over the ranks, a new contiguous tensor with the same bits on every rank.

        Args:
            x: bf16 or fp16, of the same shape and dtype on all ranks. Copied unless it is contiguous at a multiple of
                16 bytes.
            algorithm: ONE_SHOT or TWO_SHOT.
            cast_bf16_to_fp16: bf16 travels as fp16; values beyond its range as its largest.

        Raises:
            TypeError: x's dtype.
            ValueError: x is on another device, the algorithm is none of the two, or the inboxes are too small for it.
        """
        if x.dtype not in DTYPES:
            raise TypeError(f"the quantized all-reduce takes bf16 or fp16, not {x.dtype}")
        if x.device != self.device:
            raise ValueError(f"x is on {x.device}, the group's memory on {self.device}")
        if algorithm not in _KERNELS:
            raise ValueError(f"peer memory serves {' and '.join(_KERNELS)}, not {algorithm}")
        values = x.contiguous()
        if values.data_ptr() % _ALIGNMENT:
            values = values.clone()
        out = torch.empty_like(values)
        if x.numel():
            shots = 2 if algorithm is Algorithm.TWO_SHOT else 1
            config = self._config or kernels.default_config(self._hardware, self.mailbox.world, shots)
            _KERNELS[algorithm](
                values, out, self.mailbox, codec, config, self.max_spins,
                cast_bf16_to_fp16 and x.dtype == torch.bfloat16,
            )  # fmt: skip
        return out

    def check(self) -> None:
        """Says whether a rank was lost, as far as kernels have found by now. It waits for nothing and calls no driver,
        so any thread may call it at any time: every `comm.watch.INTERVAL_SECONDS`, or after a synchronization.

        Raises:
            RuntimeError: one was; the results of that call and of all later ones are not valid.
        """
        lost = self.mailbox.lost()
        if lost is not None:
            call, peer, phase = lost
            raise RuntimeError(
                f"quantized all-reduce: rank {peer} of the group did not arrive in call {call}, phase {phase + 1}, "
                f"which rank {self.mailbox.rank} noticed after looking {self.max_spins} times"
            )


def _on_all_ranks(group: dist.ProcessGroup, what: str, tell: Callable[[Exception], str], do: Callable[[], T]) -> T:
    """What `do` gives, on all ranks of `group`: who failed alone would leave the others waiting.

    Raises:
        NoPeerMemory: it failed on one of them; says `what`, with what `tell` makes of the error.
    """
    refusal = None
    try:
        result = do()
    except Exception as error:  # whatever it is, the others have to hear of it
        refusal = tell(error)
    refusal = first_refusal(refusal, group)
    if refusal is not None:
        raise NoPeerMemory(what % refusal)
    return result


def seconds_of_a_look(device: torch.device, world: int) -> float:
    """How long a kernel takes to look at a flag once: a rehearsal with ranks that do not come."""
    codec, config = CODECS["FP"], Config(blocks=16, programs=1, num_warps=128 // detect(device).lanes)
    phase_bytes = kernels.SLOTS.value * world * config.buffer_bytes(codec)
    regions = torch.zeros((world, kernels.region_bytes(world, phase_bytes, 1)), dtype=torch.uint8, device=device)
    peers = torch.tensor([region.data_ptr() for region in regions], dtype=torch.int64, device=device)
    x = torch.zeros(1, dtype=torch.bfloat16, device=device)
    for spins in (1, _REHEARSED_SPINS):  # compiled by the first one
        box = Mailbox(peers, *_own_memory(device), 0, phase_bytes, 1)
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        kernels.one_shot(x, torch.empty_like(x), box, codec, config, spins)
        torch.cuda.synchronize(device)
        seconds = time.perf_counter() - begin
        assert box.lost(), "a rank that did not come was not missed"
    return seconds / _REHEARSED_SPINS


def _own_memory(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """`Mailbox.state` and `Mailbox.report`."""
    state = torch.zeros(kernels.STATE_WORDS, dtype=torch.int32, device=device)
    # Said aloud: while an engine builds a model the default device is the GPU, whose memory cannot be pinned.
    return state, torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
