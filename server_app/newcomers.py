"""Clients that come after a run: the models that it gives them, with few or many labelled samples.

The setting `held-out-clients` keeps some clients out of a simulation. After the last round each of them is served, one
by one, in three ways:

| way | model |
| --- | --- |
| method | that of the method's messages (`serve`); without samples its `ensemble` or, if None, its global model |
| alone | trained by the client alone, from the initial model, for as many rounds as the run had |
| tuned | the global model, or the plain mean of all models, trained by the client for one round |

Each model is evaluated on the client's test data, whose labels choose nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from logging import WARNING
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.supercore import log

from kindred import InlineGrid
from kindred.client.site import LABELLED
from kindred.engine.checkpoint import NotResumable
from kindred.engine.simulated_state import begin_simulation, end_simulation
from kindred.messages import (
    ARRAYS,
    CONFIG,
    LOSS,
    METHOD,
    METRIC,
    SERVER_ROUND,
    TRAINED,
    first_line,
    records_of,
)
from kindred.settings import LOCAL_EPOCHS, LOCAL_STEPS, SHADOW_LOCAL

from .headline import Headline

if TYPE_CHECKING:
    from flwr.clientapp import ClientApp

    from kindred import PersonalizedStrategy
    from kindred.data import Federation
    from kindred.engine.checkpoint import Checkpoints

ALL = "all"
AMOUNTS: tuple[int | str, ...] = (0, 5, 20, ALL)
WAYS = ("method", "alone", "tuned")
LOCAL = "local"


class Service:
    """Serve the newcomers of a finished run.

    Parameters
    ----------
    client_app : ClientApp
    run_config : mapping
        The run's settings, kebab-case.
    local_settings : mapping
        Settings of local training, as clients receive them.
    federation : Federation
        With newcomers.
    finished : PersonalizedStrategy
        After its run.
    strategy : PersonalizedStrategy
        Another one with the same arguments.
    initial_arrays : ArrayRecord
        The model from which the run started.
    first_model : ArrayRecord
        The same, also where no model travels.
    checkpoints : Checkpoints
        Those of the run.
    rounds : int
        Number of training rounds of the run.
    """

    def __init__(
        self,
        client_app: ClientApp,
        run_config: Mapping[str, Any],
        local_settings: Mapping[str, Any],
        federation: Federation,
        *,
        finished: PersonalizedStrategy,
        strategy: PersonalizedStrategy,
        initial_arrays: ArrayRecord,
        first_model: ArrayRecord,
        checkpoints: Checkpoints,
        rounds: int,
    ) -> None:
        self._client_app = client_app
        self._run_config = run_config
        self._settings = {key: value for key, value in local_settings.items() if key != SHADOW_LOCAL.key}
        self._federation = federation
        self._strategy = strategy
        self._initial_arrays = initial_arrays
        self._first_model = first_model
        self._global_model, self._ensemble = finished.general_model(), finished.ensemble()
        self._checkpoints = checkpoints
        self._rounds = rounds
        self._metric = strategy.metric

    def results(self) -> dict[str, Any]:
        """Return the values of the headline metric of all newcomers, as summary.json has them.

        Returns
        -------
        dict
            - `clients`: a list of `client`, its `name` if it has one, its number of training `samples`, and `served`: a
              list of `labelled`, a number of these samples or "all", and the value of each of `WAYS`; None without.
              A client with fewer samples than a number has no entry for it.
            - `means`: a list of `labelled`, the number of `clients` that have it, and each way's mean over these.

        Raises
        ------
        NotResumable
            The run's last round has no checkpoint.
        """
        if (newest := self._checkpoints.newest) != self._rounds:
            last = "no round" if newest is None else f"round {newest}"
            raise NotResumable(f"the last checkpoint is of {last}, not of round {self._rounds}")
        clients: list[dict[str, Any]] = []
        names = self._federation.newcomer_names
        for place, client in enumerate(self._federation.newcomers):
            samples = self._federation.newcomer_size(client)
            served = [self._served(client, labelled, samples) for labelled in AMOUNTS if _has(samples, labelled)]
            name = {"name": names[place]} if names else {}
            clients.append({"client": client, **name, "samples": samples, "served": served})
        return {"clients": clients, "means": means(each["served"] for each in clients)}

    def _served(self, client: int, labelled: int | str, samples: int) -> dict[str, Any]:
        """Return the values of one client with so many labelled samples, as an entry of `served`."""
        count = samples if labelled == ALL else int(labelled)
        node = {"partition-id": client, LABELLED: count}

        def grid() -> InlineGrid:
            return InlineGrid(self._client_app, 1, self._run_config, [node])

        if not count:
            untrained = self._global_model and self._value(grid(), self._global_model, rounds=0)
            by_method = untrained
            if self._ensemble:
                by_method = self._value(grid(), self._ensemble, rounds=0, method=self._strategy.name)
            return {"labelled": labelled, "method": by_method, "alone": None, "tuned": untrained}
        replies = self._strategy.serve(
            grid(), self._initial_arrays, self._checkpoints, ConfigRecord(self._settings), after=self._rounds
        )
        numbers, metric = replies.get(client, {}), self._metric
        personal = numbers.get(f"{self._strategy.personal}-{metric}")
        return {
            "labelled": labelled,
            "method": numbers.get(f"{self._strategy.newcomer_result}-{metric}", personal),
            "alone": self._value(grid(), self._first_model, rounds=self._rounds),
            "tuned": self._global_model and self._value(grid(), self._global_model, rounds=1),
        }

    def _value(self, grid: InlineGrid, arrays: ArrayRecord, *, rounds: int, method: str = LOCAL) -> float | None:
        """Return the metric of a model that a client trains for so many rounds without the server; None if it fails."""
        settings = self._settings | {METRIC: self._metric, METHOD: method, SERVER_ROUND: 1}
        for each in (LOCAL_EPOCHS, LOCAL_STEPS):
            settings[each.key] = rounds * int(self._settings[each.key])
        content = RecordDict({ARRAYS: arrays, CONFIG: ConfigRecord(settings)})
        (node,) = grid.get_node_ids()
        begin_simulation(grid.run.run_id)
        message = Message(content, node, MessageType.TRAIN if rounds else MessageType.EVALUATE)
        (reply,) = grid.send_and_receive([message])
        end_simulation(grid.run.run_id)
        if reply.has_error():
            log(WARNING, "kindred: a client that came later failed: %s", first_line(reply.error.reason or ""))
            return None
        (metrics,) = records_of(reply.content, MetricRecord)
        found = [metrics.get(f"{TRAINED}-{name}" if rounds else name) for name in (self._metric, LOSS)]
        values = [float(each) for each in found if isinstance(each, int | float) and math.isfinite(each)]
        return values[0] if len(values) == len(found) else None  # predictions of NaN have an accuracy, and no loss


def _has(samples: int, labelled: int | str) -> bool:
    return labelled == ALL or samples >= int(labelled)


def means(served: Iterable[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return the means over clients of `Service.results`, given the entries of each client."""
    clients, found = list(served), []
    for labelled in AMOUNTS:
        entries = [entry for each in clients for entry in each if entry["labelled"] == labelled]
        of_ways = {way: fmean(values) if values else None for way, values in _known(entries).items()}
        found.append({"labelled": labelled, "clients": len(entries), **of_ways})
    return found


def _known(entries: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return each way's values in these entries, without those that are None."""
    return {way: [entry[way] for entry in entries if entry[way] is not None] for way in WAYS}


def lines(results: Mapping[str, Any], name: str, headline: Headline) -> list[str]:
    """Return the means as lines of text; `name` is the method's."""
    return [
        f"clients that came later, {each['clients']}, with {each['labelled']} labelled samples: "
        f"{headline.metric.title} {name} {method}, alone {alone}, tuned global model {tuned}"
        for each in results["means"]
        if each["clients"]
        for method, alone, tuned in [_texts(each, headline)]
    ]


def tables(results: Mapping[str, Any], name: str, headline: Headline) -> list[list[list[str]]]:
    """Return two tables, of the means and of all clients: lines of texts, titles first."""
    ways = [f"{title} {headline.unit}" for title in (name, "alone", "tuned global model")]
    return [
        [
            ["labelled samples", "clients", *ways],
            *([str(each["labelled"]), str(each["clients"]), *_texts(each, headline)] for each in results["means"]),
        ],
        [
            ["client", "labelled samples", *ways],
            *(
                [each.get("name", str(each["client"])), _amount(entry, each["samples"]), *_texts(entry, headline)]
                for each in results["clients"]
                for entry in each["served"]
            ),
        ],
    ]


def _amount(entry: Mapping[str, Any], samples: int) -> str:
    return f"all {samples}" if entry["labelled"] == ALL else str(entry["labelled"])


def _texts(entry: Mapping[str, Any], headline: Headline) -> list[str]:
    return ["-" if entry[way] is None else headline.number(entry[way]) for way in WAYS]


def over_seeds(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return mean and standard deviation over runs of each way's mean over clients, for each of `AMOUNTS`.

    Parameters
    ----------
    results : sequence of mapping
        From `Service.results`, of runs that differ in their seed.

    Returns
    -------
    list of dict
        `labelled`, and for each of `WAYS` a `mean` and a `std`; None where unknown. Empty without runs.
    """
    found = []
    for entries in zip(*(each["means"] for each in results), strict=True):
        spread = {
            way: {"mean": fmean(values) if values else None, "std": stdev(values) if len(values) > 1 else None}
            for way, values in _known(entries).items()
        }
        found.append({"labelled": entries[0]["labelled"], **spread})
    return found
