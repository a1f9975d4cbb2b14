"""Ctrl-C inside compiled code: it may turn the KeyboardInterrupt into an error of its own."""

from __future__ import annotations


def raise_interrupt(error: BaseException) -> None:
    """Raise KeyboardInterrupt if an error has come from one."""
    if is_interrupt(error):
        raise KeyboardInterrupt from error


def is_interrupt(error: BaseException | None) -> bool:
    """Return whether an error has come from a KeyboardInterrupt, as its cause or its context."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None
