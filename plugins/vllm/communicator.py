# SPDX-License-Identifier: Apache-2.0
"""The quantized all-reduce behind vLLM's communicators, for tensor-parallel groups.

`class_over` makes a subclass of whichever communicator the platform chose. It asks `QuantizedAllReduce.quantized`
first, and where that declines a message, because of its size or its type, vLLM's own order of all-reduces serves it.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

import torch
import torch.distributed as dist
from vllm import envs
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.parallel_state import in_the_same_node_as
from vllm.distributed.utils import get_distributed_timeout_or_none
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname

from llm_quant_rocm.comm.policy import ENGINE, Algorithm, Choice, Policy, Settings
from llm_quant_rocm.comm.process_group import ProcessGroupReduce
from llm_quant_rocm.comm.watch import Watch
from llm_quant_rocm.formats.wire import DTYPES, Codec
from llm_quant_rocm.hardware import detect

QUANTIZATION = "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION"
# Codecs of ours alone: vLLM's QuickReduce would report each as a broken setting.
_UNKNOWN_TO_VLLM = ("FP4", "FP8")
_WARM_UP_VALUES = 4096

logger = logging.getLogger("llm_quant_rocm")


class Transport(Protocol):
    """How bytes travel: `comm.quick_reduce.QuickReduce` or `comm.process_group.ProcessGroupReduce`."""

    def all_reduce(
        self, x: torch.Tensor, codec: Codec, algorithm: Algorithm, cast_bf16_to_fp16: bool
    ) -> torch.Tensor: ...

    def check(self) -> None: ...


@cache
def class_over(name: str) -> str:
    """The name of a class of this module: the communicator called `name`, with the quantized all-reduce before it."""
    base = resolve_obj_by_qualname(name)
    ours = type(f"Quantized{base.__name__}", (QuantizedAllReduce, base), {"__module__": __name__})
    globals()[ours.__name__] = ours
    return f"{__name__}.{ours.__name__}"


class QuantizedAllReduce:
    """What `class_over` puts before a communicator of vLLM.

    Attributes:
        quantized: None where it stepped aside, and in groups other than tensor parallelism's.
    """

    device: torch.device
    unique_name: str
    quantized: "QuickReduceComm | None" = None

    def __init__(
        self,
        cpu_group: dist.ProcessGroup,
        device: torch.device | None = None,
        device_group: dist.ProcessGroup | None = None,
        unique_name: str = "",
        *args: Any,
        **kwargs: Any,
    ) -> None:
        settings = Settings.from_environment()
        with _hidden_from_vllm(settings):
            super().__init__(cpu_group, device, device_group, unique_name, *args, **kwargs)  # type: ignore[call-arg]
        if unique_name.split(":")[0] == "tp":
            self.quantized = connect(self, settings)
        if self.quantized is not None and hasattr(self, "qr_comm") and not _vllm_quick_reduce_serves(self):
            # Read by vLLM's fusion of the all-reduce with AITER's RMSNorm, which may otherwise send what is ours.
            self.qr_comm = self.quantized
            self._aiter_qr_rmsnorm_comm = False  # no AITER kernel of its own for codecs that it does not know

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        """The sum over the group; a new tensor."""
        if self.quantized is None:
            return super().all_reduce(input_)  # type: ignore[misc]
        if torch.compiler.is_compiling():
            # Only on CPUs are communicators traced: this operator of vLLM's, which ends up here, hides what follows.
            return torch.ops.vllm.all_reduce(input_, group_name=self.unique_name)
        if self.quantized.should_quick_allreduce(input_):
            return self.quantized.quick_all_reduce(input_)
        # On CPUs vLLM adds in place, which the operator may not.
        return super().all_reduce(input_.clone() if self.device.type == "cpu" else input_)  # type: ignore[misc]

    def destroy(self) -> None:
        if self.quantized is not None:
            self.quantized.close()
            self.quantized = None
        super().destroy()  # type: ignore[misc]


class QuickReduceComm:
    """The quantized all-reduce of one group, with the methods of vLLM's `QuickAllReduce`.

    Attributes:
        policy: what serves a message.
        transport: how its bytes travel.
    """

    disabled = False

    def __init__(self, transport: Transport, policy: Policy, watch: Watch | None) -> None:
        self.policy = policy
        self.transport, self._watch = transport, watch

    def should_quick_allreduce(self, inp: torch.Tensor) -> bool:
        """Whether a message is ours."""
        return self._choice(inp) is not ENGINE

    def quick_all_reduce(self, inp: torch.Tensor) -> torch.Tensor:
        """The sum over the group, a new tensor, on every rank with the same bits.

        Raises:
            RuntimeError: a rank was lost, in this call or an earlier one.
        """
        if self._watch is not None:
            self._watch.raise_if_lost()
        choice = self._choice(inp)
        assert choice.codec is not None
        return self.transport.all_reduce(
            inp, choice.codec, choice.algorithm, cast_bf16_to_fp16=self.policy.settings.cast_bf16_to_fp16
        )

    def uses_flydsl_int4(self, inp: torch.Tensor) -> bool:
        """True for what is ours: to AITER's fusion it means that an all-reduce and an RMSNorm apart serve `inp`."""
        return self.should_quick_allreduce(inp)

    def _get_qr_quant_level(self, inp: torch.Tensor) -> int:
        """The level that AITER's fused kernel would send by: FP. It serves nothing of ours."""
        return 0

    def close(self) -> None:
        """Ends the watch over lost ranks."""
        if self._watch is not None:
            self._watch.stop()

    def _choice(self, inp: torch.Tensor) -> Choice:
        return self.policy.choose(inp.numel() * inp.element_size(), inp.dtype)


def connect(communicator: Any, settings: Settings) -> QuickReduceComm | None:
    """The quantized all-reduce of a communicator's group, whose ranks all call. None where it steps aside; either way
    the group's first rank logs one line that says what serves, and why.

    Raises:
        ValueError: a file of measured crossovers is broken.
    """
    group, device = communicator.cpu_group, communicator.device
    log = logger.info if dist.get_rank(group) == 0 else logger.debug
    refusal = _refusal(device)
    if refusal is None:
        hosts = hosts_of(group)
        peers = device.type == "cuda" and len(hosts) == 1
        policy = Policy(settings, dist.get_world_size(group), detect(device).arch, peers, len(hosts))
        refusal = policy.refusal or _better_left_to_vllm(communicator, policy)
    if refusal is None:
        facts = (os.environ.get(current_platform.device_control_env_var), device.index) if peers else None
        everyone: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, (facts, [policy.steps(dtype) for dtype in DTYPES]), group)
        if any(steps != everyone[0][1] for _, steps in everyone):
            refusal = "the ranks have different settings or measured crossovers"
        elif peers:
            refusal = unreachable(device, [facts for facts, _ in everyone])
        refusal = first_refusal(refusal, group)
    transport: Transport | None = None
    if refusal is None:
        try:
            transport = _transport(communicator, peers, hosts)
            _warm_up(transport, policy, device)
        except (RuntimeError, ValueError) as error:
            refusal = str(error).splitlines()[0]
        refusal = first_refusal(refusal, group)
    if refusal is not None or transport is None:
        log("quantized all-reduce: vLLM's own serves the group %s; %s", communicator.unique_name, refusal)
        return None
    log("%s", policy.describe())
    config = get_current_vllm_config_or_none()
    if config is not None and config.compilation_config.pass_config.fuse_allreduce_rms:
        log("quantized all-reduce: what vLLM fuses with an RMSNorm (fuse_allreduce_rms) it may send unquantized")
    return QuickReduceComm(transport, policy, Watch(transport.check) if peers else None)


def hosts_of(group: dist.ProcessGroup) -> list[list[int]]:
    """The ranks, in the default group, of a group's processes on each host. All of them call."""
    ranks = dist.get_process_group_ranks(group)
    hosts, left = [], list(range(len(ranks)))
    while left:
        same = in_the_same_node_as(group, source_rank=left[0])
        host = [place for place in left if same[place] or place == left[0]]
        hosts.append([ranks[place] for place in host])
        left = [place for place in left if place not in host]
    return hosts


def _refusal(device: torch.device) -> str | None:
    """Why nothing can be served, as far as the configuration says."""
    config = get_current_vllm_config_or_none()
    dtype = getattr(config.model_config, "dtype", None) if config is not None else None
    if dtype is not None and dtype not in DTYPES:
        return f"the model computes in {dtype}, and bf16 and fp16 are served"
    if envs.VLLM_BATCH_INVARIANT:
        return "VLLM_BATCH_INVARIANT is set, and which algorithm serves depends on the size of a batch"
    if device.type not in ("cpu", "cuda"):
        return f"there are no kernels for {device.type}"
    try:
        detect(device)
    except ValueError as error:
        return str(error)
    return None


def _better_left_to_vllm(communicator: Any, policy: Policy) -> str | None:
    """vLLM's QuickReduce keeps what it serves until somebody has measured that ours is faster, or wants it so."""
    if not _vllm_quick_reduce_serves(communicator) or policy.measured or policy.settings.min_bytes is not None:
        return None
    return (
        "its QuickReduce serves this codec, and nobody measured ours here: set "
        "VLLM_ROCM_QUICK_REDUCE_MIN_SIZE_BYTES_MB for ours"
    )


def _vllm_quick_reduce_serves(communicator: Any) -> bool:
    theirs = getattr(communicator, "qr_comm", None)
    return theirs is not None and not theirs.disabled


def unreachable(device: torch.device, facts: list[tuple[str | None, int]]) -> str | None:
    """Which GPU's memory this one does not reach. `facts` are the visible devices and the index of every rank's: ranks
    that see others than this one cannot be asked about, and are found out when they connect."""
    visible = os.environ.get(current_platform.device_control_env_var)
    for theirs, index in facts:
        if theirs == visible and index != device.index and not torch.cuda.can_device_access_peer(device, index):
            return f"GPU {device.index} does not reach the memory of GPU {index}"
    return None


def first_refusal(refusal: str | None, group: dist.ProcessGroup) -> str | None:
    """The first rank's refusal: who steps aside does so with all others."""
    everyone: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, refusal, group)
    return next((said for said in everyone if said is not None), None)


def _transport(communicator: Any, peers: bool, hosts: list[list[int]]) -> Transport:
    if peers:
        # Here, not above: it imports Triton, which vLLM on a CPU may be without.
        from llm_quant_rocm.comm.quick_reduce import QuickReduce

        return QuickReduce.over(communicator.cpu_group, communicator.device)
    return ProcessGroupReduce(communicator.device_group, hosts, get_distributed_timeout_or_none())


def _warm_up(transport: Transport, policy: Policy, device: torch.device) -> None:
    """Calls once what may be called: nothing is compiled, and no connection made, while a graph is captured.

    Kernels do not depend on the size of a message.
    """
    config = get_current_vllm_config_or_none()
    known = getattr(config.model_config, "dtype", None) if config is not None else None
    for dtype in DTYPES if known is None else (known,):
        x = torch.zeros(_WARM_UP_VALUES, dtype=dtype, device=device)
        for _, choice in policy.steps(dtype):
            if choice.codec is not None:
                transport.all_reduce(x, choice.codec, choice.algorithm, policy.settings.cast_bf16_to_fp16)
    transport.check()


@contextmanager
def _hidden_from_vllm(settings: Settings) -> Iterator[None]:
    """vLLM's QuickReduce, which reads the environment when it is made, is not told of codecs that it does not know."""
    if settings.codec is None or settings.codec.name not in _UNKNOWN_TO_VLLM:
        yield
        return
    before = os.environ[QUANTIZATION]
    os.environ[QUANTIZATION] = "NONE"
    try:
        yield
    finally:
        os.environ[QUANTIZATION] = before
