"""The work of a run's clients in plain PyTorch, as fast as it goes without a library: the baseline of `simulation`.

Processes that were forked with the data, each with a share of the clients, train channels-last models with fused
optimisers. All models lie in shared memory. The next global model is the mean of all, as in FedAvg, from each process's
sum of its clients' models. Where the method makes a mixture for each client, so does the loop, from one product of the
models with each other; and FedProx, FedAMP and HeurFedAMP have their proximal term. Other arithmetic of methods is
omitted, and so are messages and files. FedDF's server computes with networks itself; so does the loop.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from kindred import make_model
from kindred.data import load_federation
from kindred.engine.layout import last_layers
from kindred.engine.stored import CloudModels
from kindred.registry import REGISTRY
from kindred.server_app.config import Config

AT_ONCE = 500  # samples per batch, where no gradient is needed
PROXIMAL = ("fedprox", "fedprox-ft", "fedamp", "heurfedamp")
MU = 1e-4  # weight of the proximal term


@dataclass(frozen=True)
class Work:
    """The work of a client in a round.

    Attributes
    ----------
    whole, head : int
        Samples that go through the network forward and backward, for all weights and for those of the last layers.
    predicted : int
        Samples that go through the network forward only.
    tests : int
        Models evaluated on the test data.
    batches_a_step : int
        Number of batches in the gradient of a step.
    """

    whole: int
    head: int
    predicted: int
    tests: int
    batches_a_step: int = 1


def loop(
    config: Config, rounds: Sequence[Sequence[tuple[int, Work]]], server: Sequence[Work], processes: int
) -> list[float]:
    """Do the work of these rounds and return the seconds of each.

    Call it in a process of its own, which is forked while it has one thread.

    Parameters
    ----------
    config : Config
        The settings of the data, the network and training.
    rounds : sequence of sequences of (int, Work)
        For each round its clients and their work.
    server : sequence of Work
        For each round the server's own work with networks.
    processes : int
        Each has its share of the CPUs for its threads.
    """
    torch.set_num_threads(1)
    federation = load_federation(config.run_config())
    sites = [federation.site_data(client) for client in range(config.num_clients)]
    public = federation.public_set() if REGISTRY[config.strategy].needs_public_set else sites[0].train[0][:0]
    model = make_model(config.model, federation.task.inputs.shape, federation.task.objective.num_outputs, 0)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    trainer = Trainer(model, config)
    mixes = issubclass(REGISTRY[config.strategy].strategy, CloudModels)
    starts = trainer.weights().repeat(len(sites) if mixes else 1, 1).share_memory_()  # (m, d), or (1, d)
    ends = torch.zeros(len(sites) if mixes else processes, starts.shape[1]).share_memory_()  # models, or their sums
    fork: Any = multiprocessing.get_context("fork")
    barrier = fork.Barrier(processes + 1)

    def work(number: int) -> None:
        torch.set_num_threads((os.cpu_count() or 1) // processes)
        for clients in rounds:
            barrier.wait()
            if not mixes:
                ends[number].zero_()
            for client, task in clients[number::processes]:
                trainer.start_from(starts[client if mixes else 0])
                trainer.do(task, sites[client].train, sites[client].test)
                if mixes:
                    ends[client] = trainer.weights()
                else:
                    ends[number] += trainer.weights()
            barrier.wait()

    workers = [fork.Process(target=work, args=(number,), daemon=True) for number in range(processes)]
    for worker in workers:
        worker.start()
    if mixes or REGISTRY[config.strategy].distils:
        torch.set_num_threads(os.cpu_count() or 1)
    seconds = []
    unlabelled = public, torch.zeros(len(public), dtype=torch.int64)
    for clients, task in zip(rounds, server, strict=True):
        started = time.perf_counter()
        barrier.wait()
        barrier.wait()
        if mixes:
            torch.mm((ends @ ends.T).softmax(1), ends, out=starts)
        else:
            torch.sum(ends, 0, out=starts[0]).div_(len(clients))
        if task != Work(0, 0, 0, 0):
            trainer.do(task, unlabelled, unlabelled)
        seconds.append(time.perf_counter() - started)
    for worker in workers:
        worker.join()
    return seconds


class Trainer:
    """A model, and what a client does with it."""

    def __init__(self, model: torch.nn.Module, config: Config) -> None:
        self.model, self.batch_size = model, config.batch_size
        self.learning_rate, self.sgd = config.learning_rate, config.own_settings().get("sgd_learning_rate")
        self.is_pulled = config.strategy in PROXIMAL
        self.head = set(last_layers(model.state_dict(), config.head_layers))

    def weights(self) -> torch.Tensor:
        """Return the model's weights, (d,)."""
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.model.parameters()])

    def start_from(self, weights: torch.Tensor) -> None:
        """Load weights, (d,)."""
        parameters = list(self.model.parameters())
        for parameter, values in zip(parameters, weights.split([each.numel() for each in parameters]), strict=True):
            parameter.data.copy_(values.view(parameter.shape))

    def do(self, work: Work, train: Sequence[Any], test: Sequence[Any]) -> None:
        """Do a client's work, given its samples and targets."""
        (x, y), (test_x, test_y) = (
            (part.to(memory_format=torch.channels_last) if part.ndim == 4 else part, targets)
            for part, targets in (train, test)
        )
        for _ in range(work.tests):
            float((self.predict(test_x).argmax(1) == test_y).float().mean())
        for count in parts(work.predicted, AT_ONCE):
            self.predict(next(drawn(x, y, count))[0])
        for samples, is_head in ((work.head, True), (work.whole, False)):
            if samples:
                self.steps(parts(samples, self.batch_size), drawn(x, y, self.batch_size), is_head, work.batches_a_step)

    def steps(self, sizes: Sequence[int], batches: Iterator[Sequence[Any]], is_head: bool, batches_a_step: int) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(not is_head or name in self.head)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        if self.sgd:
            optimizer: torch.optim.Optimizer = torch.optim.SGD(trained, self.sgd, fused=True)
        else:
            optimizer = torch.optim.Adam(trained, self.learning_rate, fused=True)
        towards = [parameter.detach().clone() for parameter in trained] if self.is_pulled else []
        self.model.train()
        for number, size in enumerate(sizes):
            samples, targets = (part[:size] for part in next(batches))
            if number % batches_a_step == 0:
                optimizer.zero_grad()
            cross_entropy(self.model(samples), targets).backward()
            if (number + 1) % batches_a_step == 0:
                if self.is_pulled:
                    self.pull(trained, towards)
                optimizer.step()

    @torch.no_grad()
    def pull(self, weights: list[Any], towards: list[torch.Tensor]) -> None:
        """Add the gradient of MU / 2 ||w - towards||^2 to the weights' gradients."""
        gradients = [parameter.grad for parameter in weights]
        torch._foreach_add_(gradients, weights, alpha=MU)
        torch._foreach_sub_(gradients, towards, alpha=MU)  # with no tensor between, twice as fast for large models

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        self.model.eval()
        with torch.inference_mode():
            return self.model(x)


def drawn(x: torch.Tensor, y: torch.Tensor, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield full batches of a client's samples, epoch after epoch; samples repeat where it has too few."""
    while True:
        order = torch.randperm(len(y))
        while len(order) < size:
            order = torch.cat([order, torch.randperm(len(y))])
        for batch in order.split(size):
            if len(batch) == size:
                yield x[batch], y[batch]


def parts(total: int, size: int) -> list[int]:
    full, left = divmod(total, size)
    return [size] * full + ([left] if left else [])
