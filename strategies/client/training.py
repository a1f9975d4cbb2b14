"""Local training in PyTorch: the library's only training loop.

Client i minimises F_i(w) + mu/2 ||w - w_received||^2, where F_i is the mean of its objective's loss over its data.

Inputs and targets lie on the model's device. Python does no work per sample, and does not wait for the device before
the end of training. Networks for images are put into channels-last layout, which changes no value. On a GPU repeated
steps run as CUDA graphs (`graphs`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kindred.errors import Reportable
from kindred.lazy import lazy
from kindred.messages import check
from kindred.objectives import Classes, Objective
from kindred.settings import (
    BATCH_SIZE,
    DEVICE,
    LABEL_SMOOTHING,
    LEARNING_RATE,
    MOMENTUM,
    OPTIMIZER,
    PRECISION,
    WEIGHT_DECAY,
)

from . import cuda_graphs as graphs
from .update import Update

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
else:
    torch = lazy("torch")

NOT_FINITE = (
    "the trained model is no longer finite, so training diverged: a smaller learning-rate may help; the model kept "
    "before stays"
)

CLASSES = Classes()
"""The objective where none is given: a logit for each class."""

# On the CPU oneDNN sets up each convolution anew. For images as small as the digits that takes longer than the
# convolution. Without oneDNN, batches of fewer than 16 go to NNPACK. In batches of 10 this is 1.8 times as fast for
# 8x8 images, 1.1 times as fast for 16x16, and slower for larger ones.
_SMALL_BATCH = 16
_SMALL_IMAGE = 16 * 16

DRAWN = 2**20
"""Samples that are drawn at a time, for the batches to come: their numbers take 8 MiB."""
LOSSES_KEPT = 2**16
"""Steps after which their losses are added up."""


def pick_device(name: str) -> torch.device:
    """Return the device that a setting names.

    Parameters
    ----------
    name : {"auto", "cpu", "cuda"}
        "auto" is the GPU if there is one, else the CPU.

    Raises
    ------
    ValueError
        Another name, or "cuda" if torch finds no GPU.
    """
    DEVICE.check(name)
    available = name != "cpu" and torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ValueError(
            Reportable("device is cuda and torch finds no CUDA GPU on this machine; set device to cpu or auto")
        )
    return torch.device("cuda" if available else "cpu")


def train(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    batch_size: int,
    optimizer: str,
    learning_rate: float,
    generator: torch.Generator,
    epochs: int = 0,
    steps: int = 0,
    momentum: float = MOMENTUM.default,
    weight_decay: float = WEIGHT_DECAY.default,
    proximal_mu: float = 0.0,
    towards: Sequence[Tensor] | None = None,
    correction: Sequence[Tensor] | None = None,
    sample_weights: Tensor | None = None,
    label_smoothing: float = LABEL_SMOOTHING.default,
    precision: str = PRECISION.default,
    term: Callable[[], Tensor] | None = None,
    memory: list[Tensor] | None = None,
    objective: Objective = CLASSES,
) -> float:
    """Train a model in place, starting from its current weights, and return the mean loss.

    Parameters
    ----------
    model : torch.nn.Module
        Maps inputs to outputs (n, k). It is left in training mode.
    x : tensor (n, ...)
        Inputs, on the model's device.
    y : tensor (n, ...)
        Targets, on the model's device.
    epochs : int
        0 or more. Each epoch goes over all samples in a new random order.
    steps : int
        0 or more, in place of epochs: the number of batches. Their samples are drawn independently (one may occur
        twice).
    batch_size : int
        1 or more. The last batch of an epoch holds the remaining samples. A single remaining sample joins the batch
        before it, because batch normalisation cannot be trained on one sample.
    optimizer : {"adam", "sgd"}
        Adam with betas 0.9 and 0.999 and epsilon 1e-8; SGD with `momentum`.
    learning_rate : float
        Above 0.
    generator : torch.Generator
        On the CPU, even for a model on a GPU, so that the order of the samples is the same on both.
    momentum : float
        Momentum of SGD, 0 to 1.
    weight_decay : float
        0 or more. The trainable parameters times this number are added to their gradients at every step, as
        torch.optim.SGD and torch.optim.Adam do; buffers do not decay.
    proximal_mu : float
        Weight mu of the proximal term, 0 or more. It acts on the trainable parameters, not on buffers. If it is more
        than 1 / learning_rate, this takes its place: a step of SGD along the term alone then ends where it pulls to.
        With a larger weight it would end beyond, and with more than 2 / learning_rate farther away than it began.
    towards : sequence of tensors, optional
        The weights towards which the proximal term pulls, in the form of `trained_weights`; by default the model's
        weights at the start.
    correction : sequence of tensors, optional
        Tensors added to the gradients at every step, one for each of `trained_weights`.
    sample_weights : tensor (n,), optional
        A factor on the loss of each sample; training minimises the mean of the products.
    label_smoothing : float
        0 to 1: the fraction of each label that is spread equally over all classes, or over true and false. No effect
        on numbers.
    precision : {"float32", "bfloat16"}
        "bfloat16" computes by autocast; weights and updates remain float32.
    term : callable, optional
        Called at each step. Returns a scalar tensor that depends on the model and is added to the loss.
    memory : list of tensors, optional
        The optimiser's state. Training starts from it, or anew if it is empty, and leaves in it the state after the
        last step. By default training starts anew, and the state is not kept.
    objective : Objective
        What the outputs mean; by default a logit for each class.

    Returns
    -------
    float
        The mean of F_i over all samples of all batches, each with the weights at its step. It uses smoothed labels if
        `label_smoothing` is set, and excludes the proximal term, the weight decay and `term`. NaN if there was no
        step: no epochs or no samples.

    Raises
    ------
    ValueError
        An argument out of range, or all parameters are frozen.
    """
    check("epochs", epochs, epochs >= 0, "0 or more")
    check("steps", steps, steps == 0 or (steps > 0 and epochs == 0), "0 or more, with epochs 0")
    BATCH_SIZE.check(batch_size)
    OPTIMIZER.check(optimizer)
    LEARNING_RATE.check(learning_rate)
    MOMENTUM.check(momentum)
    WEIGHT_DECAY.check(weight_decay)
    LABEL_SMOOTHING.check(label_smoothing)
    PRECISION.check(precision)
    check("proximal_mu", proximal_mu, 0 <= proximal_mu < math.inf, "0 or more")
    if epochs + steps == 0 or len(y) == 0:
        return math.nan
    if not trained_weights(model):
        raise ValueError(Reportable("the network has no parameter to train: all are frozen"))

    proximal_mu = min(proximal_mu, 1 / learning_rate)
    x = channels_last(model, x)
    samples = (x, y) if sample_weights is None else (x, y, sample_weights)
    epoch = _batch_sizes(len(y), batch_size)
    usual = batch_size if steps else epoch[0]
    rule = (optimizer, learning_rate, momentum, weight_decay, proximal_mu, correction is not None)

    repeated, graph = None, None
    if x.device.type in graphs.CAPTURE and term is None:
        repeated = graphs.graphs_of(model)
        shapes = tuple((usual, *part.shape[1:], part.dtype) for part in samples)
        key = (shapes, rule, objective, label_smoothing, precision, graphs.places(model))
        graph = repeated.get(key)
    update = Update(trained_weights(model), *rule) if graph is None else graph.update
    update.start(towards, correction, memory)

    losses: list[Tensor] = []
    sizes: list[int] = []
    total: Any = 0.0  # of the losses that are no longer in the list, and below the number of their samples
    count = 0
    with differentiating(model, x, batch_size, objective, precision, term, label_smoothing) as gradients_of:

        def step(*batch: Tensor) -> Tensor:
            loss, gradients = gradients_of(*batch)
            update(gradients)
            return loss

        if repeated is not None and graph is None and repeated.pays(key, steps or epochs * epoch.count(usual)):
            rows = torch.arange(usual, device=x.device) % len(y)
            graph = repeated.capture(key, model, step, update, [part[rows] for part in samples])
        for batch in batches(samples, epochs, steps, batch_size, generator):
            take = step if graph is None or len(batch[0]) != usual else graph
            losses.append(take(*batch))
            sizes.append(len(batch[0]))
            if len(losses) == LOSSES_KEPT:
                total, count = total + _weighted(losses, sizes), count + sum(sizes)
                losses, sizes = [], []
    if memory is not None:
        memory[:] = [tensor.clone() for tensor in update.memory]
    if losses:
        total, count = total + _weighted(losses, sizes), count + sum(sizes)
    return float(total) / count


def _weighted(losses: list[Tensor], sizes: Sequence[int]) -> Tensor:
    """Return the sum of batches' mean losses, each times the batch's number of samples."""
    return torch.stack(losses).double() @ torch.tensor(sizes, dtype=torch.float64).to(losses[0].device)


def trained_weights(model: nn.Module) -> list[Tensor]:
    """Return the trainable parameters of a model, detached from gradients; writing to them changes the model."""
    return [parameter.detach() for parameter in model.parameters() if parameter.requires_grad]


class Gradients:
    """Computes the gradient of a batch's mean loss at a model's current weights.

    Parameters
    ----------
    model : torch.nn.Module
        Maps inputs to outputs (n, k).
    objective : Objective
    precision : {"float32", "bfloat16"}
    term, label_smoothing
        As for `train`.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective = CLASSES,
        precision: str = "float32",
        term: Callable[[], Tensor] | None = None,
        label_smoothing: float = LABEL_SMOOTHING.default,
    ) -> None:
        self._model = model
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._objective = objective
        self._term = term
        self._smoothing = label_smoothing
        device = self._parameters[0].device.type if self._parameters else "cpu"
        # No cache of converted weights: a step uses each weight once, and a CUDA graph must contain the conversion.
        self._arithmetic = (
            torch.autocast(device, torch.bfloat16, cache_enabled=False)
            if precision == "bfloat16"
            else contextlib.nullcontext()
        )

    def __call__(self, inputs: Tensor, targets: Tensor, factors: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
        """Return a batch's mean loss, without `term`, and the gradients, with it, for each of `trained_weights`.

        If `factors` (n,) are given, each sample's loss is multiplied by its factor.
        """
        with self._arithmetic:
            outputs = self._model(inputs)
        if outputs.dtype in (torch.float16, torch.bfloat16):
            outputs = outputs.float()  # sums over classes may overflow float16
        if factors is None:
            loss = self._objective.loss(outputs, targets, label_smoothing=self._smoothing)
        else:
            each = self._objective.loss(outputs, targets, "none", self._smoothing)  # (b,)
            loss = (factors * each).mean()
        plain = loss.detach()
        if self._term is not None:
            with self._arithmetic:
                loss = loss + self._term()
        loss.backward()
        gradients = []
        for parameter in self._parameters:
            # A parameter that the loss does not depend on has gradient 0.
            gradients.append(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
            parameter.grad = None
        return plain, gradients


@contextlib.contextmanager
def differentiating(
    model: nn.Module,
    x: Tensor,
    batch_size: int,
    objective: Objective = CLASSES,
    precision: str = "float32",
    term: Callable[[], Tensor] | None = None,
    label_smoothing: float = LABEL_SMOOTHING.default,
) -> Iterator[Gradients]:
    """Put a model into training mode, with fast convolutions for batches of these inputs; yield its `Gradients`."""
    model.train()
    model.zero_grad()
    # An additional term in the loss is computed on larger batches.
    plain = precision == "float32" and term is None
    with _quick_convolutions(x, batch_size) if plain else contextlib.nullcontext():
        yield Gradients(model, objective, precision, term, label_smoothing)


def mean_gradient(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    batch_size: int = 128,
    objective: Objective = CLASSES,
    label_smoothing: float = LABEL_SMOOTHING.default,
) -> dict[str, np.ndarray]:
    """Return the gradient of the mean loss over all samples, at a model's current weights.

    Parameters
    ----------
    model : torch.nn.Module
        Maps inputs to outputs (n, k). It is left in training mode: normalisation layers use batch statistics.
    x : tensor (n, ...)
        Inputs, on the model's device.
    y : tensor (n, ...)
        Targets, on the model's device; at least one.
    batch_size : int
        Inputs per pass, as for `train`.
    objective : Objective
    label_smoothing : float
        As for `train`.

    Returns
    -------
    dict of str to ndarray
        The gradient of each trainable parameter, by its name in the state dict.
    """
    x = channels_last(model, x)
    named = dict(model.named_parameters(remove_duplicate=False))  # shared parameters under each of their names
    parameters = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
    model.train()
    model.zero_grad()
    sizes = _batch_sizes(len(y), batch_size)
    for inputs, targets in zip(x.split(sizes), y.split(sizes), strict=True):
        (objective.loss(model(inputs), targets, "sum", label_smoothing) / len(y)).backward()
    gradients = {}
    for name, parameter in parameters.items():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradients[name] = gradient.detach().cpu().numpy().copy(order="C")
    model.zero_grad()
    return gradients


def check_finite(model: nn.Module | Mapping[str, np.ndarray]) -> None:
    """Refuse a model, or arrays, with values that are not finite: the next round would start from it.

    Raises
    ------
    ValueError
    """
    arrays = model if isinstance(model, Mapping) else get_arrays(model)
    if not all(np.isfinite(array).all() for array in arrays.values()):
        raise ValueError(Reportable(NOT_FINITE))


def get_arrays(model: nn.Module) -> dict[str, np.ndarray]:
    """Copy a model's parameters and buffers into arrays, in the order and with the names of its state dict.

    They are C-contiguous. Training the model further does not change them.
    """
    arrays = {}
    for name, tensor in model.state_dict().items():
        copy = True if tensor.device.type == "cpu" else None  # an array from a GPU is a copy already
        arrays[name] = np.array(tensor.cpu().numpy(), order="C", copy=copy)
    return arrays


def set_arrays(model: nn.Module, arrays: Mapping[str, np.ndarray]) -> None:
    """Copy arrays into a model's parameters and buffers, in place.

    Parameters
    ----------
    model : torch.nn.Module
    arrays : mapping of str to ndarray
        One for each entry of the model's state dict, in any order; may be read-only.

    Raises
    ------
    ValueError
        A name, shape or type differs from the model's; the model is then unchanged.
    """
    state = model.state_dict()
    check_shapes(state, {name: array.shape for name, array in arrays.items()})
    for name, tensor in state.items():
        wanted = torch.empty(0, dtype=tensor.dtype).numpy().dtype
        if not np.can_cast(arrays[name].dtype, wanted, "same_kind"):
            raise ValueError(
                Reportable(f"array {name!r} is of type {arrays[name].dtype}, the model's is of type {wanted}")
            )
    for name, tensor in state.items():
        # NumPy writes into the tensor, because torch would warn about a read-only array.
        host = tensor if tensor.device.type == "cpu" else torch.empty_like(tensor, device="cpu")
        np.copyto(host.numpy(), arrays[name])
        if host is not tensor:
            tensor.copy_(host)


def check_shapes(state: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Compare the names and shapes of arrays with a model's state dict; raise ValueError if they differ."""
    for name, tensor in state.items():
        if name not in shapes:
            raise ValueError(Reportable(f"array {name!r} of the model is missing among those received"))
        if shapes[name] != tuple(tensor.shape):
            raise ValueError(
                Reportable(f"array {name!r} has shape {shapes[name]}, the model's has {tuple(tensor.shape)}")
            )
    for name in shapes:
        if name not in state:
            raise ValueError(Reportable(f"array {name!r} is not one of the model's, which are {', '.join(state)}"))


def channels_last(model: nn.Module, x: Tensor) -> Tensor:
    """Put a network for images into channels-last layout, and return the images in this layout; no value changes."""
    if x.dim() != 4:
        return x
    if not all(
        weight.is_contiguous(memory_format=torch.channels_last) for weight in model.parameters() if weight.dim() == 4
    ):  # `to` would process all weights in any case
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's types lack it
    return x.contiguous(memory_format=torch.channels_last)


@contextlib.contextmanager
def _quick_convolutions(x: Tensor, batch_size: int) -> Iterator[None]:
    """Switch oneDNN off while small batches of small images are convolved on the CPU."""
    small = (
        x.device.type == "cpu"
        and x.dim() == 4
        and min(len(x), batch_size) < _SMALL_BATCH
        and math.prod(x.shape[2:]) <= _SMALL_IMAGE
    )
    onednn: Any = torch.backends.mkldnn
    if not (small and onednn.enabled and torch.backends.nnpack.is_available()):
        yield
        return
    onednn.enabled = False
    try:
        yield
    finally:
        onednn.enabled = True


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed PyTorch's own random draws, such as dropout and new weights; restore the random state afterwards."""
    on_gpu = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_gpu else []):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed looks for GPUs at every call
        if on_gpu:
            torch.cuda.manual_seed(seed)
        yield


def batches(
    samples: tuple[Tensor, ...], epochs: int, steps: int, batch_size: int, generator: torch.Generator
) -> Iterator[tuple[Tensor, ...]]:
    """Yield the batches of so many epochs, or of so many steps, drawn as for `train`.

    Parameters
    ----------
    samples : tuple of tensors (n, ...)
        Such as inputs and targets.

    Yields
    ------
    tuple of tensors
        The batch's rows of each tensor in `samples`.
    """
    count, device = len(samples[0]), samples[0].device
    sizes = _batch_sizes(count, batch_size)
    # Draw many at a time: a copy from the host waits until the device has finished its earlier work.
    for number in _blocks(epochs, count):
        for order in [torch.randperm(count, generator=generator).to(device) for _ in range(number)]:
            yield from zip(*(part[order].split(sizes) for part in samples), strict=True)
    for number in _blocks(steps, batch_size):
        for drawn in torch.randint(count, (number, batch_size), generator=generator).to(device):
            yield tuple(part[drawn] for part in samples)


def _blocks(number: int, size: int) -> Iterator[int]:
    """Divide a number of draws, of `size` samples each, into blocks of up to `DRAWN` samples or one draw."""
    most = max(1, DRAWN // max(1, size))
    while number > 0:
        yield min(number, most)
        number -= most


def num_batches(num_samples: int, epochs: int, steps: int, batch_size: int) -> int:
    """Return the number of batches that `batches` draws from so many samples."""
    return epochs * len(_batch_sizes(num_samples, batch_size)) + steps


def _batch_sizes(num_samples: int, batch_size: int) -> list[int]:
    full, left = divmod(num_samples, batch_size)
    sizes = [batch_size] * full
    if left == 1 and sizes:
        sizes[-1] += 1
    elif left:
        sizes.append(left)
    return sizes
