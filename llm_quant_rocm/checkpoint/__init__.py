# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: 16-bit ones quantized and written (`quantize`, which needs safetensors, and for its layout
compressed-tensors), quantized ones read into layers that an engine serves."""
