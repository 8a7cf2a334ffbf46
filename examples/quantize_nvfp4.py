# SPDX-License-Identifier: Apache-2.0
"""Make an NVFP4 checkpoint of a 16-bit one, then serve it with `vllm serve TARGET`, with no flag:

python examples/quantize_nvfp4.py MODEL TARGET [compressed-tensors | modelopt]
"""

import sys
from pathlib import Path

from llm_quant_rocm.checkpoint import quantize_checkpoint

source, target, *layout = sys.argv[1:]
report = quantize_checkpoint(Path(source), Path(target), *layout)
print(f"{len(report.quantized)} weights are NVFP4, {len(report.kept)} stayed: {', '.join(report.kept)}")
print(f"{report.bytes_before / 2**20:.1f} MiB became {report.bytes_after / 2**20:.1f} MiB in {target}")
