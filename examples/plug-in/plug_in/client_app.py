"""The clients: training and evaluation as for FedAvg or FedProx, without any code for personalised models."""

from __future__ import annotations

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor
from torch.nn import Module

from plug_in import task

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    net, (x, y, _, _) = _prepare(message, context)
    config = message.content["config"]
    loss = task.train(
        net,
        x,
        y,
        epochs=context.run_config["local-epochs"],
        lr=config["lr"],
        mu=config.get("proximal-mu", 0.0),
        seed=config["server-round"],
    )
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(y)})
    return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    net, (_, _, x, y) = _prepare(message, context)
    loss, accuracy = task.test(net, x, y)
    metrics = MetricRecord({"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(y)})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


def _prepare(message: Message, context: Context) -> tuple[Module, tuple[Tensor, ...]]:
    """Return the received model and this client's data."""
    net = task.make_net()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    return net, task.load_data(context.node_config["partition-id"], context.node_config["num-partitions"])
