# SPDX-License-Identifier: Apache-2.0
"""JSON files of a checkpoint, read alike by the commands and by `checkpoint`, which needs packages that not all of the
commands do."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# What values of any kind raise where others are expected.
NONSENSE = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, RecursionError, re.error)


@contextmanager
def understood(checkpoint: str = "the checkpoint") -> Iterator[None]:
    """What reading the description of a checkpoint of this name raises becomes a `ValueError`: its values may be
    anything.

    Raises:
        ValueError: the description is nonsense.
    """
    try:
        yield
    except NONSENSE as error:
        raise ValueError(
            f"{checkpoint} describes itself in a way that cannot be understood ({error!r}): download the checkpoint "
            "again, or correct its config.json"
        ) from error


def parsed(file: Path) -> Any:
    """What a JSON file of a checkpoint holds.

    Raises:
        ValueError: it is broken.
    """
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise ValueError(f"{file} is no JSON ({error}): download the checkpoint again") from error


def json_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file of a checkpoint.

    Raises:
        ValueError: it is broken, or holds something else.
    """
    found = parsed(file)
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds no JSON object: download the checkpoint again")
    return found
