"""The Flower app of the installed package: a pyproject.toml that names the two components, without code.

`flwr run` sends a folder and runs the components that its pyproject.toml names. These are the ones of the installed
package. So a run needs no clone, and each machine runs the code that is installed there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kindred.lazy import lazy
from kindred.versions import DISTRIBUTION, VERSION

if TYPE_CHECKING:
    from kindred.server_app import config
else:
    config = lazy("kindred.server_app.config")  # imports all methods, which `kindred --help` does not need

CONNECTION = "kindred"  # the SuperLink's name in config.toml of our FLWR_HOME
COMPONENTS = {"serverapp": "kindred.server_app.app:app", "clientapp": "kindred.client_app.app:app"}
PYPROJECT = """[project]
name = {name}
version = {version}
description = "Its code is the installed package kindred"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "kindred"

[tool.flwr.app.components]
{components}
[tool.flwr.app.config]
{settings}"""


def write_flower_app(folder: Path) -> Path:
    """Write the app into a folder, which is made if it is missing, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    text = PYPROJECT.format(
        name=json.dumps(DISTRIBUTION), version=json.dumps(VERSION), components=toml(COMPONENTS),
        settings=toml(config.Config().run_config()),
    )  # fmt: skip
    (folder / "pyproject.toml").write_text(text, encoding="utf-8")
    return folder


def toml(values: Mapping[str, Any]) -> str:
    """Return bools, ints, finite floats and texts as TOML."""
    lines = []
    for key, value in values.items():
        if isinstance(value, bool):
            text = str(value).lower()
        elif isinstance(value, str):  # TOML has JSON's escapes, and also requires DEL to be escaped
            text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        else:
            text = repr(value)
        lines.append(f"{key} = {text}\n")
    return "".join(lines)
