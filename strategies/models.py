"""The networks of the papers, by name.

Each factory takes the images' shape (channels, height, width) and the number of classes, and returns a
module that maps images (n, c, h, w) to logits (n, classes). Pooling comes before ReLU: the function is
the same and ReLU works on a quarter of the values.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # reading the names of the models must not wait for PyTorch
    import torch

ImageShape = tuple[int, int, int]


def digits_cnn(image_shape: ImageShape, num_classes: int) -> torch.nn.Module:
    """A small CNN of our own for the 8x8 digits of scikit-learn: 13,706 parameters for 10 classes.

    Two 3x3 convolutions (16, 32 channels), each with 2x2 max pooling and ReLU; FC 64 with ReLU; FC.
    """
    from torch import nn

    channels, height, width = _at_least(4, "digits-cnn", image_shape)
    return nn.Sequential(OrderedDict(
        conv1=nn.Conv2d(channels, 16, 3, padding=1), pool1=nn.MaxPool2d(2), relu1=nn.ReLU(),
        conv2=nn.Conv2d(16, 32, 3, padding=1), pool2=nn.MaxPool2d(2), relu2=nn.ReLU(),
        flatten=nn.Flatten(),
        fc1=nn.Linear(32 * (height // 4) * (width // 4), 64), relu3=nn.ReLU(),
        fc2=nn.Linear(64, num_classes),
    ))


def mcmahan_cnn(image_shape: ImageShape, num_classes: int) -> torch.nn.Module:
    """The MNIST CNN of McMahan et al., "Communication-Efficient Learning of Deep Networks from
    Decentralized Data", AISTATS 2017, arXiv:1602.05629: its 1,663,370 parameters for 28x28 grey images.

    Two 5x5 convolutions (32, 64 channels), each with 2x2 max pooling and ReLU; FC 512 with ReLU; FC.
    The paper's number of parameters fixes what it leaves open: convolutions keep the images' size.
    """
    from torch import nn

    channels, height, width = _at_least(4, "mcmahan-cnn", image_shape)
    return nn.Sequential(OrderedDict(
        conv1=nn.Conv2d(channels, 32, 5, padding=2), pool1=nn.MaxPool2d(2), relu1=nn.ReLU(),
        conv2=nn.Conv2d(32, 64, 5, padding=2), pool2=nn.MaxPool2d(2), relu2=nn.ReLU(),
        flatten=nn.Flatten(),
        fc1=nn.Linear(64 * (height // 4) * (width // 4), 512), relu3=nn.ReLU(),
        fc2=nn.Linear(512, num_classes),
    ))


def cnn2(image_shape: ImageShape, num_classes: int) -> torch.nn.Module:
    """The CNN2 of Shen et al., "Federated Mutual Learning", arXiv:2006.16765, as FedeRiCo uses it on
    CIFAR-10: 319,242 parameters for 32x32 colour images and 10 classes.

    Three 3x3 convolutions of 128 channels, each with 2x2 max pooling and ReLU; FC. The convolutions keep
    the images' size.
    """
    from torch import nn

    channels, height, width = _at_least(8, "cnn2", image_shape)
    return nn.Sequential(OrderedDict(
        conv1=nn.Conv2d(channels, 128, 3, padding=1), pool1=nn.MaxPool2d(2), relu1=nn.ReLU(),
        conv2=nn.Conv2d(128, 128, 3, padding=1), pool2=nn.MaxPool2d(2), relu2=nn.ReLU(),
        conv3=nn.Conv2d(128, 128, 3, padding=1), pool3=nn.MaxPool2d(2), relu3=nn.ReLU(),
        flatten=nn.Flatten(),
        fc=nn.Linear(128 * (height // 8) * (width // 8), num_classes),
    ))


def resnet18(image_shape: ImageShape, num_classes: int) -> torch.nn.Module:
    """ResNet-18 of He et al., "Deep Residual Learning for Image Recognition", CVPR 2016,
    arXiv:1512.03385, for small images: 11,173,962 parameters for colour images and 10 classes.

    torchvision's, with a 3x3 convolution of stride 1 in place of the 7x7 one of stride 2, and without
    max pooling, so that 32x32 images reach the last stage as 4x4. It has batch normalisation.
    """
    from torch import nn

    from .compat import import_torchvision

    channels, _, _ = _at_least(8, "resnet18", image_shape)
    model = import_torchvision().models.resnet18(num_classes=num_classes)
    model.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")  # as torchvision's others
    model.maxpool = nn.Identity()
    return model


MODELS: dict[str, Callable[[ImageShape, int], torch.nn.Module]] = {
    "digits-cnn": digits_cnn,
    "mcmahan-cnn": mcmahan_cnn,
    "cnn2": cnn2,
    "resnet18": resnet18,
}


def choose_model(image_shape: ImageShape) -> str:
    """The name of the model that "auto" stands for, by the size of the images.

    Raises
    ------
    ValueError
        There is none for this size.
    """
    channels, *size = image_shape
    if size == [8, 8]:
        return "digits-cnn"
    if size == [28, 28] and channels == 1:
        return "mcmahan-cnn"
    if size == [32, 32]:
        return "cnn2"
    raise ValueError(
        f"model auto knows 8x8, 28x28 grey and 32x32 images, these are {_described(image_shape)}; "
        f"choose one of {', '.join(MODELS)}"
    )


def make_model(name: str, image_shape: ImageShape, num_classes: int, seed: int) -> torch.nn.Module:
    """Build a network with weights drawn from a seed; the global random state stays as it is.

    Parameters
    ----------
    name : str
        One of `MODELS`, or "auto" for the one that goes with the images' size (`choose_model`).
    image_shape : tuple of int
        Channels, height, width.
    num_classes : int
        2 or more.
    seed : int
        The same seed gives the same bits.

    Returns
    -------
    torch.nn.Module
        On the CPU, in training mode: images (n, c, h, w) to logits (n, num_classes).

    Raises
    ------
    ValueError
        An unknown name, fewer than two classes, or images that are too small for the network.
    """
    import torch

    if name == "auto":
        name = choose_model(image_shape)
    if name not in MODELS:
        raise ValueError(f"model is {name!r}, allowed: auto, {', '.join(MODELS)}")
    if num_classes < 2:
        raise ValueError(f"num_classes is {num_classes}, allowed: 2 or more")
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed, which seeds the GPUs too.
        torch.random.default_generator.manual_seed(seed)
        return MODELS[name](image_shape, num_classes)


def _at_least(side: int, name: str, image_shape: ImageShape) -> ImageShape:
    if min(image_shape[1:]) < side:
        raise ValueError(f"model {name} needs images of at least {side}x{side}, these are {_described(image_shape)}")
    return image_shape


def _described(image_shape: ImageShape) -> str:
    channels, height, width = image_shape
    return f"{height}x{width} with {channels} channel{'s' if channels > 1 else ''}"
