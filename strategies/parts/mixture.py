"""Mixtures of models, with which clients of FedeRiCo and FedEM predict, and the file that holds one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors import SafetensorError, safe_open

from kindred.client.evaluation import predict
from kindred.client.state import BEST, MIXTURE
from kindred.client.training import CLASSES, set_arrays
from kindred.client.visit import Visit
from kindred.lazy import lazy
from kindred.messages import RECEIVED, ClientId, by_prefix, decode, encode, with_prefix
from kindred.objectives import Objective

if TYPE_CHECKING:
    import torch
else:
    torch = lazy("torch")

Arrays = dict[str, np.ndarray]


def mixture_shares(weights: np.ndarray, threshold: float) -> np.ndarray:
    """Return the weights of `threshold` or more, divided by their sum, and 0 for the others.

    If no weight is that large, all weights count; if all are 0, the shares are equal.

    Parameters
    ----------
    weights : ndarray, shape (k,)
    threshold : float
        0 to 1.

    Returns
    -------
    ndarray, shape (k,)
        Summing to 1.
    """
    counted = np.where(weights >= threshold, weights, 0.0)
    if not counted.any():
        counted = weights if weights.any() else np.ones_like(weights)
    return counted / counted.sum()


def mixture_of(
    predictions: np.ndarray, shares: np.ndarray, kind: str = "probabilities", objective: Objective = CLASSES
) -> np.ndarray:
    """Return the prediction of a mixture, h(x) = sum_j w_j h_j(x).

    Parameters
    ----------
    predictions : ndarray, shape (k, n, N)
        h_j(x) of each model, for n samples and N outputs.
    shares : ndarray, shape (k,)
        w_j, summing to 1.
    kind : {"probabilities", "logits"}
        What is mixed, see `Objective.mix`.
    objective : Objective

    Returns
    -------
    ndarray, shape (n, N)
    """
    counted = np.flatnonzero(shares)  # a diverged model may predict NaN, and 0 times NaN is not 0
    return objective.mix(predictions[counted], shares[counted], kind)


def evaluation_inputs(visit: Visit) -> torch.Tensor:
    """Return the inputs, (n, ...), for which the models of a mixture predict: test data, then validation data."""
    x, validation = visit.site.test[0], visit.site.validation
    return x if validation is None else torch.cat([x, validation[0]])


def mixture_scores(
    visit: Visit,
    predictions: np.ndarray,
    shares: np.ndarray,
    single: int,
    kind: str = "probabilities",
    prefix: str = "",
) -> dict[str, float]:
    """Return metrics and loss, on the client's test data, of a mixture and of one of its models.

    Parameters
    ----------
    visit : Visit
    predictions : ndarray, shape (k, n, N)
        The models' predictions for the n `evaluation_inputs`.
    shares : ndarray, shape (k,)
        Summing to 1.
    single : int
        Index of the model that is also evaluated alone.
    kind : {"probabilities", "logits"}
        What is mixed.
    prefix : str
        Prefix of the mixture's metrics; those of the single model begin with "received-", those of the mixture on
        validation data with "validation-".
    """
    targets = visit.site.test[1].cpu().numpy()
    mixed = mixture_of(predictions, shares, kind, visit.objective)
    metrics = {
        f"{which}{name}": value
        for which, rows in ((prefix, mixed), (f"{RECEIVED}-", predictions[single]))
        for name, value in visit.objective.evaluated(
            rows[: len(targets)], targets, visit.further(is_result=rows is mixed)
        ).items()
    }
    visit.finish(mixed[: len(targets)])
    metrics |= visit.judged(mixed[len(targets) :])
    return metrics | (visit.select(mixed[: len(targets)]) if visit.is_best(metrics) else {})


@dataclass(frozen=True)
class Mixture:
    """Models and their shares with which a client predicts, without a server.

    Attributes
    ----------
    clients : list of k client ids
        Owners of the models; the models' numbers where they have no owners.
    shares : ndarray, shape (k,)
        Summing to 1.
    models : list of k dicts of str to ndarray
    kind : {"probabilities", "logits"}
        What is mixed.
    """

    clients: list[ClientId]
    shares: np.ndarray
    models: list[Arrays]
    kind: str = "probabilities"

    @classmethod
    def load(cls, path: str | Path) -> Mixture:
        """Read the file that a site keeps, `mixture.safetensors`.

        Raises
        ------
        ValueError
            The file holds no mixture.
        """
        try:
            with safe_open(path, "numpy") as file:
                about = file.metadata() or {}
                arrays = {name: file.get_tensor(name) for name in file.keys()}
            clients, shares = decode(about["clients"]), arrays.pop("shares")
            parts = by_prefix(arrays)
            return cls(clients, shares, [parts[str(place)] for place in range(len(clients))], about["kind"])
        except (SafetensorError, KeyError, ValueError, TypeError) as error:  # TypeError: types that NumPy does not have
            raise ValueError(f"{path} holds no mixture of models ({error})") from None

    def predict(self, module: torch.nn.Module, x: torch.Tensor, objective: Objective = CLASSES) -> np.ndarray:
        """Return the predictions, (n, N), for inputs x (n, ...); `module` then holds the last model's arrays."""
        predictions = []
        for model in self.models:
            set_arrays(module, model)
            predictions.append(predict(module, x, objective))
        return mixture_of(np.stack(predictions), self.shares, self.kind, objective)


def keep_mixture(
    visit: Visit,
    clients: Sequence[ClientId],
    models: Sequence[Arrays],
    shares: np.ndarray,
    kind: str = "probabilities",
    metrics: Mapping[str, float] | None = None,
) -> None:
    """Write a file that `Mixture.load` reads to the folder of the client's state.

    With `metrics`, those of `mixture_scores`, it is the file of the client's best model; otherwise that of its mixture.
    """
    counted = np.flatnonzero(shares).tolist()
    arrays: Arrays = {"shares": shares[counted]}
    for place, i in enumerate(counted):
        arrays |= with_prefix(place, models[i])
    about = {"clients": encode([clients[i] for i in counted]), "kind": kind}
    if metrics is None:
        visit.save_result(MIXTURE, arrays, {**about, **visit.site.about})
    else:
        visit.save_result(BEST, arrays, {**about, **visit.about_best(metrics)})
