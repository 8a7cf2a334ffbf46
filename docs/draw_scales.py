# SPDX-License-Identifier: Apache-2.0
"""Draws docs/scales.png: what one scale a tensor and one a row leave of a token beside an outlier.

python docs/draw_scales.py
"""

from pathlib import Path

import matplotlib.pyplot as plt
import torch

from llm_quant_rocm.formats import fp8


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 2048, generator=generator) * torch.tensor([1.0, 3e-3, 300.0, 0.1, 1e-3, 0.03])[:, None]
    per_row = fp8.dequantize(*fp8.quantize_rows(x, fp8.OCP))
    tensor_scale = fp8.scale_from_amax(x.abs().max(), fp8.OCP)
    per_tensor = fp8.dequantize(fp8.quantize(x, tensor_scale, fp8.OCP), tensor_scale)
    errors = [((kept - x).norm(dim=1) / x.norm(dim=1)).tolist() for kept in (per_tensor, per_row)]
    figure, axis = plt.subplots(figsize=(8, 3.4))
    tokens = torch.arange(6)
    axis.bar(tokens - 0.2, [100 * e for e in errors[0]], 0.4, label="one scale for the tensor")
    axis.bar(tokens + 0.2, [100 * e for e in errors[1]], 0.4, label="one scale a token (PTPC)")
    axis.set_xticks(tokens, [f"token {i}\nlargest {row.abs().max():.2g}" for i, row in enumerate(x)])
    axis.set_ylabel("relative error, %")
    axis.set_yscale("log")
    axis.set_ylim(1, 1000)
    axis.legend(loc="upper right", ncols=2)
    axis.set_title("Six tokens in one tensor, quantized to E4M3", fontsize=10)
    figure.tight_layout()
    figure.savefig(Path(__file__).parent / "scales.png", dpi=110)


if __name__ == "__main__":
    main()
