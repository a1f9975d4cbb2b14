"""The page of a report: one HTML file that holds its style, its script and what it shows.

The parts lie in files beside this one: the frame `page.html`, the style `page.css` and the script, which is put
together from the files of `SCRIPT_FILES`. The script makes every text of other people a text node or an attribute, and
never HTML; `page` puts in the @NAMES@ of the frame.
"""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Mapping
from hashlib import sha256
from importlib.resources import files
from typing import Any

from kindred.server_app.run_files import finite

SCRIPT_FILES = (
    "page_elements.js",  # elements, numbers as text, plots, tables
    "page_run.js",  # the page of a run, and accuracies of its clients
    "page_collaboration.js",  # who helps whom: matrix and graph
    "page_tables.js",  # clusters, unused replies, settings
    "page_comparison.js",  # the page of a comparison
    "page_refresh.js",  # showing the page, printing it, keeping it up to date
)


def _text(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")


PAGE = _text("page.html")
STYLE = "\n" + _text("page.css")
SCRIPT = '\n(() => {\n"use strict";\n' + "\n".join(map(_text, SCRIPT_FILES)) + "})();\n"


def page(content: Mapping[str, Any], poll_seconds: float = 0) -> str:
    """The page that shows what `run_content` or `comparison_content` gave.

    Parameters
    ----------
    content : mapping
    poll_seconds : float (default: 0)
        How often the page asks the server that it came from whether there is more to show; 0: never.
    """

    def digest(text: str) -> str:
        return f"sha256-{base64.b64encode(sha256(text.encode()).digest()).decode()}"

    # The browser runs this script and loads nothing, whatever else may be in the page.
    policy = (
        f"default-src 'none'; script-src '{digest(SCRIPT)}'; style-src '{digest(STYLE)}'; img-src data:; "
        f"connect-src '{'self' if poll_seconds else 'none'}'; base-uri 'none'; form-action 'none'"
    )
    parts = {
        "POLICY": policy,
        "TITLE": html.escape(content["title"]),
        "STYLE": STYLE,
        "SCRIPT": SCRIPT,
        "POLL": f"{poll_seconds:g}",
        "DATA": embedded(content),
    }
    return re.sub(r"@([A-Z]+)@", lambda found: parts[found[1]], PAGE)


def embedded(content: Mapping[str, Any]) -> str:
    """JSON that may stand inside a `script` element: no character of it can end the element or begin another."""
    text = json.dumps(finite(content), separators=(",", ":"), allow_nan=False)
    return text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")
