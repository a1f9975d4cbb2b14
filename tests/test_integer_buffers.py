"""No method lets one client's integer buffers, such as counters and indices, decide those of another client's model."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, RecordDict

from kindred import REGISTRY, Site, make_client_app
from kindred.client.training import get_arrays
from kindred.engine.admission import MAX_STEPS, Refused, check_integers, integer_ranges
from kindred.engine.layout import Layout
from kindred.engine.model_store import ClientModels
from kindred.messages import read_record, records_of, to_record, with_prefix

from .client_apps import LITTLE_TRAINING, POINTS, Small, small_site
from .grids import FaultyGrid
from .test_conformance import every_method, make

ROUNDS = 3


class Indexed(Small):
    """A network that uses an integer buffer as an index, and the counter of its normalisation for its mean."""

    def __init__(self) -> None:
        super().__init__()
        self.norm.momentum = None
        self.register_buffer("order", torch.tensor([1, 0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x[:, self.order])


def indexed() -> Indexed:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Indexed()


def load_site(context) -> Site:
    site = small_site(context.node_config["partition-id"])
    return Site(model=indexed, train=site.train, test=site.test, public=POINTS)


def sending(name: str, value: int):
    """Return what puts a value into this integer buffer of all models of a reply."""

    def change(content: RecordDict) -> None:
        for record in records_of(content, type(content["arrays"])):
            arrays = {key: array.copy() for key, array in read_record(record).items()}
            for key in arrays:
                if key.endswith(name):
                    arrays[key][...] = value
            record.update(to_record(arrays))

    return change


@every_method
@pytest.mark.parametrize(
    ("buffer", "value", "others"),
    [("num_batches_tracked", 2**63 - 1, 2), ("order", 10**9, 2), ("order", 1000, 2), ("order", -1000, 1)],
)
def test_one_client_s_integer_buffers_reach_no_other_client(name, buffer, value, others) -> None:
    """Values that no round can give are refused with a reason, others hurt at most the client itself."""
    attack = sending(buffer, value)
    app = make_client_app(load_site)
    grid = FaultyGrid(app, 1 + others, lambda r, c: attack if (r, c) == (1, 0) else "ok")
    strategy = make(name, network=Indexed, images=POINTS, max_strikes=0)
    config = ConfigRecord({**LITTLE_TRAINING})
    strategy.start(grid, to_record(get_arrays(indexed())), ROUNDS, 60, config, config)
    honest = [row for row in strategy.history.rows if row["client"] != 0]
    assert {row["status"] for row in honest} == {"ok"} and not any("evaluate-status" in row for row in honest)
    assert {(row["round"], row["client"]) for row in honest} >= {(r, 1 + c) for r in range(1, 4) for c in range(others)}
    if value > MAX_STEPS and REGISTRY[name].models_travel:
        first = next(row["status"] for row in strategy.history.rows if (row["round"], row["client"]) == (1, 0))
        assert re.match(rf"refused: array '.*{buffer}' holds {value}, allowed after a round: -", first)


def test_the_median_does_not_depend_on_the_order_and_is_one_of_the_numbers() -> None:
    layout = Layout({"w": np.zeros(1), "count": np.array(0), "which": np.array([1, 2])})
    own = {"count": np.array(100), "which": np.array([1, 2])}
    sent = [{"count": np.array(c), "which": np.array(w)} for c, w in ((107, [1, 2]), (103, [1, 2]), (9, [-7, 10**9]))]
    for replies in itertools.permutations(sent):
        found = layout.integer_medians(replies, own)
        assert found["count"] == 103 and found["which"].tolist() == [1, 2]
    assert layout.integer_medians(sent[:2], own)["count"] == 103  # of two, the server's is the third
    for alone in sent:
        np.testing.assert_equal(layout.integer_medians([alone], own), own)
    assert layout.integer_medians([{**own, "count": np.array(2**63 - 1)}] * 3, own)["count"] == 2**63 - 1  # exact


def test_stored_models_keep_their_counters_and_share_the_median() -> None:
    models = ClientModels(Layout({"w": np.zeros(1, np.float32), "count": np.array(0)}))
    for client, count in (("a", 7), ("b", 9), ("c", 10**9)):
        models.put(client, {"w": np.zeros(1, np.float32), "count": np.array(count)})
    again = ClientModels(models.layout)
    again.restore(models.state())
    for each in (models, again):
        assert [int(read_record(each[client])["count"]) for client in "abc"] == [7, 9, 10**9]
        assert each.shared_integers()["count"] == 9
    models.put("c", {"w": np.zeros(1, np.float32), "count": np.array(8)})
    assert models.shared_integers()["count"] == 8


def test_an_integer_buffer_may_change_by_what_a_round_can_do_to_any_model_that_was_sent() -> None:
    sent = integer_ranges(to_record({"w": np.ones(2), **with_prefix(0, {"n": np.array(5)}), "1/n": np.array([20, 30])}))
    assert sent == {"n": (5, 30)}
    for right in (5 - MAX_STEPS, 30 + MAX_STEPS):
        check_integers({"model/n": np.array(right)}, sent)
    for wrong in (4 - MAX_STEPS, 31 + MAX_STEPS, 2**63 - 1, -(2**63)):
        with pytest.raises(Refused, match=f"^array 'n' holds {wrong}, allowed after a round: -9999995 to 10000030$"):
            check_integers({"n": np.array([20, wrong])}, sent)
