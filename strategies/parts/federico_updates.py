"""Models that a client of FedeRiCo receives, and its updates of them."""

from __future__ import annotations

import numpy as np

from kindred.client.training import get_arrays
from kindred.client.visit import Visit
from kindred.messages import ClientId, by_prefix, decode
from kindred.settings import LOCAL_EPOCHS, LOCAL_STEPS

from .mixture import Arrays

MODELS = "models"  # in a message: the owners of its models


def received_models(visit: Visit) -> tuple[dict[ClientId, Arrays], bool]:
    """Return the models in a message, and the client's own one if the server does not have it yet.

    Returns
    -------
    models : dict of client id to model
        Owner -> model; the client itself is first.
    is_new : bool
        Whether the client's own model was not in the message.
    """
    parts = by_prefix(visit.arrays)
    is_new = "0" not in parts
    if is_new:
        parts["0"] = get_arrays(visit.own_model())
    return {owner: parts[str(place)] for place, owner in enumerate(decode(visit.config[MODELS]))}, is_new


def weighted_update(visit: Visit, arrays: Arrays, weight: float, scale: float, *, own: bool) -> Arrays:
    """Return a client's update of a model; Algorithm 1, lines 18 to 21.

    Parameters
    ----------
    visit : Visit
    arrays : dict of str to ndarray
        The model.
    weight : float
        w_ib.
    scale : float
        Factor of the gradient: the number of samples if the loss is their sum, 1 if it is their mean.
    own : bool
        Whether the model is the client's own: its update has the change of the buffers too, unweighted.

    Returns
    -------
    dict of str to ndarray
        The gradient g_bi, or w_ib times the change by local training.
    """
    config = visit.config
    model = visit.model(arrays)
    if config["m-step"] == "gradient":
        update = {name: weight * scale * array for name, array in visit.gradient(model).items()}
    else:
        epochs = int(LOCAL_EPOCHS.read(config)) if config["m-step"] == "epochs" else 0
        visit.train(model, epochs=epochs, steps=0 if epochs else int(LOCAL_STEPS.read(config)))
        trained, parameters = get_arrays(model), {name for name, _ in model.named_parameters(remove_duplicate=False)}
        update = {name: weight * (trained[name] - arrays[name]) for name in arrays if name in parameters}
    if own:
        now = get_arrays(model)
        update |= {
            name: now[name] - arrays[name]
            for name in arrays
            if name not in update and np.issubdtype(now[name].dtype, np.floating)
        }
    return update
