# SPDX-License-Identifier: Apache-2.0
"""Quantized inference for AMD Instinct GPUs: formats, operators and engine plugins.

Importing this package touches no GPU, no engine and no Triton. The operators are in `llm_quant_rocm.ops`.
"""

__version__ = "0.1.0"
