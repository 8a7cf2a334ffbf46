# SPDX-License-Identifier: Apache-2.0
"""What the commands `tune` and `bench` and the repository's benchmarks measure alike, one way each. Importing a module
imports Triton; `llm_quant_rocm.timing` has the clock."""
