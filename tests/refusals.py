"""Refusals of data, which must be one line."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kindred.data import DataError


def refusal(call: Callable[[], object]) -> str:
    """Return the text of the DataError that a call raises; it has one line."""
    with pytest.raises(DataError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)
