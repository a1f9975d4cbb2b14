"""One thread for all: two cores are soon oversubscribed, and results then have the same bits everywhere."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
