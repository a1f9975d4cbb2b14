"""The ServerApp: from settings to a strategy, a run and its results."""

from __future__ import annotations

import shutil
from functools import partial
from logging import INFO, WARNING
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.supercore import log
from flwr.supercore.object_ref import load_app

from kindred import REGISTRY, InlineGrid, Method, make_model
from kindred.client.models import network_names, parse_models
from kindred.client.site import fingerprint_of
from kindred.client.state import MIXTURE, MODEL, NotResumable, end_simulation, saved_files, simulated
from kindred.data import DATASETS, Federation, Sites, load_clients
from kindred.engine.model_store import last_layers
from kindred.lazy import lazy
from kindred.messages import to_record, with_prefix
from kindred.settings import ROUNDS, TRAINING

from .config import Config, ConfigError
from .results import RunFolder

if TYPE_CHECKING:
    import torch

    from kindred import PersonalizedStrategy
else:
    torch = lazy("torch")

CLIENT_APP = "kindred.client_app.app:app"  # as in pyproject.toml

# The folders of the results for what clients have kept on this disk, in a simulation.
KEPT = {"models": MODEL, "mixtures": MIXTURE}

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run what the run config says."""
    run(grid, Config.from_run_config(context.run_config))


def run_inline(config: Config, threads: int = 1) -> RunFolder:
    """Run in this process, without Flower's simulation engine.

    Parameters
    ----------
    config : Config
    threads : int
        Threads that PyTorch computes with.

    Returns
    -------
    RunFolder
    """
    torch.set_num_threads(threads)
    client_app = load_app(CLIENT_APP, ConfigError)
    return run(InlineGrid(client_app, config.num_clients, config.run_config()), config)


def run(grid: Grid, config: Config) -> RunFolder:
    """Train, and write the results.

    Raises
    ------
    ConfigError, DataError
        The settings cannot be used; nothing has been sent or written then. Or the results cannot be written; the run
        can be gone on with then.
    """
    federation = load_clients(config.run_config())
    strategy, initial_arrays = prepare(config, federation)
    groups = federation.groups.tolist() if isinstance(federation, Federation) and federation.groups.any() else None
    folder = RunFolder(config.run_config(), groups, images_of(config, federation))
    with folder.locked():
        _train(grid, config, federation, strategy, initial_arrays, folder)
    return folder


def prepare(config: Config, federation: Federation | Sites) -> tuple[PersonalizedStrategy, ArrayRecord]:
    """The strategy of a run, and what it starts from.

    Raises
    ------
    ConfigError, DataError
        The method cannot work with these settings, data and networks.
    """
    check_data_and_models(config, federation)
    method, networks = REGISTRY[config.strategy], network_names(config.model, federation.image_shape)
    initial_arrays, given = ArrayRecord(), needed_by(config, federation)
    if method.models_travel:
        models = {
            name: make_model(name, federation.image_shape, federation.num_classes, config.seed) for name in networks
        }
        arrays = {
            name: {key: tensor.numpy() for key, tensor in model.state_dict().items()} for name, model in models.items()
        }
        if len(networks) == 1:
            (model,), (start,) = models.values(), arrays.values()
            initial_arrays = to_record(start)
            given["buffers"] = [name for name, _ in model.named_buffers()]
        else:
            initial_arrays = to_record(
                {key: array for name, start in arrays.items() for key, array in with_prefix(name, start).items()}
            )
    elif method.needs_public_set and isinstance(federation, Federation):
        given["public_set"] = fingerprint_of(federation.public_set())
    return make_strategy(config, **given), initial_arrays


def _train(
    grid: Grid,
    config: Config,
    federation: Federation | Sites,
    strategy: PersonalizedStrategy,
    initial_arrays: ArrayRecord,
    folder: RunFolder,
) -> None:
    checkpoints = folder.checkpoints()
    if config.resume and (checkpoints is None or checkpoints.oldest is None):
        log(INFO, "kindred: nothing was saved before the run was cut short: it begins again with its first round")
    if config.checkpoint_every:
        log(INFO, "kindred: writing to %s, the folder to resume should the run be cut short", folder.path)

    def on_round(server_round: int) -> None:
        if server_round == strategy.first_round and isinstance(federation, Federation):
            _tell_who_is_missing(strategy, federation)
        try:
            folder.record_round(strategy)
        except OSError as error:
            log(
                WARNING,
                "kindred: the results of round %d cannot be written to %s (%s): the run goes on, and writes "
                "what the tables lack after the next round",
                server_round,
                folder.path,
                error.strerror or error,
            )

    try:
        strategy.start(
            grid,
            initial_arrays,
            num_rounds=config.num_rounds,
            timeout=config.round_timeout,
            train_config=_local_settings(config),
            evaluate_config=_local_settings(config),
            on_round=on_round,
            checkpoints=checkpoints,
        )
    except NotResumable as error:
        raise ConfigError(f"resume is {config.resume!r}: {error}") from None
    except BaseException:
        if not strategy.history.rounds and not config.resume:  # nothing happened that would be worth a folder
            shutil.rmtree(folder.path, ignore_errors=True)
        raise
    # Models that never travelled are still on this disk, if the clients are.
    local = strategy.clients_keep_state and simulated(grid)
    kept = {name: saved_files(strategy.run_id, file) for name, file in KEPT.items()} if local else {}
    network_of = getattr(strategy, "networks", {})  # where the server knows models of several
    network, *_ = network_names(config.model, federation.image_shape)
    try:
        folder.finish(
            strategy,
            federation if isinstance(federation, Federation) else None,
            lambda client: federation.task.to_metadata(network_of.get(client, network)),
            kept,
        )
    except OSError as error:
        saved = checkpoints is not None and checkpoints.oldest is not None
        raise ConfigError(
            f"the results cannot be written to {folder.path} ({error.strerror or error}); make room there, then "
            + (f"go on with --resume {folder.path}" if saved else "begin the run anew: nothing of it was saved")
        ) from None
    if local:
        end_simulation(strategy.run_id)
    log(INFO, "kindred: results in %s", folder.path)


def images_of(config: Config, federation: Federation | Sites) -> str | None:
    """What says which images a run has, public ones where it needs them; None where sites have data of their own."""
    if not isinstance(federation, Federation):
        return None
    if not REGISTRY[config.strategy].needs_public_set:
        return federation.fingerprint
    return f"{federation.fingerprint}, public {fingerprint_of(federation.public_set())}"


def check_data_and_models(config: Config, federation: Federation | Sites) -> None:
    """Find out whether a method can work with these data and networks.

    Raises
    ------
    ConfigError, DataError
        What keeps it from doing so.
    """
    method = REGISTRY[config.strategy]
    if len(asked := parse_models(config.model)) > 1 and not method.mixed_networks:
        raise ConfigError(
            f"model is {config.model!r}, allowed with {config.strategy}: one network, for its models are combined"
        )
    try:
        names = network_names(config.model, federation.image_shape)
        if asked == names:  # the network that auto stands for fits, and PyTorch takes a second to import
            for name in names:
                make_model(name, federation.image_shape, federation.num_classes, config.seed)
        if "head_layers" in method:
            (name,) = names
            model = make_model(name, federation.image_shape, federation.num_classes, config.seed)
            last_layers(model.state_dict(), config.own_settings().get("head_layers", 1))
    except ValueError as error:
        raise ConfigError(_in_kebab(str(error), method)) from None
    if method.distils:
        public_images(config, federation)
    elif method.needs_public_set and isinstance(federation, Federation):
        federation.public_set()


def needed_by(config: Config, federation: Federation | Sites) -> dict[str, Any]:
    """The arguments that a method's strategy cannot do without, besides settings: networks and public images."""
    if not REGISTRY[config.strategy].distils:
        return {}
    models = {
        name: partial(make_model, name, federation.image_shape, federation.num_classes)
        for name in network_names(config.model, federation.image_shape)
    }
    return {"models": models, "public": public_images(config, federation), "device": config.device}


def public_images(config: Config, federation: Federation | Sites) -> torch.Tensor:
    """The public images that the server itself works with; where sites have the data, those of the run's public-data.

    Raises
    ------
    ConfigError, DataError
        There are none, or they cannot be used.
    """
    if isinstance(federation, Federation):
        return federation.public_set()
    if config.public_data in ("auto", *DATASETS):
        raise ConfigError(
            f"public-data is {config.public_data!r}, allowed with {config.strategy} and dataset sites: "
            "an .npz file with x on the server's machine"
        )
    x = federation.public_set()
    if config.public_size > len(x):
        raise ConfigError(f"public-size is {config.public_size}, and {config.public_data} has {len(x)} images")
    return x[: config.public_size or len(x)]


def make_strategy(config: Config, **given: Any) -> PersonalizedStrategy:
    """The strategy that the settings name, with its own settings among them.

    Parameters
    ----------
    config : Config
    **given
        More of its arguments.

    Raises
    ------
    ConfigError
        A setting that this method does not take.
    """
    method = REGISTRY[config.strategy]
    if method.name != config.strategy:
        raise ConfigError(
            f"the name of {method.strategy.__name__} is {method.name!r}, and it is registered as "
            f"{config.strategy!r}: they must be the same"
        )
    rounds = {each.name: getattr(config, each.name) for each in ROUNDS}
    try:
        return method.strategy(
            **config.own_settings(),
            **rounds,
            fraction_train=config.fraction_train,
            min_train_nodes=config.min_train_clients,
            min_available_nodes=config.min_available_clients,
            **given,
        )
    except ValueError as error:
        raise ConfigError(f"{config.strategy}: {_in_kebab(str(error), method)}") from None


def _in_kebab(text: str, method: Method) -> str:
    for each in method.settings:
        text = text.replace(each.name, each.key)
    return text


def _local_settings(config: Config) -> ConfigRecord:
    return ConfigRecord({each.key: getattr(config, each.name) for each in TRAINING})


def _tell_who_is_missing(strategy: PersonalizedStrategy, federation: Federation) -> None:
    here, all_of_them = len(strategy.clients()) + len(strategy.history.left_out), federation.num_clients
    if here < all_of_them:
        log(
            INFO,
            "kindred: %d of the federation's %d clients are here; for all of them in a simulation: "
            "flwr run . --stream --federation-config 'num-supernodes=%d client-resources-num-cpus=1'",
            here,
            all_of_them,
            all_of_them,
        )
