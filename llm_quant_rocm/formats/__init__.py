# SPDX-License-Identifier: Apache-2.0
"""What the bytes mean: pure torch, exact, slow on purpose."""
