"""Ratio of a round's bytes on the network to the size of its models.

    python -m benchmarks.wire

Every object of every message is counted as Flower sends it. The run is HeurFedAMP with the McMahan CNN and 10 clients.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from kindred import HeurFedAMP, InlineGrid, make_model
from kindred.client.training import get_arrays
from kindred.messages import read_record, records_of, to_record

CLIENTS = 10


class CountingGrid(InlineGrid):
    """A grid that counts the bytes of messages and replies."""

    sent = received = 0

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        self.sent += sum(map(wire_bytes, messages))
        return super().push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = list(super().pull_messages(message_ids))
        self.received += sum(map(wire_bytes, replies))
        return replies


def wire_bytes(message: Message) -> int:
    return sum(len(part.deflate()) for part in get_all_nested_objects(message).values())


def main() -> None:
    logging.getLogger("flwr").setLevel(logging.ERROR)
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        # All weights of the client change, as in any training.
        (received,) = records_of(message.content, ArrayRecord)
        arrays = {k: a * 0.9 + 0.1 * (context.node_id % 97) for k, a in read_record(received).items()}
        arrays = {k: a.astype("float32") for k, a in arrays.items()}
        metrics = MetricRecord({"num-examples": 100, "trained-accuracy": 0.5, "received-accuracy": 0.5})
        return Message(RecordDict({"arrays": to_record(arrays), "metrics": metrics}), reply_to=message)

    arrays = get_arrays(make_model("mcmahan-cnn", (1, 28, 28), 10, 0))
    size = sum(array.nbytes for array in arrays.values())
    grid = CountingGrid(app, CLIENTS)
    strategy = HeurFedAMP(sigma=100.0, self_weight=0.2)
    settings = ConfigRecord(
        {"local-epochs": 1, "batch-size": 100, "optimizer": "adam", "learning-rate": 1e-3, "seed": 0}
    )
    rounds = 3
    strategy.start(grid, to_record(arrays), rounds, train_config=settings)
    down, up = (count / (rounds * CLIENTS * size) for count in (grid.sent, grid.received))
    print(f"{CLIENTS} clients, {size / 1e6:.2f} MB a model, {rounds} rounds")
    print(f"bytes down over the models' size: {down:.4f}")
    print(f"bytes up over the models' size: {up:.4f}")


if __name__ == "__main__":
    main()
