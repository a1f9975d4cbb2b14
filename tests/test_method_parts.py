"""The parts of FedeRiCo that have a state, each alone and by hand."""

from __future__ import annotations

import numpy as np
import pytest

from kindred.engine.layout import Layout
from kindred.engine.model_store import ClientModels
from kindred.engine.optimizers import OptimizerSteps
from kindred.engine.sent_models import NEW_MODEL, SentModels, Updates
from kindred.messages import read_record, with_prefix
from kindred.parts.federico_requests import Request

LAYOUT = Layout({"weight": np.zeros(2, np.float32), "running_mean": np.zeros(1, np.float32)})


def model(*numbers: float) -> dict[str, np.ndarray]:
    """Return a model with two parameters and a buffer."""
    return {"weight": np.array(numbers[:2], np.float32), "running_mean": np.array(numbers[2:], np.float32)}


def restored(fresh, part):
    """Return a new part that continues from another."""
    fresh.restore(part.state())
    return fresh


# --- FedeRiCo -----------------------------------------------------------------------------------------


def sent_to_both() -> SentModels:
    models = ClientModels(LAYOUT)
    models.put("a", model(1, 1, 1))
    sent = SentModels(models)
    sent.pack("a", [])
    sent.pack("b", ["a"])
    return sent


def test_a_message_has_the_available_models_by_place() -> None:
    sent = sent_to_both()
    assert sent.count == 2 and sent.neighbours("a") == [] and sent.neighbours("b") == ["a"]
    assert sent.neighbours("c") == []
    assert list(read_record(sent.pack("b", ["a"]))) == ["1/weight", "1/running_mean"]  # b has no model yet
    update = {"weight": np.zeros(2, np.float32)}
    new = with_prefix(NEW_MODEL, model(0, 0, 0))  # the model that b must send
    assert sent.mismatch("b", {**new, **with_prefix(0, model(0, 0, 0)), **with_prefix(1, update)}) is None
    owners_alone = "array 'running_mean' may be changed by the model's owner alone"
    assert sent.mismatch("b", {**new, **with_prefix(1, model(0, 0, 0))}) == owners_alone
    assert sent.mismatch("b", with_prefix(1, update)) == "its model is missing"
    assert sent.mismatch("a", with_prefix(1, update)) == "arrays '1' belong to no model that was sent"
    assert sent.mismatch("a", new) == "it holds a model where an update is expected"


def test_packed_models_are_kept_for_other_clients_only_where_asked() -> None:
    sent = sent_to_both()
    first, again = (sent.pack(client, ["a"])["1/weight"] for client in "bc")
    assert first is again
    sent.forget_packed()
    first, again = (sent.pack(client, ["a"], keep=False)["1/weight"] for client in "bc")
    assert first is not again


def test_variances_and_counters_of_a_model_are_0_or_more_and_their_changes_any_number() -> None:
    arrays = {"w": np.ones(1), "bn.running_var": np.ones(2), "bn.num_batches_tracked": np.array(3)}
    layout = Layout(arrays)
    for name, value in (("bn.running_var", np.array([1.0, -1e15])), ("bn.num_batches_tracked", np.array(-1))):
        assert layout.mismatch({**arrays, name: value}) == f"array {name!r} holds {value.min():g}, allowed: 0 or more"
    assert layout.mismatch({"bn.running_var": np.array([1.0, -0.5])}, whole=False) is None
    assert layout.mismatch(arrays) is None


def test_the_norm_of_updates_is_the_largest_over_their_parameters() -> None:
    updates = {**with_prefix(0, model(1, 0, 9)), **with_prefix(1, model(3, 4, 9))}
    assert sent_to_both().update_norm({**updates, **with_prefix(NEW_MODEL, model(9, 9, 9))}) == 5
    assert sent_to_both().update_norm({}) is None


@pytest.mark.parametrize(("steps", "moved"), [(None, [3, 5, 2]), (OptimizerSteps("sgd", 0.5), [0, -1, 2])])
def test_updates_are_changes_or_gradients_and_are_summed(steps, moved) -> None:
    sent = sent_to_both()
    updates = Updates(sent, ["a", "b"], steps)
    updates.add("b", {NEW_MODEL: model(7, 7, 7), "1": {"weight": np.array([1, 1], np.float32)}})
    updates.add("a", {"0": model(1, 3, 1)})
    updates.finish()
    assert sent.models.row("a").tolist() == moved and sent.models.row("b").tolist() == [7, 7, 7]


@pytest.mark.parametrize("order", ["ab", "ba"])
@pytest.mark.parametrize(("steps", "sign"), [(None, 1), (OptimizerSteps("sgd", 1.0), -1)])
def test_an_update_by_another_client_is_at_most_the_bound_times_the_owner_s(order, steps, sign) -> None:
    sent, lengths = sent_to_both(), {}
    by = {
        "a": {"0": model(3, 4, 1)},  # of length 5 over the parameters
        "b": {NEW_MODEL: model(7, 7, 7), "1": {"weight": np.array([0, -40], np.float32)}},
    }
    updates = Updates(sent, ["a", "b"], steps, 0.5, lengths)
    for client in order:
        updates.add(client, by[client])
    updates.finish()
    assert sent.models.row("a").tolist() == [1 + 3 * sign, 1 + (4 - 2.5) * sign, 2]
    assert lengths == {"a": 5} and updates.shortened == {"b": 1}

    later = Updates(sent, ["a", "b"], steps, 0.5, lengths)  # in a round without a, its last update counts
    later.add("b", {"1": {"weight": np.array([2, 0], np.float32)}})
    later.finish()
    assert sent.models.row("a").tolist() == [1 + 5 * sign, 1 + (4 - 2.5) * sign, 2] and later.shortened == {}


def test_a_request_is_read_as_packed_and_a_malformed_one_is_empty() -> None:
    request = Request(["b", 3], ["a", "b"], {"a": 0.75, "b": 0.25})
    assert Request.unpack(request.pack()) == request
    assert Request.unpack({**request.pack(), "weights": [0.75, 0.5]}) == Request(["b", 3], ["a", "b"])
    assert Request.unpack({}) == Request([], [])


def test_the_bound_is_by_the_owner_s_last_update_not_its_longest() -> None:
    sent, lengths = sent_to_both(), {"a": 5.0}
    updates = Updates(sent, ["a", "b"], None, 0.5, lengths)
    updates.add("a", {"0": model(0, 1, 0)})  # of length 1
    updates.add("b", {"1": {"weight": np.array([2, 0], np.float32)}})
    updates.finish()
    assert lengths == {"a": 1} and sent.models.row("a").tolist() == [1 + 0.5, 1 + 1, 1]
