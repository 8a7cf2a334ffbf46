# SPDX-License-Identifier: Apache-2.0
"""Draws docs/figures/scales.png: what one scale a tensor, and one a row, leave of each token.

`python docs/figures/scales.py`
"""

from pathlib import Path

import matplotlib.pyplot as plt
import torch

from llm_quant_rocm.formats import fp8


def main(folder: Path) -> None:
    """Draw scales.png in `folder`."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 2048, generator=generator) * torch.tensor([1.0, 3e-3, 300.0, 0.1, 1e-3, 0.03])[:, None]
    per_row = fp8.dequantize(*fp8.quantize_rows(x, fp8.OCP))
    tensor_scale = fp8.scale_from_amax(x.abs().max(), fp8.OCP)
    per_tensor = fp8.dequantize(fp8.quantize(x, tensor_scale, fp8.OCP), tensor_scale)
    errors = [((kept - x).norm(dim=1) / x.norm(dim=1)).tolist() for kept in (per_tensor, per_row)]
    figure, axis = plt.subplots(figsize=(8, 3.4))
    positions = torch.arange(len(x))
    labels = ("one scale for the tensor", "one scale a token")
    for offset, error, label in zip((-0.2, 0.2), errors, labels, strict=True):
        bars = axis.bar(positions + offset, [100 * e for e in error], 0.38, label=label)
        axis.bar_label(bars, fmt="%.1f", fontsize=8)
    largest = [float(f"{row.abs().max():.2g}") for row in x]
    axis.set_xticks(positions, [f"token {i}\nlargest {value:g}" for i, value in enumerate(largest)])
    axis.set_ylabel("relative error, %")
    axis.set_ylim(0, 112)
    axis.legend(loc="upper center")
    axis.set_title("Six tokens in one tensor, quantized to E4M3 (OCP)", fontsize=10)
    figure.tight_layout()
    figure.savefig(folder / "scales.png", dpi=110)


if __name__ == "__main__":
    main(Path(__file__).parent)
