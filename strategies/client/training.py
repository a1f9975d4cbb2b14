"""Local training in PyTorch: the one loop of the library.

Client i minimises F_i(w) + mu/2 ||w - w_received||^2, F_i the mean cross-entropy over its data.

Images and labels lie on the model's device; nothing per sample happens in Python and nothing waits for
the device before the end. Networks of images are put into channels-last layout, which changes no value.
On a GPU the steps that repeat are CUDA graphs (`graphs`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kindred.lazy import lazy
from kindred.messages import check
from kindred.settings import BATCH_SIZE, DEVICE, LEARNING_RATE, MOMENTUM, OPTIMIZER, PRECISION

from . import cuda_graphs as graphs
from .update import Update

if TYPE_CHECKING:
    import torch
    import torch.nn.functional as F
    from torch import Tensor, nn
else:
    torch, F = lazy("torch"), lazy("torch.nn.functional")

# On the CPU oneDNN sets each convolution up anew, which for images as small as the digits takes longer
# than the work; without it batches of fewer than 16 go to NNPACK. In batches of 10 this is 1.8 times as
# fast at 8x8 and 1.1 times at 16x16, and slower above.
_SMALL_BATCH = 16
_SMALL_IMAGE = 16 * 16


def pick_device(name: str) -> torch.device:
    """The device that a setting names.

    Parameters
    ----------
    name : {"auto", "cpu", "cuda"}
        "auto" is the GPU where there is one.

    Raises
    ------
    ValueError
        Another name, or "cuda" where torch finds no GPU.
    """
    DEVICE.check(name)
    available = name != "cpu" and torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ValueError("device is cuda and torch finds no CUDA GPU on this machine; set device to cpu or auto")
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
    proximal_mu: float = 0.0,
    towards: Sequence[Tensor] | None = None,
    correction: Sequence[Tensor] | None = None,
    sample_weights: Tensor | None = None,
    label_smoothing: float = 0.0,
    precision: str = PRECISION.default,
    term: Callable[[], Tensor] | None = None,
) -> float:
    """Train a model in place, from the weights that it has.

    Parameters
    ----------
    model : torch.nn.Module
        Maps images to logits (n, classes). Left in training mode; what the optimiser remembers is
        forgotten at the end.
    x : tensor (n, ...)
        Images, on the model's device.
    y : tensor (n,) of int64
        Labels, on the model's device.
    epochs : int
        0 or more. Each goes over all samples in a new random order.
    steps : int
        0 or more, in place of epochs: so many batches, of samples drawn independently (one may occur twice).
    batch_size : int
        1 or more. The last batch of an epoch is as large as what is left; a single sample that is left
        joins the batch before it, because batch normalisation cannot be trained on one.
    optimizer : {"adam", "sgd"}
        Adam with beta 0.9 and 0.999 and epsilon 1e-8; SGD with `momentum`. Neither has weight decay.
    learning_rate : float
        Above 0.
    generator : torch.Generator
        On the CPU, also for a model on a GPU: the order of the samples is the same on both.
    momentum : float
        0 to 1, of SGD.
    proximal_mu : float
        Weight mu of the proximal term, 0 or more. It acts on the trainable parameters, not on buffers.
    towards : sequence of tensors, optional
        The weights to which the proximal term pulls, as `trained_weights` gives them; by default those at the start.
    correction : sequence of tensors, optional
        What is added to every gradient, one for each of `trained_weights`.
    sample_weights : tensor (n,), optional
        A factor on the loss of each sample; what is minimised is the mean of the products.
    label_smoothing : float
        0 to 1: so much of each label is given to all classes alike.
    precision : {"float32", "bfloat16"}
        "bfloat16" computes by autocast; weights and updates remain float32.
    term : callable, optional
        Called at each step; a scalar tensor that is added to the loss, and depends on the model.

    Returns
    -------
    float
        The mean of F_i over all samples of all batches, each with the weights at its step, of smoothed labels if they
        are, without the proximal and the other term. NaN where there was no step: no epochs or no samples.

    Raises
    ------
    ValueError
        An argument outside what is allowed.
    """
    check("epochs", epochs, epochs >= 0, "0 or more")
    check("steps", steps, steps == 0 or (steps > 0 and epochs == 0), "0 or more, with epochs 0")
    BATCH_SIZE.check(batch_size)
    OPTIMIZER.check(optimizer)
    LEARNING_RATE.check(learning_rate)
    MOMENTUM.check(momentum)
    PRECISION.check(precision)
    check("proximal_mu", proximal_mu, 0 <= proximal_mu < math.inf, "0 or more")
    check("label_smoothing", label_smoothing, 0 <= label_smoothing <= 1, "0 to 1")
    if epochs + steps == 0 or len(y) == 0:
        return math.nan

    x = channels_last(model, x)
    samples = (x, y) if sample_weights is None else (x, y, sample_weights)
    sizes = [batch_size] * steps or _batch_sizes(len(y), batch_size) * epochs
    usual = sizes[0]
    rule = (optimizer, learning_rate, momentum, proximal_mu, correction is not None)

    repeated, graph = None, None
    if x.device.type in graphs.CAPTURE and term is None:
        repeated = graphs.graphs_of(model)
        shapes = tuple((usual, *part.shape[1:], part.dtype) for part in samples)
        key = (shapes, rule, label_smoothing, precision, graphs.places(model))
        graph = repeated.get(key)
    update = Update(trained_weights(model), *rule) if graph is None else graph.update
    update.start(towards, correction)

    losses: list[Tensor] = []
    with differentiating(model, x, batch_size, precision, term, label_smoothing) as gradients_of:

        def step(*batch: Tensor) -> Tensor:
            loss, gradients = gradients_of(*batch)
            update(gradients)
            return loss

        if repeated is not None and graph is None and repeated.pays(key, sizes.count(usual)):
            rows = torch.arange(usual, device=x.device) % len(y)
            graph = repeated.capture(key, model, step, update, [part[rows] for part in samples])
        for batch in batches(samples, epochs, steps, batch_size, generator):
            take = step if graph is None or len(batch[0]) != usual else graph
            losses.append(take(*batch))
    return float(torch.stack(losses).double() @ torch.tensor(sizes, dtype=torch.float64).to(x.device)) / sum(sizes)


def trained_weights(model: nn.Module) -> list[Tensor]:
    """The parameters of a model that are trained, without their gradients: what is written into them is the model's."""
    return [parameter.detach() for parameter in model.parameters() if parameter.requires_grad]


class Gradients:
    """The gradient of a batch's mean cross-entropy, at the weights that a model has.

    Parameters
    ----------
    model : torch.nn.Module
        Maps images to logits (n, classes).
    precision : {"float32", "bfloat16"}
    term, label_smoothing
        As for `train`.
    """

    def __init__(
        self,
        model: nn.Module,
        precision: str = "float32",
        term: Callable[[], Tensor] | None = None,
        label_smoothing: float = 0.0,
    ) -> None:
        self._model = model
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._term = term
        self._smoothing = label_smoothing
        device = self._parameters[0].device.type if self._parameters else "cpu"
        # Without a cache of converted weights: a step uses each once, and a CUDA graph must hold the conversion.
        self._arithmetic = (
            torch.autocast(device, torch.bfloat16, cache_enabled=False)
            if precision == "bfloat16"
            else contextlib.nullcontext()
        )

    def __call__(self, images: Tensor, labels: Tensor, factors: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
        """The mean loss of a batch, without the term, and its gradient for each of `trained_weights`.

        Of each sample the loss is multiplied by its factor, if there are any (n,).
        """
        with self._arithmetic:
            logits = self._model(images)
        if logits.dtype in (torch.float16, torch.bfloat16):
            logits = logits.float()  # sums over classes may be beyond float16
        if factors is None:
            loss = F.cross_entropy(logits, labels, label_smoothing=self._smoothing)
        else:
            each = F.cross_entropy(logits, labels, reduction="none", label_smoothing=self._smoothing)  # (b,)
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
    precision: str = "float32",
    term: Callable[[], Tensor] | None = None,
    label_smoothing: float = 0.0,
) -> Iterator[Gradients]:
    """Have a model in training mode, and what makes batches of these images quick; yields its `Gradients`."""
    model.train()
    model.zero_grad()
    # What else is in the loss is of larger batches.
    plain = precision == "float32" and term is None
    with _quick_convolutions(x, batch_size) if plain else contextlib.nullcontext():
        yield Gradients(model, precision, term, label_smoothing)


def mean_gradient(model: nn.Module, x: Tensor, y: Tensor, batch_size: int = 128) -> dict[str, np.ndarray]:
    """The gradient of the mean cross-entropy over all samples, at the weights that a model has.

    Parameters
    ----------
    model : torch.nn.Module
        Maps images to logits (n, classes). Left in training mode: normalisation layers go by the batch.
    x : tensor (n, ...)
        Images, on the model's device.
    y : tensor (n,) of int64
        Labels, on the model's device; one at least.
    batch_size : int
        Images at a time, as for `train`.

    Returns
    -------
    dict of str to ndarray
        For each parameter that is trained, by its name in the state dict.
    """
    x = channels_last(model, x)
    named = dict(model.named_parameters(remove_duplicate=False))  # shared ones under each of their names
    parameters = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
    model.train()
    model.zero_grad()
    sizes = _batch_sizes(len(y), batch_size)
    for images, labels in zip(x.split(sizes), y.split(sizes), strict=True):
        (F.cross_entropy(model(images), labels, reduction="sum") / len(y)).backward()
    gradients = {}
    for name, parameter in parameters.items():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradients[name] = gradient.detach().cpu().numpy().copy(order="C")
    model.zero_grad()
    return gradients


def check_finite(model: nn.Module) -> None:
    """Refuse to keep a model that training has driven out of bounds: the next round would begin with it.

    Raises
    ------
    ValueError
    """
    if not all(tensor.isfinite().all() for tensor in model.state_dict().values()):
        raise ValueError("the trained model is no longer finite; the one kept before stays")


def get_arrays(model: nn.Module) -> dict[str, np.ndarray]:
    """Copy a model's parameters and buffers into arrays, in the order and with the names of its state dict.

    They are C-contiguous. Training the model further does not change them.
    """
    arrays = {}
    for name, tensor in model.state_dict().items():
        copy = True if tensor.device.type == "cpu" else None  # what comes from a GPU is a copy already
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
        A name, shape or type of number is not the model's; then the model is as it was.
    """
    state = model.state_dict()
    check_shapes(state, {name: array.shape for name, array in arrays.items()})
    for name, tensor in state.items():
        wanted = torch.empty(0, dtype=tensor.dtype).numpy().dtype
        if not np.can_cast(arrays[name].dtype, wanted, "same_kind"):
            raise ValueError(f"array {name!r} is of type {arrays[name].dtype}, the model's is of type {wanted}")
    for name, tensor in state.items():
        # NumPy writes into the tensor: torch would warn of an array that is read-only.
        host = tensor if tensor.device.type == "cpu" else torch.empty_like(tensor, device="cpu")
        np.copyto(host.numpy(), arrays[name])
        if host is not tensor:
            tensor.copy_(host)


def check_shapes(state: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Compare the names and shapes of arrays with a model's state dict; ValueError where they differ."""
    for name, tensor in state.items():
        if name not in shapes:
            raise ValueError(f"array {name!r} of the model is missing among those received")
        if shapes[name] != tuple(tensor.shape):
            raise ValueError(f"array {name!r} has shape {shapes[name]}, the model's has {tuple(tensor.shape)}")
    for name in shapes:
        if name not in state:
            raise ValueError(f"array {name!r} is not one of the model's, which are {', '.join(state)}")


def channels_last(model: nn.Module, x: Tensor) -> Tensor:
    """Put a network of images into channels-last layout, and return the images in it; values stay as they are."""
    if x.dim() != 4:
        return x
    if not all(
        weight.is_contiguous(memory_format=torch.channels_last) for weight in model.parameters() if weight.dim() == 4
    ):  # `to` goes through all in any case
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's types lack it
    return x.contiguous(memory_format=torch.channels_last)


@contextlib.contextmanager
def _quick_convolutions(x: Tensor, batch_size: int) -> Iterator[None]:
    """Keep the convolutions of small batches of small images on the CPU from oneDNN."""
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


def batches(
    samples: tuple[Tensor, ...], epochs: int, steps: int, batch_size: int, generator: torch.Generator
) -> Iterator[tuple[Tensor, ...]]:
    """Batches for so many epochs, or so many steps, drawn as for `train`.

    Parameters
    ----------
    samples : tuple of tensors (n, ...)
        Such as images and labels.

    Yields
    ------
    tuple of tensors
        The batch's rows of each.
    """
    count, device = len(samples[0]), samples[0].device
    sizes = _batch_sizes(count, batch_size)
    # All of them first: a copy from the host waits until the device has done what was asked of it before.
    for order in [torch.randperm(count, generator=generator).to(device) for _ in range(epochs)]:
        yield from zip(*(part[order].split(sizes) for part in samples), strict=True)
    for drawn in torch.randint(count, (steps, batch_size), generator=generator).to(device):
        yield tuple(part[drawn] for part in samples)


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
