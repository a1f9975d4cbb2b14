"""The task of a run's models: their inputs, and their objective. With these and its arrays a model can be used."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kindred.lazy import lazy
from kindred.objectives import Number, Objective

from .files import DataError, one_line
from .inputs import KINDS, Inputs

if TYPE_CHECKING:
    import torch

    from .dataset import Dataset
else:
    torch = lazy("torch")


@dataclass(frozen=True)
class Task:
    """Inputs and objective of a run's models.

    Attributes
    ----------
    inputs : Inputs
        What goes in, and how it is prepared.
    objective : Objective
        What comes out, its loss and its metrics.
    """

    inputs: Inputs
    objective: Objective

    @classmethod
    def fitted(cls, dataset: Dataset, x: np.ndarray, y: np.ndarray) -> Task:
        """Return the task of a dataset, prepared by the statistics of some of its samples: inputs x, targets y."""
        objective = dataset.objective
        if isinstance(objective, Number) and not dataset.is_fitted:  # its deviation is 1 instead of 0
            objective = replace(objective, mean=float(y.mean()), deviation=float(y.std()) or 1.0)
        return cls(KINDS[dataset.kind].fitted(dataset, objective.prepare(x)), objective)

    def prepared(self, x: np.ndarray) -> np.ndarray:
        """Return inputs, as a dataset has them, in the form that the networks take.

        Raises
        ------
        DataError
            The inputs have another shape.
        """
        return self.inputs.prepared(self.objective.prepare(x))

    def tensor(self, x: np.ndarray) -> torch.Tensor:
        """Return `prepared` inputs as a tensor."""
        return torch.from_numpy(self.prepared(x))

    def samples(self, x: np.ndarray, y: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets, as a dataset has them, as tensors for training and evaluation."""
        return self.tensor(x), torch.from_numpy(self.objective.scaled(y))

    def to_metadata(self, model: str) -> dict[str, str]:
        """Return texts to store beside the arrays of a model; `model` is the name of its network."""
        return {"model": model, "task": json.dumps(self.to_dict())}

    def to_dict(self) -> dict[str, Any]:
        """Return the task as entries of a JSON file."""
        return {"inputs": self.inputs.to_dict(), "objective": self.objective.to_dict()}

    @classmethod
    def from_dict(cls, entries: Mapping[str, Any]) -> Task:
        """Return the task that `to_dict` describes; raise KeyError, TypeError or ValueError where it is none."""
        return cls(Inputs.from_dict(entries["inputs"]), Objective.from_dict(entries["objective"]))

    @classmethod
    def load(cls, path: Path) -> Task:
        """Return the task in a JSON file, such as schema.json; DataError where the file cannot be read or has none."""
        path = path.expanduser()
        if path.exists() and not path.is_file():  # a pipe would wait for its writer
            raise DataError(f"{path} cannot be read as a schema: it is no file")
        try:
            return cls.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except KeyError as error:
            raise DataError(f"{path} cannot be read as a schema: it has no {one_line(error)}") from error
        except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(f"{path} cannot be read as a schema: {one_line(error)}") from error

    @property
    def fingerprint(self) -> str:
        """Hash of the task: equal where inputs are prepared, and outputs read, in the same way."""
        return sha256(json.dumps(self.to_dict()).encode()).hexdigest()[:16]

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str]) -> tuple[str, Task]:
        """Return the name of the network and the task from the texts of `to_metadata`.

        Raises
        ------
        KeyError, ValueError, TypeError
            The texts are missing, or a field is out of range.
        """
        return metadata["model"], cls.from_dict(json.loads(metadata["task"]))
