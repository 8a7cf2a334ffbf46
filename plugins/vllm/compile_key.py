# SPDX-License-Identifier: Apache-2.0
"""What vLLM must know a compiled model by.

It keeps compiled graphs from one run to the next, under a key of its own variables, its configuration and its models'
code. How our layers compute is constants in such a graph, and would be those of the run that compiled it.
"""

from typing import Any

from vllm.config import get_current_vllm_config_or_none

from llm_quant_rocm import __version__


def begin() -> None:
    """To be called before a model has layers: models that are parts of others get copies of vLLM's configuration, which
    share what is in it by then."""
    _facts(get_current_vllm_config_or_none())


def extend(vllm_config: Any, fact: str) -> None:
    """Makes `fact` part of the key, of which vLLM takes the hash when the model is loaded."""
    facts = _facts(vllm_config)
    if fact not in facts:
        facts.append(fact)


def _facts(vllm_config: Any) -> list[str]:
    # Some platforms' is an object with a hash of its own; none of those that we serve.
    if vllm_config is None or not isinstance(vllm_config.additional_config, dict):
        return []
    facts: list[str] = vllm_config.additional_config.setdefault("llm_quant_rocm", [__version__])
    return facts
