"""What a real site keeps of a run: only finite models, the one before a spoiled one, and never another run's."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from safetensors.numpy import load_file

from kindred import REGISTRY, InlineGrid, TooFewClients, make_client_app
from kindred.client.journal import JOURNAL
from kindred.client.local_training import LocalTraining
from kindred.client.state import BEST, MIXTURE, MODEL
from kindred.client.training import get_arrays
from kindred.data import DataError
from kindred.messages import LAST, read_record, records_of, to_record
from kindred.server_app.report.site import site_content

from .test_client import CLIENTS, PUBLIC, SETTINGS, app, network
from .test_conformance import make

ROUNDS = 3
RESULTS = (MODEL, MIXTURE, BEST)


class Sites(InlineGrid):
    """Real sites, each with a folder of its own; `change` may change a message, `spoil` the reply to it."""

    def __init__(
        self,
        folder: Path,
        change: Callable[[Message], object] = lambda message: None,
        spoil: Callable[[Message, Message], object] = lambda message, reply: None,
    ) -> None:
        super().__init__(app, CLIENTS)
        self.folder, self._change, self._spoil = folder, change, spoil
        for client, context in enumerate(self._contexts.values()):
            context.node_config["state-dir"] = str(folder / str(client))

    def _answer(self, message: Message) -> Message:
        self._change(message)
        reply = super()._answer(message)
        self._spoil(message, reply)
        return reply


def start(name: str, grid: InlineGrid, *, rounds: int = ROUNDS, checkpoints=None, **settings):
    config = ConfigRecord(SETTINGS | settings)
    server = {"device": "cpu"} if REGISTRY[name].distils else {}
    strategy = make(name, network, PUBLIC, **server)
    initial = to_record(get_arrays(network()))
    strategy.start(grid, initial, rounds, 60, config, config, checkpoints=checkpoints)
    return strategy


def config_in(message: Message) -> ConfigRecord:
    (config,) = records_of(message.content, ConfigRecord)
    return config


def is_last(message: Message) -> bool:
    return any(LAST in config for config in records_of(message.content, ConfigRecord))


def fill(content: RecordDict, value: float) -> None:
    """Set all floats in a message to a value."""
    for name, record in content.items():
        if isinstance(record, ArrayRecord):
            arrays = read_record(record).items()
            content[name] = to_record({
                key: np.full_like(array, value) if array.dtype.kind == "f" else array for key, array in arrays
            })  # fmt: skip


def results_in(folder: Path, pattern: str = "{}.safetensors") -> dict[str, dict[str, np.ndarray]]:
    return {
        str(path.relative_to(folder)): load_file(path)
        for name in RESULTS
        for path in sorted(folder.glob(f"*/run-*/client-*/{pattern.format(name)}"))
    }


@pytest.mark.parametrize("name", REGISTRY)
def test_no_result_with_values_that_are_not_finite_is_kept(name, tmp_path) -> None:
    """The last messages are full of NaN, those of the closing evaluation too."""
    start(name, Sites(tmp_path, lambda message: is_last(message) and fill(message.content, np.nan)))
    found = results_in(tmp_path)
    assert {path.split("/")[0] for path in found} == {"0", "1", "2", "3"}
    for path, arrays in found.items():
        assert all(np.isfinite(array).all() for array in arrays.values()), path


@pytest.mark.parametrize(("name", "kept"), [("fedavg", MODEL), ("fedem", MIXTURE), ("federico", MIXTURE)])
def test_the_result_before_a_spoiled_one_stays_beside_it(name, kept, tmp_path) -> None:
    before = {}

    def spoil(message: Message, reply: Message) -> None:
        """One client sends huge numbers in the last round of training."""
        if is_last(message) and message.metadata.message_type == MessageType.TRAIN:
            before.update({
                path: arrays for path, arrays in results_in(tmp_path).items() if path.endswith(f"{kept}.safetensors")
            })  # fmt: skip
            if message.metadata.dst_node_id == 1001:
                fill(reply.content, 1e14)

    start(name, Sites(tmp_path, spoil=spoil))
    spoilt = 0
    for path, arrays in results_in(tmp_path).items():
        if max(np.abs(array).max() for array in arrays.values()) > 1e9:
            spoilt += 1
            beside = tmp_path / Path(path).with_name(f".{kept}.round-{ROUNDS:04d}.safetensors")
            assert {key: array.tobytes() for key, array in load_file(beside).items()} == {
                key: array.tobytes() for key, array in before[path].items()
            }
    assert spoilt


# --- What the server learns of an error -----------------------------------------------------------------

SECRETS = ("Alice Martin", "/srv/hospital")


class CellError(Exception):
    pass


def _raising(error: Exception) -> Callable[..., None]:
    def raises(*_: object) -> None:
        raise error

    return raises


@pytest.mark.parametrize("is_site", [True, False], ids=["site", "simulation"])
@pytest.mark.parametrize(
    "error",
    [
        CellError("line 3: Alice Martin"),
        KeyError("Alice Martin"),
        OSError(28, "No space left", "/srv/hospital/data.csv"),
        ValueError("/srv/hospital/model.safetensors is damaged"),
        DataError("line 3 has the cell 'Alice Martin'"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("when", ["introduction", "training", "evaluation"])
def test_the_text_of_an_error_stays_at_a_real_site(when, error, is_site, tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setenv(JOURNAL, str(page := tmp_path / "journal"))
    if when != "introduction":
        monkeypatch.setattr(LocalTraining, "train" if when == "training" else "evaluate", _raising(error))
    grid = Sites(tmp_path / "sites")
    if not is_site:
        for context in grid._contexts.values():
            del context.node_config["state-dir"]
    if when == "introduction":
        grid._client_app = make_client_app(_raising(error))
    strategy = make("fedavg", wait_timeout=0.1, max_empty_rounds=1)
    with suppress(TooFewClients):
        strategy.start(grid, to_record(get_arrays(network())), 1, 60, ConfigRecord(SETTINGS), ConfigRecord(SETTINGS))
    rows = [row["status"] for row in strategy.history.rows if row["status"] != "ok"]
    (told, *_) = rows or [str(reason) for reason in strategy.history.left_out.values()]
    assert type(error).__name__ in told
    hidden = not any(secret in each for secret in SECRETS for each in [told, *rows])
    assert hidden == is_site
    if is_site:
        number = re.search(r"its text is fault (\d+) in the site's log", told)[1]
        assert f"kindred: fault {number}: {type(error).__name__}: {error}" in caplog.text
        (entry,) = [each for each in map(json.loads, page.read_text().splitlines()) if each.get("fault") == int(number)]
        assert str(error)[:20] in entry["problem"]
        faults = site_content("lyon", {"lines": [], "classes": []}, [{**entry, "at": 0.0}, {**entry, "at": 1.0}])[
            "faults"
        ]
        assert [fault[1] for fault in faults] == ["2"] and f"fault {number}: " in faults[0][2]


def test_our_own_errors_without_data_reach_the_server_from_a_real_site(tmp_path) -> None:
    def change(message: Message) -> None:
        if message.metadata.message_type == MessageType.TRAIN:
            config_in(message)["local-epochs"] = 10**6

    strategy = make("fedavg", max_empty_rounds=1)
    with pytest.raises(TooFewClients):
        config = ConfigRecord(SETTINGS)
        strategy.start(Sites(tmp_path, change), to_record(get_arrays(network())), 1, 60, config, config)
    told = "error 2: ValueError: epochs is 1000000, allowed at this site: up to 1000 (its max-epochs)"
    assert {row["status"] for row in strategy.history.rows if row["round"] == 1} == {told}
