"""The networks of the papers, by name, and which of several a client gets.

Each factory takes the images' shape (channels, height, width) and the number of classes, and returns a
module that maps images (n, c, h, w) to logits (n, classes). In those written here pooling comes before
ReLU: the function is the same and ReLU works on a quarter of the values.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kindred.extensions import Registry
from kindred.lazy import lazy
from kindred.messages import check
from kindred.torchvision_import import import_torchvision

if TYPE_CHECKING:  # reading the names of the models must not wait for PyTorch
    import torch
    from torch import nn
else:
    torch, nn = lazy("torch"), lazy("torch.nn")

ImageShape = tuple[int, int, int]


def digits_cnn(image_shape: ImageShape, num_classes: int) -> torch.nn.Module:
    """A small CNN of our own for the 8x8 digits of scikit-learn: 13,706 parameters for 10 classes.

    Two 3x3 convolutions (16, 32 channels), each with 2x2 max pooling and ReLU; FC 64 with ReLU; FC.
    """
    channels, height, width = _at_least(4, "digits-cnn", image_shape)
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, 16, 3, padding=1),
            pool1=nn.MaxPool2d(2),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(16, 32, 3, padding=1),
            pool2=nn.MaxPool2d(2),
            relu2=nn.ReLU(),
            flatten=nn.Flatten(),
            fc1=nn.Linear(32 * (height // 4) * (width // 4), 64),
            relu3=nn.ReLU(),
            fc2=nn.Linear(64, num_classes),
        )
    )


def mcmahan_cnn(image_shape: ImageShape, num_classes: int) -> torch.nn.Module:
    """The MNIST CNN of FedAvg: 1,663,370 parameters for 28x28 grey images.

    McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017,
    arXiv:1602.05629. Two 5x5 convolutions (32, 64 channels), each with 2x2 max pooling and ReLU; FC 512 with ReLU;
    FC. The paper's number of parameters fixes what it leaves open: convolutions keep the images' size.
    """
    channels, height, width = _at_least(4, "mcmahan-cnn", image_shape)
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, 32, 5, padding=2),
            pool1=nn.MaxPool2d(2),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(32, 64, 5, padding=2),
            pool2=nn.MaxPool2d(2),
            relu2=nn.ReLU(),
            flatten=nn.Flatten(),
            fc1=nn.Linear(64 * (height // 4) * (width // 4), 512),
            relu3=nn.ReLU(),
            fc2=nn.Linear(512, num_classes),
        )
    )


def cnn2(image_shape: ImageShape, num_classes: int) -> torch.nn.Module:
    """The CNN2 that FedeRiCo uses on CIFAR-10: 319,242 parameters for 32x32 colour images and 10 classes.

    Shen et al., "Federated Mutual Learning", arXiv:2006.16765. Three 3x3 convolutions of 128 channels, each with 2x2
    max pooling and ReLU; FC. The convolutions keep the images' size.
    """
    channels, height, width = _at_least(8, "cnn2", image_shape)
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, 128, 3, padding=1),
            pool1=nn.MaxPool2d(2),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(128, 128, 3, padding=1),
            pool2=nn.MaxPool2d(2),
            relu2=nn.ReLU(),
            conv3=nn.Conv2d(128, 128, 3, padding=1),
            pool3=nn.MaxPool2d(2),
            relu3=nn.ReLU(),
            flatten=nn.Flatten(),
            fc=nn.Linear(128 * (height // 8) * (width // 8), num_classes),
        )
    )


def resnet18(image_shape: ImageShape, num_classes: int) -> torch.nn.Module:
    """ResNet-18 for small images: 11,173,962 parameters for colour images and 10 classes.

    He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, arXiv:1512.03385. It is torchvision's, with
    a 3x3 convolution of stride 1 in place of the 7x7 one of stride 2, and without max pooling, so that 32x32 images
    reach the last stage as 4x4. It has batch normalisation.
    """
    channels, _, _ = _at_least(8, "resnet18", image_shape)
    model = import_torchvision().models.resnet18(num_classes=num_classes)
    model.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")  # as torchvision's others
    model.maxpool = nn.Identity()
    return model


def ckt_cnn(image_shape: ImageShape, num_classes: int) -> torch.nn.Module:
    """The small CNN of PerFed-CKT: 151,216 parameters for 32x32 colour images and 10 classes.

    Cho et al., "Personalized Federated Learning for Heterogeneous Clients with Clustered Knowledge Transfer",
    arXiv:2109.08119. The paper's (appendix E): two convolutions with max pooling; FC 120, 100, 84, 50; FC. Our
    choice, where it says no more: the 5x5 kernels and the 6 and 16 channels of LeNet-5, padding that keeps the
    images' size, 2x2 pooling, and ReLU.
    """
    channels, height, width = _at_least(4, "ckt-cnn", image_shape)
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, 6, 5, padding=2),
            pool1=nn.MaxPool2d(2),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(6, 16, 5, padding=2),
            pool2=nn.MaxPool2d(2),
            relu2=nn.ReLU(),
            flatten=nn.Flatten(),
            fc1=nn.Linear(16 * (height // 4) * (width // 4), 120),
            relu3=nn.ReLU(),
            fc2=nn.Linear(120, 100),
            relu4=nn.ReLU(),
            fc3=nn.Linear(100, 84),
            relu5=nn.ReLU(),
            fc4=nn.Linear(84, 50),
            relu6=nn.ReLU(),
            fc5=nn.Linear(50, num_classes),
        )
    )


def office_mlp(image_shape: ImageShape, num_classes: int) -> torch.nn.Module:
    """FedeRiCo's MLP for ResNet-18's features of Office-Home: 726,265 parameters for 512 features and 65 classes.

    Sui et al., "Find Your Friends: Personalized Federated Learning with the Right Collaborators", arXiv:2210.06597,
    appendix D. Two hidden layers, FC 1000 and FC 200, each with ReLU; FC. Larger images are flattened.
    """
    return nn.Sequential(
        OrderedDict(
            flatten=nn.Flatten(),
            fc1=nn.Linear(math.prod(image_shape), 1000),
            relu1=nn.ReLU(),
            fc2=nn.Linear(1000, 200),
            relu2=nn.ReLU(),
            fc3=nn.Linear(200, num_classes),
        )
    )


def vgg11(image_shape: ImageShape, num_classes: int) -> torch.nn.Module:
    """VGG11 for small images, as PerFed-CKT uses it: 9,756,426 parameters for colour images and 10 classes.

    Simonyan and Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition", ICLR 2015,
    arXiv:1409.1556. It has torchvision's layers of convolution, batch normalisation, ReLU and 2x2 max pooling, then
    for each of two times dropout, FC 512 and ReLU; FC. PerFed-CKT does not say how it fits torchvision's classifier
    to 32x32 images, but its Table 1 fixes the size: HypCluster with c = 2 and C = 0.1 costs 2340e7 floats in 200
    rounds of 10 uploads and 2 broadcasts, 9.75 million a model, as with two layers of 512. The last stage leaves one
    pixel of 32x32 images; the mean over its pixels makes larger ones fit.

    Weights are drawn as PyTorch's layers draw theirs, not as torchvision's VGG does: with its N(0, 0.01)
    for linear layers of this width SGD does not get started. After 150 steps of 32 out of 400 images of
    CIFAR-10 the loss is still log 10 = 2.30 with step sizes of 0.01 and 0.001, against 1.02 and 2.21.
    """
    return _vgg("vgg11", "A", image_shape, num_classes)


def vgg13(image_shape: ImageShape, num_classes: int) -> torch.nn.Module:
    """VGG13, otherwise as `vgg11`: 9,941,322 parameters for colour images and 10 classes."""
    return _vgg("vgg13", "B", image_shape, num_classes)


MODELS: Registry[Callable[[ImageShape, int], torch.nn.Module]] = Registry(
    "kindred.models",
    Callable,  # type: ignore[arg-type]  # a class when the program runs
    {
        "digits-cnn": digits_cnn,
        "mcmahan-cnn": mcmahan_cnn,
        "cnn2": cnn2,
        "resnet18": resnet18,
        "ckt-cnn": ckt_cnn,
        "office-mlp": office_mlp,
        "vgg11": vgg11,
        "vgg13": vgg13,
    },
)


def parse_models(text: str) -> list[str]:
    """The names in a setting: one model for all clients, or several for `model_for_size` to choose from.

    Parameters
    ----------
    text : str
        "auto", or names of `MODELS` separated by commas, each once; blanks around them do no harm.

    Returns
    -------
    list of str
        In the order written; `["auto"]` for "auto".

    Raises
    ------
    ValueError
        Another name, a name twice, or "auto" beside others.
    """
    names = [name.strip() for name in text.split(",")]
    if names == ["auto"]:
        return names
    for place, name in enumerate(names):
        if name not in MODELS or name in names[:place]:
            raise ValueError(
                f"model is {text!r}, where {name!r} cannot stand; "
                f"allowed: auto alone, or any of {', '.join(MODELS)}, each once, separated by commas"
            )
    return names


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
    if size == [1, 1]:
        return "office-mlp"
    raise ValueError(
        f"model auto knows 8x8, 28x28 grey and 32x32 images and features (1x1), these are {_described(image_shape)}; "
        f"choose one of {', '.join(MODELS)}"
    )


def model_for_size(names: Sequence[str], num_examples: int, typical: float, seed: int) -> str:
    """Draw a client's model: the more data it has, the likelier a larger one.

    PerFed-CKT (section 5) gives a larger model with a probability "proportional to the client's dataset
    size" and no formula. Ours, for K models: the place in `names` is Binomial(K - 1, r) with
    r = n / (n + typical). One seed's draw never falls as n grows.

    Parameters
    ----------
    names : sequence of str
        One or more, from the smallest model to the largest.
    num_examples : int
        The client's number n of examples, 0 or more.
    typical : float
        Above 0: the n for which r is 1/2, the mean or median over clients for instance.
    seed : int
        0 or more. The same seed gives the same draw; clients need seeds of their own.

    Returns
    -------
    str
        One of `names`.

    Raises
    ------
    ValueError
        No names, or a number outside what is allowed.
    """
    check("names", names, len(names) >= 1, "one name or more")
    check("num_examples", num_examples, 0 <= num_examples < math.inf, "0 or more")
    check("typical", typical, 0 < typical < math.inf, "more than 0")
    check("seed", seed, seed >= 0, "0 or more")
    coins = np.random.default_rng(seed).random(len(names) - 1)  # the same whatever n is: hence monotone in n
    return names[int((coins < num_examples / (num_examples + typical)).sum())]


def network_names(setting: str, image_shape: ImageShape) -> list[str]:
    """Return the networks that a run's clients may have, from the setting `model` and the images' shape."""
    return [choose_model(image_shape) if name == "auto" else name for name in parse_models(setting)]


def client_network(setting: str, image_shape: ImageShape, num_examples: int, typical: float, seed: int) -> str:
    """Return the name of a client's network: the only one of the run, or one drawn by the client's number of examples.

    Parameters
    ----------
    setting : str
        The run's `model`, see `parse_models`.
    image_shape : tuple of int
        Channels, height, width; decides what "auto" stands for.
    num_examples, typical, seed
        As for `model_for_size`. A typical number of 0 is not known: the client's own stands for it.

    Raises
    ------
    ValueError
        As in `parse_models`, `choose_model` and `model_for_size`.
    """
    return model_for_size(network_names(setting, image_shape), num_examples, typical or num_examples, seed)


def make_model(name: str, image_shape: ImageShape, num_classes: int, seed: int | None = None) -> torch.nn.Module:
    """Build a network.

    Parameters
    ----------
    name : str
        One of `MODELS`, or "auto" for the one that goes with the images' size (`choose_model`).
    image_shape : tuple of int
        Channels, height, width.
    num_classes : int
        2 or more.
    seed : int, optional
        Of the weights: the same seed gives the same bits, and PyTorch's random state stays as it is. By default
        they are drawn from that state.

    Returns
    -------
    torch.nn.Module
        On the CPU, in training mode: images (n, c, h, w) to logits (n, num_classes).

    Raises
    ------
    ValueError
        An unknown name, fewer than two classes, or images that are too small for the network.
    """
    if name == "auto":
        name = choose_model(image_shape)
    if name not in MODELS:
        raise ValueError(f"model is {name!r}, allowed: auto, {', '.join(MODELS)}")
    if num_classes < 2:
        raise ValueError(f"num_classes is {num_classes}, allowed: 2 or more")
    if seed is None:
        return MODELS[name](image_shape, num_classes)
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed, which seeds the GPUs too.
        torch.default_generator.manual_seed(seed)
        return MODELS[name](image_shape, num_classes)


def _vgg(name: str, configuration: str, image_shape: ImageShape, num_classes: int) -> torch.nn.Module:
    channels, _, _ = _at_least(32, name, image_shape)
    # Not torchvision's VGG class, which would first make and fill a classifier of 120 million parameters.
    vgg = import_torchvision().models.vgg
    features = vgg.make_layers(vgg.cfgs[configuration], batch_norm=True)
    features[0] = nn.Conv2d(channels, 64, 3, padding=1)
    return nn.Sequential(
        OrderedDict(
            features=features,
            mean=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            dropout1=nn.Dropout(),
            fc1=nn.Linear(512, 512),
            relu1=nn.ReLU(),
            dropout2=nn.Dropout(),
            fc2=nn.Linear(512, 512),
            relu2=nn.ReLU(),
            fc3=nn.Linear(512, num_classes),
        )
    )


def _at_least(side: int, name: str, image_shape: ImageShape) -> ImageShape:
    if min(image_shape[1:]) < side:
        raise ValueError(f"model {name} needs images of at least {side}x{side}, these are {_described(image_shape)}")
    return image_shape


def _described(image_shape: ImageShape) -> str:
    channels, height, width = image_shape
    return f"{height}x{width} with {channels} channel{'s' if channels > 1 else ''}"
