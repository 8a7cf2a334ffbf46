# SPDX-License-Identifier: Apache-2.0
"""Every routing of tests/routing_inputs.py through Triton's interpreter. Prints what went wrong, by case, as JSON.

Interpreted or not is decided for a whole process, when a kernel is defined: so this is a program of its own.
"""

import json
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from unittest.mock import patch

import torch
import triton

from llm_quant_rocm.hardware import CPU
from llm_quant_rocm.kernels import routing
from tests.kernels.interpreter import make_fast
from tests.routing_inputs import (
    Routing,
    check_gather,
    check_schedule,
    check_sum,
    many_slots_a_part,
    random_ids,
    routings,
)


def in_two_launches(given: Routing) -> None:
    with patch.object(routing, "MANY_READS", 0):
        check_schedule(given, CPU)


def in_few_parts() -> None:
    with patch.object(routing, "_MOST_PARTS", 32):
        check_schedule(many_slots_a_part(), CPU)


def cases() -> Iterator[tuple[str, Callable[[], None]]]:
    for name, given in routings().items():
        yield f"{name}", partial(check_schedule, given, CPU)
        yield f"{name}, in two launches", partial(in_two_launches, given)
        # Not bf16: the interpreter truncates what it converts to it.
        yield f"sum, {name}", partial(check_sum, given, CPU, dtype=torch.float16)
    for tokens in (190, 200):  # 1520 ids are read by 20 tiles in one launch, or 1600 in two
        yield f"{tokens * 8} slots", partial(check_schedule, Routing(random_ids(tokens, 8, 9), None, 9, 128), CPU)
    yield "many slots a part", in_few_parts
    yield "gather", partial(check_gather, CPU)


def main() -> None:
    assert triton.knobs.runtime.interpret
    make_fast()
    failures = {}
    for name, check in cases():
        try:
            check()
        except Exception:
            failures[name] = traceback.format_exc()
    json.dump(failures, sys.stdout)


if __name__ == "__main__":
    main()
