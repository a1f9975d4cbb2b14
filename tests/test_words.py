"""Text is written in the field's standard terms: no word or opening of the list below, wherever people read."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CODE = sorted(
    path
    for room in ("strategies", "data", "server_app", "client_app", "tests", "benchmarks", "examples", "docs")
    for path in (ROOT / room).rglob("*.py")
    if path != Path(__file__)
)
DOCUMENTS = [
    path
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
]

# not -> but
WORDS = {
    "told": "reported",
    "heard": "received",
    "kin": "neighbours, similar clients",
    "mended": "fixed",
    "besides": "also",
    "at hand": "available",
    "of use": "usable",
    "by itself": "alone, or left out",
    "as it is": "unchanged, or left out",
    "is worth": "has the value",
    "stands for": "represents",
    "comes of": "results from",
    "came of": "resulted from",
    "goes by": "is identified by",
    "speaks for": "estimates",
    "sits out": "is not sampled",
    "sat out": "was not sampled",
    "who is away": "absent clients",
    "gone on with": "resumed",
    "go on with": "resume",
    "goes on with": "resumes",
    "so much of": "a fraction of",
    "by how much": "the amount",
    "as far as": "where",
}
FORBIDDEN = re.compile(rf"\b({'|'.join(map(re.escape, WORDS))})\b", re.IGNORECASE)
# A docstring says what is returned or done.
OPENINGS = ("What", "Of", "That", "By", "How", "Which", "Who", "Whose", "Whether", "Where", "When")


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """The comments of a file of code, and its strings of several words, docstrings among them, each with its line."""
    code = path.read_text()
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:  # not a key
            yield node.lineno, node.value


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), text


def lines_of(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a document, without names in code, each with its number."""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        yield number, re.sub("`[^`]*`", "", line)


def found_in(path: Path, lines: Iterator[tuple[int, str]]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{number}: {word!r}, better: {WORDS[' '.join(word.lower().split())]}"
        for number, text in lines
        for word in FORBIDDEN.findall(" ".join(text.split()))
    ]


def test_code_uses_no_word_of_the_list() -> None:
    assert [line for path in CODE for line in found_in(path, texts(path))] == []


def test_documents_use_no_word_of_the_list() -> None:
    assert [line for path in DOCUMENTS for line in found_in(path, lines_of(path))] == []


def test_docstrings_say_what_is_returned_or_done() -> None:
    openings = tuple(f"{word} " for word in OPENINGS)
    found = ((path, line, text) for path in CODE for line, text in docstrings(path) if text.startswith(openings))
    assert [f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}" for path, line, text in found] == []


def test_test_names_use_no_word_of_the_list() -> None:
    names = [(1, name.replace("_", " ")) for path in CODE for name in re.findall(r"def (test_\w+)", path.read_text())]
    assert found_in(ROOT / "tests", iter(names)) == []


def test_the_list_is_found_where_it_is_used(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / "a.py").write_text('x = 1  # as told\n\n\ndef f():\n    """What comes of\n    it."""\n')
    assert [line.split(",")[0] for line in found_in(tmp_path / "a.py", texts(tmp_path / "a.py"))] == [
        "a.py:1: 'told'",
        "a.py:5: 'comes of'",
    ]
    assert [text[:4] for _, text in docstrings(tmp_path / "a.py")] == ["What"]
