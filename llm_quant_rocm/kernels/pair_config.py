# SPDX-License-Identifier: Apache-2.0
"""How the two products of routed experts are cut."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True)
class PairConfig:
    """Configurations of a grouped GEMM kernel for the products with w13 and with w2, whose tiles hold as many rows, one
    `block_m`."""

    w13: Any
    w2: Any

    def __post_init__(self) -> None:
        if self.w13.block_m != self.w2.block_m:
            raise ValueError(f"tiles of {self.w13.block_m} rows cannot be multiplied as tiles of {self.w2.block_m}")

    @property
    def block_m(self) -> int:
        """Rows of a tile."""
        return self.w13.block_m

    @classmethod
    def of(cls, fields: Mapping[str, Any], config_of: Callable[[Mapping[str, Any]], Any]) -> Self:
        """The configuration with these fields, as a file of configurations holds it: w13 and w2, or the fields of one
        configuration for both."""
        if fields.keys() == {"w13", "w2"}:
            return cls(config_of(fields["w13"]), config_of(fields["w2"]))
        return cls(config_of(fields), config_of(fields))
