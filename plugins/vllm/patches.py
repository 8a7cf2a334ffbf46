# SPDX-License-Identifier: Apache-2.0
"""Each patch that the plugin makes to vLLM. There is one. `tests/engine/test_patches.py` fails where it no longer fits.

## `get_device_communicator_cls` of the current platform's class
- Why: it names the class that reduces over tensor-parallel groups. Ours is a subclass of the class that it would have
  named (`communicator.py`).
- Why no public hook serves: a platform plugin may override the method, but vLLM takes one such plugin only, which then
  stands for the whole platform; and whoever has another (a vendor's) could not use ours.
- When it acts: where VLLM_ROCM_QUICK_REDUCE_QUANTIZATION names a codec. Elsewhere the answer is the platform's own.
- Checked on: vLLM 0.26.0 and 0.32.0 by running it, 0.33.0 by reading.
- It can go when vLLM lets a general plugin register a communicator, or an all-reduce.

The variable itself is widened by our codecs in `vllm.envs.environment_variables`, a public table, by vLLM's own
`env_with_choices`.
"""

import logging
from typing import Any

from vllm import envs
from vllm.config import get_current_vllm_config_or_none
from vllm.platforms import current_platform

from llm_quant_rocm.comm.policy import Settings
from llm_quant_rocm.environment import QUICK_REDUCE, read
from llm_quant_rocm.formats.wire import CODECS

QUANTIZATION = f"{QUICK_REDUCE}QUANTIZATION"

logger = logging.getLogger("llm_quant_rocm")


def apply() -> None:
    """Make the patch. May be called any number of times; touches no GPU.

    Raises:
        ValueError: a codec is wished for, and an environment variable of the quantized all-reduce is wrong.
    """
    if (read(QUANTIZATION) or "NONE") != "NONE":
        Settings.from_environment()
    envs.environment_variables[QUANTIZATION] = envs.env_with_choices(QUANTIZATION, "NONE", [*CODECS, "NONE"])
    platform = type(current_platform)
    if not hasattr(platform.get_device_communicator_cls, "replaces"):
        platform.get_device_communicator_cls = classmethod(_with_ours_before(platform.get_device_communicator_cls))


def _with_ours_before(platforms_own: Any) -> Any:
    def get_device_communicator_cls(cls: type) -> str:
        name = platforms_own()
        if Settings.from_environment().codec is None:
            return name
        config = get_current_vllm_config_or_none()
        if config is not None and getattr(config.parallel_config, "enable_elastic_ep", False):
            logger.warning("quantized all-reduce: off; vLLM's elastic expert parallelism takes its own communicators")
            return name
        # Here, not above: it imports vLLM's process groups.
        from llm_quant_rocm_vllm.communicator import class_over

        return class_over(name)

    get_device_communicator_cls.replaces = platforms_own  # type: ignore[attr-defined]
    return get_device_communicator_cls
