"""Local training against the plain PyTorch loop: images per second, and the accuracy of both.

    python -m benchmarks.training [--device auto|cpu|cuda] [--data-dir DIR] [--repeats N]

The plain loop is that of tutorials: a shuffling DataLoader over images on the host, a copy of each batch to
the device, torch.optim.Adam, and loss.item() at each step. Both train the same networks from the same weights, with the
same settings and for the same epochs, as for one message of a client; only the order of the images differs.
Repetitions alternate, each from new weights; the first is not counted. Rates and ratios are medians, accuracies on
test images are means and standard deviations over the repetitions.

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

LEARNING_RATE = 1e-3
TEST_IMAGES = 800


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


def compare(case: Case, precision: str, device: torch.device, data_dir: str, repeats: int) -> str:
    """Measure one case and return its line of the table."""
    num_images, epochs = case.work[device.type]
    (x, y), (test_x, test_y) = samples(case, num_images, data_dir)
    test = test_x.to(device), test_y.to(device)
    resident = x.to(device), y.to(device)
    fast, plain = (make_model(case.model, case.shape, 10, 0).to(device) for _ in range(2))

    def train_fast(seed: int) -> None:
        train(
            fast,
            *resident,
            batch_size=case.batch_size,
            optimizer="adam",
            learning_rate=LEARNING_RATE,
            epochs=epochs,
            precision=precision,
            generator=torch.Generator().manual_seed(seed),
        )

    def train_plain(seed: int) -> None:
        torch.manual_seed(seed)
        plain_loop(plain, x, y, case.batch_size, epochs, precision)

    rates, accuracies = np.empty((2, 2, repeats + 1))
    for repeat in range(repeats + 1):
        received = get_arrays(make_model(case.model, case.shape, 10, repeat))
        for row, (model, work) in enumerate(((plain, train_plain), (fast, train_fast))):
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
    (plain_rate, fast_rate), ratio = np.median(rates, axis=1), np.median(rates[1] / rates[0])
    learnt = "  ".join(f"{of.mean():5.1f} +- {of.std():4.1f}" for of in accuracies)
    return f"{case.model:<11}  {precision:<9}  {plain_rate:8.0f}  {fast_rate:8.0f}  {ratio:5.2f}  {learnt}"


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
        print("                        images per second                 accuracy %")
        print("model        precision     plain      ours  ratio         plain           ours")
        for case in CASES:
            for precision in ("float32", "bfloat16"):
                print(compare(case, precision, device, arguments.data_dir, arguments.repeats), flush=True)
    except (DataError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
