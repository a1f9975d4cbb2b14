"""What a real site keeps of a run: only finite models, the one before a spoiled one, and never another run's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from safetensors.numpy import load_file

from kindred import REGISTRY, InlineGrid
from kindred.client.state import BEST, MIXTURE, MODEL
from kindred.client.training import get_arrays
from kindred.messages import LAST, read_record, records_of, to_record

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
