"""The dataset `text`: the next character of texts, a file for each client, as in LEAF's Shakespeare.

Caldas et al., "LEAF: A Benchmark for Federated Settings", 2018, arXiv:1812.01097. From 80 characters a model predicts
the next one. LEAF has a sample for each character of a text; here there is one for every tenth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from kindred.objectives import NextToken, Objective

from .dataset import Dataset
from .files import FOLDER_BYTES, DataError, existing_path, one_line
from .inputs import TokenInputs

TEXTS = "[!.]*.[tT][xX][tT]"  # names of files

LENGTH = 80
"""Characters that a model sees."""

STRIDE = 10
"""Characters between the beginnings of two samples."""

MOST_CHARACTERS = 99
"""Largest number of characters that are tokens of their own; all others are one more token."""

UNKNOWN = "\ufffd"

Samples = Sequence[tuple[np.ndarray, np.ndarray]]

NEEDS = "text needs a folder with a .txt file for each client, in UTF-8"


def read_texts(data_dir: str, test_share: float = 0.3) -> Dataset:
    """Read a folder of texts.

    The tokens are the most frequent characters of the texts' parts for training, up to `MOST_CHARACTERS`, and one for
    all others. Times are places in the texts, so that validation samples are from the end of the part for training.

    Parameters
    ----------
    data_dir : str
        A folder with a `.txt` file for each client, whose name is the client's.
    test_share : float
        Fraction of each text, its end, that is for test; above 0, below 1. No sample has characters of both parts.

    Raises
    ------
    DataError
        There are no such files, one cannot be read, or the texts are too short for any sample.
    """
    folder = existing_path(data_dir, NEEDS)
    paths = sorted(folder.glob(TEXTS)) if folder.is_dir() else []
    if not paths:
        raise DataError(f"data-dir {folder} has no .txt files: {NEEDS}")
    if (size := sum(path.stat().st_size for path in paths)) > FOLDER_BYTES:
        raise DataError(f"{folder} has texts of {size:,} bytes, allowed: {FOLDER_BYTES:,}")
    texts = [read_text(path) for path in paths]
    cuts = [cut_of(text, test_share) for text in texts]
    characters = frequent_characters(text[:cut] for text, cut in zip(texts, cuts, strict=True))
    train = [samples_of(text[:cut], characters) for text, cut in zip(texts, cuts, strict=True)]
    test = [samples_of(text[cut:], characters) for text, cut in zip(texts, cuts, strict=True)]
    if not (any(len(y) for _, y in train) and any(len(y) for _, y in test)):
        raise DataError(
            f"the texts in {folder} have up to {max(map(len, texts))} characters, and both parts of one, for training "
            f"and for test, need {LENGTH + 1} or more"
        )
    names = [path.stem for path in paths]
    return Dataset(
        np.concatenate([x for x, _ in train]),
        np.concatenate([y for _, y in train]),
        np.concatenate([x for x, _ in test]),
        np.concatenate([y for _, y in test]),
        NextToken(len(characters)),
        "tokens",
        np.repeat(names, [len(y) for _, y in train]),
        np.repeat(names, [len(y) for _, y in test]),
        places_of(train, test),
        vocabulary=len(characters),
        characters=characters,
    )


def read_text_site(path: Path, inputs: TokenInputs, objective: Objective, test_share: float) -> Dataset:
    """Return the samples of one text, by the characters of a task; the end of the text is for test.

    Raises
    ------
    DataError
        The text cannot be read or is too short, or the task has no characters.
    """
    _, length = inputs.shape
    if not inputs.characters:
        raise DataError(f"{path} is a text, and the schema's tokens are no characters")
    text = read_text(path)
    cut = cut_of(text, test_share)
    (x_train, y_train), (x_test, y_test) = (
        samples_of(part, inputs.characters, length) for part in (text[:cut], text[cut:])
    )
    if not len(y_train) or (test_share and not len(y_test)):
        raise DataError(
            f"{path} has {len(text)} characters, too few: its parts for training and for test need {length + 1} each"
        )
    return Dataset(
        x_train,
        y_train,
        x_test,
        y_test,
        objective,
        "tokens",
        times=places_of([(x_train, y_train)], [(x_test, y_test)]),
        vocabulary=len(inputs.characters),
    )


def read_text(path: Path) -> str:
    """Return the text in a file in UTF-8; DataError where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as a text in UTF-8: {one_line(error)}") from error


def cut_of(text: str, test_share: float) -> int:
    """Return the place of a text at which its part for test begins."""
    return round(len(text) * (1 - test_share))


def frequent_characters(texts: Iterable[str]) -> str:
    """Return the most frequent characters of texts, most frequent first, and U+FFFD for all others."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    del counts[UNKNOWN]
    ordered = sorted(counts, key=lambda character: (-counts[character], character))
    return "".join(ordered[:MOST_CHARACTERS]) + UNKNOWN


def tokens_of(text: str, characters: str) -> np.ndarray:
    """Return the token of each character of a text, (n,), int16; the last token for characters that are not known."""
    known = _codes(characters)
    order = np.argsort(known)
    codes = _codes(text)
    places = np.minimum(np.searchsorted(known[order], codes), len(known) - 1)
    tokens = order[places]
    return np.where(known[tokens] == codes, tokens, len(known) - 1).astype(np.int16)


def windows_of(text: str, characters: str, length: int = LENGTH) -> np.ndarray:
    """Return the tokens of every tenth sequence of `length` characters in a text, (n, length), int16."""
    tokens = tokens_of(text, characters)
    if len(tokens) < length:
        return np.empty((0, length), np.int16)
    return np.lib.stride_tricks.sliding_window_view(tokens, length)[::STRIDE]


def samples_of(text: str, characters: str, length: int = LENGTH) -> tuple[np.ndarray, np.ndarray]:
    """Return the samples of a text: tokens (n, length), int16, and the next token (n,), int64."""
    windows = windows_of(text, characters, length + 1)
    return windows[:, :-1], windows[:, -1].astype(np.int64)


def places_of(train: Samples, test: Samples) -> np.ndarray:
    """Return the place of each sample among those of its text, (n,): of the parts for training, then for test.

    Parameters
    ----------
    train, test : sequence of pairs of ndarray
        The samples of each text's two parts.
    """
    first = [np.arange(len(y)) for _, y in train]
    then = [len(own) + np.arange(len(y)) for own, (_, y) in zip(first, test, strict=True)]
    return np.concatenate(first + then).astype(float)


def _codes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
