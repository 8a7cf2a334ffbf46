# SPDX-License-Identifier: Apache-2.0
"""Loads the plugin as an engine would. For a process of its own: it imports the engine."""

import json
import logging
from importlib.metadata import entry_points

OURS = "llm_quant_rocm"


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def main(group: str) -> None:
    """Call our entry point of `group`, and print a JSON list of what the library warned of meanwhile (an unsupported
    version, a patch that does not fit) on the last line."""
    kept = _Kept()
    logging.getLogger(OURS).addHandler(kept)
    (plugin,) = entry_points(group=group, name=OURS)
    plugin.load()()
    print(json.dumps(kept.messages))
