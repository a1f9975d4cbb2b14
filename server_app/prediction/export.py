"""Export of a model as an ONNX or torch.export program, checked against `kindred predict`."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kindred.data.inputs import TableInputs, TokenInputs
from kindred.files import replacing
from kindred.lazy import lazy
from kindred.server_app.config import ConfigError

from .card import model_card
from .output import writing
from .predictor import Predictor
from .program import Program, example, expected

if TYPE_CHECKING:
    import onnx
    import onnxruntime
else:
    onnx, onnxruntime = lazy("onnx"), lazy("onnxruntime")

SUFFIXES = {".onnx": "ONNX", ".pt2": "torch.export"}
CHECKED = (5, 1)  # samples with which a program is checked; two numbers, as it takes any
TOLERANCE = 1e-4  # of a probability, or of a number's deviation
EXTRA = "pip install 'kindred-fl[export]'"


def export(model: Path, output: Path) -> tuple[Path, float]:
    """Write a program and, beside it, a model card.

    Parameters
    ----------
    model : Path
        A file of `Predictor.load`.
    output : Path
        The file to write; its suffix chooses the format, see `SUFFIXES`.

    Returns
    -------
    card : Path
        The model card.
    difference : float
        The largest difference between the program's predictions and those of `kindred predict`.

    Raises
    ------
    ConfigError
        The model cannot be used or exported, the file cannot be written, or the program predicts something else.
    """
    output = output.expanduser()
    if output.suffix not in SUFFIXES:
        raise ConfigError(f"--output is {str(output)!r}, allowed: a name that ends in {' or '.join(SUFFIXES)}")
    if output.suffix == ".onnx":
        _check_extra()
    predictor = Predictor.load(model)
    program, about = Program(predictor), description(predictor)
    with writing(f"--output is {str(output)!r}, which cannot be written"), replacing(output) as temporary:
        write = _write_onnx if output.suffix == ".onnx" else _write_torch
        write(program, predictor, about, temporary)
        difference = _difference(predictor, temporary)
        if not difference <= TOLERANCE:
            raise ConfigError(
                f"the exported program differs from `kindred predict` by {difference:.2g}, allowed: {TOLERANCE}; "
                "nothing was written"
            )
    card = output.with_suffix(".md")
    with writing(f"{card} cannot be written"), replacing(card) as temporary:
        temporary.write_text(model_card(predictor, model, output, about, difference), encoding="utf-8")
    return card, difference


def description(predictor: Predictor) -> dict[str, str]:
    """Return the texts that a program carries: what goes in, and what comes out, as JSON."""
    task, x = predictor.task, example(predictor, 1)
    given: dict[str, Any] = {"name": "x", "type": str(x.dtype), "shape": ["n", *x.shape[1:]], "kind": task.inputs.kind}
    if isinstance(task.inputs, TableInputs):
        given["columns"] = [
            {"name": each.name, "type": each.type} | ({"categories": list(each.categories)} if each.categories else {})
            for each in task.inputs.schema.columns
        ]
    if isinstance(task.inputs, TokenInputs) and task.inputs.characters:
        given["characters"] = task.inputs.characters
    what = "probabilities" if task.objective.probabilities else "numbers"
    result = {"name": what, "objective": task.objective.name, "names": list(predictor.names)}
    return {"input": json.dumps(given, ensure_ascii=False), "output": json.dumps(result, ensure_ascii=False)}


def _exported(program: Program, predictor: Predictor) -> torch.export.ExportedProgram:
    x = torch.from_numpy(example(predictor, 2))
    try:
        return torch.export.export(program, (x,), dynamic_shapes={"x": {0: torch.export.Dim.DYNAMIC}})
    except Exception as error:  # a network of an extension may do anything in Python
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"the model's network cannot be exported by torch.export ({reason})") from None


def _write_torch(program: Program, predictor: Predictor, about: Mapping[str, str], path: Path) -> None:
    with open(path, "wb") as file:
        torch.export.save(_exported(program, predictor), file, extra_files=dict(about))


def _write_onnx(program: Program, predictor: Predictor, about: Mapping[str, str], path: Path) -> None:
    name = json.loads(about["output"])["name"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = torch.onnx.export(
            _exported(program, predictor), input_names=["x"], output_names=[name], dynamo=True, external_data=False,
            verbose=False, optimize=True,
        )  # fmt: skip
    assert made is not None
    content = made.model_proto
    onnx.helper.set_model_props(content, dict(about))
    path.write_bytes(content.SerializeToString())


def _difference(predictor: Predictor, path: Path) -> float:
    """Return the largest difference of a program's predictions from those of `kindred predict`."""
    scale = getattr(predictor.task.objective, "deviation", 1.0)
    return max(
        float(np.abs(run(path, x) - expected(predictor, x)).max() / scale)
        for x in (example(predictor, count, seed=count) for count in CHECKED)
    )


def run(path: Path, x: np.ndarray) -> np.ndarray:
    """Return the predictions of an exported program of raw inputs, by ONNX Runtime or PyTorch."""
    if path.suffix == ".onnx":
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        return session.run(None, {"x": x})[0]
    with open(path, "rb") as file, torch.inference_mode():
        return torch.export.load(file).module()(torch.from_numpy(x)).numpy()


def _check_extra() -> None:
    for name in ("onnx", "onnxruntime", "onnxscript"):
        if find_spec(name) is None:
            raise ConfigError(f"--output ends in .onnx, which needs {name}, and it is not installed: {EXTRA}")
