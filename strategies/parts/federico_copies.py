"""Other clients' models that a client of FedeRiCo keeps, and the mixture with which it predicts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import numpy as np

from kindred.client.evaluation import predict
from kindred.client.state import file_name
from kindred.client.visit import Visit
from kindred.messages import ClientId, by_prefix, with_prefix

from .mixture import Arrays, evaluation_inputs, keep_mixture, mixture_scores

MODEL = "model"  # prefix of the model's arrays in a file
PREDICTED = "probabilities"


class Copies:
    """The last copy of each model that a client has received in training, and what it predicts for `evaluation_inputs`.

    Each is a file `received-client-ID.safetensors` of the client's state.

    Parameters
    ----------
    visit : Visit
        A message at the client.
    received : dict of client id to model
        The models in the message, the client's own first.

    Attributes
    ----------
    inputs : tensor (n, ...)
        `evaluation_inputs`.
    """

    def __init__(self, visit: Visit, received: Mapping[ClientId, Arrays]) -> None:
        self._visit = visit
        self._received = received
        self.inputs = evaluation_inputs(visit)

    def update(
        self, known: Iterable[ClientId], owners: Collection[ClientId], predictions: Mapping[ClientId, np.ndarray]
    ) -> None:
        """Keep those of the received models that are these owners', and forget all copies that are not.

        Parameters
        ----------
        known : iterable of client ids
            Owners of all models that the client has received so far.
        owners : collection of client ids
        predictions : dict of client id to ndarray (n, N)
            What the received models predict for `evaluation_inputs`.
        """
        state, (own, *others) = self._visit.state, self._received
        for owner in known:
            if owner in owners and owner in others:
                arrays = {**with_prefix(MODEL, self._received[owner]), PREDICTED: predictions[owner]}
                state.save(_name(owner), arrays, rounds_load_it=True)
            elif owner not in owners and owner != own and state.load(_name(owner), PREDICTED):
                state.save(_name(owner), {})  # its last version stays as long as the round may be repeated

    def predictions(
        self, owners: Iterable[ClientId], computed: Mapping[ClientId, np.ndarray]
    ) -> dict[ClientId, np.ndarray]:
        """Return what the models of these owners predict for `evaluation_inputs`: owner -> predictions (n, N).

        Models that the client has neither received in this message nor kept are missing. `computed` has the predictions
        that need not be computed.
        """
        count, found = len(self.inputs), {}
        for owner in owners:
            if owner in self._received:
                found[owner] = computed[owner] if owner in computed else self._predict(owner)
            elif kept := self._visit.state.load(_name(owner), PREDICTED):
                is_of_x = len(kept[PREDICTED]) == count  # a site may be restarted with other data
                found[owner] = kept[PREDICTED] if is_of_x else self._predict(owner)
        return found

    def metrics(
        self, predictions: Mapping[ClientId, np.ndarray], shares: np.ndarray, *, keep: bool, prefix: str
    ) -> dict[str, float]:
        """Return the metrics of a mixture and of the client's own model; see `mixture_scores`.

        Parameters
        ----------
        predictions : dict of client id to ndarray (n, N)
            The k models of the mixture, the client's own first.
        shares : ndarray, shape (k,)
            Summing to 1.
        keep : bool
            Whether the mixture is kept in a file. A site always keeps it: the run may end at any time.
        prefix : str
            Prefix of the mixture's metrics.
        """
        kind, owners = str(self._visit.config["mixture"]), list(predictions)
        if keep or self._visit.is_site:
            keep_mixture(self._visit, owners, [self._model(owner) for owner in owners], shares, kind)
        metrics = mixture_scores(self._visit, np.stack(list(predictions.values())), shares, 0, kind, prefix)
        if self._visit.is_best(metrics):
            keep_mixture(self._visit, owners, [self._model(owner) for owner in owners], shares, kind, metrics)
        return metrics

    def _predict(self, owner: ClientId) -> np.ndarray:
        return predict(self._visit.model(self._model(owner)), self.inputs, self._visit.objective)

    def _model(self, owner: ClientId) -> Arrays:
        if owner in self._received:
            return self._received[owner]
        return by_prefix(self._visit.state.load(_name(owner), MODEL) or {})[MODEL]


def _name(owner: ClientId) -> str:
    return f"received-{file_name(owner)}"
