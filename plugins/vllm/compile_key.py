# SPDX-License-Identifier: Apache-2.0
"""What vLLM must know a compiled model by.

It keeps compiled graphs from one run to the next, under a key of its own variables, its configuration and its models'
code. How our layers compute is constants in such a graph, and would be those of the run that compiled it.
"""

from typing import Any

from llm_quant_rocm import __version__


def extend(vllm_config: Any, fact: str) -> None:
    """Makes `fact` part of the key, of which vLLM takes the hash when the model is loaded."""
    # Some platforms' is an object with a hash of its own; none of those that we serve.
    if isinstance(vllm_config.additional_config, dict):
        facts = vllm_config.additional_config.setdefault("llm_quant_rocm", [__version__])
        if fact not in facts:
            facts.append(fact)
