# SPDX-License-Identifier: Apache-2.0
"""Routed experts in NVFP4 against vLLM's own, on the shapes of Qwen3-30B-A3B, DeepSeek-V3 (at TP 8) and Mixtral; with
--untuned, of models for which nothing was tuned.

    python benchmarks/nvfp4_moe.py [--untuned] [--vllm FOLDER] [--models PATTERN ...] [--tokens T ...]
        [--routers ROUTER ...]

FOLDER is where `pip install --target` put vLLM, where it is not installed.
Peers, both of vLLM: its fused Marlin experts, which serve NVFP4 on Hopper, given the workspace that vLLM makes at
every call, and its Triton experts in bf16 on the decoded weights. _experts.py says how they are compared; `limit` takes
the rate of a bf16 product.
"""

import sys
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import _experts
from benchmarks._nvfp4_peers import reading_bytes
from llm_quant_rocm.cli.bench._peers import vllm_bf16, vllm_marlin
from llm_quant_rocm.formats import nvfp4
from llm_quant_rocm.measure.experts import Bind, ours

# The largest relative error that counts as right: bf16 rounds what is between the products, and each expert's share.
TOLERANCE = 0.012


def bf16(w13: nvfp4.NvFp4Weight, w2: nvfp4.NvFp4Weight) -> Bind:
    return vllm_bf16(w13.dequantize(torch.bfloat16), w2.dequantize(torch.bfloat16))


EVERYONE = {"bf16": bf16, "marlin": vllm_marlin, "nvfp4_moe": ours}
COMPARED = _experts.Comparison(
    EVERYONE,
    dict.fromkeys(EVERYONE, TOLERANCE),
    nbytes=partial(reading_bytes, m=0),
    rate="bf16",
    arrange=nvfp4.quantize,
    exact=nvfp4.NvFp4Weight.dequantize,
)

if __name__ == "__main__":
    _experts.main("nvfp4_moe", COMPARED, __doc__)
