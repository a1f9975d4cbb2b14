"""The notebook examples/tour.ipynb: its cells run in order, without Jupyter."""

from __future__ import annotations

import ast
import json
import warnings
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parent.parent / "examples" / "tour.ipynb"


def executed(notebook: Path) -> tuple[dict[str, Any], list[Any]]:
    """Execute the cells as a notebook does; return its variables, and the value that each cell of code shows."""
    variables: dict[str, Any] = {}
    shown = []
    for cell in json.loads(notebook.read_text())["cells"]:
        if cell["cell_type"] == "code":
            body = ast.parse("".join(line for line in cell["source"] if not line.startswith("%"))).body
            last = body.pop() if isinstance(body[-1], ast.Expr) else None
            exec(compile(ast.Module(body, []), str(notebook), "exec"), variables)
            value = ast.Expression(last.value) if isinstance(last, ast.Expr) else None
            shown.append(value and eval(compile(value, str(notebook), "eval"), variables))
    return variables, shown


def test_the_tour_goes_from_a_table_to_a_model_for_each_hospital(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(json.loads(NOTEBOOK.read_text())["cells"]) == 15
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # Lyon has more than half of the patients
        variables, shown = executed(NOTEBOOK)
    patients, summary, clients, predicted = shown[1], shown[3], shown[6], shown[8]
    assert patients.index.tolist() == clients["name"].tolist() == ["Lyon", "Oslo", "Porto"]
    assert summary["strategy"].tolist() == ["local", "fedavg", "heurfedamp", "kindred"]
    assert not summary.isna().any(axis=None) and summary["accuracy"].between(0.6, 1).all()
    said = capsys.readouterr().out
    assert [line.split(":")[0] for line in said.splitlines()] == ["fedavg", "heurfedamp", "kindred"]
    assert predicted["label"].isin(["no", "yes"]).all() and len(predicted) == 2
    assert all((variables["run"].folder / clients["model"][i]).exists() for i in range(3))
    for figure in (shown[5], shown[7]):
        assert figure.axes
