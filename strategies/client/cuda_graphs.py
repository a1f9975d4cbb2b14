"""Steps of training as CUDA graphs.

A GPU has done a step of a small network before Python has asked for its kernels, of which there are some hundred. A
CUDA graph is all of them, recorded from a step as it stands and started by one call.

A graph reads and writes where the recorded step did: the weights and buffers of one module, which is why it lives as
long as the module, from message to message; and places of its own, into which each batch is copied, and in which the
optimiser's memory is. Whatever else the step depends on is recorded with it, so that another learning rate, for
instance, is another graph: the caller's key names all that.

A step is captured once the module has taken, or is about to take, `PAYS` of its kind: by then the plain steps have lost
about as much as a capture costs, so that neither a module that trains briefly, once, nor one that trains forever takes
more than twice the time of the better way. What cannot be captured is done step by step, as on a CPU.
"""

from __future__ import annotations

import contextlib
import random
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from logging import WARNING
from typing import TYPE_CHECKING, Any

from flwr.supercore import log

from kindred.lazy import lazy

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
else:
    torch = lazy("torch")

Step = Callable[..., "Tensor"]
"""Takes a batch's tensors, trains on them and returns the loss."""

PAYS = 200  # steps: a capture takes some tenths of a second, and saves about half a millisecond a step
GRAPHS_KEPT = 4  # a module; each holds the memory of a step
COUNTS_KEPT = 256  # a module; more kinds of step than graphs, or their counts would push each other out
WARM_UP = 3  # steps, as in torch's documentation: libraries set themselves up at their first calls


class Graph:
    """A step of one module, captured.

    Attributes
    ----------
    update : object
        What the step remembers from batch to batch, at the places where the graph finds it.
    """

    def __init__(self, model: nn.Module, step: Step, update: Any, batch: Sequence[Tensor]) -> None:
        self.update = update
        self._batch = batch
        # As long as these are held nothing else comes to lie where the graph writes.
        self._tensors = [tensor.detach() for tensor in _tensors(model)]
        self._replay = CAPTURE[batch[0].device.type](lambda: step(*batch))

    def __call__(self, *batch: Tensor) -> Tensor:
        """Take a step on a batch; its loss."""
        for place, part in zip(self._batch, batch, strict=True):
            place.copy_(part)
        return self._replay().clone()


class Graphs:
    """The graphs of a module, and how often it has taken the steps that have none."""

    def __init__(self) -> None:
        self._graphs: OrderedDict[Hashable, Graph] = OrderedDict()
        self._taken: OrderedDict[Hashable, int] = OrderedDict()
        self._refused = False

    def __len__(self) -> int:
        """Number of graphs."""
        return len(self._graphs)

    def get(self, key: Hashable) -> Graph | None:
        """The graph of a kind of step, if there is one."""
        if key in self._graphs:
            self._graphs.move_to_end(key)
        return self._graphs.get(key)

    def pays(self, key: Hashable, count: int) -> bool:
        """Whether a kind of step that is to be taken so many times more, and has no graph, is to be captured."""
        if self._refused:
            return False
        self._taken[key] = self._taken.pop(key, 0) + count
        _trim(self._taken, COUNTS_KEPT)
        return self._taken[key] >= PAYS

    def capture(
        self, key: Hashable, model: nn.Module, step: Step, update: Any, batch: Sequence[Tensor]
    ) -> Graph | None:
        """Capture a step; None where that cannot be, of which the log tells once. Nothing else changes.

        Parameters
        ----------
        key : hashable
            Names what the step depends on besides the values of the model, of `update` and of the batch.
        step : callable
        update : object
            What the step remembers, in its `memory`, a list of tensors.
        batch : sequence of tensors
            Any; those to come have its shapes and types.
        """
        self._taken.pop(key, None)
        try:
            with _as_it_was(model, update.memory):
                graph = Graph(model, step, update, batch)
        except Exception as error:  # of whatever kind: if it is the step's own the plain step will raise it
            self._refused = True
            cause: BaseException = error
            while cause.__context__ is not None:
                cause = cause.__context__
            reason = (str(cause) or type(cause).__name__).partition("\n")[0]
            log(
                WARNING,
                "kindred: a step of %s cannot be a CUDA graph, so it stays as it is: %s",
                type(model).__name__,
                reason,
            )
            return None
        self._graphs[key] = graph
        _trim(self._graphs, GRAPHS_KEPT)
        return graph

    def drop(self) -> None:
        """Do without the graphs; they are captured anew when they pay again."""
        self._graphs.clear()


graphs_by_module: weakref.WeakKeyDictionary[nn.Module, Graphs] = weakref.WeakKeyDictionary()


def graphs_of(model: nn.Module) -> Graphs:
    """The graphs of a module, which go when it goes: nothing in them refers to it."""
    return graphs_by_module.setdefault(model, Graphs())


def places(model: nn.Module) -> tuple[Hashable, ...]:
    """Where a module's values lie, and which are trained: part of every key."""
    return tuple((tensor.data_ptr(), tensor.requires_grad) for tensor in _tensors(model))


def _tensors(model: nn.Module) -> Iterable[Tensor]:
    return [*model.parameters(), *model.buffers()]


@contextlib.contextmanager
def _as_it_was(model: nn.Module, memory: Sequence[Tensor]) -> Iterator[None]:
    """Leave a model, what an optimiser remembers and the random state as if nothing had been done with them."""
    tensors = [*_tensors(model), *memory]
    copies = [tensor.detach().clone() for tensor in tensors]
    devices = [tensors[0].device] if tensors[0].is_cuda else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            model.zero_grad()
            with torch.no_grad():
                for tensor, copy in zip(tensors, copies, strict=True):
                    tensor.copy_(copy)


def _capture(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Record a step on the GPU; what it allocates, the loss among it, stays in the graph's memory."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    usable = generator.clone_state()
    stream.wait_stream(torch.cuda.current_stream())
    try:
        # Not torch.cuda.graph's alone: it does not leave the stream when a capture fails.
        with torch.cuda.stream(stream):
            before = _host_random_state()
            for _ in range(WARM_UP):
                step()
            if _host_random_state() != before:
                raise RuntimeError("it draws random numbers on the host, which a graph would not draw anew")
            with torch.cuda.graph(graph, stream=stream):
                loss = step()
    except Exception:
        # Before torch 2.13 the generator is out of use after a failed capture. The new one is none that the graphs
        # at hand know.
        generator.graphsafe_set_state(usable)
        for graphs in graphs_by_module.values():
            graphs.drop()
        raise
    finally:
        torch.cuda.current_stream().wait_stream(stream)

    def replay() -> Tensor:
        graph.replay()
        return loss

    return replay


CAPTURE: dict[str, Callable[[Callable[[], Tensor]], Callable[[], Tensor]]] = {"cuda": _capture}
"""How a step is captured, by the type of the device; where it cannot be there is none."""


def _host_random_state() -> tuple[Any, ...]:
    return torch.get_rng_state().numpy().tobytes(), random.getstate()


def _trim(ordered: OrderedDict[Hashable, Any], bound: int) -> None:
    while len(ordered) > bound:
        ordered.popitem(last=False)
