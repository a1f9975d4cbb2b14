"""The server's memory over a run, measured in separate processes."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from benchmarks.memory import Measured, in_a_process
from kindred.engine.admission import admit
from kindred.messages import to_record

CLIENTS, A_ROUND = 1000, 100


def check_memory(found: Measured) -> None:
    assert found.ratio <= 1.2
    beside = (np.array(found.peaks) - found.models) / found.models[-1]  # after the first round all have models
    assert len(set(found.models)) == 1 and np.ptp(beside[2:]) <= 0.05  # only the history grows


def test_the_server_holds_every_model_once_and_little_else() -> None:
    check_memory(in_a_process(store="memory", clients=CLIENTS, a_round=A_ROUND, rounds=6, closing=False, full=True))


def test_with_models_on_disk_memory_is_that_of_the_clients_of_a_round() -> None:
    """40 MB and 200 MB of models, of which 10 MB take part in a round."""
    peaks = [
        max(
            in_a_process(
                store="disk", clients=clients, millions=0.5, a_round=5, rounds=5, closing=False, full=True
            ).peaks
        )
        for clients in (20, 100)
    ]
    assert max(peaks) < 50e6 and abs(peaks[0] - peaks[1]) < 10e6


def test_a_reply_is_freed_as_soon_as_it_has_been_processed() -> None:
    """It must not wait for Python's cycle collector: a few replies of 45 MB exceed all other memory."""
    content = RecordDict(
        {
            "arrays": to_record({"w": np.ones(3)}),
            "metrics": MetricRecord({"num-examples": 1}),
            "config": ConfigRecord({"seed": 1}),
        }
    )
    gone = weakref.ref(next(record for record in content.values() if isinstance(record, ArrayRecord)))
    gc.disable()
    try:
        assert admit(content, "num-examples", lambda arrays: None).config == {"seed": 1}
        del content
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.faults
@pytest.mark.parametrize("name", ["heurfedamp", "fedamp", "local"])
def test_a_thousand_clients_and_twenty_rounds(name) -> None:
    check_memory(in_a_process(store="memory", name=name, clients=CLIENTS, a_round=A_ROUND, closing=False, full=True))
    on_disk = in_a_process(store="disk", name=name, clients=CLIENTS, a_round=A_ROUND, closing=False, full=True)
    assert on_disk.ratio < 0.4
