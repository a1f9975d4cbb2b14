"""The hooks of a method: the whole interface between its server half and the round engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import ArrayRecord

from kindred.messages import (
    METHODS,
    NUM_EXAMPLES,
    NUM_TEST_EXAMPLES,
    SHARE_MODEL,
    TASK,
    TRAINED,
    VERSION_KEY,
    ClientId,
)
from kindred.registry import REGISTRY
from kindred.settings import UNIFORM
from kindred.versions import mismatch

from .admission import MAX_EXAMPLES, Reply
from .collaboration import Collaboration
from .introductions import UntilRestart
from .layout import Layout
from .norms import scaled


@dataclass(frozen=True)
class SideEvaluation:
    """A model that a client is asked to evaluate for the server, in addition to its personal model.

    By default our clients evaluate it on their training data. An ordinary ClientApp evaluates it as any other model.

    Parameters
    ----------
    client : client id
    name : str
        The model's name. The client finds it in the message's config (PROBE), and `take_side_loss` receives it. The
        history holds the loss in the client's row, as NAME-loss.
    arrays : ArrayRecord
    settings : mapping, optional
        Settings of the message, in addition to those of every evaluation.
    """

    client: ClientId
    name: str
    arrays: ArrayRecord
    settings: Mapping[str, Any] = field(default_factory=dict)


class Hooks:
    """The hooks of a method. A method overrides those that it needs.

    | hook | called | by default |
    | --- | --- | --- |
    | `begin` | once, before the first round; a resumed run calls `restore` next | must be given |
    | `introduce` | for clients that connected since the last round | excludes clients that cannot take part |
    | `introduce_validators` | the same, for sites that only validate | excludes sites that cannot evaluate |
    | `outgoing` | with the sampled clients: yields the model of each training message | must be given |
    | `round_config` | for each training or evaluation message | no settings |
    | `row_fields` | for each message, just before it is sent | no fields |
    | `mismatch` | for each training reply, with its arrays | expects arrays like the initial model's |
    | `inspect` | next | no further check |
    | `update_norm` | next | the distance from `update_origin` |
    | `network_of` | next: only updates of the same network are compared | one network |
    | `update_origin` | for `update_norm` and `scaled_update` | no origin |
    | `scaled_update` | where `max_update_norm` "auto" scales an update down | moves it to its origin |
    | `take` | next: the reply is admitted | must be given |
    | `end_round` | after all training replies | must be given |
    | `side_evaluations` | before clients evaluate: yields models to evaluate in addition to the personal ones | none |
    | `personal_models` | with the clients to evaluate; also before and after all rounds | `personal_arrays` of each |
    | `take_side_loss`, `take_evaluation` | for each admitted evaluation reply of a round or after the last | ignored |
    | `state`, `restore` | for a checkpoint after a round, and to resume from it | the attributes named in `STATE` |
    | `newcomer_visits`, `begin_visits`, `end_visit` | for clients that come after the run, see `serve` | one visit |
    | `general_model` | for clients that do not train, after a round or the run | `global_arrays` |
    | `ensemble` | for a newcomer without labelled samples, after the run | none |
    | `global_arrays`, `client_models`, `shared_rows` | by the caller, after any round | must be given |

    Most methods need few hooks; a method based on `Averaging` or `CloudModels` needs one to three.

    An exception in `introduce` excludes its client. In `mismatch`, `inspect`, `update_norm`, `scaled_update` or a
    `take…` the client's reply is lost; in `end_round` the round is lost. In any other hook it ends the run, which can
    be resumed.

    An array of the state may be changed in place in `introduce`, `take…` and `end_round` alone. Other hooks replace it
    by a new one, because its checkpoint may be being written.
    """

    name: str
    """The method's name in messages, in the registry and in results."""

    personal: str = TRAINED
    """Which evaluation is the method's result for a client, such as RECEIVED, TRAINED or TUNED (messages.py)."""

    task: str = ""
    """Fingerprint of the task that clients must have; "" for any."""

    clients_keep_state: bool = False
    """True if clients keep state between rounds, on their own disk (`state.py`)."""

    model_stays: bool = False
    """True if a client keeps its personal model to itself: the server never receives it."""

    evaluations_have_models: bool = False
    """True if a client's reply to an evaluation holds its model; else arrays in it are ignored."""

    needs_shared_models: bool = True
    """True if others receive each client's model or part of it; a client that does not share its model is refused."""

    mixes_updates: bool = True
    """False if no client's update reaches another client's model, as in local training: no update is then bounded by
    `max_update_norm` "auto", or named for its norm."""

    newcomer_result: str = ""
    """Which evaluation in a newcomer's last training reply is the method's result for it; for "", or if the reply has
    none of that kind, `personal`."""

    default_sampling: str = UNIFORM
    """How a round's clients are drawn, UNIFORM or BY_SIZE (settings.py), unless the run's `sampling` says it."""

    STATE: tuple[str, ...] = ()
    """The attributes that a checkpoint saves, and from which a run resumes with the same arguments."""

    layout: Layout
    """Names, shapes and types of the model's arrays; `begin` sets it."""

    @property
    def first_round(self) -> int:
        """1, or 0 if the method has an exchange before the training rounds."""
        return 1

    # --- Before a round -------------------------------------------------------------------------------

    def begin(self, initial_arrays: ArrayRecord) -> None:
        """Prepare a run, given the model that clients start from."""
        raise NotImplementedError

    def introduce(self, newcomers: Mapping[ClientId, Mapping[str, Any]]) -> dict[ClientId, str]:
        """Check the introductions of new clients.

        Parameters
        ----------
        newcomers : mapping
            client -> its introduction; empty if its ClientApp does not answer the identity query.

        Returns
        -------
        dict
            client -> reason, for each client that cannot take part.
        """
        reasons = {}
        method = REGISTRY.get(self.name)
        for client, about in newcomers.items():
            examples, known = about.get(NUM_EXAMPLES, 1), about.get(METHODS)
            if examples == 0:
                reasons[client] = "it has no training sample"
            elif not isinstance(examples, int) or not 1 <= examples <= MAX_EXAMPLES:
                reasons[client] = f"its {NUM_EXAMPLES} is {examples!r}, allowed: 1 to {MAX_EXAMPLES}"
            elif other_task := self._other_task(about):
                reasons[client] = other_task
            elif self.needs_shared_models and about.get(SHARE_MODEL) is False:
                reasons[client] = UntilRestart(f"its {SHARE_MODEL} is false, and {self.name} mixes all models")
            elif METHODS in about and (differs := mismatch(about.get(VERSION_KEY), "the client", "this server")):
                reasons[client] = differs
            elif method and method.needs_our_client and not (isinstance(known, list) and self.name in known):
                reasons[client] = f"its ClientApp does not support {method.title}; use that of kindred.make_client_app"
        return reasons

    def introduce_validators(self, newcomers: Mapping[ClientId, Mapping[str, Any]]) -> dict[ClientId, str]:
        """Check the introductions of new sites that only validate; see `introduce`."""
        reasons = {}
        for client, about in newcomers.items():
            examples = about.get(NUM_TEST_EXAMPLES)
            if examples == 0:
                reasons[client] = "it has no labelled sample"
            elif not isinstance(examples, int) or not 1 <= examples <= MAX_EXAMPLES:
                reasons[client] = f"its {NUM_TEST_EXAMPLES} is {examples!r}, allowed: 1 to {MAX_EXAMPLES}"
            elif differs := self._other_task(about):
                reasons[client] = differs
            elif other := mismatch(about.get(VERSION_KEY), "the client", "this server"):
                reasons[client] = other
        return reasons

    def _other_task(self, about: Mapping[str, Any]) -> str:
        """Say how the task in a client's introduction differs from the run's; empty if it does not."""
        if not self.task or about.get(TASK, self.task) == self.task:
            return ""
        return f"its task has the fingerprint {about[TASK]}, expected {self.task}: its schema differs"

    # --- Messages to train ----------------------------------------------------------------------------

    def outgoing(self, server_round: int, clients: Sequence[ClientId]) -> Iterator[tuple[ClientId, ArrayRecord]]:
        """Yield the model that each of these clients is to train from."""
        raise NotImplementedError

    def round_config(self, server_round: int, client: ClientId) -> dict[str, Any]:
        """Return settings to send to a client with its model, in addition to the caller's."""
        return {}

    def row_fields(self, client: ClientId) -> dict[str, Any]:
        """Return fields about the message that is being sent, for the client's row of the history."""
        return {}

    # --- Replies to them ------------------------------------------------------------------------------

    def mismatch(self, client: ClientId, arrays: Mapping[str, np.ndarray]) -> str | None:
        """Say in a few words how a training reply's arrays differ from those expected; None if they do not.

        By default the model of `layout` is expected.
        """
        return self.layout.mismatch(arrays)

    def inspect(self, client: ClientId, reply: Reply) -> None:
        """Raise `Refused` where the method cannot use a training reply that is well formed."""

    def update_origin(self, client: ClientId) -> Mapping[str, np.ndarray] | None:
        """Return the arrays from which a client's update is measured, such as the model that the client was sent.

        None if training replies hold no models.
        """
        return None

    def update_norm(self, client: ClientId, arrays: Mapping[str, np.ndarray]) -> float | None:
        """Return the L2 norm, over the parameters, of the update in a training reply; None if there is no update."""
        origin = self.update_origin(client)
        return None if origin is None else self.layout.distance(arrays, origin)

    def network_of(self, client: ClientId) -> str:
        """Return the name of the network whose updates a client sends; "" if all clients have the same one."""
        return ""

    def scaled_update(self, client: ClientId, arrays: Mapping[str, np.ndarray], factor: float) -> dict[str, np.ndarray]:
        """Return a training reply's arrays with the update times a factor, more than 0 and less than 1."""
        origin = self.update_origin(client)
        return dict(arrays) if origin is None else scaled(arrays, origin, factor)

    def take(self, client: ClientId, reply: Reply) -> None:
        """Process an admitted training reply. Replies arrive in any order; the result must not depend on it."""
        raise NotImplementedError

    def end_round(self, server_round: int, answered: Sequence[ClientId]) -> None:
        """Compute the new models; `answered` are the clients that answered, in order. If empty, nothing changes."""
        raise NotImplementedError

    # --- Evaluation -----------------------------------------------------------------------------------

    def side_evaluations(self, server_round: int) -> Iterable[SideEvaluation]:
        """Yield models that clients are asked to evaluate in addition to their personal models.

        A client that did not answer in this round, or that cannot take part, is not asked.
        """
        return ()

    def personal_models(self, clients: Sequence[ClientId]) -> Iterator[ArrayRecord]:
        """Yield the personal model of each of these clients, for it to evaluate."""
        return (self.personal_arrays(client) for client in clients)

    def personal_arrays(self, client: ClientId) -> ArrayRecord:
        """Return a client's personal model, for it to evaluate."""
        raise NotImplementedError

    def take_side_loss(self, client: ClientId, name: str, loss: float) -> None:
        """Process the finite loss that a client reports for the model of this name from `side_evaluations`."""

    def take_evaluation(self, client: ClientId, reply: Reply) -> None:
        """Process the admitted evaluation of a client's personal model; the reply's arrays, if any, are that model."""

    # --- Clients that come after the run --------------------------------------------------------------

    def newcomer_visits(self, rounds: int) -> int:
        """Return the number of training messages that serve a newcomer, after a run of so many rounds.

        The last reply holds the method's result. Two are needed where the server computes a client's model from the
        client's first reply.
        """
        return 1

    def begin_visits(self) -> None:
        """Prepare to serve newcomers from the restored state of the run."""

    def end_visit(self, client: ClientId) -> None:
        """Use a newcomer's training reply, which `take` has received; the models of other clients must not change."""

    def ensemble(self) -> ArrayRecord | None:
        """Return models with which a newcomer without labelled samples predicts together; None: by `general_model`.

        The method's client evaluates them.
        """
        return None

    # --- Results --------------------------------------------------------------------------------------

    def global_arrays(self) -> ArrayRecord:
        """Return the global model; if the method has none, the plain mean of the clients' models."""
        raise NotImplementedError

    def general_model(self, network: str = "") -> ArrayRecord | None:
        """Return the model for clients that do not train, which is `global_arrays()` by default.

        These are sites that only validate, and newcomers without labelled samples. `network` is the name of a site's
        network. A method without a whole model for others returns None.
        """
        return self.global_arrays()

    def client_models(self) -> Mapping[ClientId, ArrayRecord]:
        """Return each client's personal model, if the server receives models; also of clients that have left."""
        raise NotImplementedError

    def shared_rows(self) -> Collaboration:
        """Return the shares of the clients' models in the model that each client last received, or predicts with."""
        raise NotImplementedError

    def collaboration(self) -> tuple[list[ClientId], np.ndarray]:
        """Return the collaboration weights: the share of each client's model in the other clients' models.

        Returns
        -------
        clients : list of m client ids, in order
        weights : ndarray, shape (m, m)
            Row i holds the shares of the clients' models in the model that client i last received, or predicts with.
            Rows sum to 1, or are 0 if the server must not know them.
        """
        found = self.shared_rows()
        return found.clients, found.matrix()

    def state(self) -> dict[str, Any]:
        """Return the state to save at the end of a round; `checkpoint.pack` lists the types that it may hold."""
        return {name: getattr(self, name) for name in self.STATE}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from what `state` returned, after `begin`."""
        for name, value in state.items():
            if hasattr(attribute := getattr(self, name), "restore"):
                attribute.restore(value)
            else:
                setattr(self, name, value)
