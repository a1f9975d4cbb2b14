"""The contract between the two halves of a method: the records of each message and their names.

TRAIN and EVALUATE, server to client: an ArrayRecord `arrays` (the model that the client starts from or evaluates) and
a ConfigRecord `config` (`server-round`, `method`, and the settings of local training).
TRAIN and EVALUATE, client to server: an ArrayRecord `arrays` (the trained model) and a MetricRecord `metrics`. In
TRAIN its `num-examples` counts training samples; if the client has introduced itself with a number, that number counts.
In EVALUATE `num-test-examples` counts test samples, or if it is missing `num-examples`.

QUERY with action `identity`: the server sends only its `kindred-version`. The reply's ConfigRecord holds:

| entry | sent by | meaning |
| --- | --- | --- |
| `client-id` | all clients | the client's id |
| `kindred-version` | clients made by `make_client_app` | the client's version |
| `num-examples`, `num-classes` | all without a problem | training samples, outputs of the network |
| `objective` | all without a problem | name of the objective, see `objectives` |
| `task` | clients that know it | fingerprint of inputs and objective: those of one run are the same |
| `share-model` | all without a problem | false if other sites must not receive the site's model |
| `validate-only` | sites that only validate | true: the site is never asked to train |
| `num-test-examples` | sites that only validate, without a problem | samples that the site evaluates models on |
| `network` | clients that know it | name of the network |
| `public-set`, `num-public` | clients with a public set | its fingerprint and its number of inputs |
| `methods` | clients made by `make_client_app` | the methods that the client supports |
| `problem` | clients that fail to introduce themselves | the reason; then only `client-id`, `validate-only` follow |

QUERY with action `refusal`, only to clients that reported their `methods`: a ConfigRecord with the `problem`, the
reason why the client takes no part or why its last reply was not used. The server does not wait for the reply.

A site that only validates receives no TRAIN message, and refuses one. In EVALUATE it receives the global model, and its
reply holds `metrics` alone.

In PerFed-CKT logits travel in place of models. `arrays` then holds `centroids` on the way to the client and `logits`
on the way back, and the reply's ConfigRecord `config` repeats the fingerprint. Anything else that a method's clients
report, apart from numbers for the history, is also in that record, under names that the method's file defines.

Between machines the arrays of all records travel as one to and from a client that reported its `methods`: `packing`.

The names are those of Flower's own FedAvg and FedProx, so that a ClientApp written for these can take part.
"""

from __future__ import annotations

import hashlib
import io
import json
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from .errors import Reportable
from .metrics import METRICS as KINDS_OF_METRICS

Record = TypeVar("Record", ArrayRecord, MetricRecord, ConfigRecord)

ARRAYS = "arrays"
CONFIG = "config"
METRICS = "metrics"

IDENTITY_QUERY = "query.identity"
REFUSAL_QUERY = "query.refusal"
CLIENT_ID = "client-id"
VERSION_KEY = "kindred-version"  # the sender's version, in the identity query and in its reply

SERVER_ROUND = "server-round"
# They identify the state that a client keeps: the id of the run when it began, the time at which the run began or was
# last resumed, and the earliest round after which the server may have to resume.
RUN = "run"
ATTEMPT = "attempt"
KEEP_FROM = "keep-from"
METHOD = "method"
PROXIMAL_MU = "proximal-mu"
FINETUNE_EPOCHS = "finetune-epochs"
SERVER_MOMENTUM = "server-momentum"  # present where the model to train from is ahead of the global one
NEIGHBOURS = "neighbours"  # the other clients whose models a client receives
WEIGHTS = "weights"  # of these models, as the client reports them
SHARE = "share-"  # metrics share-0, share-1, ...: a client's shares of component models, where it reports them
METRIC = "metric"  # the headline metric
LAST = "last-round"  # whether no training follows: clients then report all metrics
PROBE = "probed-model"  # in EVALUATE messages: name of a model other than the personal one, see `SideEvaluation`

METHODS = "methods"
NETWORK = "network"
PUBLIC_SET = "public-set"
NUM_PUBLIC = "num-public"
NUM_CLASSES = "num-classes"
OBJECTIVE = "objective"
TASK = "task"
# In a site's node config: whether other sites may receive its model, and whether the server may know its weights.
SHARE_MODEL = "share-model"
REPORT_WEIGHTS = "report-weights"
VALIDATE_ONLY = "validate-only"  # in a site's node config and in its introduction: it evaluates models and trains none
PROBLEM = "problem"

NUM_EXAMPLES = "num-examples"
NUM_TEST_EXAMPLES = "num-test-examples"
TRAIN_LOSS = "train-loss"
MODEL_BYTES = "model-bytes"
# Samples that the client half of a method has processed in a round, see `Visit.compute`.
SAMPLES_TRAINED = "samples-trained"
SAMPLES_PREDICTED = "samples-predicted"
# Evaluations on a client's test data are named WHICH-METRIC, such as trained-accuracy. WHICH is the model:
RECEIVED = "received"  # the model received from the server
TRAINED = "trained"  # the model after local training
TUNED = "tuned"  # the received model, fine-tuned for this client alone
OWN = "own"  # a second model that stays at the client, beside the one exchanged with the server
BETWEEN = "between"  # a model between the one received from the server and the client's last one
VALIDATION = "validation"  # the method's result, on validation data in place of test data
SELECTED = "selected"  # the method's result of the round that is best on validation data
ALONE = "alone"  # the model that a client trains alone beside the federation, see `client.shadow`
AFTER_TRAINING = (TRAINED, OWN)  # models that the last training reply evaluates: no further evaluation is needed
PERSONAL = "personal"  # the model among these that is the method's result for the client

LOSS = "loss"


def ordinary_names(metric: str) -> tuple[str, ...]:
    """Return the names under which a separate evaluation may report a metric: our clients' and ordinary ones."""
    return (metric, f"eval_{metric}", *(["eval_acc"] if metric == "accuracy" else []))


# The names of metrics that this project knows, from its own clients and from ordinary ones.
KNOWN_METRICS = frozenset({
    NUM_EXAMPLES, NUM_TEST_EXAMPLES, TRAIN_LOSS, "train_loss", MODEL_BYTES, SAMPLES_TRAINED, SAMPLES_PREDICTED,
    *(name for metric in KINDS_OF_METRICS.own for name in ordinary_names(metric)),
    *(f"{which}-{measure}" for which in (RECEIVED, TRAINED, TUNED, OWN, BETWEEN, "mixture", VALIDATION, SELECTED, ALONE)
      for measure in KINDS_OF_METRICS.own),
})  # fmt: skip

ClientId = int | str
"""A client's id: node-config's `client-id`, else its partition, else its node id."""


MAX_NAME = 200  # characters
MOST = 2**53  # largest whole number: every program that reads the results represents it exactly, even as a float
NUMBERS = -(2**63), 2**64 - 1  # smallest and largest whole number that a message can carry


def is_name(name: object) -> bool:
    """Return whether `name` can name a client or a metric: one line of text, or a whole number that fits a message."""
    if isinstance(name, str):
        return 1 <= len(name) <= MAX_NAME and name.isprintable()
    return isinstance(name, int) and not isinstance(name, bool) and NUMBERS[0] <= name <= NUMBERS[1]


ALIKE = ("LATIN", "CYRILLIC", "GREEK")  # scripts with letters that look the same, as Unicode calls them


def spelling(client: ClientId) -> str:
    """Return the form in which ids are compared: 7 and "7", "Lyon" and "lyon" are the same client."""
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", str(client)).casefold()).strip()


def scripts_of(client: ClientId) -> list[str]:
    """Return the scripts of ALIKE that an id has letters of."""
    letters = {unicodedata.name(letter, "").split(" ")[0] for letter in spelling(client)}
    return [script for script in ALIKE if script in letters]


LONGEST_LINE = 300  # characters shown of a client's text


def first_line(text: str) -> str:
    """Return the first line of a text that is not blank, made fit for a log: printable, at most `LONGEST_LINE` long."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")
    line = "".join(character if character.isprintable() else "?" for character in line[: LONGEST_LINE + 1])
    return line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]}..."


def in_order(clients: Iterable[ClientId]) -> list[ClientId]:
    """Sort client ids in the order that is used everywhere: numbers by value, then names."""
    return sorted(clients, key=lambda client: (isinstance(client, str), client))


def seed_for(*parts: object) -> int:
    """Return a seed in [0, 2**63) that depends on every part and is the same in every process and on every machine."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1


STATE_NOT_WRITTEN = "clients' state cannot be written"  # how a simulated client says that the disk is full


def check(name: str, value: object, holds: bool, allowed: str) -> None:
    """Raise ValueError unless `holds`; the message has the argument's name, its value and what is allowed."""
    if not holds:
        raise ValueError(Reportable(f"{name} is {value!r}, allowed: {allowed}"))


LONGEST_HEADER = 10_000  # bytes; NumPy refuses longer ones too


def to_record(arrays: Mapping[str, np.ndarray]) -> ArrayRecord:
    """Pack arrays into a record, copying each once (Flower's own constructor copies twice)."""
    record = ArrayRecord()
    for name, array in arrays.items():
        array = np.asarray(array, order="C")
        header, dtype = _header(array.dtype, array.shape)
        data = b"".join((header, array.data if array.ndim else array.tobytes()))
        record[name] = Array(dtype, array.shape, "numpy.ndarray", data)
    return record


@lru_cache(maxsize=1024)  # every message has the same few shapes
def _header(dtype: np.dtype, shape: tuple[int, ...]) -> tuple[bytes, str]:
    """Return the header of an array's .npy file, and the name of the array's type."""
    stream, descr = io.BytesIO(), np.lib.format.dtype_to_descr(dtype)
    np.lib.format.write_array_header_1_0(stream, {"descr": descr, "fortran_order": False, "shape": shape})
    return stream.getvalue(), str(dtype)


def _header_length(data: bytes) -> int:
    """Return the number of bytes before an array's values in a .npy file of version 1 or 2."""
    magic = np.lib.format.MAGIC_LEN
    width = {(1, 0): 2, (2, 0): 4}[np.lib.format.read_magic(io.BytesIO(data[:magic]))]
    length = magic + width + int.from_bytes(data[magic : magic + width], "little")
    if length > LONGEST_HEADER:
        raise ValueError(f"a header of {length} bytes, allowed: {LONGEST_HEADER}")
    return length


@lru_cache(maxsize=1024)
def _parse_header(header: bytes) -> tuple[tuple[int, ...], bool, np.dtype, str]:
    """Return what the header of a .npy file says, and the name of the array's type."""
    stream = io.BytesIO(header)
    if np.lib.format.read_magic(stream) == (1, 0):
        shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(stream)
    else:
        shape, fortran_order, dtype = np.lib.format.read_array_header_2_0(stream)
    return shape, fortran_order, dtype, str(dtype)


def read_array(array: Array) -> np.ndarray:
    """View the array that a record's entry carries, without copying it.

    The header is compared with the bytes that follow before anything is allocated: an entry that
    declares more than it carries costs no memory.

    Raises
    ------
    ValueError
        The entry is not a NumPy array, or its content has not the type or shape that it declares.
    """
    if array.stype != "numpy.ndarray":
        raise ValueError(f"serialised as {array.stype!r}, allowed: 'numpy.ndarray'")
    try:
        begin = _header_length(array.data)
        shape, fortran_order, dtype, name = _parse_header(array.data[:begin])
    except Exception as error:  # the bytes can be anything
        raise ValueError("carries no readable NumPy array") from error
    if dtype.hasobject or name != array.dtype or shape != tuple(array.shape):
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
    """Return the records of one kind in a message.

    Flower's own views of them (`array_records` and so on) are reference cycles: the records, with all their arrays,
    would stay in memory until Python's garbage collector runs.
    """
    return [record for record in content.values() if isinstance(record, kind)]


def config_of(content: RecordDict) -> dict[str, Any]:
    """Return the entries of all ConfigRecords in a message, merged."""
    return {key: value for record in records_of(content, ConfigRecord) for key, value in record.items()}


def with_prefix(prefix: object, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Prefix the names of a model's arrays, so that one record can hold several models."""
    return {f"{prefix}/{name}": array for name, array in arrays.items()}


def by_prefix(arrays: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Undo `with_prefix`: return prefix -> arrays by name."""
    parts: dict[str, dict[str, Any]] = {}
    for key, array in arrays.items():
        prefix, _, name = key.partition("/")
        parts.setdefault(prefix, {})[name] = array
    return parts


def encode(clients: Sequence[ClientId]) -> str:
    """Encode client ids as one JSON text, which distinguishes 7 from "7".

    (Flower's ConfigRecord cannot count the bytes of an empty list.)
    """
    return json.dumps(list(clients))


def decode(text: Any) -> list[ClientId]:
    """Decode the client ids in a text from `encode`; items that are no ids, and malformed texts, are ignored."""
    try:
        found = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return []
    listed = found if isinstance(found, list) else []
    return [client for client in listed if is_name(client)]


def in_a_row(arrays: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the models that `with_prefix` gave the prefixes 0, 1, 2 and so on, in this order."""
    parts = by_prefix(arrays)
    return [parts[str(place)] for place in range(len(parts))]


def read_record(record: ArrayRecord) -> dict[str, np.ndarray]:
    """View all arrays of a record by name; see `read_array`."""
    return {name: read_array(array) for name, array in record.items()}


def payload_bytes(content: RecordDict) -> int:
    """Return the number of bytes in a message's records: arrays with their headers, metrics and settings."""
    return sum(_count_bytes(record) for record in content.values())


def _count_bytes(record: ArrayRecord | MetricRecord | ConfigRecord) -> int:
    try:
        return record.count_bytes()
    except (IndexError, ValueError):  # Flower accepts an empty list or text in a record but cannot count it
        return 0
