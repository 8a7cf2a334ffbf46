# SPDX-License-Identifier: Apache-2.0
"""The quantized all-reduce between processes: which algorithm serves a message, and how its bytes travel."""
