"""The command `kindred schema`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from kindred.lazy import lazy

from .common import app, end, option, show
from .display import displayed

if TYPE_CHECKING:  # imported on first use, so that `kindred --help` is quick
    from kindred import data
    from kindred.data import codebook as codebooks, csv_files, sites, text as texts
    from kindred.server_app import config, run_files, schema_text
else:
    data, csv_files = lazy("kindred.data"), lazy("kindred.data.csv_files")
    sites, texts = lazy("kindred.data.sites"), lazy("kindred.data.text")
    codebooks, config = lazy("kindred.data.codebook"), lazy("kindred.server_app.config")
    run_files, schema_text = lazy("kindred.server_app.run_files"), lazy("kindred.server_app.schema_text")


@app.command()
def schema(
    target: Annotated[
        str, option("target", "TEXT", "Of tables what is predicted: a column, labels a,b,c, or num>0.")
    ] = "",
    data_dir: Annotated[
        Path | None,
        option(
            "data-dir", "PATH", "A sample: a .csv file or a folder of them, an .npz file, or a folder of .txt files."
        ),
    ] = None,
    codebook: Annotated[
        Path | None, option("codebook", "FILE", "A .csv file with a row for each column: name, type, categories, ...")
    ] = None,
    client: Annotated[str, option("client", "COLUMN", "Column that says whose a row is; no input.")] = "",
    time: Annotated[str, option("time", "COLUMN", "Column of numbers that says when a row was; no input.")] = "",
    task: Annotated[str, option("task", "NAME", "classes, labels or number (default: what fits the target).")] = "auto",
    out: Annotated[Path | None, option("out", "FILE", "File to write, such as schema.json (default: none).")] = None,
) -> None:
    """Make the schema of sites' data from a sample, or of tables from a codebook, and print it."""
    if (data_dir is None) == (codebook is None):
        end(2, "--data-dir and --codebook: allowed: one of them")
    try:
        remarks: tuple[str, ...] = ()
        with displayed("reading the data", sys.stderr):
            if codebook is not None:
                made = codebooks.read_codebook(codebook, target, client, time, task)
            elif data_dir is not None and (data_dir.suffix.lower() == ".npz" or any(data_dir.glob(texts.TEXTS))):
                for name, value in (("target", target), ("client", client), ("time", time)):
                    if value:
                        end(2, f"--{name} is {value!r}, allowed with {str(data_dir)!r}: none, as it has no columns")
                made = sites.task_of_sample(data_dir, task)
            else:
                made, remarks = csv_files.schema_of_sample(str(data_dir), target, client, time, task)
        for line in (*schema_text.schema_lines(made), *remarks):
            show(line)
        if out is not None:
            run_files.write_json(out.expanduser(), made.to_dict())
            show(f"schema in {out}")
    except (config.ConfigError, data.DataError) as error:
        end(2, " ".join(str(error).splitlines()))
    except (OSError, ValueError) as error:
        end(2, f"--out is {str(out)!r}, which cannot be written ({getattr(error, 'strerror', None) or error})")
