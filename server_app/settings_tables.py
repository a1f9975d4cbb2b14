"""The settings of a run in the documents and in pyproject.toml, generated from the code.

`python -m kindred.server_app.settings_tables` prints the table of settings. With `--write`, in a clone, it updates
docs/configuration.md, the methods' pages in docs/methods, the README's table of methods and pyproject.toml.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from kindred import REGISTRY
from kindred.registry import Method
from kindred.settings import Setting, kebab

from .config import SETTINGS, Config
from .flower_app import toml

TABLE_HEAD = ("| setting | type | default | allowed | meaning |", "|---|---|---|---|---|")


def table_row(name: str, each: Setting, methods: Sequence[str] = ()) -> str:
    """Return a setting as a line of a Markdown table; `methods` are the titles of the methods that have it."""
    kind, allowed = each.kind.replace(" | ", " or "), each.allowed.documented or each.allowed.words
    meaning = f"{', '.join(methods)}: {each.meaning}" if methods else each.meaning
    return f"| `{kebab(name)}` | {kind} | {json.dumps(each.default)} | {allowed} | {meaning} |"


def table() -> str:
    """Return the settings as a Markdown table, one line per setting."""
    rows = [
        table_row(spec.name, each, methods)
        for spec in fields(Config)
        for each, methods in spec.metadata["methods"].items()
    ]
    return "\n".join((*TABLE_HEAD, *rows))


def table_of(method: Method) -> str:
    """Return a method's own settings as a Markdown table, one line per setting; "No settings." if it has none."""
    if not method.settings:
        return "No settings."
    return "\n".join((*TABLE_HEAD, *(table_row(each.name, each) for each in method.settings)))


def methods_table() -> str:
    """Return our own methods and their papers as a Markdown table, a line each."""
    lines = ["| `--strategy` | method | from |", "|---|---|---|"]
    for name in REGISTRY.own:
        method = REGISTRY[name]
        paper = re.sub(r"(docs/\S+\.md)", r"[its page](\1)", method.paper)
        lines.append(f"| `{name}` | {method.title} | {paper} |")
    return "\n".join(lines)


def method_settings_table() -> str:
    """Return our own methods and the settings of each as a Markdown table, a line each."""
    lines = ["| method | settings |", "|---|---|"]
    for name in REGISTRY.own:
        own = ", ".join(f"`{each.key}`" for each in REGISTRY[name].settings)
        lines.append(f"| `{name}` | {own or 'none'} |")
    return "\n".join(lines)


def defaults() -> str:
    """Return the settings with their defaults, in TOML."""
    return toml({key: known.default for key, known in SETTINGS.items()}).rstrip("\n")


def written(root: Path) -> dict[Path, str]:
    """Return the up-to-date texts of all files that contain generated parts: path -> text."""
    documented, readme, project = root / "docs" / "configuration.md", root / "README.md", root / "pyproject.toml"
    pages = {root / "docs" / "methods" / f"{name}.md": REGISTRY[name] for name in REGISTRY.own}
    parts = (
        (documented, r"(?:^\| setting \| .*\n(?:^\|.*\n)+)", table()),
        (documented, r"(?:^\| method \| .*\n(?:^\|.*\n)+)", method_settings_table()),
        (readme, r"(?:^\| `--strategy` .*\n(?:^\|.*\n)+)", methods_table()),
        (project, r"(?<=^\[tool\.flwr\.app\.config\]\n)(?:^[\w-]+ = .*\n)+", defaults()),
        *(
            (page, r"(?<=^<!-- settings -->\n)(?:.*\n)*?(?=<!-- end of settings -->$)", f"\n{table_of(method)}\n")
            for page, method in pages.items()
        ),
    )
    changed = {path: path.read_text() for path in (documented, readme, project, *pages)}
    for path, pattern, text in parts:
        before, _, after = re.split(f"({pattern})", changed[path], maxsplit=1, flags=re.MULTILINE)
        changed[path] = f"{before}{text}\n{after}"
    return changed


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        for path, text in written(Path()).items():
            path.write_text(text)
    else:
        print(table())
