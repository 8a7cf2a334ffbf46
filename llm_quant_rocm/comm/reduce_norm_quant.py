# SPDX-License-Identifier: Apache-2.0
"""The ranks that `ops.reduce_norm_quant` adds up over, by name: operators take strings, not process groups.

connect("tp:0", group, device)            # once on every rank, before the first call
ops.reduce_norm_quant(x, weight, residual, group="tp:0", ...)
"""

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from llm_quant_rocm.comm import process_group
from llm_quant_rocm.formats.norm_quant import Norm, Result, Target
from llm_quant_rocm.formats.wire import CODECS, Codec
from llm_quant_rocm.hardware import detect
from llm_quant_rocm.reference.reduce_norm_quant import padded

if TYPE_CHECKING:  # importing them imports Triton
    from llm_quant_rocm.comm.quick_reduce import QuickReduce
    from llm_quant_rocm.kernels.reduce_norm_quant import Config

FP = CODECS["FP"]
# Bytes of x up to which everybody sends everything to everybody, by the number of ranks: not measured.
_ONE_SHOT_BYTES = {2: 512 * 1024, 3: 256 * 1024, 4: 256 * 1024}
_ONE_SHOT_BYTES_OF_MORE = 128 * 1024
_CODEC_BYTES = 1024 * 1024

logger = logging.getLogger("llm_quant_rocm")


@dataclass(frozen=True)
class Plan:
    """Which shots and codec serve a message.

    Attributes:
        one_shot_bytes: bytes of x up to which one shot by FP serves; two shots from there on.
        codec: of the two shots, from `codec_bytes` on; FP below.
        codec_bytes: bytes of x from which on `codec` is worth its errors.
    """

    one_shot_bytes: int
    codec: Codec = FP
    codec_bytes: int = _CODEC_BYTES

    @classmethod
    def of(cls, world: int, codec: Codec = FP) -> "Plan":
        """The plan for a number of ranks."""
        return cls(_ONE_SHOT_BYTES.get(world, _ONE_SHOT_BYTES_OF_MORE), codec)

    def choose(self, nbytes: int) -> tuple[int, Codec]:
        """(shots, codec) for an x of `nbytes`."""
        if nbytes <= self.one_shot_bytes:
            return 1, FP
        return 2, self.codec if nbytes >= self.codec_bytes else FP


@dataclass(frozen=True, eq=False)
class Ranks:
    """Who adds up. All ranks make the same calls in the same order.

    Attributes:
        world: how many they are.
        plan: what serves a message.
        group: their process group; None for one rank alone.
        memory: their all-reduce over peer memory, whose region and calls the fused kernels share; or None.
        obstacle: why there is no peer memory.
        config: how the fused kernels share out rows; None for the default.
    """

    world: int
    plan: Plan
    group: dist.ProcessGroup | None = None
    memory: "QuickReduce | None" = None
    obstacle: str | None = None
    config: "Config | None" = None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of x [M, K] over the ranks by the process group, with the bits that the fused kernels give it."""
        if self.world == 1:
            return x
        _, codec = self.plan.choose(x.numel() * x.element_size())
        return process_group.all_reduce(padded(x), codec, self.group)[:, : x.shape[1]]

    def reduce_norm_quant(self, x: torch.Tensor, residual: torch.Tensor | None, norm: Norm, target: Target) -> Result:
        """The fused kernels over peer memory, of rows whose last dimension is contiguous.

        Raises:
            ValueError: x is elsewhere than the memory, or the memory is too small.
        """
        from llm_quant_rocm.kernels import reduce_norm_quant as kernels

        memory = self.memory
        assert memory is not None
        if x.device != memory.device:
            raise ValueError(f"x is on {x.device}, the group's memory on {memory.device}")
        shots, codec = self.plan.choose(x.numel() * x.element_size())
        kernel = kernels.two_shot if shots == 2 else kernels.one_shot
        config = self.config or kernels.default_config(x.shape[1], detect(x.device))
        out = target.empty(x)
        step = kernels.max_rows(memory.mailbox, shots)
        if step < x.shape[0]:
            step -= step % target.layout.tile_rows
        if not step:
            raise ValueError(
                f"flags of {memory.mailbox.max_tiles} tiles do not serve {target.layout.tile_rows} rows: give it more"
            )
        for start in range(0, x.shape[0], step):
            # Rows that pad scales belong to the last part.
            part = slice(start, start + step if start + step < x.shape[0] else None)
            normed, codes, scales = (None if tensor is None else tensor[part] for tensor in out[1:])
            pieces = Result(out.residual[part], normed, codes, scales)
            added = None if residual is None else residual[part]
            kernel(x[part], added, norm, target, pieces, memory.mailbox, codec, config, memory.max_spins)
        return out


ALONE = Ranks(1, Plan.of(1))
_NAMED: dict[str, Ranks] = {}


def connect(
    name: str,
    group: dist.ProcessGroup | None,
    device: torch.device,
    codec: Codec = FP,
    memory: "QuickReduce | None" = None,
) -> Ranks:
    """Registers the ranks of `group` under `name`, on all of them.

    Args:
        group: None: this rank alone.
        device: where x will be.
        codec: how large messages travel; FP is exact.
        memory: an all-reduce over the group's peer memory, to be shared; without it GPUs get one of their own.

    Raises:
        ValueError: the name is taken, or the group has more than 8 ranks.
    """
    if name in _NAMED:
        raise ValueError(f"ranks are registered under {name!r} already: disconnect it first")
    world = 1 if group is None else dist.get_world_size(group)
    if world > process_group.MAX_WORLD_SIZE:
        raise ValueError(f"{name!r} has {world} ranks; reduce_norm_quant serves up to {process_group.MAX_WORLD_SIZE}")
    obstacle = None
    if memory is None and world > 1:
        memory, obstacle = _peer_memory(group, device)
    ranks = Ranks(world, Plan.of(world, codec), group, memory, obstacle)
    how = obstacle and f"the process group, as {obstacle}" or ("peer memory" if memory else "one rank")
    logger.info("reduce_norm_quant over %r, %d ranks: %s", name, world, how)
    _NAMED[name] = ranks
    return ranks


def disconnect(name: str) -> None:
    """Forgets `name`."""
    _NAMED.pop(name, None)


def ranks_named(name: str) -> Ranks:
    """The ranks registered under `name`; for "" one rank alone.

    Raises:
        ValueError: nobody registered it.
    """
    if not name:
        return ALONE
    if name not in _NAMED:
        known = ", ".join(map(repr, _NAMED)) or "none"
        raise ValueError(
            f"no ranks are registered under {name!r} (registered: {known}): call "
            "comm.reduce_norm_quant.connect on every rank first"
        )
    return _NAMED[name]


def _peer_memory(group: dist.ProcessGroup | None, device: torch.device) -> "tuple[QuickReduce | None, str | None]":
    """The all-reduce over peer memory, or why there is none."""
    if not detect(device).gpu:
        return None, f"{device} has no peer memory"
    assert group is not None
    from llm_quant_rocm.comm.quick_reduce import QuickReduce

    try:
        return QuickReduce.over(group, device), None
    except RuntimeError as error:
        return None, f"GPUs do not reach each other's memory: {str(error).splitlines()[0]}"
