"""The page of a report: one HTML file that holds its style, its script and what it shows.

Its parts are files in this folder: the frame `page.html`, the style `page.css` and the files of `SCRIPT_FILES`, which
together are the script. `page` replaces the @NAMES@ in the frame. The script writes texts from clients and users as
text nodes or attributes, never as HTML.
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
    "page_run.js",  # the page of a run, and the metric of its clients
    "page_live.js",  # what a run at real sites does now
    "page_site.js",  # the page of a site
    "page_clients.js",  # each client's verdict, value and curve; sites that only validate
    "page_collaboration.js",  # which client learns from which: matrix and graph
    "page_weights.js",  # weights over rounds
    "page_tables.js",  # clusters, unused replies, settings
    "page_comparison.js",  # the page of a comparison
    "page_refresh.js",  # showing, printing and refreshing the page
)


def _text(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")


PAGE = _text("page.html")
STYLE = "\n" + _text("page.css")
SCRIPT = '\n(() => {\n"use strict";\n' + "\n".join(map(_text, SCRIPT_FILES)) + "})();\n"


def page(content: Mapping[str, Any], poll_seconds: float = 0) -> str:
    """Return the page, as HTML, that shows the result of `run_content` or `comparison_content`.

    Parameters
    ----------
    content : mapping
    poll_seconds : float (default: 0)
        Interval at which the page asks its server for new content, in seconds; 0: never.
    """

    def digest(text: str) -> str:
        return f"sha256-{base64.b64encode(sha256(text.encode()).digest()).decode()}"

    # The browser runs this script alone and loads nothing else, whatever the page contains.
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
    """Return JSON for the inside of a `script` element: no character of it can end the element or start another."""
    text = json.dumps(finite(content), separators=(",", ":"), allow_nan=False)
    return text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")
