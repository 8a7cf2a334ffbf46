# SPDX-License-Identifier: Apache-2.0
"""Routed experts in FP8 against vLLM's own, on the shapes of Qwen3-30B-A3B, DeepSeek-V3 (at TP 8) and Mixtral; with
--untuned, of models for which nothing was tuned.

    python benchmarks/ptpc_moe.py [--untuned] [--vllm FOLDER] [--models PATTERN ...] [--tokens T ...]
        [--routers ROUTER ...]

FOLDER is where `pip install --target` put vLLM, where it is not installed.
Peers: vLLM's Triton experts in bf16 and, with one scale a token and one a channel as ours have, in FP8; its CUTLASS
experts in FP8, which serve such layers on Hopper; and torch's grouped product in bf16 (CUTLASS) with the same
activation and weighting around it, given its groups already sorted, so that what is timed of it is a lower bound.
_experts.py says how they are compared; `limit` takes the bytes of FP8 weights and the rate of an FP8 product.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import _experts
from llm_quant_rocm.cli.bench._peers import vllm_bf16, vllm_cutlass, vllm_fp8
from llm_quant_rocm.measure.experts import grouped_bf16, ptpc, tolerance_of_dense


def weight_bytes(n: int, k: int) -> int:
    """Codes and a row's scales in fp32."""
    return n * k + 4 * n


EVERYONE = {
    "bf16": vllm_bf16,
    "bf16_grouped": grouped_bf16,
    "vllm_fp8": vllm_fp8,
    "vllm_cutlass": vllm_cutlass,
    "ptpc_moe": ptpc,
}
COMPARED = _experts.Comparison(EVERYONE, tolerance_of_dense(EVERYONE), weight_bytes, rate="fp8")

if __name__ == "__main__":
    _experts.main("ptpc_moe", COMPARED, __doc__)
