"""Model, data and local training: handwritten digits, turned by a different angle for each group of clients."""

from __future__ import annotations

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

GROUPS = 4
TRAINING_IMAGES = 40  # per client; its other images are for testing


def make_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def load_data(partition_id: int, num_partitions: int) -> tuple[torch.Tensor, ...]:
    """Return a client's part of the digits, turned by its group's angle: x_train, y_train, x_test, y_test."""
    images, labels = load_digits(return_X_y=True)
    own = np.random.default_rng(0).permutation(len(labels))[partition_id::num_partitions]
    turned = np.rot90(images[own].reshape(-1, 1, 8, 8) / 16, k=partition_id % GROUPS, axes=(2, 3))
    x, y = torch.tensor(turned.copy(), dtype=torch.float32), torch.tensor(labels[own])
    return x[:TRAINING_IMAGES], y[:TRAINING_IMAGES], x[TRAINING_IMAGES:], y[TRAINING_IMAGES:]


def train(net: nn.Module, x: torch.Tensor, y: torch.Tensor, epochs: int, lr: float, mu: float, seed: int) -> float:
    """Train with FedProx's proximal term mu/2 ||w - w_received||^2; return the mean loss."""
    received = [w.detach().clone() for w in net.parameters()]
    optimizer = torch.optim.Adam(net.parameters(), lr)
    shuffle = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(epochs):
        for batch in torch.randperm(len(y), generator=shuffle).split(10):
            loss = cross_entropy(net(x[batch]), y[batch])
            losses.append(loss.item())
            moved = sum(((w - r) ** 2).sum() for w, r in zip(net.parameters(), received))
            optimizer.zero_grad()
            (loss + mu / 2 * moved).backward()
            optimizer.step()
    return sum(losses) / len(losses)


@torch.no_grad()
def test(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
    """Return loss and accuracy."""
    logits = net(x)
    return cross_entropy(logits, y).item(), (logits.argmax(1) == y).float().mean().item()
