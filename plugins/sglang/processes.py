# SPDX-License-Identifier: Apache-2.0
"""Plugins in the one kind of process where SGLang loads none: the tokenizers of --tokenizer-worker-num."""

from collections.abc import Callable
from typing import Any


class WithPlugins(dict[str, Any]):
    """A dictionary that loads SGLang's plugins in the process where it is unpickled, and is a plain one there."""

    def __reduce__(self) -> tuple[Callable[..., dict[str, Any]], tuple[dict[str, Any]]]:
        return _after_loading, (dict(self),)


def _after_loading(value: dict[str, Any]) -> dict[str, Any]:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    return value


def write_data(original: Callable[..., Any], port_args: Any, server_args: Any, scheduler_info: dict[str, Any]) -> Any:
    """`write_data_for_multi_tokenizer`, whose data a tokenizer's process unpickles before it looks at the model."""
    return original(port_args, server_args, WithPlugins(scheduler_info))
