"""The client's side: a complete ClientApp for every method, from a function that loads a site."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from logging import ERROR
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore import log

from kindred.lazy import lazy
from kindred.messages import (
    ARRAYS,
    ATTEMPT,
    CLIENT_ID,
    CONFIG,
    FINETUNE_EPOCHS,
    IDENTITY_QUERY,
    KEEP_FROM,
    LABEL_SMOOTHING,
    METHOD,
    METHODS,
    METRICS,
    NETWORK,
    NUM_CLASSES,
    NUM_EXAMPLES,
    NUM_PUBLIC,
    NUM_TEST_EXAMPLES,
    PROBLEM,
    PROXIMAL_MU,
    PUBLIC_SET,
    RECEIVED,
    REFUSAL_QUERY,
    REPORT_WEIGHTS,
    RUN,
    SAMPLES_PREDICTED,
    SAMPLES_TRAINED,
    SERVER_ROUND,
    SHARE_MODEL,
    TRAIN_LOSS,
    TRAINED,
    TUNED,
    VERSION_KEY,
    ClientId,
    check,
    first_line,
    read_record,
    records_of,
    seed_for,
    to_record,
)
from kindred.registry import REGISTRY
from kindred.settings import (
    BATCH_SIZE,
    DEVICE,
    LEARNING_RATE,
    LOCAL_EPOCHS,
    LOCAL_STEPS,
    MOMENTUM,
    OPTIMIZER,
    PRECISION,
)
from kindred.versions import VERSION, mismatch

from .models import MODELS
from .state import BEST, MODEL, ClientState
from .training import (
    Gradients,
    batches,
    check_finite,
    differentiating,
    evaluate,
    get_arrays,
    mean_gradient,
    pick_device,
    predict,
    set_arrays,
    train,
)

if TYPE_CHECKING:
    import torch
else:
    torch = lazy("torch")

# Sites whose data a process keeps at hand; those used least recently go first.
SITES_KEPT = 256
STATE_DIR = "state-dir"  # in the node config of a site

ModelFactory = Callable[[], "torch.nn.Module"]
Samples = tuple["torch.Tensor", "torch.Tensor"]


@dataclass(frozen=True)
class Site:
    """What a client brings: its data, and how to build its model.

    Attributes
    ----------
    model : callable
        Returns a new `torch.nn.Module`. Sites that share one factory object share one module per process.
    train, test : pair of tensors
        Images (n, ...) of float32 and labels (n,) of int64.
    public : tensor, optional
        Unlabelled images (n, ...), the same at every client and in the same order.
    validation : pair of tensors, optional
        More labelled samples, on which the trained model is evaluated besides.
    about : mapping of str to str
        What is written beside the models that the site keeps; under "model", which network they are. The server is
        told that.
    """

    model: ModelFactory
    train: Samples
    test: Samples
    public: torch.Tensor | None = None
    validation: Samples | None = None
    about: Mapping[str, str] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """What tells the public set from another, or from the same in another order: its shape and a hash."""
        return fingerprint_of(self.public)


# Sites of a simulation share one public set: it is gone through, and copied, once.
@functools.lru_cache(maxsize=4)
def fingerprint_of(public: torch.Tensor) -> str:
    """The fingerprint of a public set, see `Site.fingerprint`."""
    shape = "x".join(map(str, public.shape))
    digest = hashlib.sha256(f"{public.dtype} {shape} ".encode())
    digest.update(np.ascontiguousarray(public.cpu().numpy()))
    return f"{shape}-{digest.hexdigest()[:16]}"


@functools.lru_cache(maxsize=4)
def _public_on(device: torch.device, public: torch.Tensor) -> torch.Tensor:
    return public.to(device)


LoadSite = Callable[[Context], Site]


@dataclass(frozen=True)
class Visit:
    """A message at a client: all that a method's client half works with.

    Attributes
    ----------
    client : int or str
    site : Site
        With its data on `device`.
    config : mapping
        The settings in the message.
    arrays : dict of str to ndarray
        The arrays in the message, such as a model; views, not to be written to.
    device : torch.device
    state : ClientState
        What the client keeps between messages.
    node_config : mapping
        What the site has set.
    compute : dict
        The samples that the method has worked on so far, each as often as it was: `samples-trained` forward and
        backward, `samples-predicted` forward alone. Evaluations on test and validation data do not count.
    """

    client: ClientId
    site: Site
    config: Mapping[str, Any]
    arrays: dict[str, np.ndarray]
    device: torch.device
    state: ClientState
    node_config: Mapping[str, Any]
    compute: dict[str, int] = field(default_factory=lambda: {SAMPLES_TRAINED: 0, SAMPLES_PREDICTED: 0})

    @property
    def strategy(self) -> type[Any] | None:
        """The server half of the method; None of one that is not registered, such as Flower's own."""
        method = REGISTRY.get(str(self.config.get(METHOD)))
        return method.strategy if method else None

    @property
    def module(self) -> torch.nn.Module:
        """The site's module, holding what it was last given; there is but one."""
        return _module(self.site.model, self.device)

    def model(self, arrays: Mapping[str, np.ndarray] | None = None) -> torch.nn.Module:
        """The site's module, holding these arrays, by default those in the message."""
        model = self.module
        set_arrays(model, self.arrays if arrays is None else arrays)
        return model

    def own_model(self) -> torch.nn.Module:
        """The site's module, holding the model that the client kept; the first time, a new one."""
        kept = self.state.load(MODEL)
        if kept is None:
            with self._seeded(seed_for(self.config.get("seed", 0), self.client, MODEL)):
                return self.site.model().to(self.device)
        return self.model(kept)

    @property
    def is_site(self) -> bool:
        """Whether the client is a site of its own, which keeps what it gets out of the run (node config: state-dir)."""
        return STATE_DIR in self.node_config

    def keep(self, model: torch.nn.Module, accuracy: float) -> None:
        """Keep a model as the client's own; at a site the best one so far as well.

        Raises
        ------
        ValueError
            It is no longer finite.
        """
        check_finite(model)
        arrays, about = get_arrays(model), {**self.site.about, "accuracy": repr(accuracy)}
        self.state.save(MODEL, arrays, about)
        if self.is_site and not accuracy < float(self.state.about(BEST).get("accuracy", "-inf")):
            self.state.save(BEST, arrays, about)

    def seed(self, purpose: str) -> int:
        """A seed that depends on the run's seed, client, round and purpose alone."""
        return seed_for(self.config.get("seed", 0), self.client, self.config.get(SERVER_ROUND, 0), purpose)

    def samples_at(self, places: np.ndarray) -> Samples:
        """Some of the training data, by their places (k,)."""
        x, y = self.site.train
        at = torch.from_numpy(places).to(self.device)
        return x[at], y[at]

    @property
    def epochs(self) -> int:
        """Epochs of local training that the message asks for; 0 where it asks for steps."""
        return int(LOCAL_EPOCHS.read(self.config))

    @property
    def steps(self) -> int:
        """Steps of local training that the message asks for; 0 where it asks for epochs."""
        return 0 if self.epochs else int(LOCAL_STEPS.read(self.config))

    @property
    def batch_size(self) -> int:
        return int(BATCH_SIZE.read(self.config))

    @contextlib.contextmanager
    def _seeded(self, seed: int) -> Iterator[None]:
        """Have what PyTorch draws by itself, as for dropout or new weights, depend on a seed; then as before."""
        on_gpu = self.device.type == "cuda"
        with torch.random.fork_rng(devices=[self.device] if on_gpu else []):
            torch.random.default_generator.manual_seed(seed)  # torch.manual_seed asks for GPUs at every call
            if on_gpu:
                torch.cuda.manual_seed(seed)
            yield

    def train(
        self,
        model: torch.nn.Module,
        *,
        epochs: int | None = None,
        steps: int = 0,
        samples: Samples | None = None,
        purpose: str = "train",
        **settings: Any,
    ) -> float:
        """Train with the settings in the message, on the training data; the mean loss.

        Parameters
        ----------
        epochs, steps : int
            By default those that the message asks for.
        samples : pair of tensors, optional
            By default all training data.
        purpose : str
            Part of the seed: what is drawn for one purpose is the same with every method.
        **settings
            Of `training.train`, in place of the message's.
        """
        if epochs is None:
            epochs, steps = self.epochs, self.steps
        x, y = self.site.train if samples is None else samples
        config, seed = self.config, self.seed(purpose)
        self.compute[SAMPLES_TRAINED] += epochs * len(y) + steps * self.batch_size
        message = {
            "batch_size": self.batch_size,
            "optimizer": str(OPTIMIZER.read(config)),
            "learning_rate": float(LEARNING_RATE.read(config)),
            "momentum": float(MOMENTUM.read(config)),
            "precision": self.precision,
        }
        with self._seeded(seed):
            return train(
                model,
                x,
                y,
                epochs=epochs,
                steps=steps,
                generator=torch.Generator().manual_seed(seed),
                **(message | settings),
            )

    @property
    def precision(self) -> str:
        return str(PRECISION.read(self.config))

    @contextlib.contextmanager
    def differentiating(self, model: torch.nn.Module, purpose: str = "train") -> Iterator[Gradients]:
        """For a method's own steps: see `training.differentiating`. They are to be on `batches`."""
        with (
            self._seeded(self.seed(purpose)),
            differentiating(model, self.site.train[0], self.batch_size, self.precision) as gradients_of,
        ):
            yield gradients_of

    def batches(self, purpose: str = "train", samples: Samples | None = None) -> Iterator[tuple[torch.Tensor, ...]]:
        """The batches that `train` would draw for a purpose, for steps of a method's own."""
        samples = self.site.train if samples is None else samples
        generator = torch.Generator().manual_seed(self.seed(purpose))
        for batch in batches(samples, self.epochs, self.steps, self.batch_size, generator):
            self.compute[SAMPLES_TRAINED] += len(batch[0])
            yield batch

    def gradient(self, model: torch.nn.Module) -> dict[str, np.ndarray]:
        """The gradient of the mean loss over the training data. See `training.mean_gradient`."""
        self.compute[SAMPLES_TRAINED] += len(self.site.train[1])
        with self._seeded(self.seed("gradient")):
            return mean_gradient(model, *self.site.train)

    def loss(self, model: torch.nn.Module, samples: Samples | None = None) -> float:
        """The mean loss of a model, over the training data unless others are given."""
        samples = self.site.train if samples is None else samples
        self.compute[SAMPLES_PREDICTED] += len(samples[1])
        return evaluate(model, *samples)[1]

    def predict(self, model: torch.nn.Module, x: torch.Tensor) -> np.ndarray:
        """The class probabilities that a model gives, (n, classes). See `training.predict`."""
        self.compute[SAMPLES_PREDICTED] += len(x)
        return predict(model, x)

    def tune(self, model: torch.nn.Module) -> None:
        """Fine-tune a model for this site by the epochs that the message asks for; no proximal term."""
        self.train(model, epochs=int(self.config[FINETUNE_EPOCHS]), purpose="tune")

    def evaluation(self, which: str, model: torch.nn.Module) -> dict[str, float]:
        """Accuracy and loss of a model on the site's test data, as metrics; of a trained one, validation data too.

        If it is the method's result for the client it is kept, at a site, or where no server sees it.
        """
        accuracy, loss = evaluate(model, *self.site.test)
        metrics = {f"{which}-accuracy": accuracy, f"{which}-loss": loss}
        if which == TRAINED and self.site.validation is not None:
            metrics["validation-accuracy"], metrics["validation-loss"] = evaluate(model, *self.site.validation)
        strategy = self.strategy
        if which == (strategy.personal if strategy else TRAINED) and (
            self.is_site or (strategy and strategy.model_stays)
        ):
            self.keep(model, accuracy)
        return metrics

    def counts(self) -> dict[str, int]:
        """How many samples the client trains on and tests on, as metrics."""
        return {NUM_EXAMPLES: len(self.site.train[1]), NUM_TEST_EXAMPLES: len(self.site.test[1])}

    def separate_evaluation(self, model: torch.nn.Module) -> dict[str, float]:
        """The metrics of a reply to EVALUATE."""
        accuracy, loss = evaluate(model, *self.site.test)
        return {"accuracy": accuracy, "loss": loss, NUM_EXAMPLES: len(self.site.test[1])}


class LocalTraining:
    """The client half of the methods whose clients train the model they receive.

    These are FedAMP and HeurFedAMP (Eq. 6), Local, FedAvg, FedProx and the fine-tuned forms. The weight
    of the proximal term, the smoothing of labels and the epochs of fine-tuning are in the message.
    """

    @staticmethod
    def train(visit: Visit) -> RecordDict:
        """Train from the received model; the reply holds the trained one and the evaluations of both."""
        arrays, metrics = LocalTraining.trained(visit)
        return RecordDict({ARRAYS: to_record(arrays), METRICS: MetricRecord(metrics)})

    @staticmethod
    def trained(visit: Visit) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        """What is in the reply of `train`, for a method that does more with it."""
        model = visit.model()
        metrics = visit.evaluation(RECEIVED, model)
        if FINETUNE_EPOCHS in visit.config:
            visit.tune(model)
            metrics |= visit.evaluation(TUNED, model)
            set_arrays(model, visit.arrays)
        metrics[TRAIN_LOSS] = visit.train(
            model,
            proximal_mu=float(visit.config.get(PROXIMAL_MU, 0.0)),
            label_smoothing=float(visit.config.get(LABEL_SMOOTHING, 0.0)),
        )
        return get_arrays(model), metrics | visit.evaluation(TRAINED, model) | visit.counts()

    @staticmethod
    def evaluate(visit: Visit) -> RecordDict:
        """Evaluate the received model, or what fine-tuning makes of it, which is then in the reply."""
        model = visit.model()
        content = RecordDict()
        if FINETUNE_EPOCHS in visit.config:
            visit.tune(model)
            content[ARRAYS] = to_record(get_arrays(model))
        metrics = visit.separate_evaluation(model)
        if visit.is_site:
            visit.keep(model, metrics["accuracy"])
        content[METRICS] = MetricRecord(metrics)
        return content


def make_client_app(load_site: LoadSite) -> ClientApp:
    """Make a ClientApp that takes part in every registered method.

    Parameters
    ----------
    load_site : callable
        Given Flower's Context of a client, returns its `Site`. Called once per client and process.

    Returns
    -------
    ClientApp
    """
    app = ClientApp()

    def work(message: Message, context: Context, what: str) -> Message:
        visit = _visit(load_site, message, context)
        with visit.state.locked() if visit.is_site else contextlib.nullcontext():
            content = getattr(_half(visit), what)(visit)
        content[METRICS].update(visit.compute)
        return Message(content, reply_to=message)

    @app.query(IDENTITY_QUERY.partition(".")[2])
    def identity(message: Message, context: Context) -> Message:
        asked = dict(records_of(message.content, ConfigRecord)[0]) if message.content.config_records else {}
        about = introduction_of(load_site, context, asked.get(VERSION_KEY))
        if PROBLEM in about and STATE_DIR in context.node_config:  # a site's operator can put it right
            log(ERROR, "kindred: this site takes no part: %s", first_line(str(about[PROBLEM])))
        return Message(RecordDict({CONFIG: ConfigRecord(about)}), reply_to=message)

    @app.query(REFUSAL_QUERY.partition(".")[2])
    def refusal(message: Message, context: Context) -> Message:
        (config,) = records_of(message.content, ConfigRecord)
        log(ERROR, "kindred: the server says of this site: %s", first_line(str(config[PROBLEM])))
        return Message(RecordDict(), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return work(message, context, "train")

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return work(message, context, "evaluate")

    return app


def true_or_false(node_config: Mapping[str, Any], key: str, default: bool) -> bool:
    """What a site has set in its node config.

    Raises
    ------
    ValueError
        Neither true nor false, without quotes: what is for the site's protection is not guessed at.
    """
    value = node_config.get(key, default)
    check(key, value, isinstance(value, bool), "true, false")
    return value


def client_id(context: Context) -> ClientId:
    """Who a client is: node-config's `client-id`, else its partition, else its node id."""
    config = context.node_config
    name = config.get("client-id", config.get("partition-id"))
    return name if isinstance(name, int | str) and not isinstance(name, bool) else context.node_id


# The functions below are called by name from the ClientApp, which Flower copies to its workers:
# what they remember stays in the process that they run in.


def _half(visit: Visit) -> Any:
    method = REGISTRY.get(str(visit.config.get(METHOD)))
    return (method.client if method else None) or LocalTraining


def _visit(load_site: LoadSite, message: Message, context: Context) -> Visit:
    configs = records_of(message.content, ConfigRecord)
    config = dict(configs[0]) if configs else {}
    (arrays,) = records_of(message.content, ArrayRecord)
    device = pick_device(str(DEVICE.read(config)))
    client = client_id(context)
    run, server_round = str(config.get(RUN, context.run_id)), int(config.get(SERVER_ROUND, 0))
    check(RUN, run, run.isascii() and run.isdecimal(), "a number")  # it becomes part of a path
    repeats = ATTEMPT in config  # the server tells which state a round starts from
    evaluates = message.metadata.message_type == MessageType.EVALUATE
    state = ClientState(
        int(run),
        client,
        context.node_config.get(STATE_DIR),
        server_round=server_round,
        before=server_round + evaluates if repeats else None,
        keep_from=config.get(KEEP_FROM),
        attempt=int(config.get(ATTEMPT, 0)),
    )
    return Visit(
        client, _site(load_site, context, device), config, read_record(arrays), device, state, context.node_config
    )


def introduction_of(load_site: LoadSite, context: Context, server_version: object = VERSION) -> dict[str, Any]:
    """What a client says of itself when it is first asked: who it is, how much data it has, and what it can do."""
    about: dict[str, Any] = {CLIENT_ID: client_id(context), METHODS: list(REGISTRY), VERSION_KEY: VERSION}
    if differs := mismatch(server_version, "the server", "this client"):
        return {CLIENT_ID: about[CLIENT_ID], PROBLEM: differs}
    try:
        site = _site(load_site, context, pick_device(str(context.run_config.get("device", "auto"))))
        about |= {
            NUM_EXAMPLES: len(site.train[1]),
            NUM_CLASSES: _num_classes(site),
            SHARE_MODEL: true_or_false(context.node_config, SHARE_MODEL, True),
        }
        true_or_false(context.node_config, REPORT_WEIGHTS, False)
        if "model" in site.about:
            about[NETWORK] = site.about["model"]
        if site.public is not None:
            about |= {PUBLIC_SET: site.fingerprint, NUM_PUBLIC: len(site.public)}
    except Exception as error:  # it still has a name
        return {CLIENT_ID: about[CLIENT_ID], PROBLEM: f"{type(error).__name__}: {error}"}
    return about


def _num_classes(site: Site) -> int:
    """The classes of a site's network, once it has taken an image; ValueError where a label is none of them."""
    x, y = site.train
    if not len(y):
        return 0
    num_classes = predict(_module(site.model, x.device), x[:1]).shape[1]
    if not 0 <= int(y.min()) <= int(y.max()) < num_classes:
        raise ValueError(f"labels go from {int(y.min())} to {int(y.max())}, its network has {num_classes} classes")
    return num_classes


_sites: dict[Any, Site] = {}
_sites_of_run: dict[str, Any] = {}


def _site(load_site: LoadSite, context: Context, device: torch.device) -> Site:
    if _sites_of_run != dict(context.run_config):  # another run: its sites may differ, the old ones are done with
        _sites.clear()
        _sites_of_run.clear()
        _sites_of_run.update(context.run_config)
    key = (load_site, device, *sorted(context.node_config.items()))
    site = _sites.pop(key, None)
    if site is None:
        site = load_site(context)
        site = replace(
            site,
            train=_to(device, site.train),
            test=_to(device, site.test),
            public=None if site.public is None else _public_on(device, site.public),
            validation=None if site.validation is None else _to(device, site.validation),
        )
        while len(_sites) >= SITES_KEPT:
            del _sites[next(iter(_sites))]
    _sites[key] = site
    return site


def _to(device: torch.device, samples: Samples) -> Samples:
    x, y = samples
    return x.to(device), y.to(device)


@functools.lru_cache(maxsize=len(MODELS))
def _module(factory: ModelFactory, device: torch.device) -> torch.nn.Module:
    return factory().to(device)
