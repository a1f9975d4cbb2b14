"""Several global models in place of one: the base class of HypCluster's and FedEM's server halves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Unpack

import numpy as np
from flwr.app import ArrayRecord

from kindred.messages import ClientId, check, read_record, seed_for, to_record, with_prefix
from kindred.parts.aggregation import AGGREGATION

from .arguments import Shared
from .in_turn import InTurn
from .layout import Layout, drawn_anew
from .strategy import PersonalizedStrategy

Arrays = Mapping[str, np.ndarray]


class SeveralModels(PersonalizedStrategy):
    """Base of the methods in which the server has several models and sends all of them to every client.

    Each new model is the mean of the models that clients trained from it, weighted by their samples, as in FedAvg. A
    model that no client trained stays unchanged. Integer buffers are the median of all clients' in the round. With one
    model this is FedAvg.

    Parameters
    ----------
    count : int
        Number of models, 1 or more.
    other_models : sequence of ArrayRecord, optional
        Initial models after the first, which is that of `start`. By default each has the numbers of the first one in
        another random order (`drawn_anew`).
    aggregation : {"mean", "median", "trimmed-mean", "krum", "multi-krum", "biweight"}
        How the models that clients trained from one model are aggregated, as in `FedAvg`.
    **shared
        Arguments of `PersonalizedStrategy`.
    """

    STATE = (*PersonalizedStrategy.STATE, "models", "_examples", "_sent")

    def __init__(
        self,
        *,
        count: int,
        other_models: Sequence[ArrayRecord] | None = None,
        aggregation: str = AGGREGATION.default,
        **shared: Unpack[Shared],
    ) -> None:
        super().__init__(**shared)
        given = count - 1 if other_models is None else len(other_models)
        check("other_models", f"{given} models", given == count - 1, f"{count - 1}, all but the first")
        self.count = count
        self.aggregation = AGGREGATION.check(aggregation)
        self.other_models = other_models

    def begin(self, initial_arrays: ArrayRecord) -> None:
        self.layout = Layout(initial_arrays, self.buffers)
        others = self.other_models
        if others is None:
            first = read_record(initial_arrays)
            seeds = [seed_for(self.seed, "model", i) for i in range(1, self.count)]
            others = [to_record(drawn_anew(first, seed, self.layout.parameters)) for seed in seeds]
        for i, record in enumerate(others, start=1):
            difference = self.layout.mismatch(read_record(record))
            check("other_models", f"model {i}: {difference}", difference is None, "models like the initial one")
        self.models = [initial_arrays, *others]
        # n_k of the clients that trained each model: for the current models, and for those last sent
        self._examples: list[dict[ClientId, float]] = [{} for _ in self.models]
        self._sent = self._examples

    def outgoing(self, server_round: int, clients: Sequence[ClientId]) -> Iterator[tuple[ClientId, ArrayRecord]]:
        self._means = [self.aggregate_of(self.layout) for _ in self.models]
        self._terms: InTurn[tuple[float, dict[int, np.ndarray]]] = InTurn(clients, self._add)
        self._integers: list[Arrays] = []  # of each client's first model
        self._sent = self._examples
        record = self._all_models()
        return ((client, record) for client in clients)

    def _all_models(self) -> ArrayRecord:
        record = ArrayRecord()
        for i, model in enumerate(self.models):
            record.update(with_prefix(i, model))
        return record

    def take_models(self, client: ClientId, weight: float, models: Mapping[int, Arrays]) -> None:
        """Add the models that a client trained, by their numbers, with the client's weight."""
        rows = {}
        for i, arrays in models.items():
            rows[i] = np.empty(self.layout.size, self.layout.dtype)  # (d,)
            self.layout.flatten(arrays, rows[i])
        self._integers.append(self.layout.integer_arrays(next(iter(models.values()))))
        self._terms.add(client, (weight, rows))

    def _add(self, client: ClientId, term: tuple[float, dict[int, np.ndarray]]) -> None:
        weight, rows = term
        for i, row in rows.items():
            self._means[i].add(client, weight, row)

    def end_round(self, server_round: int, answered: Sequence[ClientId]) -> None:
        self._terms.finish()
        models, examples = list(self.models), list(self._examples)
        for i, mean in enumerate(self._means):
            if (row := mean.result()) is not None:
                integers = self.layout.integer_medians(self._integers, read_record(models[i]))
                models[i] = self.layout.record(row, integers)
                examples[i] = mean.weights
        self.models, self._examples = models, examples

    def global_arrays(self) -> ArrayRecord:
        """Return the mean of the models, each weighted by the number of clients that trained it."""
        if self.count == 1:
            return self.models[0]
        counts = np.array([len(clients) for clients in self._examples], self.layout.dtype)  # (k,)
        counts = counts if counts.any() else np.ones_like(counts)
        mean, row = np.zeros(self.layout.size, self.layout.dtype), np.empty(self.layout.size, self.layout.dtype)  # (d,)
        for share, record in zip(counts / counts.sum(), self.models, strict=True):
            self.layout.flatten(read_record(record), row)
            row *= share
            mean += row
        return self.layout.record(mean, self.layout.integer_arrays(read_record(self.models[0])))

    def personal_arrays(self, client: ClientId) -> ArrayRecord:
        """Return all models: a client chooses one of them, or mixes them."""
        return self._all_models()
