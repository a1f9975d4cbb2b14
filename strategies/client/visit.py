"""A message at a client: the data, settings and state that a method's client half works with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kindred.errors import Reportable
from kindred.lazy import lazy
from kindred.messages import (
    BETWEEN,
    FINETUNE_EPOCHS,
    LAST,
    LOSS,
    METHOD,
    METRIC,
    NUM_EXAMPLES,
    NUM_TEST_EXAMPLES,
    RECEIVED,
    REPORT_WEIGHTS,
    SAMPLES_PREDICTED,
    SAMPLES_TRAINED,
    SELECTED,
    SERVER_ROUND,
    TRAINED,
    VALIDATION,
    ClientId,
    check,
    seed_for,
)
from kindred.metrics import METRICS
from kindred.objectives import Objective
from kindred.registry import REGISTRY
from kindred.settings import (
    BATCH_SIZE,
    LABEL_SMOOTHING,
    LEARNING_RATE,
    LOCAL_EPOCHS,
    LOCAL_STEPS,
    MOMENTUM,
    OPTIMIZER,
    PRECISION,
    WEIGHT_DECAY,
)

from .evaluation import evaluate, predict, predict_and_evaluate
from .site import MOST_WORK, STATE_DIR, Samples, Site, module_of, true_or_false
from .state import BEST, MODEL, PREDICTIONS, ClientState
from .training import (
    Gradients,
    batches,
    check_finite,
    differentiating,
    get_arrays,
    mean_gradient,
    seeded,
    set_arrays,
    train,
)

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
    predicted : dict
        Predictions for the test data that were saved in this message, by name: a message loads only what earlier ones
        have saved.
    """

    client: ClientId
    site: Site
    config: Mapping[str, Any]
    arrays: dict[str, np.ndarray]
    device: torch.device
    state: ClientState
    node_config: Mapping[str, Any]
    compute: dict[str, int] = field(default_factory=lambda: {SAMPLES_TRAINED: 0, SAMPLES_PREDICTED: 0})
    predicted: dict[str, np.ndarray] = field(default_factory=dict)

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
        return self.new_model(MODEL) if kept is None else self.model(kept)

    def new_model(self, purpose: str) -> torch.nn.Module:
        """Return a new module, whose weights depend on the run's seed, the client and the purpose."""
        with seeded(seed_for(self.config.get("seed", 0), self.client, purpose), self.device):
            return self.site.model().to(self.device)

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
        """Save a model as the client's personal model, with the headline metric on its test data; see `save_result`."""
        about = {self.metric: repr(metrics[self.metric])} if self.metric in metrics else {}
        self.save_result(MODEL, get_arrays(model), {**self.site.about, **about})

    def save_result(self, name: str, arrays: Mapping[str, np.ndarray], about: Mapping[str, str]) -> None:
        """Save a model or mixture with which the client predicts, as MODEL, MIXTURE or BEST.

        At the end of a run a site keeps that of the round before beside it: other clients may spoil the last round.

        Raises
        ------
        ValueError
            It has values that are not finite. What was saved before stays.
        """
        check_finite(arrays)
        self.state.save(name, arrays, about, rounds_load_it=name == BEST or (self.is_site and self.is_last))

    @property
    def metric(self) -> str:
        """Name of the headline metric."""
        return str(self.config.get(METRIC, self.objective.metric))

    @property
    def is_last(self) -> bool:
        """True if no training follows this message."""
        return bool(self.config.get(LAST, False))

    def further(self, is_result: bool = True) -> Sequence[str]:
        """Return the names of the metrics to compute: all of the client's result at the end, else the headline one."""
        return self.objective.reports if is_result and self.is_last else (self.metric,)

    def judged(self, predictions: np.ndarray) -> dict[str, float]:
        """Return the metrics of predictions (n, k) for the validation data; none if there are no such data."""
        if self.site.validation is None:
            return {}
        found = self.objective.evaluated(predictions, self.site.validation[1].cpu().numpy(), (self.metric,))
        return {f"{VALIDATION}-{name}": value for name, value in found.items()}

    def is_best(self, metrics: Mapping[str, float], name: str = BEST) -> bool:
        """Return whether a model is the client's best one so far by its validation data.

        `metrics` are those of `judged`; without validation data no model is best. `name` is that of the best one's file
        with the texts of `about_best`.
        """
        names, known = self._validation_names, self.state.about(name)
        values, best = ([float(of.get(name, "nan")) for name in names] for of in (metrics, known))
        return METRICS[self.metric].improves((values[0], values[1]), (best[0], best[1]))

    @property
    def _validation_names(self) -> tuple[str, str]:
        return f"{VALIDATION}-{self.metric}", f"{VALIDATION}-{LOSS}"

    def about_best(self, metrics: Mapping[str, float]) -> dict[str, str]:
        """Return the texts to save with the best model: those of the site, and its values on validation data."""
        known = {name: repr(metrics[name]) for name in self._validation_names if name in metrics}
        return {**self.site.about, **known}

    def select(self, predictions: np.ndarray) -> dict[str, float]:
        """Return all metrics of the best model so far, from its predictions (n, k) for the test data; save these."""
        found = self.objective.evaluated(predictions, self._keep_predictions(predictions), self.objective.reports)
        return {f"{SELECTED}-{name}": value for name, value in found.items()}

    def finish(self, predictions: np.ndarray) -> None:
        """Save predictions (n, k) for the test data, if the run ends and no model is selected on validation data."""
        if self.is_last and self.site.validation is None:
            self._keep_predictions(predictions)

    def _keep_predictions(self, predictions: np.ndarray) -> np.ndarray:
        """Save predictions (n, k) for the test data with the targets, and return these."""
        targets = self.site.test[1].cpu().numpy()
        self.keep_predictions(PREDICTIONS, predictions, {"targets": targets})
        return targets

    def keep_predictions(
        self,
        name: str,
        predictions: np.ndarray,
        others: Mapping[str, np.ndarray] | None = None,
        about: Mapping[str, str] | None = None,
    ) -> None:
        """Save predictions for the test data under a name, with other arrays and texts."""
        self.predicted[name] = predictions
        self.state.save(name, {PREDICTIONS: predictions, **(others or {})}, about, rounds_load_it=True)

    def kept_predictions(self, name: str) -> np.ndarray | None:
        """Return the predictions last saved under a name; None if there are none."""
        if name not in self.predicted and (kept := self.state.load(name, PREDICTIONS)):
            self.predicted[name] = kept[PREDICTIONS]
        return self.predicted.get(name)

    def _judge(self, model: torch.nn.Module, predictions: np.ndarray) -> dict[str, float]:
        """Return the metrics of the client's personal model on validation data, and save it if it is the best so far.

        If it is, the metrics include all that it has on test data, for which it has these predictions (n, k).
        """
        if self.site.validation is None:
            self.finish(predictions)
            return {}
        metrics = self.judged(predict(model, self.site.validation[0], self.objective))
        if self.is_best(metrics):
            self.save_result(BEST, get_arrays(model), self.about_best(metrics))
            metrics |= self.select(predictions)
        return metrics

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

    def check_work(self, epochs: int = 0, steps: int = 0, batch_size: int = 0) -> None:
        """Raise ValueError if a message asks a site for more than its operator allows; see `MOST_WORK`."""
        if not self.is_site:
            return
        for (key, default), asked in zip(MOST_WORK.items(), (epochs, steps, batch_size), strict=True):
            most = self.node_config.get(key, default)
            check(key, most, isinstance(most, int) and not isinstance(most, bool) and most >= 1, "1 or more")
            if asked > most:
                what = key.removeprefix("max-")
                raise ValueError(Reportable(f"{what} is {asked}, allowed at this site: up to {most} (its {key})"))

    def train(
        self,
        model: torch.nn.Module,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        samples: Samples | None = None,
        purpose: str = "train",
        **settings: Any,
    ) -> float:
        """Train a model on the training data, with the settings in the message, and return the mean loss.

        Parameters
        ----------
        epochs, steps : int, optional
            If one is given, the other is 0 by default; if none is, those that the message asks for.
        samples : pair of tensors, optional
            By default all training data.
        purpose : str
            Part of the seed: for one purpose the random draws are the same with every method.
        **settings
            Arguments of `training.train` that replace the message's settings.
        """
        if epochs is None and steps is None:
            epochs, steps = self.epochs, self.steps
        epochs, steps = epochs or 0, steps or 0
        x, y = self.site.train if samples is None else samples
        config, seed = self.config, self.seed(purpose)
        arguments: dict[str, Any] = {
            "batch_size": self.batch_size,
            "optimizer": str(OPTIMIZER.read(config)),
            "learning_rate": float(LEARNING_RATE.read(config)),
            "momentum": float(MOMENTUM.read(config)),
            "weight_decay": float(WEIGHT_DECAY.read(config)),
            "label_smoothing": self.label_smoothing,
            "precision": self.precision,
            **settings,
        }
        self.check_work(epochs, steps, arguments["batch_size"] if steps else min(arguments["batch_size"], len(y)))
        self.compute[SAMPLES_TRAINED] += epochs * len(y) + steps * arguments["batch_size"]
        with seeded(seed, self.device):
            return train(
                model,
                x,
                y,
                epochs=epochs,
                steps=steps,
                generator=torch.Generator().manual_seed(seed),
                objective=self.objective,
                **arguments,
            )

    @property
    def precision(self) -> str:
        return str(PRECISION.read(self.config))

    @property
    def label_smoothing(self) -> float:
        return float(LABEL_SMOOTHING.check(LABEL_SMOOTHING.read(self.config), LABEL_SMOOTHING.key))

    @contextlib.contextmanager
    def differentiating(self, model: torch.nn.Module, purpose: str = "train") -> Iterator[Gradients]:
        """Prepare a method's own steps, which must use `batches`; yield as `training.differentiating` does."""
        x, smoothing = self.site.train[0], self.label_smoothing
        with (
            seeded(self.seed(purpose), self.device),
            differentiating(
                model, x, self.batch_size, self.objective, self.precision, label_smoothing=smoothing
            ) as gradients_of,
        ):
            yield gradients_of

    def batches(self, purpose: str = "train", samples: Samples | None = None) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield the batches that `train` would draw for a purpose, for a method's own steps."""
        samples = self.site.train if samples is None else samples
        size = self.batch_size if self.steps else min(self.batch_size, len(samples[0]))
        self.check_work(self.epochs, self.steps, size)
        generator = torch.Generator().manual_seed(self.seed(purpose))
        for batch in batches(samples, self.epochs, self.steps, self.batch_size, generator):
            self.compute[SAMPLES_TRAINED] += len(batch[0])
            yield batch

    def gradient(self, model: torch.nn.Module) -> dict[str, np.ndarray]:
        """Return the gradient of the mean loss over the training data, as `training.mean_gradient` does."""
        self.compute[SAMPLES_TRAINED] += len(self.site.train[1])
        with seeded(self.seed("gradient"), self.device):
            return mean_gradient(
                model, *self.site.train, objective=self.objective, label_smoothing=self.label_smoothing
            )

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
        """Return a model's metrics and loss on the site's test data, as metrics.

        If the model is the method's result for the client, the metrics also hold those on validation data, if there are
        any. The model is then saved at a site, and wherever the server does not receive it; and as the best one so far,
        if it is, by its validation data.
        """
        strategy = self.strategy
        is_result = which == (strategy.personal if strategy else TRAINED)
        predictions, found = predict_and_evaluate(model, *self.site.test, self.objective, names=self.further(is_result))
        metrics = {f"{which}-{name}": value for name, value in found.items()}
        if is_result:
            if self.is_site or (strategy and strategy.model_stays):
                self.keep(model, found)
            if which not in (RECEIVED, BETWEEN) or self.config.get(SERVER_ROUND, 0) != 1:  # a model that was trained
                metrics |= self._judge(model, predictions)
        return metrics

    def counts(self) -> dict[str, int]:
        """Return the numbers of training and test samples, as metrics."""
        return {NUM_EXAMPLES: len(self.site.train[1]), NUM_TEST_EXAMPLES: len(self.site.test[1])}

    def separate_evaluation(self, model: torch.nn.Module) -> dict[str, float]:
        """Return the metrics of a reply to EVALUATE, of the client's personal model; see `evaluation`."""
        predictions, found = predict_and_evaluate(model, *self.site.test, self.objective, names=self.further())
        return {**found, **self._judge(model, predictions), NUM_TEST_EXAMPLES: len(self.site.test[1])}
