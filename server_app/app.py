"""The ServerApp: from settings to a strategy, a run and its results."""

from __future__ import annotations

import shutil
import time
from functools import partial
from logging import ERROR, INFO, WARNING
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.supercore import log
from flwr.supercore.object_ref import load_app

from kindred import REGISTRY, InlineGrid, Method, make_model
from kindred.client.models import network_names, parse_models
from kindred.client.site import fingerprint_of
from kindred.client.state import BEST, MIXTURE, MODEL, PREDICTIONS
from kindred.data import DATASETS, DataError, Federation, Sites, load_clients
from kindred.engine.checkpoint import NotResumable
from kindred.engine.layout import last_layers
from kindred.engine.roster import TooFewClients
from kindred.engine.simulated_state import end_simulation, saved_files, simulated
from kindred.engine.status import Status
from kindred.engine.times import START_UP
from kindred.engine.workers import WorkerGrid
from kindred.fedamp import GROUPS
from kindred.lazy import lazy
from kindred.messages import ClientId, to_record, with_prefix
from kindred.settings import ROUNDS, TRAINING

from .config import Config, ConfigError
from .headline import Headline
from .newcomers import Service, lines
from .results import RunFolder
from .run_files import labels_of
from .summary import training_rounds

if TYPE_CHECKING:
    import torch

    from kindred import PersonalizedStrategy
    from kindred.engine.checkpoint import Checkpoints
else:
    torch = lazy("torch")

CLIENT_APP = "kindred.client_app.app:app"  # as in pyproject.toml

# Folders of the results for the files that simulated clients have kept on this disk.
KEPT = {"models": MODEL, "mixtures": MIXTURE, "selected": BEST, "predictions": PREDICTIONS}

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run with the settings of the run config."""
    status = Status.of_run(context.run_id)
    with status.followed():
        try:
            run(grid, Config.from_run_config(context.run_config), status)
        except (ConfigError, DataError, TooFewClients) as error:
            log(ERROR, "kindred: %s", error)  # Flower logs a traceback, too
            raise


def run_inline(config: Config, threads: int = 1) -> RunFolder:
    """Run in this process, without Flower's simulation engine.

    Parameters
    ----------
    config : Config
    threads : int
        Number of PyTorch's threads.

    Returns
    -------
    RunFolder
    """
    torch.set_num_threads(threads)
    client_app = load_app(CLIENT_APP, ConfigError)
    return run(InlineGrid(client_app, config.participants, config.run_config()), config)


def run_in_workers(config: Config, workers: int, threads: int = 1, gpus: int = 0) -> RunFolder:
    """Run with the clients in worker processes, without Flower's simulation engine; with one, in this process.

    Parameters
    ----------
    config : Config
    workers, threads, gpus : int
        As in `WorkerGrid`.

    Returns
    -------
    RunFolder
    """
    if workers == 1:
        return run_inline(config, threads)
    torch.set_num_threads(threads)
    grid = WorkerGrid(CLIENT_APP, config.participants, config.run_config(), workers=workers, threads=threads, gpus=gpus)
    try:
        return run(grid, config)
    finally:
        grid.close()


def run(grid: Grid, config: Config, status: Status | None = None) -> RunFolder:
    """Train, and write the results.

    Parameters
    ----------
    grid : Grid
    config : Config
    status : Status, optional
        Where to record what the run does, for those who look at it.

    Raises
    ------
    ConfigError, DataError
        The settings cannot be used: nothing has been sent or written. Or the results cannot be written: the run can
        be resumed.
    """
    started = time.monotonic()
    federation = load_clients(config.run_config())
    strategy, initial_arrays = prepare(config, federation)
    divided = federation if isinstance(federation, Federation) else None
    folder = RunFolder(
        config.run_config(),
        divided.groups.tolist() if divided and divided.groups.any() else None,
        samples_of(config, federation),
        strategy.metric,
        divided.names if divided else (),
    )
    if status:
        strategy.status = status
        status.update(folder=str(folder.path))
    with folder.locked():
        _train(grid, config, federation, strategy, initial_arrays, folder, time.monotonic() - started)
    return folder


def prepare(config: Config, federation: Federation | Sites) -> tuple[PersonalizedStrategy, ArrayRecord]:
    """Return the strategy of a run and its initial arrays.

    Raises
    ------
    ConfigError, DataError
        The method cannot work with these settings, data and networks.
    """
    check_data_and_models(config, federation)
    method, networks = REGISTRY[config.strategy], networks_of(config, federation)
    initial_arrays, given = ArrayRecord(), needed_by(config, federation)
    if method.models_travel:
        models = {
            name: make_model(name, federation.task.inputs.shape, federation.task.objective.num_outputs, config.seed)
            for name in networks
        }
        arrays = {
            name: {key: tensor.numpy() for key, tensor in model.state_dict().items()} for name, model in models.items()
        }
        if len(networks) == 1:
            (model,), (start,) = models.values(), arrays.values()
            initial_arrays = to_record(start)
            given["buffers"] = [name for name, _ in model.named_buffers() if name in start]  # others do not travel
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
    seconds_before: float,
) -> None:
    checkpoints = folder.checkpoints()
    missing = _missing_clients(grid, config, federation)
    if missing:
        log(WARNING, "kindred: %s", missing)
    if config.resume and (checkpoints is None or checkpoints.oldest is None):
        log(INFO, "kindred: nothing was saved before the run was interrupted: it starts again with its first round")
    if config.checkpoint_every:
        log(INFO, "kindred: writing to %s; resume with this folder if the run is interrupted", folder.path)

    def on_round(server_round: int) -> None:
        try:
            folder.record_round(strategy)
        except OSError as error:
            log(
                WARNING,
                "kindred: the results of round %d cannot be written to %s (%s): make room there; the run "
                "continues, and writes the missing lines after the next round",
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
        if not strategy.history.rounds and not config.resume:  # nothing happened that needs a folder
            shutil.rmtree(folder.path, ignore_errors=True)
        raise
    strategy.history.times.seconds[START_UP] += seconds_before
    newcomers = None
    if config.held_out_clients and isinstance(federation, Federation) and checkpoints:
        try:
            newcomers = _newcomers(config, federation, strategy, checkpoints)
        except NotResumable as error:  # the run's own results do not depend on it
            log(WARNING, "kindred: the clients that came later are not served: %s", error)
    # Models that were never sent are still on this disk, if the clients are simulated here.
    local = simulated(grid)
    kept = {name: saved_files(strategy.run_id, file) for name, file in KEPT.items()} if local else {}
    network_of = getattr(strategy, "networks", {})  # set where the server keeps models of several networks
    network, *_ = networks_of(config, federation)
    try:
        folder.finish(
            strategy,
            federation if isinstance(federation, Federation) else None,
            lambda client: federation.task.to_metadata(network_of.get(client, network)),
            kept,
            newcomers,
        )
    except OSError as error:
        saved = checkpoints is not None and checkpoints.oldest is not None
        raise ConfigError(
            f"the results cannot be written to {folder.path} ({error.strerror or error}); make room there, then "
            + (f"continue with --resume {folder.path}" if saved else "start the run again: nothing of it was saved")
        ) from None
    if local:
        end_simulation(strategy.run_id)
    log(INFO, "kindred: results in %s%s", folder.path, f", where {missing}" if missing else "")


def _newcomers(
    config: Config, federation: Federation, finished: PersonalizedStrategy, checkpoints: Checkpoints
) -> dict[str, Any]:
    """Serve the clients that took no part in a finished run; return `Service.results`."""
    strategy, initial_arrays = prepare(config, federation)
    network, *_ = networks_of(config, federation)
    inputs, objective = federation.task.inputs, federation.task.objective
    model = make_model(network, inputs.shape, objective.num_outputs, config.seed)
    results = Service(
        load_app(CLIENT_APP, ConfigError),
        config.run_config(),
        _local_settings(config),
        federation,
        finished=finished,
        strategy=strategy,
        initial_arrays=initial_arrays,
        first_model=to_record({key: tensor.numpy() for key, tensor in model.state_dict().items()}),
        checkpoints=checkpoints,
        rounds=len(training_rounds(config.run_config(), finished.history)),
    ).results()
    for line in lines(results, config.strategy, Headline(finished.metric)):
        log(INFO, "kindred: %s", line)
    return results


def samples_of(config: Config, federation: Federation | Sites) -> str | None:
    """Return the text that identifies a run's samples, with public ones if needed; None if sites have their own."""
    if not isinstance(federation, Federation):
        return None
    if not REGISTRY[config.strategy].needs_public_set:
        return federation.fingerprint
    return f"{federation.fingerprint}, public {fingerprint_of(federation.public_set())}"


def networks_of(config: Config, federation: Federation | Sites) -> list[str]:
    """Return the networks that the run's clients may have; ValueError where they do not fit the inputs."""
    inputs = federation.task.inputs
    return network_names(config.model, inputs.kind, inputs.shape)


def check_data_and_models(config: Config, federation: Federation | Sites) -> None:
    """Check that a method can work with these data and networks.

    Raises
    ------
    ConfigError, DataError
        It cannot; the text says why.
    """
    method = REGISTRY[config.strategy]
    if len(asked := parse_models(config.model)) > 1 and not method.mixed_networks:
        raise ConfigError(
            f"model is {config.model!r}, allowed with {config.strategy}: one network, because its models are combined"
        )
    try:
        names = networks_of(config, federation)
        if asked == names:  # not for auto, whose network fits: importing PyTorch takes a second
            for name in names:
                make_model(name, federation.task.inputs.shape, federation.task.objective.num_outputs, config.seed)
        if "head_layers" in method:
            (name,) = names
            model = make_model(name, federation.task.inputs.shape, federation.task.objective.num_outputs, config.seed)
            last_layers(model.state_dict(), config.own_settings()["head_layers"])
    except ValueError as error:
        raise ConfigError(_in_kebab(str(error), method)) from None
    if config.held_out_clients and not isinstance(federation, Federation):
        raise ConfigError(f"held-out-clients is {config.held_out_clients}, allowed with dataset sites: 0")
    if config.held_out_clients and len(names) > 1:
        raise ConfigError(
            f"held-out-clients is {config.held_out_clients}, allowed with several networks, as by model "
            f"{config.model!r}: 0"
        )
    if config.stop_after and not federation.has_validation:
        raise ConfigError(
            f"stop-after is {config.stop_after}, and there are no validation samples: set validation-share, or "
            "stop-after to 0"
        )
    if method.distils:
        public_samples(config, federation)
    elif method.needs_public_set and isinstance(federation, Federation):
        federation.public_set()


def needed_by(config: Config, federation: Federation | Sites) -> dict[str, Any]:
    """Return the arguments that a strategy needs in addition to settings.

    These are the headline metric, and for some methods groups, or the objective, networks and public samples.

    Raises
    ------
    ConfigError, DataError
        They are not known, or cannot be used.
    """
    objective, shape = federation.task.objective, federation.task.inputs.shape
    given: dict[str, Any] = {"metric": metric_of(config, federation)}
    if config.dataset == "sites":
        given["task"] = federation.task.fingerprint
    if config.own_settings().get("self_weight") == GROUPS:
        given["groups"] = groups_of(config, federation)
    if REGISTRY[config.strategy].distils:
        names = networks_of(config, federation)
        given["models"] = {name: partial(make_model, name, shape, objective.num_outputs) for name in names}
        given |= {"objective": objective, "public": public_samples(config, federation), "device": config.device}
    return given


def metric_of(config: Config, federation: Federation | Sites) -> str:
    """Return the name of the headline metric; ConfigError if no client can report it."""
    name = Headline.chosen(config.metric, federation.task.objective).name
    if isinstance(federation, Federation) and len(federation.clients_without(name)) == federation.num_clients:
        raise ConfigError(
            f"metric is {name!r}, and no client has more than one {_target(federation)} in its test data, allowed: "
            "auto, or test data that define the metric"
        )
    return name


def metric_remarks(config: Config, federation: Federation, most: int = 10) -> list[str]:
    """Return a line for each client, at most `most`, whose test samples do not define the headline metric."""
    name = metric_of(config, federation)
    without = federation.clients_without(name)
    lines = [
        f"client {label} has {'one' if number else 'no'} {_target(federation)} in its test data: it has no {name}"
        for label, number in zip(labels_of(without, federation.names), without.values(), strict=True)
    ]
    return lines if len(lines) <= most else [*lines[:most], f"{len(lines) - most} more clients have no {name}"]


def _target(federation: Federation) -> str:
    return "class" if federation.task.objective.has_classes else "value of the target"


def groups_of(config: Config, federation: Federation | Sites) -> dict[ClientId, int]:
    """Return the group of each client, for self-weight groups; ConfigError if the clients have no known groups."""
    if not isinstance(federation, Federation):
        without = "the groups of real sites are not known"
    elif not federation.groups.any():
        without = f"partition {config.partition} has no groups of clients here"
    else:
        return dict(enumerate(federation.groups.tolist()))
    raise ConfigError(f"self-weight is {GROUPS!r}, and {without}; set self-weight to 0 to 1, or uniform")


def public_samples(config: Config, federation: Federation | Sites) -> torch.Tensor:
    """Return the public samples that the server itself uses; if sites have the data, those of the run's public-data.

    Raises
    ------
    ConfigError, DataError
        There are no public samples, or they cannot be used.
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
        raise ConfigError(f"public-size is {config.public_size}, and {config.public_data} has {len(x)} samples")
    return x[: config.public_size or len(x)]


def make_strategy(config: Config, **given: Any) -> PersonalizedStrategy:
    """Return the strategy that the settings name, with its own settings.

    Parameters
    ----------
    config : Config
    **given
        Further arguments of the strategy.

    Raises
    ------
    ConfigError
        The method does not accept one of the settings.
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


def _missing_clients(grid: Grid, config: Config, federation: Federation | Sites) -> str:
    """Return a line about how many simulated clients lack a node, with the command that gives each one; else ""."""
    if not isinstance(federation, Federation):
        return ""
    nodes, clients = len(list(grid.get_node_ids())), config.participants
    if nodes >= clients:
        return ""
    return (
        f"{nodes} of the federation's {clients} clients are connected; to simulate all of them: "
        f"flwr run . --stream --federation-config 'num-supernodes={clients} client-resources-num-cpus=1'"
    )
