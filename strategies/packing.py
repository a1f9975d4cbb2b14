"""All arrays of a message in one, on the way between machines.

Flower sends a message as a tree of objects, and each object in a separate request: two for every array, some 250 for a
ResNet-18. Each request costs a round trip and some ms of the SuperLink's time. One array has two objects, and one
more for each further chunk of 5 MB.

The server packs what it sends to clients that reported their `methods`, except in a simulation. Such a client packs its
replies. All other code receives messages unpacked, and the bytes that are reported are those of unpacked messages.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import cast

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict

PACKED = "packed"  # name of the record of the one array, of the array, and of its format
WIDTH = 8  # bytes of the length of the index, with which the array begins
LONGEST_INDEX = 2**22  # bytes

Answer = Callable[[Message, Context], Message]


def packed(content: RecordDict) -> RecordDict:
    """Return the same records without their arrays, and the record PACKED with all of them.

    The one array is the length of an index, the index in JSON, and the bytes of all arrays. For each array the index
    has the place of its record, its name, type, shape, format and number of bytes.
    """
    arrays = [
        (i, name, array)
        for i, record in enumerate(content.values())
        if isinstance(record, ArrayRecord)
        for name, array in record.items()
    ]
    index = json.dumps([(i, name, a.dtype, list(a.shape), a.stype, len(a.data)) for i, name, a in arrays]).encode()
    data = b"".join((len(index).to_bytes(WIDTH, "big"), index, *(array.data for _, _, array in arrays)))
    one = ArrayRecord({PACKED: Array("uint8", (len(data),), PACKED, data)})
    return RecordDict({**_without_arrays(content), PACKED: one})


def unpacked(content: RecordDict) -> RecordDict:
    """Undo `packed`; return other content unchanged. The content of the arrays is checked later, by `read_array`.

    Raises
    ------
    Exception
        The record PACKED is malformed.
    """
    if PACKED not in content:
        return content
    data = memoryview(cast(ArrayRecord, content[PACKED])[PACKED].data)
    begin = WIDTH + int.from_bytes(data[:WIDTH], "big")
    if begin > WIDTH + LONGEST_INDEX:
        raise ValueError(f"an index of {begin - WIDTH} bytes, allowed: {LONGEST_INDEX}")
    found = _without_arrays(content)
    del found[PACKED]
    records = list(found.values())
    for place, name, dtype, shape, stype, length in json.loads(bytes(data[WIDTH:begin])):
        end = begin + length
        if not begin <= end <= len(data):
            raise ValueError(f"an array of {length} bytes, of which {len(data) - begin} are there")
        cast(ArrayRecord, records[place])[name] = Array(dtype, tuple(shape), stype, bytes(data[begin:end]))
        begin = end
    return RecordDict(found)


def _without_arrays(content: RecordDict) -> dict[str, ArrayRecord | MetricRecord | ConfigRecord]:
    return {key: ArrayRecord() if isinstance(record, ArrayRecord) else record for key, record in content.items()}


def unpacking(answer: Answer) -> Answer:
    """Decorate a ClientApp's function: a packed message is unpacked for it, and the reply to such a message packed."""

    @functools.wraps(answer)
    def carrying(message: Message, context: Context) -> Message:
        if PACKED not in message.content:
            return answer(message, context)
        message.content = unpacked(message.content)
        reply = answer(message, context)
        if reply.has_content():
            reply.content = packed(reply.content)
        return reply

    return carrying
