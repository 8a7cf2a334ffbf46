# SPDX-License-Identifier: Apache-2.0
"""Triton kernels, one file an operator. Imported only when a GPU runs them."""
