# SPDX-License-Identifier: Apache-2.0
"""Which modules of a 16-bit checkpoint stay as they are, which engines fuse, and which models stay altogether."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

# Encoders of images and sounds, as a whole.
ENCODERS = ("*visual*", "*vision*", "*audio*")
# Output layers (GLM-4 and InternLM2 have other names of theirs), embeddings, routers (of HunYuan called gate.wg), the
# small layers of Gemma-3n's altup, what joins hidden states before a layer that predicts further tokens and reads what
# it says, what picks tokens for sparse attention, and encoders with what joins them to the language model stay: engines
# read them as they are.
IGNORE = (
    "lm_head", "*.lm_head", "output_layer", "*.output_layer", "output", "language_model.output", "score", "score.*",
    "*.score", "classifier", "classifier.*", "*embed*", "*.wte", "*.wpe", "*.gate", "*.gate.*", "*.router*",
    "*.shared_expert_gate", "*.altup.*", "*.eh_proj", "mtp.fc", "*.mtp_linear_proj.*", "*.mtp_layers.*.input_proj",
    "*.shared_head.head", "*.indexer.wk", "*.indexer.weights_proj", *ENCODERS, "*projector*", "*connector*",
    "*resampler*", "*aligner*", "mlp1.*", "mlp_AR.*",
)  # fmt: skip
# Models of transformers' Conv1D, whose weights are [K, N].
TRANSPOSED = ("gpt2", "openai-gpt")
# Layers that engines fuse into one. Upstream takes one global scale for all of a fused layer's rows.
_FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
    ("wq", "wk", "wv"),
    ("query", "key", "value"),
)


def fused_with(module: str) -> tuple[str, ...]:
    """The names of the modules that engines fuse with `module`, itself included, in the order of their rows."""
    parent, dot, last = module.rpartition(".")
    group = next((group for group in _FUSED if last in group), (last,))
    return tuple(f"{parent}{dot}{member}" for member in group)


def in_mixers(modules: Iterable[str]) -> set[str]:
    """Those of Mamba's first kind, whose layers have a dt_proj: engines know no quantization of them."""
    names = set(modules)
    return {name for name in names if f"{name.rpartition('.')[0]}.dt_proj" in names}


def holds_all_experts(module: str, shape: Sequence[int]) -> bool:
    """Whether a weight is that of all experts of a layer: it would stay as it is, and nobody would read it so."""
    # The last dimension of a convolution's weight is short, or it has one channel in each group.
    stacked = len(shape) == 3 and shape[1] > 1 and shape[2] >= 16
    return stacked and (".experts." in module or not any(fnmatchcase(module, entry) for entry in IGNORE))
