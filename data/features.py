"""Features of the images in a folder, from a pretrained network: the dataset office-home.

Office-Home (Venkateswara et al., CVPR 2017) has photographs and drawings of 65 classes of objects in four domains, in
folders DIR/domain/class. As in FedeRiCo (Sui et al., 2022, arXiv:2210.06597, appendix D) the images of all domains are
merged. Clients learn from 512 features of each image, the input of the last layer of ResNet-18 trained on ImageNet. The
features are computed once and kept in a file.
"""

from __future__ import annotations

import os
import tempfile
from hashlib import file_digest, sha256
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from kindred import torchvision_import
from kindred.lazy import lazy

from .dataset import Dataset, Images
from .files import DEFAULT_FOLDER, SUFFIXES, DataError, one_line, read_image, read_npz, safetensors_header

if TYPE_CHECKING:
    import safetensors.torch as safetensors_torch
    import torch
else:
    safetensors_torch, torch = lazy("safetensors.torch"), lazy("torch")

WEIGHTS = "resnet18.safetensors"
WIDTH = 512
_BATCH = 64


def folder_features(folder: Path) -> Dataset:
    """Return the features of the images in a folder: computed on the CPU, or read if they were computed before.

    An image is resized, cropped and normalised as torchvision does for these weights. The features are kept in
    `office-home-KEY.npz` in the folder, or in `DEFAULT_FOLDER` where the folder cannot be written. KEY is computed
    from the images' names, sizes and times and from the weights, so other data get new features. These files may be
    deleted.

    The dataset has no division into training and test images. Here, in each class, with its images in the order of
    their paths, the second of every five is for test.

    Parameters
    ----------
    folder : Path
        Images are DOMAIN/CLASS/NAME with a suffix of `SUFFIXES`; other files, and hidden ones, are ignored. Classes
        are numbered in the order of their names. The weights are `resnet18.safetensors` in the folder, a state dict
        of torchvision's resnet18; where it is missing, torchvision downloads its own.

    Returns
    -------
    Dataset
        x (n, 512, 1, 1), float32, in the order of the images' paths.

    Raises
    ------
    DataError
        There are too few classes or images, an image cannot be read, the weights are missing or do not fit, or the
        features cannot be written anywhere.
    """
    paths = _image_paths(folder)
    names = sorted({path.parts[1] for path in paths})
    y = np.array([names.index(path.parts[1]) for path in paths])
    sizes = np.bincount(y)
    if len(names) < 2:
        raise DataError(f"{folder} has images of one class only, {names[0]}: 2 classes or more are needed")
    if sizes.min() < 2:
        raise DataError(f"{folder} has one image only of class {names[sizes.argmin()]}: 2 or more are needed")
    x = features_of(folder, paths).reshape(-1, WIDTH, 1, 1)
    test = np.zeros(len(y), bool)
    for label in range(len(names)):
        test[np.flatnonzero(y == label)[1::5]] = True
    return Images(x[~test], y[~test], x[test], y[test], len(names))


def _image_paths(folder: Path) -> list[Path]:
    """Return the images' paths relative to the folder, sorted."""

    def visible(place: Path) -> list[Path]:
        return [path for path in place.iterdir() if not path.name.startswith(".")]

    try:
        classes = [path for domain in visible(folder) if domain.is_dir() for path in visible(domain) if path.is_dir()]
        files = [path for place in classes for path in visible(place)]
        paths = [path.relative_to(folder) for path in files if path.suffix.lower() in SUFFIXES and path.is_file()]
    except OSError as error:
        raise DataError(f"{folder} cannot be read: {one_line(error)}") from error
    if not paths:
        raise DataError(
            f"{folder} has no images: they must be DOMAIN/CLASS/NAME, with a suffix of {', '.join(sorted(SUFFIXES))}"
        )
    return sorted(paths, key=lambda path: path.parts)


def features_of(folder: Path, paths: list[Path]) -> np.ndarray:
    """Return the features of the images (n, 512), float32: read if they are kept in a file, else computed and kept."""
    name = f"office-home-{_key(folder, paths)}.npz"
    places = (folder, Path(DEFAULT_FOLDER).expanduser())
    for place in places:
        try:
            x = read_npz(place / name, ("features",))["features"]
        except DataError:  # missing or damaged
            continue
        if x.shape == (len(paths), WIDTH) and x.dtype == np.float32 and np.isfinite(x).all():
            return x
    with _temporary_folder(places) as partial:  # before computing, which takes minutes
        x = compute_features(folder, paths)
        try:
            np.savez(Path(partial, name), features=x)
            os.replace(Path(partial, name), Path(partial).parent / name)
        except OSError as error:
            raise DataError(f"{Path(partial).parent / name} cannot be written: {one_line(error)}") from error
    return x


def _key(folder: Path, paths: list[Path]) -> str:
    """Return a hash of everything that the features depend on, as 16 hexadecimal digits."""
    key = sha256()
    weights = folder / WEIGHTS
    try:
        if weights.is_file():
            with open(weights, "rb") as file:
                key.update(file_digest(file, "sha256").digest())
        else:
            key.update(_torchvision().models.ResNet18_Weights.IMAGENET1K_V1.url.encode())  # contains the weights' hash
        for path in paths:
            about = (folder / path).stat()
            key.update(b"\0%s\0%d\0%d" % (os.fsencode(path), about.st_size, about.st_mtime_ns))
    except OSError as error:
        raise DataError(f"{folder} cannot be read: {one_line(error)}") from error
    return key.hexdigest()[:16]


def _temporary_folder(places: tuple[Path, ...]) -> tempfile.TemporaryDirectory[str]:
    """Return a temporary folder for incomplete files, in the first of these places that can be written."""
    reasons = []
    for place in places:
        try:
            place.mkdir(parents=True, exist_ok=True)
            return tempfile.TemporaryDirectory(dir=place, prefix=".office-home-")
        except OSError as error:
            reasons.append(one_line(error))
    raise DataError(f"the features can be kept neither in {places[0]} nor in {places[1]}: {'; '.join(reasons)}")


def compute_features(folder: Path, paths: list[Path]) -> np.ndarray:
    """Return the features of the images: (n, 512), float32."""
    network = _network(folder)
    prepare = _torchvision().models.ResNet18_Weights.IMAGENET1K_V1.transforms()

    x = np.empty((len(paths), WIDTH), np.float32)
    with torch.inference_mode():
        for start in range(0, len(paths), _BATCH):
            some = slice(start, start + _BATCH)
            x[some] = network(torch.stack([prepare(read_image(folder / path)) for path in paths[some]])).numpy()
    if not np.isfinite(x).all():
        raise DataError(f"the weights of resnet18 for {folder} give features that are not finite")
    return x


def _network(folder: Path) -> torch.nn.Module:
    """Return ResNet-18 without its last layer: images (n, 3, 224, 224) to features (n, 512)."""
    models = _torchvision().models
    file = folder / WEIGHTS
    if file.is_file():
        try:
            safetensors_header(file)
            state = safetensors_torch.load_file(file)
        except Exception as error:
            raise DataError(f"{file} cannot be read as safetensors: {one_line(error)}") from error
    else:
        try:
            state = models.ResNet18_Weights.IMAGENET1K_V1.get_state_dict(
                progress=False, check_hash=True, weights_only=True
            )
        except Exception as error:  # no network, disk full, a damaged file
            raise DataError(
                f"office-home needs the weights of torchvision's resnet18: {file}, its state dict, is not there, and "
                f"the download failed: {one_line(error)}"
            ) from error
    with torch.random.fork_rng(devices=[]):  # later random draws must not depend on whether the features were kept
        network = models.resnet18()
    network.fc = torch.nn.Identity()
    try:
        network.load_state_dict({name: tensor for name, tensor in state.items() if not name.startswith("fc.")})
    except RuntimeError as error:
        raise DataError(f"{file} is no state dict of torchvision's resnet18: {one_line(error)}") from error
    return network.eval()


def _torchvision() -> ModuleType:
    try:
        return torchvision_import.import_torchvision()
    except ImportError as error:
        raise DataError(f"the features of office-home are computed by torchvision: {one_line(error)}") from error
