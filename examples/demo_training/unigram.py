# SPDX-License-Identifier: Apache-2.0
"""The yardstick of a language model that has learned nothing but how frequent each token is."""

import torch


def unigram_loss(train: torch.Tensor, heldout: torch.Tensor, vocabulary: int) -> float:
    """Mean negative log-likelihood in nats of ``heldout`` under the token frequencies of ``train``, plus one each.

    Args:
        train, heldout: int64 [tokens].
    """
    counts = torch.bincount(train, minlength=vocabulary).double() + 1.0
    return -(counts / counts.sum()).log()[heldout].mean().item()
