"""`report.html`: the results of a run, or of a comparison of runs, in one self-contained file.

`run_content` and `comparison_content` collect the content of the page from the files in the folder. `render.page` puts
it into the page, whose script draws it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kindred.files import write_bytes

from .comparison_content import comparison_content
from .content import run_content
from .reading import COMPARISON, REPORT
from .render import page


def write_report(folder: Path, summary: Mapping[str, Any] | None = None) -> Path:
    """Write `report.html` into the folder of a run, or of a comparison.

    Parameters
    ----------
    folder : Path
    summary : mapping, optional
        The summary of a run that has not written its summary file yet.

    Raises
    ------
    ConfigError
        The folder holds neither a run nor a comparison, or a file cannot be read.
    """
    is_comparison = (folder / COMPARISON).exists()
    content = comparison_content(folder) if is_comparison else run_content(folder, summary)
    path = folder / REPORT
    write_bytes(path, page(content).encode())
    return path
