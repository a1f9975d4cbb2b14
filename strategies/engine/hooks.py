"""The hooks of a method: all that its server half says to the round engine, in one place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import ArrayRecord

from kindred.messages import METHODS, NUM_EXAMPLES, SHARE_MODEL, TRAINED, VERSION_KEY, ClientId
from kindred.registry import REGISTRY
from kindred.versions import mismatch

from .admission import MAX_EXAMPLES, Reply
from .model_store import Layout


@dataclass(frozen=True)
class SideEvaluation:
    """A model that a client is to evaluate for the server, and that is not its personal model.

    Parameters
    ----------
    client : client id
    name : str
        The model's name: the client finds it in the message's config (PROBE), `take_side_loss` receives it, and the
        history has the loss in the client's row as NAME-loss.
    arrays : ArrayRecord
    settings : mapping, optional
        Settings of the message, in addition to those of every evaluation.
    """

    client: ClientId
    name: str
    arrays: ArrayRecord
    settings: Mapping[str, Any] = field(default_factory=dict)


class Hooks:
    """The hooks of a method, which overrides those that it needs.

    | hook | called | by default |
    | --- | --- | --- |
    | `begin` | once, before the first round; a resumed run calls `restore` next | must be given |
    | `introduce` | for clients that connected since the last round | refuses who cannot take part |
    | `chances` | when some of the clients are sampled | all alike |
    | `outgoing` | with the sampled clients: gives the model of each message to train | must be given |
    | `round_config` | for each message to train or evaluate | no settings |
    | `row_fields` | for each message, just before it is sent | no fields |
    | `mismatch` | for each training reply, with its arrays | they are like the initial model |
    | `inspect` | next | nothing more is checked |
    | `update_norm` | next, where `max_update_norm` sets a bound | 0 |
    | `take` | next: the reply is admitted | must be given |
    | `end_round` | when all training replies are in | must be given |
    | `side_evaluations` | before clients evaluate: models to evaluate besides the personal ones | none |
    | `personal_models` | with the clients to evaluate; also after the last round | `personal_arrays` of each |
    | `take_side_loss`, `take_evaluation` | for each admitted evaluation reply | ignored |
    | `state`, `restore` | for a checkpoint after a round, and to resume from it | the attributes named in `STATE` |
    | `global_arrays`, `client_models`, `collaboration` | after any round, by whoever runs the method | must be given |

    Most methods need few: on `FedAvg` or `CloudModels` one to three. An exception in `introduce` excludes its client,
    one in `mismatch`, `inspect`, `update_norm` or a `take…` costs its client the reply, and one in `end_round` the
    round: none ends the run.
    """

    name: str
    """The method's name in messages, in the registry and in results."""

    personal: str = TRAINED
    """Which evaluation is the method's result for a client, such as RECEIVED, TRAINED or TUNED (messages.py)."""

    clients_keep_state: bool = False
    """Whether clients keep something between rounds, on their own disk (`state.py`)."""

    model_stays: bool = False
    """Whether a client keeps its personal model, and no server sees it."""

    needs_shared_models: bool = True
    """Whether others receive something of each client's model; a client that does not share its model is refused."""

    STATE: tuple[str, ...] = ()
    """The attributes that a run is resumed from, in addition to the arguments of `__init__` and `start`."""

    layout: Layout
    """Names, shapes and types of the model's arrays; `begin` sets it."""

    @property
    def first_round(self) -> int:
        """1, or 0 where an exchange comes before the rounds of training."""
        return 1

    # --- Before a round -------------------------------------------------------------------------------

    def begin(self, initial_arrays: ArrayRecord) -> None:
        """Take the model that clients start from."""
        raise NotImplementedError

    def introduce(self, newcomers: Mapping[ClientId, Mapping[str, Any]]) -> dict[ClientId, str]:
        """Check what new clients report of themselves.

        Parameters
        ----------
        newcomers : mapping
            client -> its introduction; empty where its ClientApp does not answer the question.

        Returns
        -------
        dict
            client -> why it cannot take part, for those that cannot.
        """
        reasons = {}
        method = REGISTRY.get(self.name)
        for client, about in newcomers.items():
            examples, known = about.get(NUM_EXAMPLES, 1), about.get(METHODS)
            if examples == 0:
                reasons[client] = "it has no training sample"
            elif not isinstance(examples, int) or not 1 <= examples <= MAX_EXAMPLES:
                reasons[client] = f"its {NUM_EXAMPLES} is {examples!r}, allowed: 1 to {MAX_EXAMPLES}"
            elif self.needs_shared_models and about.get(SHARE_MODEL) is False:
                reasons[client] = f"its {SHARE_MODEL} is false, and {self.name} mixes all models"
            elif METHODS in about and (differs := mismatch(about.get(VERSION_KEY), "the client", "this server")):
                reasons[client] = differs
            elif method and method.needs_our_client and not (isinstance(known, list) and self.name in known):
                reasons[client] = f"its ClientApp knows no {method.title}; that of kindred.make_client_app does"
        return reasons

    def chances(self, clients: Sequence[ClientId]) -> np.ndarray | None:
        """Return the probability that each client is sampled, shape (m,), summing to 1; None if all are alike."""
        return None

    # --- Messages to train ----------------------------------------------------------------------------

    def outgoing(self, server_round: int, clients: Sequence[ClientId]) -> Iterator[tuple[ClientId, ArrayRecord]]:
        """Yield the model that each of these clients is to train from."""
        raise NotImplementedError

    def round_config(self, server_round: int, client: ClientId) -> dict[str, Any]:
        """Return settings that go to a client with its model, in addition to the caller's."""
        return {}

    def row_fields(self, client: ClientId) -> dict[str, Any]:
        """Return fields for the client's row of the history, about the message that goes to it now."""
        return {}

    # --- Replies to them ------------------------------------------------------------------------------

    def mismatch(self, client: ClientId, arrays: Mapping[str, np.ndarray]) -> str | None:
        """Say in a few words how a training reply's arrays differ from those expected; None if they do not.

        By default the model of `layout` is expected.
        """
        return self.layout.mismatch(arrays)

    def inspect(self, client: ClientId, reply: Reply) -> None:
        """Raise `Refused` where the method cannot use a training reply that is well formed."""

    def update_norm(self, client: ClientId, arrays: Mapping[str, np.ndarray]) -> float:
        """Return the L2 norm, over the parameters, of the update in a training reply; 0 where there is no bound."""
        return 0.0

    def take(self, client: ClientId, reply: Reply) -> None:
        """Take in an admitted training reply. Replies come in any order; the result must not depend on it."""
        raise NotImplementedError

    def end_round(self, server_round: int, answered: Sequence[ClientId]) -> None:
        """Compute the new models; these clients (in order) answered. Without any, nothing changes."""
        raise NotImplementedError

    # --- Evaluation -----------------------------------------------------------------------------------

    def side_evaluations(self, server_round: int) -> Iterable[SideEvaluation]:
        """Yield models that clients are to evaluate in addition to their personal models.

        A client that has not answered in this round, or cannot take part, is not asked.
        """
        return ()

    def personal_models(self, clients: Sequence[ClientId]) -> Iterator[ArrayRecord]:
        """Yield the model that each of these clients is to evaluate."""
        return (self.personal_arrays(client) for client in clients)

    def personal_arrays(self, client: ClientId) -> ArrayRecord:
        """Return the model that a client is to evaluate."""
        raise NotImplementedError

    def take_side_loss(self, client: ClientId, name: str, loss: float) -> None:
        """Take in the loss, finite, that a client reports for the model of this name from `side_evaluations`."""

    def take_evaluation(self, client: ClientId, reply: Reply) -> None:
        """Take in the admitted evaluation of a client's personal model; its arrays, if any, are that model."""

    # --- Results --------------------------------------------------------------------------------------

    def global_arrays(self) -> ArrayRecord:
        """Return the global model; the plain mean of the clients' models where there is none."""
        raise NotImplementedError

    def client_models(self) -> Mapping[ClientId, ArrayRecord]:
        """Return each client's personal model, where models reach the server."""
        raise NotImplementedError

    def collaboration(self) -> tuple[list[ClientId], np.ndarray]:
        """Return who learns from whom.

        Returns
        -------
        clients : list of m client ids, in order
        weights : ndarray, shape (m, m)
            Row i holds the shares of the clients' models in the one that client i last received, or predicts with; rows
            sum to 1, or are 0 where the server is not to know.
        """
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint at the end of a round holds; `checkpoint.pack` says what can be in it."""
        return {name: getattr(self, name) for name in self.STATE}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from what `state` returned, after `begin`."""
        for name, value in state.items():
            if hasattr(mine := getattr(self, name), "restore"):
                mine.restore(value)
            else:
                setattr(self, name, value)
