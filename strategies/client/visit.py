"""A message at a client: the data, settings and state that a method's client half works with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kindred.lazy import lazy
from kindred.messages import (
    FINETUNE_EPOCHS,
    METHOD,
    NUM_EXAMPLES,
    NUM_TEST_EXAMPLES,
    REPORT_WEIGHTS,
    SAMPLES_PREDICTED,
    SAMPLES_TRAINED,
    SERVER_ROUND,
    TRAINED,
    ClientId,
    seed_for,
)
from kindred.metrics import METRICS
from kindred.objectives import Objective
from kindred.registry import REGISTRY
from kindred.settings import (
    BATCH_SIZE,
    LEARNING_RATE,
    LOCAL_EPOCHS,
    LOCAL_STEPS,
    MOMENTUM,
    OPTIMIZER,
    PRECISION,
    WEIGHT_DECAY,
)

from .evaluation import evaluate, predict
from .site import STATE_DIR, Samples, Site, module_of, true_or_false
from .state import BEST, MODEL, ClientState
from .training import Gradients, batches, check_finite, differentiating, get_arrays, mean_gradient, set_arrays, train

if TYPE_CHECKING:
    import torch
else:
    torch = lazy("torch")


@dataclass(frozen=True)
class Visit:
    """A message at a client, with everything that a method's client half needs.

    Attributes
    ----------
    client : int or str
    site : Site
        With its data on `device`.
    config : mapping
        The settings in the message.
    arrays : dict of str to ndarray
        The arrays in the message, such as a model; read-only views.
    device : torch.device
    state : ClientState
        The client's saved state.
    node_config : mapping
        The site's own settings.
    compute : dict
        Number of samples that the method has processed so far; a sample counts each time that it is used.
        `samples-trained` counts forward and backward passes, `samples-predicted` forward passes alone. Evaluations on
        test and validation data do not count.
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
        """The server half of the method; None if the method is not registered, such as Flower's own methods."""
        method = REGISTRY.get(str(self.config.get(METHOD)))
        return method.strategy if method else None

    @property
    def objective(self) -> Objective:
        """The objective of the site's network."""
        return self.site.objective

    @property
    def module(self) -> torch.nn.Module:
        """The site's only module, with the weights that it was last given."""
        return module_of(self.site.model, self.device)

    def model(self, arrays: Mapping[str, np.ndarray] | None = None) -> torch.nn.Module:
        """Return the site's module with these arrays as weights, by default those in the message."""
        model = self.module
        set_arrays(model, self.arrays if arrays is None else arrays)
        return model

    def own_model(self) -> torch.nn.Module:
        """Return the site's module with the model that the client saved; if there is none, a new model."""
        kept = self.state.load(MODEL)
        if kept is None:
            with self._seeded(seed_for(self.config.get("seed", 0), self.client, MODEL)):
                return self.site.model().to(self.device)
        return self.model(kept)

    @property
    def is_site(self) -> bool:
        """True if the client is a real site, which keeps its model after the run (node config: state-dir)."""
        return STATE_DIR in self.node_config

    @property
    def reports_weights(self) -> bool:
        """True if the client reports its weights: `report-weights` of its node config, true in a simulation."""
        # In a simulation, a client's node config identifies it by a number only.
        is_simulated = "partition-id" in self.node_config and "client-id" not in self.node_config and not self.is_site
        return true_or_false(self.node_config, REPORT_WEIGHTS, is_simulated)

    def keep(self, model: torch.nn.Module, metrics: Mapping[str, float]) -> None:
        """Save a model as the client's personal model; at a site also as the best one so far, if it is.

        `metrics` are those of the model on the site's test data, with the objective's headline metric.

        Raises
        ------
        ValueError
            The model has values that are not finite.
        """
        check_finite(model)
        name = self.objective.metric
        reached = metrics[name]
        arrays, about = get_arrays(model), {**self.site.about, name: repr(reached)}
        self.state.save(MODEL, arrays, about)
        if self.is_site and not METRICS[name].worse(reached, float(self.state.about(BEST).get(name, "nan"))):
            self.state.save(BEST, arrays, about)

    def seed(self, purpose: str) -> int:
        """Return a seed that depends only on the run's seed, client, round and purpose."""
        return seed_for(self.config.get("seed", 0), self.client, self.config.get(SERVER_ROUND, 0), purpose)

    def samples_at(self, places: np.ndarray) -> Samples:
        """Return the training samples at these indices (k,)."""
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
        """Seed PyTorch's own random draws, such as dropout and new weights; restore the random state afterwards."""
        on_gpu = self.device.type == "cuda"
        with torch.random.fork_rng(devices=[self.device] if on_gpu else []):
            torch.default_generator.manual_seed(seed)  # torch.manual_seed looks for GPUs at every call
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
        """Train a model on the training data, with the settings in the message, and return the mean loss.

        Parameters
        ----------
        epochs, steps : int
            By default those that the message asks for.
        samples : pair of tensors, optional
            By default all training data.
        purpose : str
            Part of the seed: for one purpose the random draws are the same with every method.
        **settings
            Arguments of `training.train` that replace the message's settings.
        """
        if epochs is None:
            epochs, steps = self.epochs, self.steps
        x, y = self.site.train if samples is None else samples
        config, seed = self.config, self.seed(purpose)
        self.compute[SAMPLES_TRAINED] += epochs * len(y) + steps * self.batch_size
        message: dict[str, Any] = {
            "batch_size": self.batch_size,
            "optimizer": str(OPTIMIZER.read(config)),
            "learning_rate": float(LEARNING_RATE.read(config)),
            "momentum": float(MOMENTUM.read(config)),
            "weight_decay": float(WEIGHT_DECAY.read(config)),
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
                objective=self.objective,
                **(message | settings),
            )

    @property
    def precision(self) -> str:
        return str(PRECISION.read(self.config))

    @contextlib.contextmanager
    def differentiating(self, model: torch.nn.Module, purpose: str = "train") -> Iterator[Gradients]:
        """Prepare a method's own steps, which must use `batches`; yield as `training.differentiating` does."""
        with (
            self._seeded(self.seed(purpose)),
            differentiating(model, self.site.train[0], self.batch_size, self.objective, self.precision) as gradients_of,
        ):
            yield gradients_of

    def batches(self, purpose: str = "train", samples: Samples | None = None) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield the batches that `train` would draw for a purpose, for a method's own steps."""
        samples = self.site.train if samples is None else samples
        generator = torch.Generator().manual_seed(self.seed(purpose))
        for batch in batches(samples, self.epochs, self.steps, self.batch_size, generator):
            self.compute[SAMPLES_TRAINED] += len(batch[0])
            yield batch

    def gradient(self, model: torch.nn.Module) -> dict[str, np.ndarray]:
        """Return the gradient of the mean loss over the training data. See `training.mean_gradient`."""
        self.compute[SAMPLES_TRAINED] += len(self.site.train[1])
        with self._seeded(self.seed("gradient")):
            return mean_gradient(model, *self.site.train, objective=self.objective)

    def loss(self, model: torch.nn.Module, samples: Samples | None = None) -> float:
        """Return the mean loss of a model on samples, by default on the training data."""
        samples = self.site.train if samples is None else samples
        self.compute[SAMPLES_PREDICTED] += len(samples[1])
        return evaluate(model, *samples, self.objective)["loss"]

    def predict(self, model: torch.nn.Module, x: torch.Tensor) -> np.ndarray:
        """Return a model's predictions, shape (n, outputs). See `evaluation.predict`."""
        self.compute[SAMPLES_PREDICTED] += len(x)
        return predict(model, x, self.objective)

    def tune(self, model: torch.nn.Module) -> None:
        """Fine-tune a model for this site, for the epochs that the message asks for and without a proximal term."""
        self.train(model, epochs=int(self.config[FINETUNE_EPOCHS]), purpose="tune")

    def evaluation(self, which: str, model: torch.nn.Module) -> dict[str, float]:
        """Return a model's metrics and loss on the site's test data, as metrics; saves the model if it is the result.

        For a trained model the metrics also include those on validation data, if there are any. If the model is the
        method's result for the client, it is saved at a site, and wherever the server does not receive it.
        """
        found = evaluate(model, *self.site.test, self.objective)
        metrics = {f"{which}-{name}": value for name, value in found.items()}
        if which == TRAINED and self.site.validation is not None:
            validation = evaluate(model, *self.site.validation, self.objective)
            metrics |= {f"validation-{name}": value for name, value in validation.items()}
        strategy = self.strategy
        if which == (strategy.personal if strategy else TRAINED) and (
            self.is_site or (strategy and strategy.model_stays)
        ):
            self.keep(model, found)
        return metrics

    def counts(self) -> dict[str, int]:
        """Return the numbers of training and test samples, as metrics."""
        return {NUM_EXAMPLES: len(self.site.train[1]), NUM_TEST_EXAMPLES: len(self.site.test[1])}

    def separate_evaluation(self, model: torch.nn.Module) -> dict[str, float]:
        """Return the metrics of a reply to EVALUATE."""
        return {**evaluate(model, *self.site.test, self.objective), NUM_EXAMPLES: len(self.site.test[1])}
