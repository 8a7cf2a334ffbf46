# SPDX-License-Identifier: Apache-2.0
"""An engine's tensor-parallel group, made known to `ops.reduce_norm_quant` by the engine's name of it."""

import logging
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from llm_quant_rocm.comm import reduce_norm_quant
from llm_quant_rocm.comm.group import Members, hosts_of, unreachable
from llm_quant_rocm.comm.policy import MAX_WORLD_SIZE, WORLD_SIZES, Settings
from llm_quant_rocm.comm.setup_errors import Disagreement, answers, first_refusal
from llm_quant_rocm.comm.watch import Watch
from llm_quant_rocm.formats.wire import CODECS
from llm_quant_rocm.hardware import detect

_watches: dict[str, Watch] = {}

logger = logging.getLogger("llm_quant_rocm")


def connect(
    members: Members,
    settings: Settings,
    refusal: str | None,
    transport: Any,
    all_reduce: Callable[[torch.Tensor], torch.Tensor] | None,
) -> str | None:
    """The name by which `ops.reduce_norm_quant` knows a group, whose ranks all call; None where the engine's all-reduce
    stays apart from its norms, which the group's first rank says in one line.

    Args:
        settings: the codec of large messages, and what is large; without one they travel as they are.
        refusal: why the engine keeps them apart, or None. It need not be the same on all ranks.
        transport: that of the group's quantized all-reduce, whose peer memory is shared, or None.
        all_reduce: the engine's own, which gives a new tensor, for the sizes at which it was measured to be faster.

    Raises:
        ValueError: a file of measured crossovers is broken, on any of the ranks.
    """
    group, device, name = members.cpu_group, members.device, members.name
    disconnect(name)
    found = _refusal(members)
    refusal = first_refusal(refusal or found, group)
    if refusal is None:
        shared = transport if hasattr(transport, "mailbox") else None
        codec = settings.codec or CODECS["FP"]
        # As for the quantized all-reduce: smaller messages are not for the codec, nor are larger ones.
        sizes = range(max(settings.min_bytes or 0, settings.quantization_min_bytes), settings.max_bytes + 1)
        always = settings.min_bytes is not None
        try:
            ranks = reduce_norm_quant.connect(
                name, group, device, codec, shared, all_reduce, sizes, always, members.seconds
            )
        except Disagreement as error:
            refusal = str(error)
        else:
            # A CPU has no peer memory, and nothing better than the process group either.
            refusal = first_refusal(ranks.obstacle if device.type != "cpu" else None, group)
            if refusal is None:
                if ranks.memory is not None and shared is None:
                    _watches[name] = Watch(ranks.memory.check)
                return name
            disconnect(name)
    if dist.get_rank(group) == 0:
        logger.info("norm fusion: %s's all-reduce of the group %s stays apart; %s", members.engine, name, refusal)
    return None


def disconnect(name: str) -> None:
    """Forgets a group, with the memory and the watch that it had of its own."""
    reduce_norm_quant.disconnect(name)
    watch = _watches.pop(name, None)
    if watch is not None:
        watch.stop()


def disconnect_with(owner: Any, name: str) -> None:
    """Does so once `owner`, the engine's object of the group, is gone, unless the name is another group's by then."""
    ranks = reduce_norm_quant.ranks_named(name)

    def forget() -> None:
        if reduce_norm_quant.is_named(name, ranks):
            disconnect(name)

    weakref.finalize(owner, forget).atexit = False


def _refusal(members: Members) -> str | None:
    """Why the group is not served, as this rank sees it. All ranks call."""
    world = dist.get_world_size(members.cpu_group)
    facts = answers((os.environ.get(members.visible_devices), members.device.index), members.cpu_group)
    hosts = hosts_of(members.cpu_group, members.same_host)
    if world not in WORLD_SIZES:
        return f"it has {world} ranks, and up to {MAX_WORLD_SIZE} are served"
    if len(hosts) > 1:
        return "its ranks are on several hosts"
    if members.device.type == "cpu":
        return None
    if members.device.type != "cuda":
        return f"there are no kernels for {members.device.type}"
    if not detect(members.device).fp8_cast:
        return f"Triton has no conversion to FP8 for {detect(members.device).arch}"
    return unreachable(members.device, members.visible_devices, facts)
