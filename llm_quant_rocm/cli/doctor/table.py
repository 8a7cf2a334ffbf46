# SPDX-License-Identifier: Apache-2.0
"""What every part of the doctor produces: rows under a title, and the problems found on the way."""

from collections.abc import Sequence
from dataclasses import Field, asdict, dataclass, fields
from typing import Any, Self

_HEADING, _BELOW = "heading", "below"


@dataclass(frozen=True)
class Problem:
    """Something that would not work, and what to do about it."""

    what: str
    cure: str

    @classmethod
    def of(cls, message: str) -> Self:
        """Of one of this project's messages, whose cure stands behind the last colon."""
        what, _, cure = message.rpartition(": ")
        return cls(what or message, cure if what else "")


@dataclass(frozen=True)
class Part:
    """One table of the report.

    Attributes:
        name: its key in the JSON report.
        title: its heading for people.
        rows: dataclasses of one type, whose fields are the columns (`heading`), or stand under them (`below`).
        notes: lines below the table.
        problems: what would not work.
    """

    name: str
    title: str
    rows: Sequence[Any] = ()
    notes: Sequence[str] = ()
    problems: Sequence[Problem] = ()

    def headings(self) -> dict[str, str]:
        """The heading of every column of the table, by the name of its field."""
        columns = [column for column in self._fields() if _BELOW not in column.metadata]
        return {column.name: column.metadata.get(_HEADING, column.name.replace("_", " ")) for column in columns}

    def below(self) -> list[str]:
        """The fields that stand under the table (`below`)."""
        return [column.name for column in self._fields() if _BELOW in column.metadata]

    def _fields(self) -> tuple[Field[Any], ...]:
        return fields(self.rows[0]) if self.rows else ()

    def data(self) -> dict[str, Any]:
        """The part as JSON can hold it."""
        return {
            "rows": [asdict(row) for row in self.rows],
            "notes": list(self.notes),
            "problems": [asdict(problem) for problem in self.problems],
        }


def heading(text: str) -> dict[str, str]:
    """A field's metadata that give its column this heading, where its name would not do."""
    return {_HEADING: text}


def below() -> dict[str, bool]:
    """A field's metadata that print it under the table, in lines that are never broken and so can be copied."""
    return {_BELOW: True}
