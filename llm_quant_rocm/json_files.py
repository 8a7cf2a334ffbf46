# SPDX-License-Identifier: Apache-2.0
"""JSON files of a checkpoint, read alike by the commands and by `checkpoint`, which needs packages that not all of the
commands do."""

import json
from pathlib import Path
from typing import Any


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
