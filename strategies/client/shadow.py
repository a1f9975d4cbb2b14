"""The model that a client trains alone beside the federation, if the run's setting `shadow-local` is true.

It never leaves the client. It is trained as the method `local` trains: in every round from where it was, with the run's
settings of local training. It is selected on the same validation data as the federation's model. The client reports the
comparison of the two on its test data.
"""

from __future__ import annotations

from logging import WARNING
from typing import TYPE_CHECKING

from flwr.supercore import log

from kindred.lazy import lazy
from kindred.messages import ALONE, seed_for

from .evaluation import predict
from .gain import gain_of_predictions
from .state import PREDICTIONS
from .training import check_finite, get_arrays
from .visit import Visit

if TYPE_CHECKING:
    import torch
else:
    torch = lazy("torch")

SELECTED_ALONE = "alone-best"  # name under which a client keeps what its best model alone predicts


def train_alone(visit: Visit) -> None:
    """Train the client's model alone for a round, and keep what it predicts if it is the best so far."""
    model = visit.new_model(ALONE) if (kept := visit.state.load(ALONE)) is None else visit.model(kept)
    visit.train(model)
    try:
        check_finite(model)
    except ValueError as error:  # the federation's model need not diverge with it
        log(WARNING, "kindred: the model that client %s trains alone stays as it was: %s", visit.client, error)
        return
    visit.state.save(ALONE, get_arrays(model))
    validation = visit.site.validation
    if validation is None:
        if visit.is_last:
            _keep(visit, model, {})
        return
    metrics = visit.judged(predict(model, validation[0], visit.objective))
    if visit.is_best(metrics, SELECTED_ALONE):
        _keep(visit, model, visit.about_best(metrics))


def keep_at_the_end(visit: Visit) -> None:
    """Keep what the model alone predicts in a closing evaluation, if it is not selected on validation data."""
    if visit.is_last and visit.site.validation is None and (kept := visit.state.load(ALONE)) is not None:
        _keep(visit, visit.model(kept), {})


def _keep(visit: Visit, model: torch.nn.Module, about: dict[str, str]) -> None:
    predictions = predict(model, visit.site.test[0], visit.objective)
    visit.keep_predictions(SELECTED_ALONE, predictions, about=about)


def comparison(visit: Visit) -> dict[str, float]:
    """Return the comparison of the client's two models, as metrics; none while one of them is missing."""
    ours, alone = visit.kept_predictions(PREDICTIONS), visit.kept_predictions(SELECTED_ALONE)
    targets = visit.site.test[1].cpu().numpy()
    if ours is None or alone is None or not len(targets):
        return {}
    if not len(targets) == len(ours) == len(alone):  # a site restarted with other data
        return {}
    seed = seed_for(visit.config.get("seed", 0), visit.client, ALONE)
    gain = gain_of_predictions(visit.objective, ours, alone, targets, seed)
    found = visit.objective.evaluated(alone, targets, visit.further())
    return {f"{ALONE}-{name}": value for name, value in found.items()} | {
        f"gain-{name}": float(value) for name, value in vars(gain).items()
    }
