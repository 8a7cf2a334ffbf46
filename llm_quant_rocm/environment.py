# SPDX-License-Identifier: Apache-2.0
"""Every environment variable that sets this package, and the one place where they are read; but for what the plugins
ask the engines about themselves, by the engines' own variables."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

OURS = "LLM_QUANT_ROCM_"
NVFP4, FUSION, ERRORS = f"{OURS}NVFP4", f"{OURS}FUSION", f"{OURS}ERRORS"
QUICK_REDUCE, SGLANG_QUICK_REDUCE = "VLLM_ROCM_QUICK_REDUCE_", "ROCM_QUICK_REDUCE_"


@dataclass(frozen=True)
class Variable:
    """One variable: what it is for, what holds where it is unset, and its values where they can be listed."""

    name: str
    meaning: str
    default: str
    values: tuple[str, ...] = ()

    def refusal(self, value: str) -> str | None:
        """Why `value` is none of its values, or None."""
        if not self.values or value in self.values:
            return None
        return f"{self.name}={value}: it must be {_listed(self.values)}"


def _listed(values: tuple[str, ...]) -> str:
    return " or ".join(filter(None, (", ".join(values[:-1]), values[-1])))


def backend_of(operator: str) -> str:
    """The variable that forces a backend of `operator`."""
    return OURS + operator.upper()


def _backend(operator: str, what: str, *backends: str) -> Variable:
    return Variable(backend_of(operator), f"forces the backend of {what}", "the best that can serve", backends)


def _quick_reduce(prefix: str) -> tuple[Variable, ...]:
    codecs = ("FP", "INT8", "FP8", "INT6", "INT4", "FP4", "INT3", "NONE")
    return (
        Variable(f"{prefix}QUANTIZATION", "the codec of the quantized all-reduce", "NONE", codecs),
        Variable(
            f"{prefix}MIN_SIZE_BYTES_MB",
            "MiB: serve messages from this size on, whatever was measured",
            "the measured crossover",
        ),
        Variable(f"{prefix}MAX_SIZE_BYTES_MB", "MiB: serve messages up to this size", "2048"),
        Variable(f"{prefix}QUANTIZATION_MIN_SIZE_KB", "KiB: smaller messages travel unquantized", "0"),
        Variable(f"{prefix}CAST_BF16_TO_FP16", "1 or true: bf16 travels as fp16; else as it is", "0"),
    )


_ALL = (
    _backend("per_token_quant", "the quantization per token", "triton", "reference"),
    _backend("act_and_mul_quant", "a gated layer's activation with quantization", "triton", "reference"),
    _backend("rms_norm_quant", "RMSNorm with quantization", "triton", "reference"),
    _backend("reduce_norm_quant", "all-reduce with RMSNorm and quantization", "fused", "triton", "reference"),
    _backend("ptpc_gemm", "the PTPC GEMM", "aiter", "torch", "triton", "reference"),
    _backend("ptpc_moe", "the PTPC experts", "triton", "reference"),
    _backend("nvfp4_gemm", "the NVFP4 GEMM", "triton", "torch", "reference"),
    _backend("nvfp4_moe", "the NVFP4 experts", "triton", "reference"),
    Variable(NVFP4, "0 leaves NVFP4 checkpoints to the engine", "1", ("0", "1")),
    Variable(
        f"{NVFP4}_PREFILL",
        "fp8 computes dense layers' calls of more than 64 tokens, decode too, in FP8 where that is faster; less exact",
        "`prefill` of the checkpoint's configuration, else exact",
        ("exact", "fp8"),
    ),
    Variable(
        f"{NVFP4}_ACTIVATIONS",
        "nvfp4 rounds activations too: what FP4 hardware would make of a model",
        "`activations` of the checkpoint's configuration, else 16bit",
        ("16bit", "nvfp4"),
    ),
    Variable(
        FUSION,
        "0 leaves norms and activations apart from the all-reduces before and the quantization behind",
        "1",
        ("0", "1"),
    ),
    Variable(ERRORS, "set by the vLLM plugin: the file in which an engine's processes say why they end", "a new file"),
    *_quick_reduce(QUICK_REDUCE),
    *(
        replace(variable, meaning="SGLang's name of the same, which comes first there")
        for variable in _quick_reduce(SGLANG_QUICK_REDUCE)
    ),
    Variable("VLLM_PLUGINS", "vLLM's: the plugins that it loads, separated by commas; ours is llm_quant_rocm", "all"),
    Variable("SGLANG_PLUGINS", "the same of SGLang", "all"),
    Variable(
        "VLLM_BATCH_INVARIANT",
        "vLLM's: 1 asks for results that do not depend on the batch, which all layers have but those with FP8 prefill",
        "0",
        ("0", "1"),
    ),
    Variable(
        "SGLANG_ENABLE_DETERMINISTIC_INFERENCE",
        "SGLang's, as is --enable-deterministic-inference: the quantized all-reduce steps aside",
        "0",
    ),
    Variable("HF_HUB_OFFLINE", "Hugging Face's: 1 forbids downloads, as the commands do where a model is local", "0"),
    Variable(
        "LLM_QUANT_ROCM_COMMIT",
        "what measurements name as their commit; needed where the package lies in no repository",
        "git's",
    ),
    Variable("XDG_CACHE_HOME", "the folder whose llm-quant-rocm holds what was measured on this machine", "~/.cache"),
)
VARIABLES = {variable.name: variable for variable in _ALL}


def read(name: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """What the user set variable `name` to, None where it is unset. An empty text is as good as unset to most readers;
    to vLLM an empty VLLM_PLUGINS means none."""
    return environment.get(name)


def switched_on(name: str) -> bool:
    """Whether variable `name` is 1, which it is where it is not set, or empty.

    Raises:
        ValueError: it is neither 0 nor 1.
    """
    switch = read(name) or "1"
    if switch not in ("0", "1"):
        raise ValueError(f"{name} is 0 or 1, not {switch!r}")
    return switch != "0"
