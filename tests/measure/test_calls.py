# SPDX-License-Identifier: Apache-2.0
"""How many calls a graph of a measurement between GPUs holds."""

import pytest

pytest.importorskip("triton")

from llm_quant_rocm.measure.reduce_norm_quant import calls_of_a_graph


@pytest.mark.parametrize(
    ("call_ms", "calls"),
    [(0.001, 100), (0.05, 100), (0.1, 50), (0.5, 10), (5.0, 2), (100.0, 2)],
    ids=["a_microsecond", "launched", "slowly", "long", "an_eighth", "beyond"],
)
def test_short_calls_are_many_and_a_replay_keeps_to_its_budget(call_ms: float, calls: int) -> None:
    assert calls_of_a_graph(call_ms) == calls
