# SPDX-License-Identifier: Apache-2.0
"""The quantized all-reduce between processes, and the one that is fused with the norm behind it: which algorithm serves
a message, and how its bytes travel."""
