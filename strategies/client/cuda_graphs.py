"""Steps of training as CUDA graphs.

A training step of a small network starts some hundred GPU kernels. The GPU computes them faster than Python can start
them. A CUDA graph records all kernels of a step, and one call starts them all.

A graph reads and writes the same memory as the recorded step. That is the weights and buffers of one module, so the
graph lives as long as the module, from message to message. It is also memory of the graph's own, into which each batch
is copied and in which the optimiser's state lies. Everything else that the step depends on is recorded as a constant.
Another learning rate, for instance, needs another graph; the caller's key names all such values.

A step is captured once the module has taken, or is about to take, `PAYS` steps of its kind. By then the plain steps
have lost about as much time as a capture costs. So neither a module that trains briefly, once, nor one that trains
forever takes more than twice the time of the better choice. Steps that cannot be captured run one kernel at a time, as
without graphs.
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
GRAPHS_KEPT = 4  # per module; each holds the memory of a step
COUNTS_KEPT = 256  # per module; far more kinds of step than graphs, so that counts do not push each other out
WARM_UP = 3  # steps before a capture, as in torch's documentation: libraries initialise at their first calls


class Graph:
    """A captured step of one module.

    Attributes
    ----------
    update : object
        The step's state from batch to batch, in the memory that the graph uses.
    """

    def __init__(self, model: nn.Module, step: Step, update: Any, batch: Sequence[Tensor]) -> None:
        self.update = update
        self._batch = batch
        # While these references exist, nothing else can be allocated in the memory that the graph writes.
        self._tensors = [tensor.detach() for tensor in _tensors(model)]
        self._replay = CAPTURE[batch[0].device.type](lambda: step(*batch))

    def __call__(self, *batch: Tensor) -> Tensor:
        """Take a step on a batch and return its loss."""
        for place, part in zip(self._batch, batch, strict=True):
            place.copy_(part)
        return self._replay().clone()


class Graphs:
    """The graphs of a module, and how often it has taken each kind of step that has no graph."""

    def __init__(self) -> None:
        self._graphs: OrderedDict[Hashable, Graph] = OrderedDict()
        self._taken: OrderedDict[Hashable, int] = OrderedDict()
        self._refused = False

    def __len__(self) -> int:
        """Number of graphs."""
        return len(self._graphs)

    def get(self, key: Hashable) -> Graph | None:
        """Return the graph of a kind of step; None if there is none."""
        if key in self._graphs:
            self._graphs.move_to_end(key)
        return self._graphs.get(key)

    def pays(self, key: Hashable, count: int) -> bool:
        """Return whether to capture a kind of step that has no graph and will be taken `count` more times."""
        if self._refused:
            return False
        self._taken[key] = self._taken.pop(key, 0) + count
        _trim(self._taken, COUNTS_KEPT)
        return self._taken[key] >= PAYS

    def capture(
        self, key: Hashable, model: nn.Module, step: Step, update: Any, batch: Sequence[Tensor]
    ) -> Graph | None:
        """Capture a step and return its graph; None, with one warning in the log, if that fails.

        The model, `update` and the random state are left unchanged.

        Parameters
        ----------
        key : hashable
            Names everything that the step depends on, except the values of the model, of `update` and of the batch.
        step : callable
        update : object
            The step's state: its `memory` is a list of tensors.
        batch : sequence of tensors
            Any batch with the shapes and types of those to come.
        """
        self._taken.pop(key, None)
        try:
            with _restoring(model, update.memory):
                graph = Graph(model, step, update, batch)
        except Exception as error:  # of any kind: an error of the step itself will be raised again by the plain step
            self._refused = True
            cause: BaseException = error
            while cause.__context__ is not None:
                cause = cause.__context__
            reason = (str(cause) or type(cause).__name__).partition("\n")[0]
            log(
                WARNING,
                "kindred: a step of %s cannot be captured as a CUDA graph and runs without one: %s",
                type(model).__name__,
                reason,
            )
            return None
        self._graphs[key] = graph
        _trim(self._graphs, GRAPHS_KEPT)
        return graph

    def drop(self) -> None:
        """Drop all graphs; they are captured anew once that pays again."""
        self._graphs.clear()


graphs_by_module: weakref.WeakKeyDictionary[nn.Module, Graphs] = weakref.WeakKeyDictionary()


def graphs_of(model: nn.Module) -> Graphs:
    """Return the graphs of a module. They are freed with it, because they hold no reference to it."""
    return graphs_by_module.setdefault(model, Graphs())


def places(model: nn.Module) -> tuple[Hashable, ...]:
    """Return the memory addresses of a module's values and which of these are trained: part of every key."""
    return tuple((tensor.data_ptr(), tensor.requires_grad) for tensor in _tensors(model))


def _tensors(model: nn.Module) -> Iterable[Tensor]:
    return [*model.parameters(), *model.buffers()]


@contextlib.contextmanager
def _restoring(model: nn.Module, memory: Sequence[Tensor]) -> Iterator[None]:
    """Restore a model, an optimiser's state and the random state at the end of the block."""
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
    """Record a step on the GPU; all that it allocates, including the loss, stays in the graph's memory."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    usable = generator.clone_state()
    stream.wait_stream(torch.cuda.current_stream())
    try:
        # torch.cuda.graph's own stream context is not enough: it does not leave the stream if a capture fails.
        with torch.cuda.stream(stream):
            before = _host_random_state()
            for _ in range(WARM_UP):
                step()
            if _host_random_state() != before:
                raise RuntimeError("it draws random numbers on the host, which a graph would repeat at every step")
            with torch.cuda.graph(graph, stream=stream):
                loss = step()
    except Exception:
        # Before torch 2.13 the generator is unusable after a failed capture. The existing graphs do not know the new
        # one, so they are dropped.
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
"""Functions that capture a step, by type of device; a type that is missing has no capture."""


def _host_random_state() -> tuple[Any, ...]:
    return torch.get_rng_state().numpy().tobytes(), random.getstate()


def _trim(ordered: OrderedDict[Hashable, Any], bound: int) -> None:
    while len(ordered) > bound:
        ordered.popitem(last=False)
