# SPDX-License-Identifier: Apache-2.0
"""What every command prints for --json."""

import json
import math
from collections.abc import Mapping
from typing import Any

from rich.console import Console


def print_json(output: Console, figures: Any) -> None:
    """`figures` as JSON (`json_of`), for programs."""
    output.print_json(json_of(figures))


def json_of(figures: Any) -> str:
    """`figures` as JSON, which has neither infinity nor NaN: null stands for them."""
    return json.dumps(_finite(figures), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value
