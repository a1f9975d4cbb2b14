"""A setting that a comparison varies: each method that uses it is run once with each value, under its own name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kindred.data.loading import KEYS
from kindred.server_app.config import ConfigError, is_used_by

NAME = r"[\w.+-]+"  # of a compared method
BESIDE = ("output-dir", "resume", "checkpoint-every", "keep-checkpoints")  # settings that do not change results
NOT_VARIED = (*KEYS, "strategy", "metric", *BESIDE)


@dataclass(frozen=True)
class Variant:
    """A compared method as one of several that differ in the varied setting.

    Attributes
    ----------
    of : str
        The method's name in the command or preset.
    value : bool, int, float, str or None
        The value of the varied setting; None if the method is not varied.
    """

    of: str
    value: Any = None

    @property
    def text(self) -> str:
        """The value as text, as in the variant's name; "" if the method is not varied."""
        return "" if self.value is None else text_of(self.value)

    @property
    def name(self) -> str:
        """The name under which the variant is compared."""
        return self.of if self.value is None else f"{self.of}-{self.text}"


@dataclass(frozen=True)
class Variation:
    """The setting that a comparison varies, and its values.

    Raises
    ------
    ConfigError
        It cannot be varied.
    """

    setting: str
    values: tuple[Any, ...]

    def __post_init__(self) -> None:
        what = f"--vary {self.setting}"
        if self.setting in NOT_VARIED:
            raise ConfigError(
                f"{what} is not allowed: all compared methods have the same data, seeds and metric; allowed: settings "
                "of methods, training and rounds"
            )
        texts = [text_of(value) for value in self.values]
        for text in texts:
            if not re.fullmatch(NAME, text):
                raise ConfigError(f"{what} has {text!r}, allowed: letters, digits and . _ + -")
        if len(set(texts)) < max(2, len(texts)):
            raise ConfigError(f"{what} has {', '.join(texts)}, allowed: two or more different values")

    @classmethod
    def of(cls, vary: Mapping[str, Sequence[Any]]) -> Variation | None:
        """Return the variation of a command or preset, setting -> values; None if it has none."""
        if len(vary) > 1:
            raise ConfigError(f"--vary names {', '.join(vary)}, allowed: one setting")
        return next((cls(setting, tuple(values)) for setting, values in vary.items()), None)

    @property
    def text(self) -> str:
        """The setting and its values, in a line."""
        return f"{self.setting} {', '.join(map(text_of, self.values))}"


def variants_of(variation: Variation | None, name: str, strategy: str) -> list[tuple[Variant, dict[str, Any]]]:
    """Return a method's variants, each with its varied setting; the method alone if it does not use the setting."""
    if variation is None or not is_used_by(variation.setting, strategy):
        return [(Variant(name), {})]
    return [(Variant(name, value), {variation.setting: value}) for value in variation.values]


def text_of(value: Any) -> str:
    """Return a setting's value as a short text."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
