"""A client's work on one message: its seeds, and which of its models is selected."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from kindred.client.evaluation import evaluate
from kindred.client.state import ClientState
from kindred.client.visit import Visit
from kindred.errors import Reportable
from kindred.messages import METHOD, RECEIVED, SERVER_ROUND
from kindred.objectives import Classes

from .two_weights import SETTINGS, Client, TwoWeights, samples


def visit_in(folder, server_round: int, client: int = 0) -> Visit:
    config = SETTINGS | {"batch-size": 10, SERVER_ROUND: server_round}
    site = Client(1.0, 0, 50).site()
    return Visit(client, site, config, {}, torch.device("cpu"), ClientState(1, client, folder), {})


def test_each_round_and_each_client_has_an_order_of_its_own(tmp_path) -> None:
    rows = torch.arange(50), torch.arange(50)
    orders = [
        torch.cat([x for x, _ in visit_in(tmp_path, number, client).batches(samples=rows)]).tolist()
        for number, client in ((1, 0), (2, 0), (1, 1), (1, 0))
    ]
    assert orders[0] == orders[3] and orders[0] != orders[1] and orders[0] != orders[2]


def test_dropout_differs_between_rounds_and_clients(tmp_path) -> None:
    def dropped(server_round: int, client: int) -> list[float]:
        found: list[float] = []
        network = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.Dropout(0.5))
        network[1].register_forward_hook(lambda _, __, out: found.extend((out == 0).flatten().tolist()))
        visit_in(tmp_path, server_round, client).train(network)
        return found

    one, again, later, other = dropped(1, 0), dropped(1, 0), dropped(2, 0), dropped(1, 1)
    assert one == again and one not in (later, other)


def judging_visit(folder, server_round: int) -> Visit:
    site = Client(1.0, 0, validation=(1.0, 0)).site()
    config = SETTINGS | {METHOD: "fedavg", SERVER_ROUND: server_round}
    return Visit(0, site, config, {}, torch.device("cpu"), ClientState(1, 0, folder), {})


def test_the_initial_model_is_never_selected(tmp_path) -> None:
    first, second = (judging_visit(tmp_path, number).evaluation(RECEIVED, TwoWeights()) for number in (1, 2))
    assert not [name for name in first if name.startswith(("validation-", "selected-"))]
    assert second["validation-loss"] == second["selected-loss"] == pytest.approx(np.log(2))


def test_a_model_that_is_evaluated_separately_is_judged(tmp_path) -> None:
    found = judging_visit(tmp_path, 2).separate_evaluation(TwoWeights())
    assert found["validation-loss"] == found["selected-loss"] == pytest.approx(np.log(2))


def test_reported_losses_have_no_weights_of_classes() -> None:
    x, y = samples(1.0, 1, 2)  # both logits are 0
    loss = evaluate(TwoWeights(), x, y, Classes(2, weights=(1.0, 3.0)))["loss"]
    assert loss == pytest.approx(np.log(2))


@pytest.mark.parametrize(
    ("asked", "refused"),
    [
        ({"local-epochs": 400_000}, "epochs is 400000, allowed at this site: up to 1000 (its max-epochs)"),
        ({"local-epochs": 0, "local-steps": 10**9}, "steps is 1000000000, allowed at this site: up to 100000"),
        ({"local-epochs": 0, "batch-size": 10**9}, "batch-size is 1000000000, allowed at this site: up to 10000"),
        ({"local-epochs": 1, "batch-size": 10**6}, None),  # at most all samples
        ({"local-epochs": 9}, None),
    ],
)
def test_a_site_bounds_the_work_of_a_message_and_a_simulation_does_not(tmp_path, asked, refused) -> None:
    at_home = visit_in(tmp_path, 1)
    site = replace(at_home, config=dict(at_home.config) | asked, node_config={"state-dir": str(tmp_path)})
    for work in (lambda: site.train(TwoWeights()), lambda: next(site.batches())):
        if refused is None:
            work()
        else:
            with pytest.raises(ValueError, match=re.escape(refused)) as told:
                work()
            assert isinstance(told.value.args[0], Reportable)
    own = replace(site, node_config={**site.node_config, "max-epochs": 8})
    if asked == {"local-epochs": 9}:
        with pytest.raises(ValueError, match="epochs is 9, allowed at this site: up to 8"):
            own.train(TwoWeights())
    replace(at_home, config=dict(at_home.config) | {"local-epochs": 1_001}).train(TwoWeights())
