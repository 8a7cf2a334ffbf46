# SPDX-License-Identifier: Apache-2.0
"""The tensor-parallel group of this process, made known to `ops.reduce_norm_quant` by vLLM's name of it."""

import weakref

from vllm.config import ParallelConfig
from vllm.distributed import get_tp_group
from vllm.distributed.parallel_state import GroupCoordinator, in_the_same_node_as
from vllm.platforms import current_platform

from llm_quant_rocm.comm import norm_ranks
from llm_quant_rocm.comm.group import Members
from llm_quant_rocm.comm.policy import Settings

# By group, the name under which it is connected, or None. An engine that follows another one in this process has other
# groups of the same names.
_connected: "weakref.WeakKeyDictionary[GroupCoordinator, str | None]" = weakref.WeakKeyDictionary()


def connect(parallel_config: ParallelConfig) -> str | None:
    """The name by which `ops.reduce_norm_quant` knows this process's tensor-parallel group; None where there is one
    rank alone, and where the group is better served by vLLM, which one line says. All ranks of the group call."""
    group = get_tp_group()
    if group not in _connected:
        _connected[group] = _connect(group, parallel_config) if group.world_size > 1 else None
    return _connected[group]


def _connect(group: GroupCoordinator, parallel_config: ParallelConfig) -> str | None:
    refusal = "halves of a batch run at once, and calls need an order" if parallel_config.use_ubatching else None
    members = Members(
        engine="vLLM",
        name=group.unique_name,
        cpu_group=group.cpu_group,
        device_group=group.device_group,
        device=group.device,
        same_host=in_the_same_node_as,
        visible_devices=current_platform.device_control_env_var,
    )
    transport = getattr(getattr(group.device_communicator, "quantized", None), "transport", None)
    all_reduce = getattr(group.device_communicator, "all_reduce", None)
    return norm_ranks.connect(members, Settings.from_environment(), refusal, transport, all_reduce)
