# SPDX-License-Identifier: Apache-2.0
"""The quantized all-reduce of GPUs that reach each other's memory, over torch's symmetric memory."""

from typing import Self

import torch
import torch.distributed as dist

from llm_quant_rocm.comm.policy import WORLD_SIZES, Algorithm
from llm_quant_rocm.formats.wire import DTYPES, Codec
from llm_quant_rocm.hardware import detect
from llm_quant_rocm.kernels import quick_reduce as kernels
from llm_quant_rocm.kernels.quick_reduce import Config, Mailbox

INBOX_BYTES = 32 * 1024 * 1024
MAX_TILES = 32768
MAX_SPINS = 100_000_000
_ALIGNMENT = 16
_KERNELS = {Algorithm.ONE_SHOT: kernels.one_shot, Algorithm.TWO_SHOT: kernels.two_shot}


class QuickReduce:
    """All-reduces of one group of ranks. All ranks make the same calls in the same order, on one stream at a time.

    A call allocates nothing but its result, waits for nothing on the host, and may be captured in a graph.
    """

    def __init__(self, mailbox: Mailbox, config: Config, region: torch.Tensor, max_spins: int = MAX_SPINS) -> None:
        """
        Args:
            region: this rank's part of the memory behind `mailbox`, kept alive; zeros on all ranks by now.
            max_spins: looks at a flag until its rank counts as lost.
        """
        self._mailbox, self._config, self._region, self._max_spins = mailbox, config, region, max_spins

    @classmethod
    def over(
        cls,
        group: dist.ProcessGroup,
        device: torch.device,
        inbox_bytes: int = INBOX_BYTES,
        max_spins: int = MAX_SPINS,
    ) -> Self:
        """For the ranks of `group`, which all call. Takes four times `inbox_bytes` of every GPU's memory, and some.

        Args:
            inbox_bytes: room for encoded values on their way, a multiple of 16. With less, fewer programs run.

        Raises:
            ValueError: a group of other than 2 to 8 ranks.
            RuntimeError: torch's, where the GPUs do not reach each other's memory.
        """
        import torch.distributed._symmetric_memory as symmetric_memory

        world = dist.get_world_size(group)
        if world not in WORLD_SIZES:
            raise ValueError(
                f"the quantized all-reduce serves 2 to {WORLD_SIZES.stop - 1} ranks, the group has {world}"
            )
        config = kernels.default_config(detect(device))
        size = kernels.region_bytes(world, inbox_bytes, MAX_TILES)
        region = symmetric_memory.empty(size, dtype=torch.uint8, device=device)
        handle = symmetric_memory.rendezvous(region, group)
        region.zero_()
        handle.barrier()  # nobody sets a flag that somebody clears afterwards
        offset = region.data_ptr() - handle.buffer_ptrs[handle.rank]  # of the tensor in its buffer, on all ranks
        peers = torch.tensor([pointer + offset for pointer in handle.buffer_ptrs], dtype=torch.int64, device=device)
        state = torch.zeros(kernels.STATE_WORDS, dtype=torch.int32, device=device)
        return cls(Mailbox(peers, state, handle.rank, inbox_bytes, MAX_TILES), config, region, max_spins)

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
        if x.device != self._region.device:
            raise ValueError(f"x is on {x.device}, the group's memory on {self._region.device}")
        if algorithm not in _KERNELS:
            raise ValueError(f"peer memory serves {' and '.join(_KERNELS)}, not {algorithm}")
        values = x.contiguous()
        if values.data_ptr() % _ALIGNMENT:
            values = values.clone()
        out = torch.empty_like(values)
        if x.numel():
            _KERNELS[algorithm](
                values.view(-1), out.view(-1), self._mailbox, codec, self._config, self._max_spins,
                cast_bf16_to_fp16 and x.dtype == torch.bfloat16,
            )  # fmt: skip
        return out

    @property
    def mailbox(self) -> Mailbox:
        """For other kernels on the same memory, whose calls count among these."""
        return self._mailbox

    @property
    def device(self) -> torch.device:
        """Where the memory is."""
        return self._region.device

    @property
    def max_spins(self) -> int:
        """Looks at a flag until its rank counts as lost."""
        return self._max_spins

    def check(self) -> None:
        """Waits for the device and sees whether all ranks arrived in all calls so far.

        Raises:
            RuntimeError: one did not; the results of that call and of all later ones are not valid.
        """
        call, peer, phase = self._mailbox.state[kernels.FAILED_CALL.value :].tolist()[:3]
        if call:
            raise RuntimeError(
                f"quantized all-reduce: rank {peer} of the group did not arrive in call {call}, phase {phase + 1}, "
                f"which rank {self._mailbox.rank} noticed after looking {self._max_spins} times"
            )
