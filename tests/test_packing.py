"""Messages between machines: all arrays travel as one, and nothing else differs from a simulation."""

from __future__ import annotations

import json

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from hypothesis import given, strategies as st

from kindred import REGISTRY, InlineGrid
from kindred.client.training import get_arrays
from kindred.messages import payload_bytes, read_record, records_of, to_record
from kindred.packing import LONGEST_INDEX, PACKED, WIDTH, packed, unpacked

from .client_apps import initial, plain_app, small, small_app, small_site
from .test_conformance import APPS, everything, make

OBJECTS = 8  # at most: message, its records, each of three kinds and PACKED, its array and the array's bytes


def count_arrays(content: RecordDict) -> int:
    return sum(len(record) for record in records_of(content, ArrayRecord))


class Machines(InlineGrid):
    """Clients on other machines; records how many arrays and objects each message has."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.objects: list[tuple[int, int]] = []

    def _transported(self, message):
        """Return the message as it arrives on another machine."""
        contents = {key: each.deflate() for key, each in get_all_nested_objects(message).items()}
        self.objects.append((count_arrays(message.content), len(contents)))
        arrived = inflate_object_from_contents(message.object_id, contents)
        arrived.metadata.__dict__["_message_id"] = message.metadata.message_id
        return arrived

    def push_messages(self, messages):
        return super().push_messages([self._transported(message) for message in messages])

    def pull_messages(self, message_ids):
        return [
            reply if reply.has_error() else self._transported(reply) for reply in super().pull_messages(message_ids)
        ]


@pytest.mark.parametrize("name", [name for name in REGISTRY if name not in APPS])
def test_a_run_on_machines_has_the_bits_of_a_simulation_and_few_objects_a_message(name, monkeypatch) -> None:
    def run(grid):
        strategy = make(name, network=small, images=small_site(0).train[0])
        strategy.start(grid, to_record(get_arrays(small())), 2)
        return everything(strategy)

    simulation = run(InlineGrid(small_app(), 3))
    monkeypatch.setattr("kindred.engine.strategy.simulated", lambda grid: False)
    machines = Machines(small_app(), 3)
    assert run(machines) == simulation
    assert max(arrays for arrays, _ in machines.objects) == 1
    assert max(objects for _, objects in machines.objects) <= OBJECTS


def test_a_client_app_of_another_author_receives_and_sends_arrays_unpacked(monkeypatch) -> None:
    monkeypatch.setattr("kindred.engine.strategy.simulated", lambda grid: False)
    machines = Machines(plain_app(), 3)
    make("fedavg").start(machines, initial(), 1)
    assert {arrays for arrays, _ in machines.objects} == {0, len(initial())}


arrays = st.builds(
    lambda dtype, shape: np.arange(int(np.prod(shape))).reshape(shape).astype(dtype),
    st.sampled_from(["float32", "float16", "int64", "bool", "uint8", ">f8"]),
    st.lists(st.integers(0, 3), max_size=3),
)
array_records = st.dictionaries(st.text(max_size=9), arrays, max_size=4).map(to_record)
others = st.sampled_from([MetricRecord({"loss": 0.5}), ConfigRecord({"round": 3}), ConfigRecord()])
contents = st.dictionaries(st.text(max_size=9).filter(lambda key: key != PACKED), array_records | others, max_size=4)


@given(contents.map(RecordDict))
def test_records_come_back_in_their_order_with_every_bit(content) -> None:
    there = packed(content)
    assert count_arrays(there) == 1
    back = unpacked(there)
    assert list(back.items()) == list(content.items())
    assert [list(record) for record in back.values()] == [list(record) for record in content.values()]
    assert payload_bytes(back) == payload_bytes(content)
    assert unpacked(content) is content


MODEL = to_record({"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones((), np.int64)})


def carrying(data: bytes) -> RecordDict:
    array = Array("uint8", (len(data),), PACKED, data)
    return RecordDict({"arrays": ArrayRecord(), "metrics": MetricRecord(), PACKED: ArrayRecord({PACKED: array})})


def framed(index: object, data: bytes = b"") -> bytes:
    text = json.dumps(index).encode()
    return len(text).to_bytes(WIDTH, "big") + text + data


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "Expecting value"),
        (framed([[0, "w", "float32", [1], "numpy.ndarray", 4]], b"123"), "an array of 4 bytes, of which 3 are there"),
        (framed([[0, "w", "float32", [1], "numpy.ndarray", -1]], b"123"), "an array of -1 bytes"),
        (framed([[1, "w", "float32", [1], "numpy.ndarray", 3]], b"123"), "valid type"),
        (framed([[2, "w", "float32", [1], "numpy.ndarray", 3]], b"123"), "list index out of range"),
        (framed([[0, 5, "float32", [1], "numpy.ndarray", 3]], b"123"), "must be of type"),
        (framed([[0, "w", "float32", 7, "numpy.ndarray", 3]], b"123"), "not iterable"),
        (framed([[0, "w"]]), "not enough values"),
        (framed(7), "not iterable"),
        (framed("[" * 9), "not enough values"),
        (b"\0\0\0\0\0\1\0\0" + b"[" * 2**16, "Expecting value|recursion"),
        (b"\xff" * 99, f"allowed: {LONGEST_INDEX}"),
    ],
    ids=range(12),
)
def test_bytes_that_no_client_of_ours_sends_are_an_exception(data, reason) -> None:
    with pytest.raises(Exception, match=reason):
        unpacked(carrying(data))


@given(st.data())
def test_altered_bytes_are_an_exception_or_records(data) -> None:
    whole = bytearray(packed(RecordDict({"arrays": MODEL}))[PACKED][PACKED].data)
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    try:
        for record in records_of(unpacked(carrying(bytes(whole))), ArrayRecord):
            read_record(record)
    except Exception as error:
        assert not isinstance(error, MemoryError)
