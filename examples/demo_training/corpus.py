# SPDX-License-Identifier: Apache-2.0
"""Text that every Python installation carries: the language reference of ``help()`` and the library's docstrings."""

import ast
import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

# Not documentation of the library, or already counted as topics, or not part of Python at all.
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data", "__pycache__"}
# Held-out documents are kept short so that the split covers many subjects.
_LONGEST_HELDOUT_DOCUMENT = 8_000
# A shared paragraph shorter than this ("See also:") is idiom, not leakage.
_SHORTEST_LEAK = 40


@dataclass(frozen=True)
class Document:
    """One help topic, or all docstrings of one module in the order of its source."""

    name: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """Training and held-out documents. No paragraph of ``_SHORTEST_LEAK`` characters or more is in both."""

    train: list[Document]
    heldout: list[Document]

    @property
    def heldout_text(self) -> str:
        return "\n\n".join(document.text for document in self.heldout) + "\n"


def gather(heldout_characters: int = 48_000) -> Corpus:
    """Read the text and split it by document.

    Which documents are held out depends on a hash of their names alone, so the split moves little between
    Python versions. Two modules may share text (``decimal`` and ``_pydecimal``): a paragraph that is held out is
    removed from the training documents.

    Args:
        heldout_characters: how much text to hold out, in characters; reached by at most one document more.
    """
    documents = _topics() + _modules()
    heldout: list[Document] = []
    size = 0
    for document in sorted(documents, key=lambda d: hashlib.sha256(d.name.encode()).digest()):
        if size < heldout_characters and 200 <= len(document.text) <= _LONGEST_HELDOUT_DOCUMENT:
            heldout.append(document)
            size += len(document.text)
    names = {document.name for document in heldout}
    secret = {p for document in heldout for p in _paragraphs(document.text) if len(p) >= _SHORTEST_LEAK}
    train = []
    for document in documents:
        if document.name not in names:
            kept = "\n\n".join(p for p in document.text.split("\n\n") if p.strip() not in secret)
            if kept:
                train.append(Document(document.name, kept))
    return Corpus(train, heldout)


def _paragraphs(text: str) -> list[str]:
    return [paragraph.strip() for paragraph in text.split("\n\n")]


def _topics() -> list[Document]:
    return [Document(f"topic {name}", text.strip()) for name, text in sorted(topics.items())]


def _modules() -> list[Document]:
    root = Path(sysconfig.get_paths()["stdlib"])
    seen: set[str] = set()
    documents = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if _SKIPPED_FOLDERS.isdisjoint(relative.parts):
            text = "\n\n".join(_docstrings(path, seen))
            if text:
                documents.append(Document(f"module {relative.as_posix()}", text))
    return documents


def _docstrings(path: Path, seen: set[str]) -> list[str]:
    """Docstrings of one source file in its order, without those in ``seen``, which it extends."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # template and bad-syntax fixtures that are no Python of this version
        return []
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = (ast.get_docstring(node) or "").strip()
            if docstring and docstring not in seen:
                seen.add(docstring)
                found.append((getattr(node, "lineno", 0), docstring))
    return [docstring for _, docstring in sorted(found)]
