"""A site: a client's data and network. A process loads it once and keeps it on its device."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import Context

from kindred.lazy import lazy
from kindred.messages import VALIDATE_ONLY, ClientId, check
from kindred.objectives import Classes, Objective

from .models import MODELS, make_model

if TYPE_CHECKING:
    import torch
else:
    torch = lazy("torch")

# Sites whose data a process keeps; the least recently used ones are dropped first.
SITES_KEPT = 256
STATE_DIR = "state-dir"  # in the node config of a site
# In the node config of a site: the most work that a message may ask of it, and the defaults.
MOST_WORK = {"max-epochs": 1_000, "max-steps": 100_000, "max-batch-size": 10_000}
LABELLED = "labelled-samples"  # in that of a client that comes later: the number of training samples that it has

ModelFactory = Callable[[], "torch.nn.Module"]
Samples = tuple["torch.Tensor", "torch.Tensor"]


@dataclass(frozen=True)
class Site:
    """A client's data, and how to build its model.

    Attributes
    ----------
    model : callable
        Returns a new `torch.nn.Module`. Sites that share one factory object share one module per process.
    train, test : pair of tensors
        Inputs (n, ...) as the network takes them, and targets as the objective has them: classes (n,) of int64 by
        default.
    public : tensor, optional
        Unlabelled inputs (n, ...), the same at every client and in the same order.
    validation : pair of tensors, optional
        More labelled samples, on which the trained model is also evaluated.
    about : mapping of str to str
        Texts to save with the site's models. The entry "model" is the name of the network; it and a fingerprint of the
        entry "task" are reported to the server, which may require one value of all.
    objective : Objective
        What the network's outputs mean; by default a logit for each class.
    """

    model: ModelFactory
    train: Samples
    test: Samples
    public: torch.Tensor | None = None
    validation: Samples | None = None
    about: Mapping[str, str] = field(default_factory=dict)
    objective: Objective = field(default_factory=Classes)

    def __post_init__(self) -> None:
        is_factory = callable(self.model) and not isinstance(self.model, torch.nn.Module)
        check("model", type(self.model).__name__, is_factory, "a function that returns a new torch.nn.Module")
        shape = self._checked("train", self.train).shape[1:]
        for name, samples in (("test", self.test), ("validation", self.validation)):
            if samples is not None and (found := self._checked(name, samples).shape[1:]) != shape:
                raise ValueError(f"{name} has inputs of shape {tuple(found)}, allowed: {tuple(shape)}, as train has")

    def _checked(self, name: str, samples: Samples) -> torch.Tensor:
        """Return the inputs of one kind of samples; raise ValueError if they are no inputs with their targets."""
        is_pair = isinstance(samples, tuple | list) and len(samples) == 2
        kinds = [type(part).__name__ for part in samples] if is_pair else type(samples).__name__
        are_tensors = is_pair and all(isinstance(part, torch.Tensor) for part in samples)
        check(name, kinds, are_tensors, "a pair of tensors: inputs (n, ...) and targets (n, ...)")
        x, y = samples
        if not (x.ndim and y.ndim and len(x) == len(y)):
            shapes = f"inputs {tuple(x.shape)} and targets {tuple(y.shape)}"
            raise ValueError(f"{name} has {shapes}, allowed: as many of both")
        if self.objective.has_classes and y.dtype != torch.int64:
            raise ValueError(f"{name} has classes of {y.dtype}, allowed: torch.int64")
        return x

    def check_finite(self) -> None:
        """Raise ValueError if an input or a target is not finite; the message names the sample, not the value."""
        parts = {"train": self.train, "test": self.test, "validation": self.validation or ()}
        for name, samples in parts.items():
            for what, values in zip(("inputs", "targets"), samples, strict=False):
                if not (finite := values.isfinite()).all():
                    first = int((~finite).nonzero()[0, 0])
                    raise ValueError(f"{name} has {what} that are not finite: the first is in sample {first}")

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the public set: its shape, and a hash of its values in their order."""
        return fingerprint_of(self.public)


LoadSite = Callable[[Context], Site]


def client_id(context: Context) -> ClientId:
    """Return the client's id: node-config's `client-id`, else its partition, else its node id."""
    config = context.node_config
    name = config.get("client-id", config.get("partition-id"))
    return name if isinstance(name, int | str) and not isinstance(name, bool) else context.node_id


def true_or_false(node_config: Mapping[str, Any], key: str, default: bool) -> bool:
    """Return a site's setting from its node config.

    Raises
    ------
    ValueError
        The value is not true or false, written without quotes: a setting that protects the site is never guessed.
    """
    value = node_config.get(key, default)
    check(key, value, isinstance(value, bool), "true, false")
    return value


def only_validates(node_config: Mapping[str, Any]) -> bool:
    """Return whether a site only validates: `validate-only` of its node config, false by default."""
    return true_or_false(node_config, VALIDATE_ONLY, False)


# Sites of a simulation share one public set: it is hashed and copied only once.
@functools.lru_cache(maxsize=4)
def fingerprint_of(public: torch.Tensor) -> str:
    """Return the fingerprint of a public set, see `Site.fingerprint`."""
    shape = "x".join(map(str, public.shape))
    digest = hashlib.sha256(f"{public.dtype} {shape} ".encode())
    digest.update(np.ascontiguousarray(public.cpu().numpy()).data)
    return f"{shape}-{digest.hexdigest()[:16]}"


# The names below belong to the process: Flower copies a ClientApp to its workers, but no modules.

_sites: dict[Any, tuple[Site, torch.device]] = {}
_modules: dict[tuple[ModelFactory, torch.device], torch.nn.Module] = {}
_sites_of_run: list[tuple[int, dict[str, Any]]] = []  # the id and the config of the run whose sites these are, if any


def site_of(load_site: LoadSite, context: Context, device: torch.device) -> Site:
    """Return a client's site, with its data on a device.

    It is loaded at the first call and kept for the run. Messages may name different devices: the introduction precedes
    the settings of training.
    """
    run = context.run_id, dict(context.run_config)
    if _sites_of_run != [run]:  # another run: its sites may differ, the old ones are not needed
        _sites.clear()
        _sites_of_run[:] = [run]
        for made in [made for made in _modules if not _is_of_models(made[0])]:
            del _modules[made]
    key = (load_site, context.node_id, *sorted(context.node_config.items()))
    site, where = _sites.pop(key, (None, None))
    if site is None:
        site = load_site(context)
        if not isinstance(site, Site):  # it may hold data
            raise ValueError(f"what load_site returned is {site!r}, allowed: a Site")
        site.check_finite()
        while len(_sites) >= SITES_KEPT:
            del _sites[next(iter(_sites))]
    if where != device:
        site = _on(device, site)
    _sites[key] = site, device
    return site


def forget_sites() -> None:
    """Forget all data and networks that this process keeps."""
    _sites.clear()
    _sites_of_run.clear()
    _modules.clear()


def _on(device: torch.device, site: Site) -> Site:
    return replace(
        site,
        train=_to(device, site.train),
        test=_to(device, site.test),
        public=None if site.public is None else _public_on(device, site.public),
        validation=None if site.validation is None else _to(device, site.validation),
    )


def _to(device: torch.device, samples: Samples) -> Samples:
    x, y = samples
    return x.to(device), y.to(device)


@functools.lru_cache(maxsize=4)
def _public_on(device: torch.device, public: torch.Tensor) -> torch.Tensor:
    return public.to(device)


def module_of(factory: ModelFactory, device: torch.device) -> torch.nn.Module:
    """Return the one module that all sites with this factory share on a device."""
    module = _modules.pop((factory, device), None)
    if module is None:
        while len(_modules) >= len(MODELS):
            del _modules[next(iter(_modules))]
        module = factory().to(device)
    _modules[factory, device] = module
    return module


def _is_of_models(factory: ModelFactory) -> bool:
    """Return whether a factory makes a network of `MODELS`, which is the same in every run."""
    return isinstance(factory, functools.partial) and factory.func is make_model
