"""Models that predict together: what a client of FedeRiCo or FedEM has in the end, and the file that it is in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .client.state import MIXTURE
from .messages import ClientId, by_prefix, decode, encode, with_prefix

if TYPE_CHECKING:
    import torch

    from .client.app import Visit

Arrays = dict[str, np.ndarray]

SMALLEST = float(np.finfo(np.float32).tiny)
"""What a probability of 0 counts as where its logarithm is asked for."""


def mixture_of(probabilities: np.ndarray, shares: np.ndarray, kind: str = "probabilities") -> np.ndarray:
    """h(x) = sum_j w_j h_j(x), what a client predicts.

    Parameters
    ----------
    probabilities : ndarray, shape (k, n, N)
        h_j(x) of each model, for n samples and N classes.
    shares : ndarray, shape (k,)
        w_j, summing to 1.
    kind : {"probabilities", "logits"}
        What is mixed. A mixture of logits is the geometric mean of the probabilities.

    Returns
    -------
    ndarray, shape (n, N)
        Rows sum to 1.
    """
    counted = np.flatnonzero(shares)  # what a diverged model gives may be no numbers: 0 times that is not 0
    shares, probabilities = shares[counted], probabilities[counted]
    if kind == "probabilities":
        return np.tensordot(shares, probabilities, axes=1)
    scores = np.tensordot(shares, np.log(np.maximum(probabilities, SMALLEST)), axes=1)  # (n, N)
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def accuracy_and_loss(probabilities: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """The share of labels (n,) that rows (n, N) give most to, and their mean cross-entropy; NaN of no samples."""
    if not len(labels):
        return np.nan, np.nan
    given = probabilities[np.arange(len(labels)), labels]  # (n,)
    return float((probabilities.argmax(axis=1) == labels).mean()), float(-np.log(np.maximum(given, SMALLEST)).mean())


@dataclass(frozen=True)
class Mixture:
    """What a client predicts with: models and their shares. It needs no server.

    Attributes
    ----------
    clients : list of k client ids
        Whose models they are; of models that are nobody's, their numbers.
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
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, "numpy") as file:
                about = file.metadata() or {}
                arrays = {name: file.get_tensor(name) for name in file.keys()}
            clients, shares = decode(about["clients"]), arrays.pop("shares")
            parts = by_prefix(arrays)
            return cls(clients, shares, [parts[str(place)] for place in range(len(clients))], about["kind"])
        except (SafetensorError, KeyError, ValueError, TypeError) as error:  # TypeError: numbers that NumPy has not
            raise ValueError(f"{path} holds no mixture of models ({error})") from None

    def predict(self, module: torch.nn.Module, x: torch.Tensor) -> np.ndarray:
        """Class probabilities, (n, N), of images x (n, ...); the module, of the models' kind, ends as the last one."""
        from .client.training import predict, set_arrays

        probabilities = []
        for model in self.models:
            set_arrays(module, model)
            probabilities.append(predict(module, x))
        return mixture_of(np.stack(probabilities), self.shares, self.kind)


def keep_mixture(
    visit: Visit, clients: Sequence[ClientId], models: Sequence[Arrays], shares: np.ndarray, kind: str = "probabilities"
) -> None:
    """Write the file that `Mixture.load` reads, in the folder of the client's state."""
    counted = np.flatnonzero(shares).tolist()
    arrays: Arrays = {"shares": shares[counted]}
    for place, i in enumerate(counted):
        arrays |= with_prefix(place, models[i])
    about = {"clients": encode([clients[i] for i in counted]), "kind": kind}
    visit.state.save(MIXTURE, arrays, {**about, **visit.site.about})
