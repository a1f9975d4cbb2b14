"""Local training against loops in plain PyTorch: images per second, and the accuracy of each.

    python -m benchmarks.training [--device auto|cpu|cuda] [--data-dir DIR] [--repeats N]

The plain loop is that of tutorials: a shuffling DataLoader over images on the host, a copy of each batch to
the device, torch.optim.Adam, and loss.item() at each step. The tuned loop is as fast as plain PyTorch goes: images on
the device and channels-last, a fused optimiser, no wait for the device, and on a GPU a CUDA graph of the step. All
train the same networks from the same weights, with the same settings and for the same epochs, as for one message of a
client; only the order of the images differs. Repetitions alternate, each from new weights; the first is not counted,
and contains what happens once, such as the capture of graphs. Rates and ratios are medians, accuracies on test images
are means and standard deviations over the repetitions.

Images are scikit-learn's digits, enlarged; with --data-dir those of Fashion-MNIST for the McMahan CNN and of CIFAR-10
for the others, from a folder as for `kindred run --data-dir`. On a CPU, ResNet-18 has few images and so learns little.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from kindred import make_model
from kindred.client.evaluation import evaluate
from kindred.client.training import get_arrays, pick_device, set_arrays, train
from kindred.data.sources import DataError, load_dataset

from . import markdown

LEARNING_RATE = 1e-3
TEST_IMAGES = 800
HEAD = (
    "network",
    "precision",
    "plain, images/s",
    "tuned, images/s",
    "here, images/s",
    "here / plain",
    "here / tuned",
    "plain, accuracy %",
    "tuned, accuracy %",
    "here, accuracy %",
)


@dataclass(frozen=True)
class Case:
    """A network and its data.

    Attributes
    ----------
    work : dict of str to (int, int)
        By type of device: number of training images, and epochs over them per message.
    """

    model: str
    shape: tuple[int, int, int]
    batch_size: int
    dataset: str
    work: dict[str, tuple[int, int]]


CASES = (
    Case("mcmahan-cnn", (1, 28, 28), 100, "fashion-mnist", {"cpu": (800, 2), "cuda": (800, 50)}),
    Case("cnn2", (3, 32, 32), 50, "cifar10", {"cpu": (200, 4), "cuda": (800, 25)}),
    Case("resnet18", (3, 32, 32), 50, "cifar10", {"cpu": (100, 1), "cuda": (800, 25)}),
)


def samples(case: Case, num_images: int, data_dir: str) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    """Draw training and test images from the dataset, with mean 0 and variance 1, and their labels."""
    images = load_dataset(case.dataset if data_dir else "digits", data_dir)
    rng = np.random.default_rng(0)
    parts = []
    for pool, labels, count in (
        (images.x_train, images.y_train, num_images),
        (images.x_test, images.y_test, TEST_IMAGES),
    ):
        drawn = rng.permutation(len(labels))[:count]
        pixels = torch.from_numpy(pool[drawn]).float()
        if pixels.shape[1:] != case.shape:
            pixels = F.interpolate(pixels, case.shape[1:], mode="bilinear").expand(-1, *case.shape).contiguous()
        parts.append((pixels, torch.from_numpy(labels[drawn])))
    (x, y), (test_x, test_y) = parts
    return ((x - x.mean()) / x.std(), y), ((test_x - x.mean()) / x.std(), test_y)


def plain_loop(
    model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, batch_size: int, epochs: int, precision: str
) -> float:
    """Train as tutorials do; return the mean loss."""
    device = next(model.parameters()).device
    loader = DataLoader(TensorDataset(x, y), batch_size=batch_size, shuffle=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    total = 0.0
    model.train()
    for _ in range(epochs):
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16"):
                loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(labels)
    return total / (epochs * len(y))


class TunedLoop:
    """Trains a model on the same images again and again, each time with a new optimiser."""

    def __init__(
        self, model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, batch_size: int, precision: str
    ) -> None:
        on_gpu = x.is_cuda
        self._model = model.to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]
        self._x, self._y = x.contiguous(memory_format=torch.channels_last), y
        self._batch_size, self._precision = batch_size, precision
        self._optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, fused=True, capturable=on_gpu)
        self._batch = self._x[:batch_size].clone(memory_format=torch.channels_last), y[:batch_size].clone()
        self._graph = torch.cuda.CUDAGraph() if on_gpu else None
        if self._graph:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):  # libraries initialise at their first calls
                    self._step(*self._batch)
            torch.cuda.current_stream().wait_stream(stream)
            with torch.cuda.graph(self._graph):
                self._step(*self._batch)

    def __call__(self, epochs: int) -> None:
        for state in self._optimizer.state.values():
            for tensor in state.values():
                tensor.zero_()
        for _ in range(epochs):
            for rows in torch.randperm(len(self._y), device=self._y.device).split(self._batch_size):
                batch = self._x[rows], self._y[rows]
                if self._graph:
                    for place, part in zip(self._batch, batch, strict=True):
                        place.copy_(part)
                    self._graph.replay()
                else:
                    self._step(*batch)

    def _step(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self._optimizer.zero_grad()
        bfloat16 = self._precision == "bfloat16"
        with torch.autocast(images.device.type, torch.bfloat16, enabled=bfloat16, cache_enabled=not images.is_cuda):
            loss = F.cross_entropy(self._model(images), labels)
        loss.backward()
        self._optimizer.step()


def compare(case: Case, precision: str, device: torch.device, data_dir: str, repeats: int) -> list[str]:
    """Measure one case and return its row of the table."""
    num_images, epochs = case.work[device.type]
    (x, y), (test_x, test_y) = samples(case, num_images, data_dir)
    test = test_x.to(device), test_y.to(device)
    resident = x.to(device), y.to(device)
    plain, tuned, ours = (make_model(case.model, case.shape, 10, 0).to(device) for _ in range(3))
    tuned_loop = TunedLoop(tuned, *resident, case.batch_size, precision)

    def train_plain(seed: int) -> None:
        torch.manual_seed(seed)
        plain_loop(plain, x, y, case.batch_size, epochs, precision)

    def train_tuned(seed: int) -> None:
        torch.manual_seed(seed)
        tuned_loop(epochs)

    def train_ours(seed: int) -> None:
        train(
            ours,
            *resident,
            batch_size=case.batch_size,
            optimizer="adam",
            learning_rate=LEARNING_RATE,
            epochs=epochs,
            precision=precision,
            generator=torch.Generator().manual_seed(seed),
        )

    rates, accuracies = np.empty((2, 3, repeats + 1))
    for repeat in range(repeats + 1):
        received = get_arrays(make_model(case.model, case.shape, 10, repeat))
        for row, (model, work) in enumerate(((plain, train_plain), (tuned, train_tuned), (ours, train_ours))):
            set_arrays(model, received)
            if device.type == "cuda":
                torch.cuda.synchronize()
            started = time.perf_counter()
            work(repeat)
            if device.type == "cuda":
                torch.cuda.synchronize()
            rates[row, repeat] = epochs * len(y) / (time.perf_counter() - started)
            accuracies[row, repeat] = 100 * evaluate(model, *test)["accuracy"]
    rates, accuracies = rates[:, 1:], accuracies[:, 1:]
    speeds = [f"{rate:.0f}" for rate in np.median(rates, axis=1)]
    ratios = [f"{np.median(rates[2] / other):.2f}" for other in rates[:2]]
    learnt = [f"{of.mean():.1f} ± {of.std():.1f}" for of in accuracies]
    return [case.model, precision, *speeds, *ratios, *learnt]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--data-dir", default="", help="folder of Fashion-MNIST and CIFAR-10 (default: digits)")
    parser.add_argument("--repeats", type=int, default=3, help="counted repetitions (default 3)")
    arguments = parser.parse_args()
    if arguments.repeats < 1:
        parser.error(f"--repeats is {arguments.repeats}, allowed: 1 or more")
    try:
        device = pick_device(arguments.device)
        where = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
        print(f"torch {torch.__version__}, {where}; medians of {arguments.repeats} repetitions")
        rows = [
            compare(case, precision, device, arguments.data_dir, arguments.repeats)
            for case in CASES
            for precision in ("float32", "bfloat16")
        ]
        print(markdown(HEAD, rows))
    except (DataError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
