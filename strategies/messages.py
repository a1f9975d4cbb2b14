"""The contract between the two halves of a method: what stands where in a message.

Server to client, TRAIN and EVALUATE: an ArrayRecord `arrays` (the model the client starts from or
evaluates) and a ConfigRecord `config` (`server-round`, `method`, and the settings of local work).
Client to server: an ArrayRecord `arrays` (the trained model) and a MetricRecord `metrics`.
Server to client, QUERY with action `identity`: nothing; the reply's ConfigRecord holds `client-id`, `num-examples`,
`num-classes` and `share-model`, false where the site does not want other sites to have its model; of a client that
knows the name of its network, `network`, and of one that has a public set, its fingerprint `public-set` and
`num-public`; of one made by `make_client_app` the `methods` that it knows; or `client-id` and the `problem` for which
it cannot say more.
Server to client, QUERY with action `refusal`, to those that named their `methods`: a ConfigRecord with the `problem`
for which the client takes no part, or its last reply was not used. Nobody waits for the reply.
Where logits travel in place of models (PerFed-CKT), `arrays` holds `centroids` on the way down, `logits` on the
way up, and the reply's ConfigRecord `config` the fingerprint again. What else a method's clients tell, besides numbers
for the history, is in that record too, by names that the method's file has.
These are the names of Flower's own FedAvg and FedProx, so that a ClientApp written for them takes part.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

Record = TypeVar("Record", ArrayRecord, MetricRecord, ConfigRecord)

ARRAYS = "arrays"
CONFIG = "config"
METRICS = "metrics"

IDENTITY_QUERY = "query.identity"
REFUSAL_QUERY = "query.refusal"
CLIENT_ID = "client-id"
VERSION_KEY = "kindred-version"  # of the sender, in the question who a client is and in its answer

SERVER_ROUND = "server-round"
# For what a client keeps: the run as it was first called, how often it has been gone on with, and the round from which
# it may have to go on again.
RUN = "run"
ATTEMPT = "attempt"
KEEP_FROM = "keep-from"
METHOD = "method"
PROXIMAL_MU = "proximal-mu"
LABEL_SMOOTHING = "label-smoothing"
FINETUNE_EPOCHS = "finetune-epochs"
NEIGHBOURS = "neighbours"  # the other clients whose models a client receives
WEIGHTS = "weights"  # of these models, as the client reports them
PROBE = "probed-model"  # in messages to evaluate: name of a model that is not the client's own, see `SideEvaluation`

METHODS = "methods"
NETWORK = "network"
PUBLIC_SET = "public-set"
NUM_PUBLIC = "num-public"
NUM_CLASSES = "num-classes"
# In a site's node config: whether other sites may have its model, and the server know its weights.
SHARE_MODEL = "share-model"
REPORT_WEIGHTS = "report-weights"
# In messages of several clients' models: the other clients whose models a client receives, and the models' weights.
NEIGHBOURS = "neighbours"
WEIGHTS = "weights"
PROBLEM = "problem"

NUM_EXAMPLES = "num-examples"
NUM_TEST_EXAMPLES = "num-test-examples"
TRAIN_LOSS = "train-loss"
MODEL_BYTES = "model-bytes"
# What the client's half of a method has worked on in a round, see `Visit.compute`.
SAMPLES_TRAINED = "samples-trained"
SAMPLES_PREDICTED = "samples-predicted"
# Evaluations on a client's test data are named WHICH-accuracy and WHICH-loss. Which model:
RECEIVED = "received"  # as it came from the server
TRAINED = "trained"  # after local training
TUNED = "tuned"  # the received one, fine-tuned for this client alone
OWN = "own"  # another that the client has for itself, besides the one that goes to and fro
BETWEEN = "between"  # somewhere between the one from the server and the client's last one
AFTER_TRAINING = (TRAINED, OWN)  # those of which the last training reply tells, so that nothing is left to say
PERSONAL = "personal"  # the method's own choice among these: its result for this client

# The names of metrics that this project knows, in its own clients and in ordinary ones.
ORDINARY_NAMES = {"accuracy": ("accuracy", "eval_accuracy", "eval_acc"), "loss": ("loss", "eval_loss")}
KNOWN_METRICS = frozenset({
    NUM_EXAMPLES, NUM_TEST_EXAMPLES, TRAIN_LOSS, "train_loss", MODEL_BYTES, SAMPLES_TRAINED, SAMPLES_PREDICTED,
    *(name for names in ORDINARY_NAMES.values() for name in names),
    *(f"{which}-{measure}" for which in (RECEIVED, TRAINED, TUNED, OWN, BETWEEN, "mixture", "validation")
      for measure in ORDINARY_NAMES),
})  # fmt: skip

ClientId = int | str
"""What a client is called: node-config's `client-id`, else its partition, else its node id."""


MAX_NAME = 200  # characters
MOST = 2**53  # of whole numbers: every program that reads the results has them exactly, as floats too
NUMBERS = -(2**63), 2**64 - 1  # what whole numbers a message can carry


def is_name(name: object) -> bool:
    """Whether this can name a client or a metric: a text of one line, or a whole number that a message can carry."""
    if isinstance(name, str):
        return 1 <= len(name) <= MAX_NAME and name.isprintable()
    return isinstance(name, int) and not isinstance(name, bool) and NUMBERS[0] <= name <= NUMBERS[1]


LONGEST_LINE = 300  # characters of a client's text that are shown


def first_line(text: str) -> str:
    """The first line of a text that is not blank, fit for a log: printable, and not too long."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")
    line = "".join(character if character.isprintable() else "?" for character in line[: LONGEST_LINE + 1])
    return line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]}..."


def in_order(clients: Iterable[ClientId]) -> list[ClientId]:
    """Client ids in the one order used everywhere: numbers by value, then names."""
    return sorted(clients, key=lambda client: (isinstance(client, str), client))


def seed_for(*parts: object) -> int:
    """A seed in [0, 2**63) that depends on every part, the same in every process and on every machine."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1


def check(name: str, value: object, holds: bool, allowed: str) -> None:
    """Refuse an argument out of range, naming it, its value and what is allowed."""
    if not holds:
        raise ValueError(f"{name} is {value!r}, allowed: {allowed}")


LONGEST_HEADER = 10_000  # bytes; NumPy refuses longer ones too


def to_record(arrays: Mapping[str, np.ndarray]) -> ArrayRecord:
    """Pack arrays into a record, copying each once (Flower's own constructor copies twice)."""
    record = ArrayRecord()
    for name, array in arrays.items():
        array = np.asarray(array, order="C")
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(array))
        data = b"".join((header.getvalue(), array.data if array.ndim else array.tobytes()))
        record[name] = Array(str(array.dtype), tuple(array.shape), "numpy.ndarray", data)
    return record


def _header_length(data: bytes) -> int:
    """Bytes before the values of an array in a .npy file of version 1 or 2."""
    magic = np.lib.format.MAGIC_LEN
    width = {(1, 0): 2, (2, 0): 4}[np.lib.format.read_magic(io.BytesIO(data[:magic]))]
    length = magic + width + int.from_bytes(data[magic : magic + width], "little")
    if length > LONGEST_HEADER:
        raise ValueError(f"a header of {length} bytes, allowed: {LONGEST_HEADER}")
    return length


@lru_cache(maxsize=1024)  # networks have the same few shapes, in every message
def _parse_header(header: bytes) -> tuple[tuple[int, ...], bool, np.dtype]:
    stream = io.BytesIO(header)
    if np.lib.format.read_magic(stream) == (1, 0):
        return np.lib.format.read_array_header_1_0(stream)
    return np.lib.format.read_array_header_2_0(stream)


def read_array(array: Array) -> np.ndarray:
    """View the array that a record's entry carries, without copying it.

    The header is compared with the bytes that follow before anything is made of it: an entry that
    declares more than it carries costs no memory.

    Raises
    ------
    ValueError
        The entry is not a NumPy array, or its declared type or shape is not what it carries.
    """
    if array.stype != "numpy.ndarray":
        raise ValueError(f"serialised as {array.stype!r}, allowed: 'numpy.ndarray'")
    try:
        begin = _header_length(array.data)
        shape, fortran_order, dtype = _parse_header(array.data[:begin])
    except Exception as error:  # bytes that may be anything
        raise ValueError("carries no readable NumPy array") from error
    if dtype.hasobject or str(dtype) != array.dtype or shape != tuple(array.shape):
        raise ValueError(f"declares {array.dtype} {tuple(array.shape)} but carries {dtype} {shape}")
    carried = len(array.data) - begin
    count = 1
    for length in shape:
        count *= length
    if carried != count * dtype.itemsize:
        raise ValueError(f"declares {count * dtype.itemsize} bytes but carries {carried}")
    try:
        flat = np.frombuffer(array.data, dtype, count, begin)
        return flat.reshape(shape, order="F" if fortran_order else "C")
    except (ValueError, OverflowError, TypeError) as error:  # a shape without elements may still be impossible
        raise ValueError(f"carries {dtype} {shape}, which is no array") from error


def records_of(content: RecordDict, kind: type[Record]) -> list[Record]:
    """The records of one kind in a message.

    Flower's own views of them (`array_records` and so on) refer to themselves: what they are of, arrays and all, would
    stay in memory until Python looks for such circles.
    """
    return [record for record in content.values() if isinstance(record, kind)]


def config_of(content: RecordDict) -> dict[str, Any]:
    """The entries of a message's ConfigRecords together."""
    return {key: value for record in records_of(content, ConfigRecord) for key, value in record.items()}


def with_prefix(prefix: object, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays under names by which several models go in one record."""
    return {f"{prefix}/{name}": array for name, array in arrays.items()}


def by_prefix(arrays: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What `with_prefix` put together: prefix -> arrays by name."""
    parts: dict[str, dict[str, Any]] = {}
    for key, array in arrays.items():
        prefix, _, name = key.partition("/")
        parts.setdefault(prefix, {})[name] = array
    return parts


def encode(clients: Sequence[ClientId]) -> str:
    """Client ids as one text, JSON, which tells 7 from "7".

    (Flower's ConfigRecord cannot count an empty list.)
    """
    return json.dumps(list(clients))


def decode(text: Any) -> list[ClientId]:
    """The client ids in a text; what else is in it, or no such text, counts for nothing."""
    try:
        found = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return []
    listed = found if isinstance(found, list) else []
    return [client for client in listed if is_name(client)]


def in_a_row(arrays: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The models that `with_prefix` put together under the prefixes 0, 1, 2 and so on."""
    parts = by_prefix(arrays)
    return [parts[str(place)] for place in range(len(parts))]


def read_record(record: ArrayRecord) -> dict[str, np.ndarray]:
    """View all arrays of a record by name; see `read_array`."""
    return {name: read_array(array) for name, array in record.items()}
