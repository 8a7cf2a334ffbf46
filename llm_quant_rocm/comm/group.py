# SPDX-License-Identifier: Apache-2.0
"""The quantized all-reduce of an engine's group of ranks: whether it may serve, how, and which messages."""

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from llm_quant_rocm.comm.policy import CODEC_BYTES, ENGINE, Algorithm, Choice, Policy, Settings
from llm_quant_rocm.comm.process_group import ProcessGroupReduce
from llm_quant_rocm.comm.roll_call import await_everyone
from llm_quant_rocm.comm.setup_errors import DISAGREEMENT, answers, first_refusal, raised_by_all, refusal_of
from llm_quant_rocm.comm.watch import Watch
from llm_quant_rocm.formats.wire import DTYPES, Codec
from llm_quant_rocm.hardware import detect

_WARM_UP_VALUES = 4096

logger = logging.getLogger("llm_quant_rocm")


class Transport(Protocol):
    """How bytes travel: `comm.quick_reduce.QuickReduce` or `comm.process_group.ProcessGroupReduce`."""

    def all_reduce(
        self, x: torch.Tensor, codec: Codec, algorithm: Algorithm, cast_bf16_to_fp16: bool
    ) -> torch.Tensor: ...

    def check(self) -> None: ...


@dataclass(frozen=True)
class Members:
    """An engine's group of ranks.

    Attributes:
        engine: its name, for the log.
        name: the group's, for the log.
        cpu_group, device_group: the group over gloo, and over what the engine's tensors travel by.
        same_host: the engine's answer, for each rank of a group, whether it is on the host of rank `source_rank`. A
            collective call.
        visible_devices: the environment variable that says which devices a process sees.
        dtype: in which the model computes, or None where nobody knows yet.
        timeout: of the group, or None for torch's own.
        custom: the engine's custom all-reduce over peer memory, with vLLM's `disabled` and `should_custom_ar`; or None.
    """

    engine: str
    name: str
    cpu_group: dist.ProcessGroup
    device_group: dist.ProcessGroup
    device: torch.device
    same_host: Callable[..., Sequence[bool]]
    visible_devices: str
    dtype: torch.dtype | None = None
    timeout: timedelta | None = None
    custom: Any = None

    @property
    def seconds(self) -> float | None:
        """The timeout."""
        return self.timeout.total_seconds() if self.timeout else None


class GroupReduce:
    """The quantized all-reduce of one group, with the methods that engines ask their own QuickReduce for.

    Attributes:
        policy: what serves a message.
        transport: how its bytes travel.
        custom: the engine's custom all-reduce, which takes what it can below `CODEC_BYTES`: messages of ten rows were
            faster by it in whole engines on two and four GPUs, and are exact. None: ours serve them.
    """

    disabled = False

    def __init__(self, transport: Transport, policy: Policy, watch: Watch | None, custom: Any = None) -> None:
        self.policy = policy
        self.transport, self._watch = transport, watch
        # Whoever sets a least size wishes for ours from there on.
        self.custom = custom if policy.settings.min_bytes is None else None

    def should_quick_allreduce(self, inp: torch.Tensor) -> bool:
        """Whether a message is ours."""
        if self._choice(inp) is ENGINE:
            return False
        if self.custom is None or self.custom.disabled or inp.numel() * inp.element_size() >= CODEC_BYTES:
            return True
        return not self.custom.should_custom_ar(inp)

    def quick_all_reduce(self, inp: torch.Tensor) -> torch.Tensor:
        """The sum over the group, a new tensor, on every rank with the same bits; of any size, also one that is better
        left to the engine.

        Raises:
            TypeError: neither bf16 nor fp16.
            RuntimeError: a rank was lost, in this call or an earlier one.
        """
        if self._watch is not None:
            self._watch.raise_if_lost()
        choice = self._choice(inp)
        if choice is ENGINE:
            choice = self.policy.forced(inp.numel() * inp.element_size())
        assert choice.codec is not None
        return self.transport.all_reduce(
            inp, choice.codec, choice.algorithm, cast_bf16_to_fp16=self.policy.settings.cast_bf16_to_fp16
        )

    def close(self) -> None:
        """Ends the watch over lost ranks, and lets go of the engine's all-reduce."""
        if self._watch is not None:
            self._watch.stop()
        self.custom = None

    def _choice(self, inp: torch.Tensor) -> Choice:
        return self.policy.choose(inp.numel() * inp.element_size(), inp.dtype)


Reduce = TypeVar("Reduce", bound=GroupReduce)


def connect(
    members: Members,
    settings: Settings,
    refuse: Callable[[Policy], str | None],
    make: Callable[[Transport, Policy, Watch | None, Any], Reduce],
) -> Reduce | None:
    """What `make` makes of a group whose ranks all call. None where it steps aside; either way the group's first rank
    logs one line that says what serves, and why.

    Args:
        refuse: why the engine's own serves, or None.

    Raises:
        ValueError: a file of measured crossovers is broken, on any of the ranks.
        RuntimeError: a rank does not call, as where its environment names no codec; names it.
    """
    group, device = members.cpu_group, members.device
    await_everyone(group, members.name, "quantized all-reduce")
    log = logger.info if dist.get_rank(group) == 0 else logger.debug
    hosts = hosts_of(group, members.same_host)
    peers = device.type == "cuda" and len(hosts) == 1
    refusal, steps = _refusal(members), None
    with raised_by_all(group):
        if refusal is None:
            policy = Policy(settings, dist.get_world_size(group), detect(device).arch, peers, len(hosts))
            refusal = policy.refusal or refuse(policy)
            steps = None if refusal else [policy.steps(dtype) for dtype in DTYPES]
    facts = (os.environ.get(members.visible_devices), device.index)
    everyone = answers((refusal, settings, steps, facts), group)
    refusal = next((said for said, *_ in everyone if said is not None), None)
    if refusal is None:
        if any(answer[1:3] != everyone[0][1:3] for answer in everyone):
            refusal = DISAGREEMENT
        elif peers:
            refusal = unreachable(device, members.visible_devices, [facts for *_, facts in everyone])
        refusal = first_refusal(refusal, group)
    transport: Transport | None = None
    if refusal is None:
        try:
            transport = _transport(members, peers, hosts)
            warm_up(transport, policy, device, DTYPES if members.dtype is None else (members.dtype,))
        except Exception as error:  # who raised it here would leave the other ranks waiting
            refusal = refusal_of(error)
        refusal = first_refusal(refusal, group)
    if refusal is not None or transport is None:
        log("quantized all-reduce: %s's own serves the group %s; %s", members.engine, members.name, refusal)
        return None
    reduce = make(transport, policy, Watch(transport.check) if peers else None, members.custom)
    small = f"; below {CODEC_BYTES} bytes {members.engine}'s custom all-reduce, where it serves"
    log("%s%s", policy.describe(), "" if reduce.custom is None or reduce.custom.disabled else small)
    return reduce


def better_left_to(own: Any, policy: Policy, variable: str) -> str | None:
    """Why an engine's `own` QuickReduce (or None) keeps what it serves: until somebody has measured that ours is
    faster, or wants it so by the environment's `variable`."""
    if own is None or own.disabled or policy.measured or policy.settings.min_bytes is not None:
        return None
    return (
        "its QuickReduce serves this codec, and nobody measured ours here (llm-quant-rocm tune quick_reduce): set "
        f"{variable} for ours"
    )


def hosts_of(group: dist.ProcessGroup, same_host: Callable[..., Sequence[bool]]) -> list[list[int]]:
    """The ranks, in the default group, of a group's processes on each host. All of them call."""
    ranks = dist.get_process_group_ranks(group)
    hosts, left = [], list(range(len(ranks)))
    while left:
        same = same_host(group, source_rank=left[0])
        host = [place for place in left if same[place] or place == left[0]]
        hosts.append([ranks[place] for place in host])
        left = [place for place in left if place not in host]
    return hosts


def warm_up(transport: Transport, policy: Policy, device: torch.device, dtypes: Sequence[torch.dtype]) -> None:
    """Calls once what may be called: nothing is compiled, and no connection made, while a graph is captured.

    Kernels do not depend on the size of a message.
    """
    for dtype in dtypes:
        x = torch.zeros(_WARM_UP_VALUES, dtype=dtype, device=device)
        for _, choice in policy.steps(dtype):
            if choice.codec is not None:
                transport.all_reduce(x, choice.codec, choice.algorithm, policy.settings.cast_bf16_to_fp16)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    transport.check()


def _refusal(members: Members) -> str | None:
    """Why nothing can be served, as far as the group says."""
    if members.dtype is not None and members.dtype not in DTYPES:
        return f"the model computes in {members.dtype}, and bf16 and fp16 are served"
    if members.device.type not in ("cpu", "cuda"):
        return f"there are no kernels for {members.device.type}"
    try:
        detect(members.device)
    except ValueError as error:
        return str(error)
    return None


def unreachable(device: torch.device, variable: str, facts: Sequence[tuple[str | None, int]]) -> str | None:
    """Which GPU's memory this one does not reach, or None.

    `facts` are the visible devices, by the environment's `variable`, and the index of every rank's: ranks that see
    others than this one cannot be asked about, and are found out when they connect.
    """
    visible = os.environ.get(variable)
    for theirs, index in facts:
        if theirs == visible and index != device.index and not torch.cuda.can_device_access_peer(device, index):
            return f"GPU {device.index} does not reach the memory of GPU {index}"
    return None


def _transport(members: Members, peers: bool, hosts: list[list[int]]) -> Transport:
    if peers:
        # Here, not above: it imports Triton, which an engine on a CPU may be without.
        from llm_quant_rocm.comm.quick_reduce import QuickReduce

        return QuickReduce.over(members.cpu_group, members.device, timeout=members.seconds)
    return ProcessGroupReduce(members.device_group, hosts, members.timeout)
