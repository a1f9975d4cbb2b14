"""Data of three sites from scikit-learn's digits: lyon and oslo see them upright, porto upside down.

    python make_data.py FOLDER

writes FOLDER/SITE/data.npz, with 60 training and 200 test images, and FOLDER/SITE/public.npz, with 200 other images,
upright and upside down, without labels, the same at each site.
"""

import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

HALF_TURNS = {"lyon": 0, "oslo": 0, "porto": 1}
NUM_TRAIN, NUM_TEST, NUM_PUBLIC = 60, 200, 200


def main(folder: Path) -> None:
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    x, y = (digits.images[order] * (255 / 16)).round().astype(np.uint8), digits.target[order]  # (n, 8, 8), (n,)
    size = NUM_TRAIN + NUM_TEST
    public = x[len(HALF_TURNS) * size :][:NUM_PUBLIC].copy()
    public[::2] = np.rot90(public[::2], 2, axes=(1, 2))
    for place, (site, half_turns) in enumerate(HALF_TURNS.items()):
        (folder / site).mkdir(parents=True, exist_ok=True)
        mine = slice(place * size, (place + 1) * size)
        images, labels = np.rot90(x[mine], 2 * half_turns, axes=(1, 2)), y[mine]
        np.savez(
            folder / site / "data.npz", x_train=images[:NUM_TRAIN], y_train=labels[:NUM_TRAIN],
            x_test=images[NUM_TRAIN:], y_test=labels[NUM_TRAIN:],
        )  # fmt: skip
        np.savez(folder / site / "public.npz", x=public)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
