"""Texts of errors that a real site may report to the server."""

from __future__ import annotations


class Reportable(str):
    """An error's text without data or paths of a client. `ValueError(Reportable(...))` is still a ValueError."""
