# SPDX-License-Identifier: Apache-2.0
"""What the operators of routed experts share: the schedule is a plain Python program's, and rows are copied and added
as torch does it."""

from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import torch

from llm_quant_rocm.hardware import Hardware
from llm_quant_rocm.kernels import routing
from tests.amd.budget import Budget
from tests.amd.operators import shared_out
from tests.routing_inputs import (
    Routing,
    check_scatter,
    check_schedule,
    check_sum,
    many_slots_a_part,
    random_ids,
    routings,
)

BUDGETS = {
    # Ids are four bytes each, and only those of the batch may be read.
    "schedule_kernel": Budget(wide=False),
    "count_kernel": Budget(wide=False),
    "place_kernel": Budget(wide=False),
    "scatter_rows_kernel": Budget(),
    "sum_rows_kernel": Budget(),
}


def shipped(hardware: Hardware) -> dict[str, Callable[[], object]]:
    def launch(tokens: int, experts: int, hidden: int, block_m: int) -> None:
        ids = torch.zeros(tokens, 8, dtype=torch.int32)
        schedule = routing.schedule(ids, None, experts, block_m, hardware, torch.empty(tokens, 8))
        x = torch.empty(tokens, hidden, dtype=torch.bfloat16)
        routing.scatter_rows(x, schedule.slot_row, schedule.row_map.numel(), hardware)
        rows = torch.empty(tokens * 8, hidden, dtype=torch.bfloat16)
        routing.sum_rows(rows, schedule.slot_row, 8, hardware, in_tiles=False)

    return {
        f"{tokens} tokens of {name}": partial(launch, tokens, *shape, block_m)
        for name, shape in {"Mixtral 8x7B": (8, 4096), "Qwen3-30B-A3B": (128, 2048), "DeepSeek-V3": (256, 7168)}.items()
        for tokens, block_m in ((1, 16), (64, 16), (4096, 128))
    }


def executed(hardware: Hardware) -> dict[str, Callable[[], object]]:
    def in_two_launches(given: Routing) -> None:
        with patch.object(routing, "MANY_READS", 0):
            check_schedule(given, hardware)

    def in_few_parts() -> None:
        with patch.object(routing, "_MOST_PARTS", 32):
            check_schedule(many_slots_a_part(), hardware)

    many = {
        "many slots": Routing(random_ids(600, 8, 24), None, 24, 64),
        # 1520 ids are read by 20 tiles in one launch, or 1600 in two.
        **{f"{8 * tokens} slots": Routing(random_ids(tokens, 8, 9), None, 9, 128) for tokens in (190, 200)},
    }
    cases = {
        **{name: partial(check_schedule, given, hardware) for name, given in routings().items()},
        **{f"{name}, in two launches": partial(in_two_launches, given) for name, given in routings().items()},
        **{name: partial(check_schedule, given, hardware) for name, given in many.items()},
        "many slots a part": in_few_parts,
        **{f"sum, {name}": partial(check_sum, given, hardware) for name, given in routings().items()},
    }
    return {"scatter": partial(check_scatter, hardware)} | shared_out(cases, hardware, alike=True)
