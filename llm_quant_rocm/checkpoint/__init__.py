# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: 16-bit ones quantized and written, quantized ones read into layers that an engine serves.

Needs safetensors to write, and compressed-tensors for its layout.
"""

from llm_quant_rocm.checkpoint.layouts import LAYOUTS as LAYOUTS
from llm_quant_rocm.checkpoint.layouts import PTPC_LAYOUTS as PTPC_LAYOUTS
from llm_quant_rocm.checkpoint.quantize import IGNORE as IGNORE
from llm_quant_rocm.checkpoint.quantize import SCHEMES as SCHEMES
from llm_quant_rocm.checkpoint.quantize import Report as Report
from llm_quant_rocm.checkpoint.quantize import quantize_checkpoint as quantize_checkpoint
