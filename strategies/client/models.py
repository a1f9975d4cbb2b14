"""The networks by name, and the choice of a client's network among several.

Each factory takes the shape of one sample's inputs and the number of outputs. It returns a module that maps inputs
(n, ...) to outputs (n, num_outputs). Most are networks of the papers, for images (channels, height, width). In the
networks written here pooling comes before ReLU: the function is the same, and ReLU processes a quarter of the values.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kindred.extensions import Registry
from kindred.lazy import lazy
from kindred.messages import ClientId, check, seed_for
from kindred.torchvision_import import import_torchvision

if TYPE_CHECKING:  # listing the models' names must not wait for PyTorch
    import torch
    from torch import nn

    from . import recurrent
else:
    torch, nn, recurrent = lazy("torch"), lazy("torch.nn"), lazy("kindred.client.recurrent")

Shape = tuple[int, ...]


def digits_cnn(shape: Shape, num_outputs: int) -> torch.nn.Module:
    """A small CNN of our own for the 8x8 digits of scikit-learn: 13,706 parameters for 10 classes.

    Two 3x3 convolutions (16, 32 channels), each with 2x2 max pooling and ReLU; FC 64 with ReLU; FC.
    """
    channels, height, width = _at_least(4, "digits-cnn", shape)
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
            fc2=nn.Linear(64, num_outputs),
        )
    )


def mcmahan_cnn(shape: Shape, num_outputs: int) -> torch.nn.Module:
    """The MNIST CNN of FedAvg: 1,663,370 parameters for 28x28 grey images.

    McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017,
    arXiv:1602.05629. Two 5x5 convolutions (32, 64 channels), each with 2x2 max pooling and ReLU; FC 512 with ReLU;
    FC. The paper leaves the padding open; its number of parameters implies that convolutions keep the images' size.
    """
    channels, height, width = _at_least(4, "mcmahan-cnn", shape)
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
            fc2=nn.Linear(512, num_outputs),
        )
    )


def cnn2(shape: Shape, num_outputs: int) -> torch.nn.Module:
    """The CNN2 that FedeRiCo uses on CIFAR-10: 319,242 parameters for 32x32 colour images and 10 classes.

    Shen et al., "Federated Mutual Learning", arXiv:2006.16765. Three 3x3 convolutions of 128 channels, each with 2x2
    max pooling and ReLU; FC. The convolutions keep the images' size.
    """
    channels, height, width = _at_least(8, "cnn2", shape)
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
            fc=nn.Linear(128 * (height // 8) * (width // 8), num_outputs),
        )
    )


def resnet18(shape: Shape, num_outputs: int) -> torch.nn.Module:
    """ResNet-18 for small images: 11,173,962 parameters for colour images and 10 classes.

    He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, arXiv:1512.03385. It is torchvision's network
    with two changes: the first convolution is 3x3 with stride 1 in place of 7x7 with stride 2, and there is no max
    pooling. 32x32 images therefore reach the last stage as 4x4. It has batch normalisation.
    """
    channels, _, _ = _at_least(8, "resnet18", shape)
    model = import_torchvision().models.resnet18(num_classes=num_outputs)
    model.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
    # As torchvision initialises its other convolutions.
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()
    return model


def ckt_cnn(shape: Shape, num_outputs: int) -> torch.nn.Module:
    """The small CNN of PerFed-CKT: 151,216 parameters for 32x32 colour images and 10 classes.

    Cho et al., "Personalized Federated Learning for Heterogeneous Clients with Clustered Knowledge Transfer",
    arXiv:2109.08119. The paper (appendix E) specifies two convolutions with max pooling; FC 120, 100, 84, 50; FC. It
    leaves the rest open. Our choice: the 5x5 kernels and the 6 and 16 channels of LeNet-5, padding that keeps the
    images' size, 2x2 pooling, and ReLU.
    """
    channels, height, width = _at_least(4, "ckt-cnn", shape)
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
            fc5=nn.Linear(50, num_outputs),
        )
    )


def office_mlp(shape: Shape, num_outputs: int) -> torch.nn.Module:
    """FedeRiCo's MLP for ResNet-18's features of Office-Home: 726,265 parameters for 512 features and 65 classes.

    Sui et al., "Find Your Friends: Personalized Federated Learning with the Right Collaborators", arXiv:2210.06597,
    appendix D. Two hidden layers, FC 1000 and FC 200, each with ReLU; FC. Larger images are flattened.
    """
    return nn.Sequential(
        OrderedDict(
            flatten=nn.Flatten(),
            fc1=nn.Linear(math.prod(shape), 1000),
            relu1=nn.ReLU(),
            fc2=nn.Linear(1000, 200),
            relu2=nn.ReLU(),
            fc3=nn.Linear(200, num_outputs),
        )
    )


def vgg11(shape: Shape, num_outputs: int) -> torch.nn.Module:
    """VGG11 for small images, as PerFed-CKT uses it: 9,756,426 parameters for colour images and 10 classes.

    Simonyan and Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition", ICLR 2015,
    arXiv:1409.1556. It has torchvision's layers of convolution, batch normalisation, ReLU and 2x2 max pooling, then
    twice dropout, FC 512 and ReLU; FC. PerFed-CKT does not say how it adapts torchvision's classifier to 32x32
    images, but its Table 1 implies the size. HypCluster with c = 2 and C = 0.1 costs 2340e7 floats in 200 rounds of 10
    uploads and 2 broadcasts. That is 9.75 million per model, which two layers of 512 give. The last stage reduces
    32x32 images to one pixel; larger images fit because the mean over the remaining pixels is taken.

    Weights are initialised as by PyTorch's layers, not as by torchvision's VGG: with its N(0, 0.01) for linear layers
    of this width SGD makes no progress. An example is training on 400 images of CIFAR-10, for 150 steps of 32 images
    with step sizes of 0.01 and 0.001. The loss is still log 10 = 2.30, against 1.02 and 2.21 with PyTorch's weights.
    """
    return _vgg("vgg11", "A", shape, num_outputs)


def vgg13(shape: Shape, num_outputs: int) -> torch.nn.Module:
    """VGG13, built like `vgg11`: 9,941,322 parameters for colour images and 10 classes."""
    return _vgg("vgg13", "B", shape, num_outputs)


def mlp(shape: Shape, num_outputs: int) -> torch.nn.Module:
    """A small MLP of our own for tables: 1,154 parameters for 15 features and 2 classes.

    FC 64 with ReLU; FC. Signals and images are flattened.
    """
    return nn.Sequential(
        OrderedDict(
            flatten=nn.Flatten(),
            fc1=nn.Linear(math.prod(shape), 64),
            relu1=nn.ReLU(),
            fc2=nn.Linear(64, num_outputs),
        )
    )


def cnn1d(shape: Shape, num_outputs: int) -> torch.nn.Module:
    """A small CNN of our own for signals: 4,375 parameters for 6 channels and 7 classes.

    Two convolutions over 5 times (16, 32 channels), each with max pooling of 2 times and ReLU; the mean over time; FC
    32 with ReLU; FC. The convolutions keep the signals' length, 4 times or more.
    """
    _check_signal(shape)
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv1d(shape[0], 16, 5, padding=2),
            pool1=nn.MaxPool1d(2),
            relu1=nn.ReLU(),
            conv2=nn.Conv1d(16, 32, 5, padding=2),
            pool2=nn.MaxPool1d(2),
            relu2=nn.ReLU(),
            mean=nn.AdaptiveAvgPool1d(1),
            flatten=nn.Flatten(),
            fc1=nn.Linear(32, 32),
            relu3=nn.ReLU(),
            fc2=nn.Linear(32, num_outputs),
        )
    )


def lstm(shape: Shape, num_outputs: int) -> torch.nn.Module:
    """A small LSTM for sequences of tokens: 26,244 parameters for 100 tokens and as many outputs.

    As in LEAF (Caldas et al., 2018, arXiv:1812.01097) for the next character of Shakespeare, with one layer of 64
    units instead of two of 256: an embedding of 8 numbers a token; LSTM 64; FC of its last output.
    """
    if len(shape) != 2:
        raise ValueError(f"model lstm takes tokens, (vocabulary, length), these inputs are {shape}")
    return nn.Sequential(
        OrderedDict(
            embedding=nn.Embedding(shape[0], 8),
            lstm=recurrent.LastOutput(8, 64),
            fc=nn.Linear(64, num_outputs),
        )
    )


MODELS: Registry[Callable[[Shape, int], torch.nn.Module]] = Registry(
    "kindred.models",
    Callable,  # type: ignore[arg-type]  # at run time it is a class
    {
        "digits-cnn": digits_cnn,
        "mcmahan-cnn": mcmahan_cnn,
        "cnn2": cnn2,
        "resnet18": resnet18,
        "ckt-cnn": ckt_cnn,
        "office-mlp": office_mlp,
        "vgg11": vgg11,
        "vgg13": vgg13,
        "mlp": mlp,
        "cnn1d": cnn1d,
        "lstm": lstm,
    },
)

FOR_KIND = {"table": "mlp", "signal": "cnn1d", "tokens": "lstm"}
"""The network that "auto" selects for all inputs of a kind; for images it depends on their size."""

_IMAGES, _NUMBERS = ("image",), ("image", "signal", "table")
KINDS = {
    **dict.fromkeys(("digits-cnn", "mcmahan-cnn", "cnn2", "resnet18", "ckt-cnn", "vgg11", "vgg13"), _IMAGES),
    **dict.fromkeys(("office-mlp", "mlp"), _NUMBERS),
    "cnn1d": ("signal",),
    "lstm": ("tokens",),
}
"""The kinds of inputs that our networks take."""


def parse_models(text: str) -> list[str]:
    """Return the names in a setting: one model for all clients, or several for `model_for_size` to choose from.

    Parameters
    ----------
    text : str
        "auto", or names of `MODELS` separated by commas, each once; blanks around names are ignored.

    Returns
    -------
    list of str
        The names in their order; `["auto"]` for "auto".

    Raises
    ------
    ValueError
        An unknown name, a name twice, or "auto" together with others.
    """
    names = [name.strip() for name in text.split(",")]
    if names == ["auto"]:
        return names
    for place, name in enumerate(names):
        if name not in MODELS or name in names[:place]:
            raise ValueError(
                f"model is {text!r}, where {name!r} is not valid; "
                f"allowed: auto alone, or any of {', '.join(MODELS)}, each once, separated by commas"
            )
    return names


def choose_model(kind: str, shape: Shape) -> str:
    """Return the name of the model that "auto" selects for inputs of this kind and shape.

    Parameters
    ----------
    kind : {"image", "signal", "table", "tokens"}
    shape : tuple of int
        As for `make_model`.

    Raises
    ------
    ValueError
        There is no model for this kind or size.
    """
    if kind == "signal":
        _check_signal(shape)
    if kind in FOR_KIND:
        return FOR_KIND[kind]
    if len(shape) != 3:
        raise ValueError(f"model auto is for images, (channels, height, width), these inputs are {shape}")
    channels, *size = shape
    if size == [8, 8]:
        return "digits-cnn"
    if size == [28, 28] and channels == 1:
        return "mcmahan-cnn"
    if size == [32, 32]:
        return "cnn2"
    if size == [1, 1]:
        return "office-mlp"
    raise ValueError(
        f"model auto is for 8x8, 28x28 grey and 32x32 images and features (1x1), these are {_described(shape)}; "
        f"choose one of {', '.join(MODELS)}"
    )


def model_for_size(names: Sequence[str], num_examples: int, typical: float, seed: int) -> str:
    """Draw a client's model: the more data a client has, the likelier a larger model.

    PerFed-CKT (section 5) gives a larger model with a probability "proportional to the client's dataset
    size" and no formula. Our formula for K models: the index in `names` is Binomial(K - 1, r) with
    r = n / (n + typical). For a fixed seed the index never decreases as n grows.

    Parameters
    ----------
    names : sequence of str
        One or more, from the smallest model to the largest.
    num_examples : int
        The client's number n of examples, 0 or more.
    typical : float
        Above 0: the n for which r is 1/2, for instance the mean or median over clients.
    seed : int
        0 or more. The same seed gives the same draw, so each client needs its own seed.

    Returns
    -------
    str
        One of `names`.

    Raises
    ------
    ValueError
        No names, or a number out of range.
    """
    check("names", names, len(names) >= 1, "one name or more")
    check("num_examples", num_examples, 0 <= num_examples < math.inf, "0 or more")
    check("typical", typical, 0 < typical < math.inf, "more than 0")
    check("seed", seed, seed >= 0, "0 or more")
    coins = np.random.default_rng(seed).random(len(names) - 1)  # independent of n: hence monotone in n
    return names[int((coins < num_examples / (num_examples + typical)).sum())]


def network_names(setting: str, kind: str, shape: Shape) -> list[str]:
    """Return the networks that a run's clients may have, from the setting `model` and the inputs' kind and shape.

    Raises
    ------
    ValueError
        As in `parse_models` and `choose_model`; or one of our networks takes inputs of another kind.
    """
    names = [choose_model(kind, shape) if name == "auto" else name for name in parse_models(setting)]
    for name in names:
        check_kind(name, kind)
    return names


def check_kind(name: str, kind: str) -> None:
    """Check that a network takes inputs of a kind; raise ValueError where it is known not to."""
    if kind not in (kinds := KINDS.get(name, (kind,))):
        others = ", ".join(each for each in MODELS if kind in KINDS.get(each, (kind,)))
        raise ValueError(f"model {name} takes inputs of kind {' or '.join(kinds)}, these are {kind}; allowed: {others}")


def client_network(
    setting: str, kind: str, shape: Shape, num_examples: int, typical: float, seed: int, client: ClientId
) -> str:
    """Return the name of a client's network: the only one of the run, or one drawn by the client's number of examples.

    Parameters
    ----------
    setting : str
        The run's `model`, see `parse_models`.
    kind : str
    shape : tuple of int
        Of the inputs; the two determine what "auto" selects.
    num_examples, typical
        As for `model_for_size`. A `typical` of 0 means unknown: the client's own number is then used.
    seed : int
        The run's.
    client : client id

    Raises
    ------
    ValueError
        As in `network_names` and `model_for_size`.
    """
    draw = seed_for(seed, client, "architecture")
    return model_for_size(network_names(setting, kind, shape), num_examples, typical or num_examples, draw)


def make_model(name: str, shape: Shape, num_outputs: int, seed: int | None = None) -> torch.nn.Module:
    """Build a network.

    Parameters
    ----------
    name : str
        One of `MODELS`, or "auto" for the one that fits images of this size (`choose_model`).
    shape : tuple of int
        Of the inputs: (channels, height, width) of images, (channels, time) of signals, (features,) of tables, and
        (vocabulary, length) of sequences of tokens.
    num_outputs : int
        1 or more.
    seed : int, optional
        Seed of the weights: the same seed gives the same bits and leaves PyTorch's random state unchanged. By default
        the weights are drawn from that state.

    Returns
    -------
    torch.nn.Module
        On the CPU, in training mode: inputs (n, ...) to outputs (n, num_outputs).

    Raises
    ------
    ValueError
        An unknown name, no outputs, or inputs of another kind or too small for the network.
    """
    if name == "auto":
        name = choose_model("image", shape)
    if name not in MODELS:
        raise ValueError(f"model is {name!r}, allowed: auto, {', '.join(MODELS)}")
    if num_outputs < 1:
        raise ValueError(f"num_outputs is {num_outputs}, allowed: 1 or more")
    if seed is None:
        return MODELS[name](shape, num_outputs)
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would seed the GPUs too.
        torch.default_generator.manual_seed(seed)
        return MODELS[name](shape, num_outputs)


def _vgg(name: str, configuration: str, shape: Shape, num_outputs: int) -> torch.nn.Module:
    channels, _, _ = _at_least(32, name, shape)
    # torchvision's VGG class would first build and initialise a classifier of 120 million parameters.
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
            fc3=nn.Linear(512, num_outputs),
        )
    )


def _at_least(side: int, name: str, shape: Shape) -> tuple[int, int, int]:
    if len(shape) != 3:
        raise ValueError(f"model {name} takes images, (channels, height, width), these inputs are {shape}")
    if min(shape[1:]) < side:
        raise ValueError(f"model {name} needs images of at least {side}x{side}, these are {_described(shape)}")
    channels, height, width = shape
    return channels, height, width


def _check_signal(shape: Shape) -> None:
    if len(shape) != 2 or shape[1] < 4:
        raise ValueError(f"model cnn1d takes signals, (channels, time), of 4 times or more, these inputs are {shape}")


def _described(shape: Shape) -> str:
    channels, height, width = shape
    return f"{height}x{width} with {channels} channel{'s' if channels > 1 else ''}"
