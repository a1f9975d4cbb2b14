"""Settings of the papers' tables and figures by name: a small TOML file each, beside this one.

source      which table or figure of which paper, and where its settings are
measures    what the paper's numbers are
metric      which of our numbers that is (a key of `kindred.server_app.comparison.metrics.numbers_of`)
reference   the method that the others are tested against
seeds       seeds, as many as the paper has runs, where it says so
notes       where this differs from the paper, and where the paper is silent
base        the preset whose content holds where this file has none; its [settings] and notes hold beside this file's,
            its [paper] never does
methods     names of the base's [strategies] that are compared, where not all are
[settings]  of every method
[strategies]  the methods in order, with the settings of each alone; one with another name than its method says
            which that is (strategy)
[vary]      a setting, and the values that it takes in turn for each method that uses it
[paper]     the table's numbers, in percent: mean, std, and floats, numbers sent, where the paper has them
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kindred.server_app.config import ConfigError

FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Preset:
    """The content of a preset's file: see above."""

    name: str
    source: str
    measures: str
    metric: str
    reference: str
    seeds: list[int]
    notes: list[str]
    settings: Mapping[str, Any]
    strategies: Mapping[str, Mapping[str, Any]]
    vary: Mapping[str, Sequence[Any]]
    paper: Mapping[str, Mapping[str, float]]


def preset_names() -> list[str]:
    """The names of all presets, in order."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load_preset(name: str) -> Preset:
    """Read a preset; ConfigError where there is none of this name."""
    if name not in preset_names():
        raise ConfigError(f"--preset is {name!r}, allowed: {', '.join(preset_names())}")
    return Preset(name, **_content(name))


def _content(name: str) -> dict[str, Any]:
    """Return the content of a preset's file, with that of its base."""
    own = tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
    base = _content(own.pop("base")) if "base" in own else {}
    content = {"settings": {}, "vary": {}, **base, "paper": {}, **own}
    content["settings"] = {**base.get("settings", {}), **own.get("settings", {})}
    content["notes"] = [*own.get("notes", []), *base.get("notes", [])]
    if methods := content.pop("methods", None):
        content["strategies"] = {method: content["strategies"][method] for method in methods}
    return content
