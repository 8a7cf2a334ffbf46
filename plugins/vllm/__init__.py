# SPDX-License-Identifier: Apache-2.0
"""vLLM plugin: `--quantization ptpc_fp8`, NVFP4 checkpoints without a flag, and the quantized all-reduce. All but the
last by vLLM's public hooks; `patches.py` is the ledger of the rest.

vLLM calls `register` in each of its processes through the entry point `vllm.general_plugins`.
"""

import logging

import vllm

from llm_quant_rocm.versions import warn_of_others
from llm_quant_rocm_vllm import last_line

logger = logging.getLogger("llm_quant_rocm")


def register() -> None:
    """Make our quantization methods and all-reduce known to vLLM. May be called any number of times; touches no GPU.

    Raises:
        ValueError: an environment variable of the quantized all-reduce is wrong.
    """
    _log_where_vllm_logs()
    last_line.install()
    warn_of_others("vLLM", vllm.__version__)

    # Here, not above: vLLM's quantization package is only complete once its own start-up has reached the plugins.
    from vllm.model_executor.layers.quantization import register_quantization_config

    from llm_quant_rocm_vllm import nvfp4, patches, ptpc_fp8

    register_quantization_config(ptpc_fp8.NAME)(ptpc_fp8.PtpcFp8Config)
    for name in (nvfp4.NAME, nvfp4.ALIAS):
        register_quantization_config(name)(nvfp4.NvFp4Config)
    patches.apply()


def _log_where_vllm_logs() -> None:
    """vLLM handles its own loggers alone, and sets them up after this: below them, the library's lines are seen."""
    logger.parent = logging.getLogger("vllm")
