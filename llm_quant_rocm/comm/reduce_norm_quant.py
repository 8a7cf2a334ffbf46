# SPDX-License-Identifier: Apache-2.0
"""The ranks that `ops.reduce_norm_quant` adds up over, by name: operators take strings, not process groups.

connect("tp:0", group, device)            # once on every rank, before the first call
ops.reduce_norm_quant(x, weight, residual, group="tp:0", ...)
"""

import logging
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from llm_quant_rocm.backends import forced
from llm_quant_rocm.comm import process_group
from llm_quant_rocm.comm.policy import (
    CODEC_BYTES,
    ENGINE,
    MAX_WORLD_SIZE,
    Algorithm,
    Choice,
    described,
    measured,
    step_at,
    steps_of,
)
from llm_quant_rocm.comm.roll_call import RollCall
from llm_quant_rocm.comm.setup_errors import (
    DISAGREEMENT,
    Disagreement,
    answers,
    first_refusal,
    raised_by_all,
    refusal_of,
)
from llm_quant_rocm.environment import backend_of
from llm_quant_rocm.formats.norm_quant import Norm, Result, Target
from llm_quant_rocm.formats.wire import CODECS, Codec
from llm_quant_rocm.hardware import detect
from llm_quant_rocm.reference.reduce_norm_quant import padded

if TYPE_CHECKING:  # importing them imports Triton
    from llm_quant_rocm.comm.quick_reduce import QuickReduce
    from llm_quant_rocm.kernels.reduce_norm_quant import Config

FP = CODECS["FP"]
OPERATOR = "reduce_norm_quant"
INBOX_BYTES = 64 * 1024 * 1024
# Taken for H200s: what a second hop costs, and what a GPU sends to all others together.
_HOP_SECONDS, _LINK_BYTES_A_SECOND = 3e-6, 380e9
_ALIGNMENT = 16

logger = logging.getLogger("llm_quant_rocm")


@dataclass(frozen=True)
class Plan:
    """What serves which size of x.

    Attributes:
        steps: (first size in bytes, what serves from there), rising from 0: one or two shots of the fused kernels, or
            the engine's own all-reduce with norm and quantization as one kernel behind it.
        source: who says so.
    """

    steps: tuple[tuple[int, Choice], ...]
    source: str = "given"

    @classmethod
    def always(cls, algorithm: Algorithm, codec: Codec = FP) -> "Plan":
        """One choice for every size."""
        return cls(((0, Choice(algorithm, codec)),))

    @classmethod
    def of(cls, world: int, codec: Codec = FP, arch: str = "", engine: bool = False) -> "Plan":
        """What was measured on `arch` for a number of ranks and a codec, or `predicted`.

        Measured are configs/reduce_norm_quant and the user's cache, files of the form that `comm.policy` has.

        Args:
            engine: whether there is an engine's all-reduce; without one, two shots serve its sizes.

        Raises:
            ValueError: a file of crossovers is broken; the message names it.
        """
        found = measured(arch, world, codec, OPERATOR)
        if found is None:
            return predicted(world, codec)
        source, steps = found[0], found[1][torch.bfloat16]
        if not engine:
            steps = [(start, Choice(Algorithm.TWO_SHOT, FP) if step == ENGINE else step) for start, step in steps]
        return cls(tuple(steps), source)

    def choose(self, nbytes: int) -> Choice:
        """What serves an x of `nbytes`."""
        return step_at(self.steps, nbytes)

    def between(self, sizes: range, other: "Plan") -> "Plan":
        """This plan for the sizes in `sizes`, `other` for smaller and larger ones."""
        starts = {start for plan in (self, other) for start, _ in plan.steps} | {sizes.start, sizes.stop}
        steps = steps_of(starts, lambda start: (self if start in sizes else other).choose(start))
        return Plan(tuple(steps), self.source)

    def by(self, codec: Codec) -> "Plan":
        """This plan with `codec` at every size, whatever was measured; two shots in the place of the engine's."""
        return Plan(
            tuple(
                (start, Choice(Algorithm.TWO_SHOT if step == ENGINE else step.algorithm, codec))
                for start, step in self.steps
            ),
            self.source,
        )

    def describe(self) -> str:
        """For a log."""
        return f"{described(self.steps)} ({self.source})"


def predicted(world: int, codec: Codec = FP) -> Plan:
    """The plan where nobody measured: `codec` from 1 MiB on, and one shot as long as its bytes cost less than a hop.

    By one shot each of R ranks sends R - 1 times x, by two shots 2 (R - 1) / R times. Two ranks send as much by either,
    so two shots never pay. The engine's all-reduce is predicted slower at all sizes: norm and quantization then read
    and write 7 bytes a value after the links are done, which the fused kernels do while links are busy.
    """

    def one_shot_until(by: Codec) -> float:
        more = (world - 1) * (world - 2) / world * by.group_bytes / FP.group_bytes
        return int(_HOP_SECONDS * _LINK_BYTES_A_SECOND / more) if more else math.inf

    def choose(start: int) -> Choice:
        by = codec if start >= CODEC_BYTES else FP
        return Choice(Algorithm.ONE_SHOT if start < one_shot_until(by) else Algorithm.TWO_SHOT, by)

    starts = {0, CODEC_BYTES, one_shot_until(FP), one_shot_until(codec)} - {math.inf}
    return Plan(tuple(steps_of(map(int, starts), choose)), "predicted from H200s' links")


@dataclass(frozen=True, eq=False)
class Ranks:
    """Who adds up. All ranks make the same calls in the same order.

    Attributes:
        world: how many they are.
        plan: what serves a message.
        group: their process group; None for one rank alone.
        memory: their all-reduce over peer memory, whose region and calls the fused kernels share; or None.
        obstacle: why there is no peer memory.
        engine: the sum of a tensor over the ranks, a new tensor, as the engine would make it; or None.
        config: how the fused kernels share out rows; None for the default.
        roll_call: of the group's calls.
    """

    world: int
    plan: Plan
    group: dist.ProcessGroup | None = None
    memory: "QuickReduce | None" = None
    obstacle: str | None = None
    engine: Callable[[torch.Tensor], torch.Tensor] | None = None
    config: "Config | None" = None
    roll_call: RollCall | None = None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of x [M, K] over the ranks by the process group, with the bits that the fused kernels give it.

        Raises:
            RuntimeError: a rank did not arrive within the timeout of the group, or ended.
        """
        if self.world == 1:
            return x
        choice = self.plan.choose(x.numel() * x.element_size())
        reduce = process_group.one_shot if choice.algorithm is Algorithm.ONE_SHOT else process_group.all_reduce
        with nullcontext() if self.roll_call is None else self.roll_call.call():
            return reduce(padded(x), choice.codec or FP, self.group)[:, : x.shape[1]]

    def reduce_norm_quant(self, x: torch.Tensor, residual: torch.Tensor | None, norm: Norm, target: Target) -> Result:
        """The fused kernels over peer memory, of rows whose last dimension is contiguous; or the engine's all-reduce
        and a kernel behind it, where the plan says so.

        Raises:
            ValueError: x is elsewhere than the memory, or the memory is too small.
        """
        import llm_quant_rocm.kernels.reduce_norm_quant as kernels

        memory = self.memory
        assert memory is not None
        if x.device != memory.device:
            raise ValueError(f"x is on {x.device}, the group's memory on {memory.device}")
        choice = self.plan.choose(x.numel() * x.element_size())
        if choice == ENGINE:
            assert self.engine is not None
            total = self.engine(x)
            out = target.empty(total)
            kernels.norm_quant(total, residual, norm, target, out)
            return out
        codec = choice.codec or FP
        kernel = kernels.two_shot if choice.algorithm is Algorithm.TWO_SHOT else kernels.one_shot
        x = _aligned(x)
        config = self.config or kernels.default_config(x.shape[0], x.shape[1], codec, detect(x.device))
        out = target.empty(x)
        step = memory.mailbox.max_tiles
        if x.shape[0] <= step:  # without slices, which take the host as long as the launch
            kernel(x, residual, norm, target, out, memory.mailbox, codec, config, memory.max_spins)
            return out
        step -= step % target.layout.tile_rows
        if not step:
            raise ValueError(
                f"flags of {memory.mailbox.max_tiles} tiles do not serve {target.layout.tile_rows} rows: give it more"
            )
        for start in range(0, x.shape[0], step):
            part = slice(start, start + step)
            normed, codes, scales = (None if tensor is None else tensor[part] for tensor in out[1:])
            pieces = Result(out.residual[part], normed, codes, scales)
            added = None if residual is None else residual[part]
            kernel(x[part], added, norm, target, pieces, memory.mailbox, codec, config, memory.max_spins)
        return out


ALONE = Ranks(1, predicted(1))
_NAMED: dict[str, Ranks] = {}


def connect(
    name: str,
    group: dist.ProcessGroup | None,
    device: torch.device,
    codec: Codec = FP,
    memory: "QuickReduce | None" = None,
    engine: Callable[[torch.Tensor], torch.Tensor] | None = None,
    codec_sizes: range | None = None,
    codec_always: bool = False,
    timeout: float | None = None,
) -> Ranks:
    """Registers the ranks of `group` under `name`, on all of them.

    Args:
        group: None: this rank alone.
        device: where x will be.
        codec: how large messages travel; FP is exact.
        memory: an all-reduce over the group's peer memory, to be shared; without it GPUs get one of their own.
        engine: the engine's own all-reduce, which gives a new tensor; it serves the sizes at which it was measured to
            be faster.
        codec_sizes: the bytes of x that may travel by `codec`; others are exact. None: the plan alone says.
        codec_always: whether all of those do, measured or not.
        timeout: seconds that a kernel waits for a rank, as `QuickReduce.over` has them.

    Raises:
        ValueError: the name is taken, or the group has more than 8 ranks, or a file of crossovers is broken, on any of
            them.
        Disagreement: the ranks would not make the same calls.
    """
    if name in _NAMED:
        raise ValueError(f"ranks are registered under {name!r} already: disconnect it first")
    world = 1 if group is None else dist.get_world_size(group)
    if world > MAX_WORLD_SIZE:
        raise ValueError(f"{name!r} has {world} ranks; reduce_norm_quant serves up to {MAX_WORLD_SIZE}")
    with nullcontext() if group is None else raised_by_all(group):
        plan = Plan.of(world, codec, detect(device).arch, engine is not None)
        if codec_sizes is not None and codec.quantizes:
            plan = plan.by(codec) if codec_always else plan
            plan = plan.between(codec_sizes, Plan.of(world, FP, detect(device).arch, engine is not None))
    if group is not None:
        _refuse_disagreement(plan, group)
    obstacle = None
    if memory is None and group is not None and world > 1:
        memory, obstacle = _peer_memory(group, device, timeout)
        obstacle = first_refusal(obstacle, group)  # a rank's kernels would wait for another one's process group
        memory = memory if obstacle is None else None
    roll_call = None if group is None or memory else RollCall(group, OPERATOR)
    ranks = Ranks(world, plan, group, memory, obstacle, engine, roll_call=roll_call)
    how = obstacle and f"the process group, as {obstacle}" or ("peer memory" if memory else "one rank")
    logger.info("reduce_norm_quant over %r, %d ranks: %s; %s", name, world, how, plan.describe())
    _NAMED[name] = ranks
    return ranks


def disconnect(name: str) -> None:
    """Forgets `name`."""
    _NAMED.pop(name, None)


def is_named(name: str, ranks: Ranks) -> bool:
    """Whether `ranks` are registered under `name`."""
    return _NAMED.get(name) is ranks


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


def _refuse_disagreement(plan: Plan, group: dist.ProcessGroup) -> None:
    """Disagreement where the ranks of `group`, which all call, have other plans, or are told to use other backends: one
    would wait in the process group for who runs a kernel."""
    everyone = answers((plan.steps, forced(OPERATOR)), group)
    if any(steps != plan.steps for steps, _ in everyone):
        raise Disagreement(DISAGREEMENT)
    if len({backend for _, backend in everyone}) > 1:
        found = ", ".join(f"{backend or 'unset'} on rank {rank}" for rank, (_, backend) in enumerate(everyone))
        raise Disagreement(f"{backend_of(OPERATOR)} is {found}: set the same on all")


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """x [M, K], copied unless its rows begin at multiples of 16 bytes."""
    starts = x.data_ptr() | (x.stride(0) * x.element_size() if x.shape[0] > 1 else 0)
    return x.clone(memory_format=torch.contiguous_format) if starts % _ALIGNMENT else x


def _peer_memory(
    group: dist.ProcessGroup, device: torch.device, timeout: float | None
) -> "tuple[QuickReduce | None, str | None]":
    """The all-reduce over peer memory, or why there is none."""
    if not detect(device).gpu:
        return None, f"{device} has no peer memory"
    try:
        from llm_quant_rocm.comm.quick_reduce import QuickReduce

        return QuickReduce.over(group, device, INBOX_BYTES, timeout), None
    except Exception as error:  # who raised it here would leave the other ranks waiting
        return None, refusal_of(error)
