# SPDX-License-Identifier: Apache-2.0
"""What the commands `tune` and `bench` and the repository's benchmarks measure alike, one way each. Some of the
modules import Triton as they are imported; `llm_quant_rocm.timing` has the clock."""
