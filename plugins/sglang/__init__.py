# SPDX-License-Identifier: Apache-2.0
"""SGLang plugin: `--quantization ptpc_fp8`, NVFP4 checkpoints without a flag, and the quantized all-reduce.

SGLang calls `register` in its main process and in every scheduler through the entry point `sglang.srt.plugins`. It logs
an error of a plugin and goes on without it: what cannot be done here is one line of our own in the log.
"""

from functools import cache

from llm_quant_rocm.versions import warn_of_others


@cache
def register() -> None:
    """Make our quantization methods and hooks known to SGLang. May be called any number of times; touches no GPU."""
    import sglang

    warn_of_others("SGLang", sglang.__version__)

    # SGLang's quantization package imports much of it, which the command's --help need not.
    from sglang.srt.layers import quantization
    from sglang.srt.server_args import QUANTIZATION_CHOICES, add_quantization_method_choices

    from llm_quant_rocm_sglang import nvfp4, patches, ptpc_fp8

    configs = {ptpc_fp8.NAME: ptpc_fp8.PtpcFp8Config, nvfp4.NAME: nvfp4.NvFp4Config, nvfp4.ALIAS: nvfp4.NvFp4Config}
    # The first is what most of SGLang reads; the last is the only one read on CPUs with AMX.
    for name in ("QUANTIZATION_METHODS", "BASE_QUANTIZATION_METHODS", "CPU_QUANTIZATION_METHODS"):
        getattr(quantization, name).update(configs)
    add_quantization_method_choices([name for name in configs if name not in QUANTIZATION_CHOICES])
    patches.apply()
