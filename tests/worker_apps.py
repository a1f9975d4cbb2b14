"""ClientApps for processes that import them by name."""

from __future__ import annotations

import logging
import os
import signal
import time

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()
sleeping = ClientApp()
grows = ClientApp()
LOGGER = logging.getLogger("flwr")


@app.train()
def train(message: Message, context: Context) -> Message:
    """Return the received values plus the client's number, the process's id and how often the client was asked."""
    client = context.node_config["partition-id"]
    received = {name: array.numpy() for name, array in message.content["arrays"].items()}
    if any(np.isnan(values).any() for values in received.values()):
        os.kill(os.getpid(), signal.SIGKILL)
    if any((values < 0).any() for values in received.values()):
        raise ValueError("a value is negative")
    LOGGER.info("client %d trains", client)
    asked = int(context.state["asked"]["times"]) if "asked" in context.state else 0
    context.state["asked"] = MetricRecord({"times": asked + 1})
    arrays = ArrayRecord({name: Array(values + np.float32(client)) for name, values in received.items()})
    return Message(
        RecordDict({"arrays": arrays, "metrics": MetricRecord({"process": os.getpid(), "asked": asked})}),
        reply_to=message,
    )


@sleeping.train()
def sleep(message: Message, context: Context) -> Message:
    time.sleep(600)
    return Message(RecordDict(), reply_to=message)


@grows.train()
def grow(message: Message, context: Context) -> Message:
    """Return as many values as received, one more than at the last time; the Context is large, too."""
    size = message.content["arrays"]["w"].numpy().size
    asked = int(context.state["asked"]["times"]) if "asked" in context.state else 0
    context.state["asked"] = MetricRecord({"times": asked + 1})
    context.state["kept"] = ArrayRecord({"w": Array(np.zeros(10_000, np.float32))})
    arrays = ArrayRecord({"w": Array(np.full(size, asked + 1, np.float32))})
    return Message(RecordDict({"arrays": arrays}), reply_to=message)
