"""A model of this project, read from its file and ready for use."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file

from kindred import Mixture, make_model
from kindred.client.models import check_kind
from kindred.client.training import check_shapes, set_arrays
from kindred.data import Task
from kindred.data.files import one_line, safetensors_header
from kindred.data.inputs import TokenInputs
from kindred.messages import by_prefix
from kindred.objectives import NextToken
from kindred.server_app.config import ConfigError


@dataclass(frozen=True)
class Predictor:
    """A model of this project, ready for use. A personal model is a mixture of one.

    Attributes
    ----------
    task : Task
        The model's inputs and objective.
    module : torch.nn.Module
    mixture : Mixture
        The models of the mixture; each fits `module`.
    names : tuple of str
        The names of the outputs, or else their numbers.
    """

    task: Task
    module: torch.nn.Module
    mixture: Mixture

    @classmethod
    def load(cls, path: Path) -> Predictor:
        """Read a model's file.

        Memory for a network is allocated only after the arrays in the file are known to fit it.

        Raises
        ------
        ConfigError
            The file does not exist, is damaged, or holds no model that can be used.
        """
        path = path.expanduser()
        if not path.is_file():
            raise ConfigError(f"--model is {str(path)!r}, which is no file; allowed: a model's .safetensors file")
        with _unusable(path, "cannot be read as a model"):
            about, shapes = safetensors_header(path)
        if not {"model", "task"} <= about.keys():
            raise ConfigError(
                f"--model is {str(path)!r}, which is no model of kindred's: it lacks the texts that name its "
                "network and task"
            )
        with _unusable(path, "cannot be used"):
            network, task = Task.from_metadata(about)
            for each in task.objective.names:
                if re.search(r"[\x00-\x1f\x7f\ud800-\udfff]", each):
                    raise ValueError(f"it has a class {each!r}, allowed: names without control characters")
            check_kind(network, task.inputs.kind)
            _check_carried(network, task, shapes, mixed="kind" in about)
        with _unusable(path, "cannot be read as a model"):
            mixture = _read_models(path, about)
            for name, array in ((name, array) for model in mixture.models for name, array in model.items()):
                if array.dtype.kind not in "biuf":  # such as bfloat16, where a package adds it to NumPy's
                    raise ValueError(f"its array {name!r} is of type {array.dtype}, allowed: numbers of NumPy's")
        with _unusable(path, "cannot be used"):
            module = make_model(network, task.inputs.shape, task.objective.num_outputs)
            for model in mixture.models:
                set_arrays(module, model)  # checks the arrays, too
                if spoilt := [key for key, array in model.items() if not np.isfinite(array).all()]:
                    raise ValueError(f"its array {spoilt[0]!r} has values that are not finite: did training diverge?")
        return cls(task, module, mixture)

    @property
    def names(self) -> tuple[str, ...]:
        objective, inputs = self.task.objective, self.task.inputs
        if isinstance(objective, NextToken) and isinstance(inputs, TokenInputs) and inputs.characters:
            return tuple(repr(character)[1:-1] for character in inputs.characters)  # a line break as \n
        return objective.names or tuple(map(str, range(objective.num_outputs)))

    def predictions(self, x: np.ndarray) -> np.ndarray:
        """Return predictions (n, N), as the objective has them, of inputs (n, ...) that `Task.prepared` returned.

        Raises
        ------
        ConfigError
            The predictions are not finite.
        ValueError
            The arrays are not those of the network.
        """
        rows = self.mixture.predict(self.module, torch.from_numpy(x), self.task.objective)
        if not np.isfinite(rows).all():
            raise ConfigError("the model gives predictions that are not finite: did its training diverge?")
        return rows


@contextmanager
def _unusable(path: Path, how: str) -> Iterator[None]:
    """Turn every exception into a ConfigError: a file from someone else may hold anything."""
    try:
        yield
    except Exception as error:
        raise ConfigError(f"--model is {str(path)!r}, which {how}: {one_line(error)}") from None


def _check_carried(network: str, task: Task, shapes: Mapping[str, tuple[int, ...]], mixed: bool) -> None:
    """Compare the shapes of the arrays in a file with those of the network that it names; ValueError if they differ."""
    try:
        with torch.device("meta"):  # shapes without memory for values
            state = make_model(network, task.inputs.shape, task.objective.num_outputs).state_dict()
    except RuntimeError:  # a network of an extension that cannot be built without values
        return
    for part in by_prefix({n: s for n, s in shapes.items() if n != "shares"}).values() if mixed else [shapes]:
        check_shapes(state, part)


def _read_models(path: Path, about: Mapping[str, str]) -> Mixture:

    if "kind" not in about:
        return Mixture([about.get("client", "")], np.ones(1), [load_file(path)])
    mixture = Mixture.load(path)
    shares = mixture.shares
    if shares.shape != (len(mixture.models),) or not ((shares >= 0).all() and abs(shares.sum() - 1) < 1e-6):
        raise ValueError(f"its {len(mixture.models)} models have the shares {shares.tolist()}, they must sum to 1")
    if mixture.kind not in ("probabilities", "logits"):
        raise ValueError(f"it is a mixture of {mixture.kind!r}, allowed: probabilities, logits")
    return mixture
