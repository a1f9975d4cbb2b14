"""The command line: `kindred run`, `compare`, `presets`, `strategies`, `datasets`."""

from __future__ import annotations

import io
import logging
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kindred.versions import check_flower

from .common import app, end, option, print_rich_table, print_table, show

# What takes time to import is imported where it is needed: `kindred --help` needs nothing of it.
if TYPE_CHECKING:
    from kindred.server_app.config import Config
    from kindred.server_app.simulation import Outcome


class Engine(str, Enum):
    """Where the clients of a run work."""

    ray = "ray"
    inline = "inline"


# Options that more than one command has.
Dataset = Annotated[str | None, option("dataset", "NAME", "The images; see `kindred datasets`.")]
DataDir = Annotated[str | None, option("data-dir", "PATH", "Folder or .npz file of the dataset.")]
Partition = Annotated[str | None, option("partition", "NAME", "How clients' data differ; see `kindred datasets`.")]
Clients = Annotated[str | None, option("clients", "N", "Clients among whom the data are divided.")]
Rounds = Annotated[str | None, option("rounds", "N", "Rounds of training.")]
EngineChoice = Annotated[
    Engine,
    typer.Option(
        help="ray (default): Flower's simulation engine, clients in parallel. inline: in this process.",
        show_default=False,
    ),
]
CpusPerClient = Annotated[int, option("cpus-per-client", "N", "CPUs that a client at work has (default 1).")]
GpusPerClient = Annotated[
    float, option("gpus-per-client", "SHARE", "Share of a GPU that a client at work has (ray; default 0).")
]


@app.command()
def run(
    strategy: Annotated[str | None, option("strategy", "NAME", "The method; see `kindred strategies`.")] = None,
    dataset: Dataset = None,
    data_dir: DataDir = None,
    partition: Partition = None,
    clients: Clients = None,
    rounds: Rounds = None,
    seed: Annotated[str | None, option("seed", "N", "Seed of everything random.")] = None,
    output_dir: Annotated[
        str | None, option("output-dir", "PATH", "Folder in which the run makes a folder of its own.")
    ] = None,
    settings: Annotated[
        list[str] | None, option("set", "KEY=VALUE", "Any setting of docs/configuration.md; may be repeated.")
    ] = None,
    engine: EngineChoice = Engine.ray,
    cpus_per_client: CpusPerClient = 1,
    gpus_per_client: GpusPerClient = 0.0,
    resume: Annotated[
        Path | None, option("resume", "DIR", "Go on with the run in this folder, which was cut short.")
    ] = None,
    against: Annotated[
        str, option("against", "NAMES", "Methods to run after it, in this process, to compare: local,fedavg.")
    ] = "",
) -> None:
    """Run a federation on this machine."""
    from kindred.data import DataError
    from kindred.server_app.config import ConfigError

    named = {
        "strategy": strategy, "dataset": dataset, "data-dir": data_dir, "partition": partition,
        "num-clients": clients, "num-rounds": rounds, "seed": seed, "output-dir": output_dir,
    }  # fmt: skip
    try:
        config = _config(named, settings or [], resume)
        names = dict.fromkeys(name.strip() for name in against.split(",") if name.strip())
        others = [replace(config, strategy=name, resume="") for name in names if name != config.strategy]
        check(config, others, engine, cpus_per_client, gpus_per_client)
    except (ConfigError, DataError) as error:
        end(2, str(error))

    print(f"{config.strategy} on {config.dataset}, {config.partition}, {config.num_clients} clients", flush=True)
    outcomes = [execute(config, engine, cpus_per_client, gpus_per_client)]
    for other in others:
        if outcomes[-1].code == 0:
            print(f"\n{other.strategy}", flush=True)
            outcomes.append(run_here(other, cpus_per_client))
    if outcomes[-1].code != 0:
        end(outcomes[-1].code, outcomes[-1].reason)
    report([outcome.results for outcome in outcomes if outcome.results])


@app.command()
def compare(
    strategies: Annotated[
        str,
        option(
            "strategies",
            "NAMES",
            "The methods: local,fedavg,heurfedamp. A name of your own is one too, with --set NAME:strategy=METHOD.",
        ),
    ] = "",
    preset: Annotated[str, option("preset", "NAME", "A paper's settings and numbers; see `kindred presets`.")] = "",
    dataset: Dataset = None,
    data_dir: DataDir = None,
    partition: Partition = None,
    clients: Clients = None,
    rounds: Rounds = None,
    seeds: Annotated[str, option("seeds", "LIST", "Seeds, each of a run of every method: 0,1,2 (default 0).")] = "",
    settings: Annotated[
        list[str] | None,
        option(
            "set",
            "KEY=VALUE",
            "Any setting of docs/configuration.md, for all; NAME:KEY=VALUE: for one method alone. May be repeated.",
        ),
    ] = None,
    scale: Annotated[
        float,
        option(
            "scale",
            "X",
            "Take this part of the rounds and of the images a client, for a small machine (default 1, all).",
        ),
    ] = 1.0,
    reference: Annotated[
        str, option("reference", "NAME", "The method that the others are tested against (default: the first).")
    ] = "",
    output_dir: Annotated[
        str | None, option("output-dir", "PATH", "Folder of the runs; those that are there are not run again.")
    ] = None,
    engine: EngineChoice = Engine.ray,
    cpus_per_client: CpusPerClient = 1,
    gpus_per_client: GpusPerClient = 0.0,
) -> None:
    """Run methods with the same data and seeds, and put what comes out side by side.

    The same command goes on after an interruption.
    """
    from rich.table import Column

    from kindred.data import DataError
    from kindred.server_app.comparison.files import write
    from kindred.server_app.comparison.plan import make_plan
    from kindred.server_app.comparison.runs import carry_out
    from kindred.server_app.comparison.texts import remarks, tables
    from kindred.server_app.config import ConfigError
    from kindred.server_app.presets import load_preset

    named = {
        "dataset": dataset, "data-dir": data_dir, "partition": partition, "num-clients": clients,
        "num-rounds": rounds, "output-dir": output_dir,
    }  # fmt: skip
    try:
        for_all, own = [], {}
        for assignment in settings or []:
            name, colon, rest = assignment.partition(":")
            if colon and "=" not in name and "=" in rest:
                own.setdefault(name, []).append(rest)
            else:
                for_all.append(assignment)
        plan = make_plan(
            [name.strip() for name in strategies.split(",") if name.strip()],
            given_settings(named, for_all),
            {name: given_settings({}, assignments) for name, assignments in own.items()},
            seeds=_whole_numbers("--seeds", seeds), reference=reference, scale=scale,
            preset=load_preset(preset) if preset else None,
        )  # fmt: skip
        for _, config in plan.runs:
            check_machine(config, engine, cpus_per_client, gpus_per_client)
        unusable = {}
        for name, config in plan.configs.items():
            try:
                check_method(config)
            except (ConfigError, DataError) as error:
                unusable[name] = str(error)
        if len(unusable) == len(plan.configs):
            end(2, next(iter(unusable.values())))
    except (ConfigError, DataError) as error:
        end(2, str(error))

    show(f"{plan.title}: {', '.join(plan.configs)}")
    content, code = carry_out(
        plan, lambda config: execute(config, engine, cpus_per_client, gpus_per_client), show, unusable,
        ["kindred", *sys.argv[1:]],
    )  # fmt: skip
    print(f"\n{content['title']}")
    for (first, *titles), *lines in tables(content):
        print_table((Column(first, no_wrap=True), *titles), lines)
    for line in remarks(content):
        print(line)
    try:
        write(content, plan.folder)
    except OSError as error:
        end(
            1,
            f"the comparison cannot be written to {plan.folder} ({error.strerror or error}); make room there, and "
            "give the command again",
        )
    print(f"comparison in {plan.folder}")
    if code:
        raise typer.Exit(code)


@app.command()
def presets() -> None:
    """List the papers' settings for `kindred compare --preset`."""
    from kindred.server_app.presets import load_preset, preset_names

    every = [load_preset(name) for name in preset_names()]
    print_table(
        ("preset", "methods", "rounds", "seeds", "from"),
        (
            (
                preset.name,
                str(len(preset.strategies)),
                str(preset.settings["num-rounds"]),
                str(len(preset.seeds)),
                preset.source,
            )
            for preset in every
        ),
    )


@app.command()
def strategies() -> None:
    """List the methods."""
    from kindred import REGISTRY

    columns = (
        "strategy",
        "method",
        "from",
        "what travels in a round",
        "what stays at the client",
        "mixed networks",
        "public images",
    )
    print_table(
        columns,
        (
            (
                name,
                method.title,
                method.paper,
                method.travels,
                method.stays,
                _yes_or_no(method.mixed_networks),
                _yes_or_no(method.needs_public_set),
            )
            for name, method in REGISTRY.items()
        ),
    )


@app.command()
def datasets() -> None:
    """List the datasets, the ways to divide them, and the networks."""
    from kindred.client.models import MODELS
    from kindred.data import DATASETS, PARTITIONS

    print_table(("dataset", "images"), ((name, source.description) for name, source in DATASETS.items()))
    print_table(
        ("partition", "who has what", "settings that count"),
        ((name, scheme.description, ", ".join(scheme.settings)) for name, scheme in PARTITIONS.items()),
    )
    print_table(("model", "network"), ((name, _beginning(model)) for name, model in MODELS.items()))


def _beginning(thing: Any) -> str:
    """The first paragraph of a docstring, in one line."""
    return " ".join((thing.__doc__ or "").partition("\n\n")[0].split())


def main() -> None:
    """Run the command line."""
    try:
        check_flower()
    except ImportError as error:
        end(2, str(error))
    # They add their commands: keys, server, site; predict, evaluate; report, watch.
    from kindred.server_app.deployment import keys, server, site  # noqa: F401

    from . import predict, report as see  # noqa: F401

    app(prog_name="kindred")


def _config(named: Mapping[str, str | None], assignments: Sequence[str], resume: Path | None) -> Config:
    """The settings of a command, besides those of the run that it goes on with; a ConfigError says what is wrong."""
    from kindred.server_app.config import Config
    from kindred.server_app.run_files import check_resumable, read_settings

    given = given_settings(named, assignments)
    before = read_settings(resume) if resume else {}
    if resume:
        given["resume"] = os.path.abspath(os.path.expanduser(resume))
    config = Config.from_run_config(before | given).absolute()
    if config.resume:
        check_resumable(config.run_config())
    return config


def given_settings(named: Mapping[str, str | None], assignments: Sequence[str]) -> dict[str, Any]:
    """The settings that a command's options and its --set say, each read as its kind; ConfigError where they cannot."""
    from kindred.server_app.config import SETTINGS, ConfigError

    texts = {key: text for key, text in named.items() if text is not None}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals:
            raise ConfigError(f"--set is {assignment!r}, allowed: key=value")
        if key in texts:
            raise ConfigError(f"{key} is given twice: {texts[key]!r} and {text!r}")
        texts[key] = text
    return {key: SETTINGS[key].parse(text) if key in SETTINGS else text for key, text in texts.items()}


def _whole_numbers(option: str, text: str) -> list[int]:
    from kindred.server_app.config import ConfigError

    try:
        return [int(word) for word in text.split(",")] if text else []
    except ValueError:
        raise ConfigError(f"{option} is {text!r}, allowed: whole numbers separated by commas") from None


def check(
    config: Config, others: Sequence[Config], engine: Engine, cpus_per_client: int, gpus_per_client: float
) -> None:
    """Find out what would keep the runs from working, before any of them starts.

    Raises
    ------
    ConfigError, DataError
        What it is.
    """
    check_machine(config, engine, cpus_per_client, gpus_per_client)
    for each in (config, *others):
        check_method(each)


def check_machine(config: Config, engine: Engine, cpus_per_client: int, gpus_per_client: float) -> None:
    """Find out what keeps any method from working with these settings on this machine: see `check`."""
    from kindred.server_app.config import ConfigError

    for key, value in config.run_config().items():
        if isinstance(value, str) and re.search(r"[\x00-\x1f\x7f\ud800-\udfff]", value):
            raise ConfigError(f"{key} is {value!r}, allowed: text in UTF-8 without control characters")
        if isinstance(value, int) and value >= 2**63:
            raise ConfigError(f"{key} is {value}, allowed: less than 2^63")
    for key in ("min-train-clients", "min-available-clients"):
        if (least := config.run_config()[key]) > config.num_clients:
            raise ConfigError(f"{key} is {least}, allowed: at most num-clients, which is {config.num_clients}")
    cpus = os.cpu_count() or 1
    if not 1 <= cpus_per_client <= cpus:
        raise ConfigError(f"--cpus-per-client is {cpus_per_client}, allowed: 1 to {cpus}, the CPUs of this machine")
    _check_gpus(config, engine, gpus_per_client)
    if config.resume:
        _check_folder(f"resume is {config.resume!r}", config.resume, "name a folder that can be written to")
    else:
        _check_folder(f"output-dir is {config.output_dir!r}", config.output_dir, "name a folder that can be made")


def check_method(config: Config) -> None:
    """Find out what keeps the method from working with these data: see `check`."""
    from kindred.client.state import default_root
    from kindred.data import load_federation
    from kindred.server_app.app import check_data_and_models, make_strategy, needed_by

    federation = load_federation(config.run_config())
    check_data_and_models(config, federation)
    if make_strategy(config, **needed_by(config, federation)).clients_keep_state:
        root = default_root()
        what = f"the folder of the clients' state is {str(root)!r}"
        _check_folder(what, root, "set XDG_STATE_HOME to a folder that can be made")


def _check_gpus(config: Config, engine: Engine, gpus_per_client: float) -> None:
    if config.device != "cuda" and gpus_per_client == 0:
        return
    import torch

    from kindred.server_app.config import ConfigError

    asked = "device is 'cuda'" if config.device == "cuda" else f"--gpus-per-client is {gpus_per_client:g}"
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus == 0:
        raise ConfigError(f"{asked}, but PyTorch finds no GPU here; allowed: device cpu or auto, --gpus-per-client 0")
    if not (0 <= gpus_per_client <= 1 or gpus_per_client in range(gpus + 1)):
        raise ConfigError(
            f"--gpus-per-client is {gpus_per_client:g}, allowed: 0 to 1, or a whole number of this "
            f"machine's GPUs, of which there are {gpus}"
        )
    if engine is Engine.ray and gpus_per_client == 0:
        raise ConfigError(f"{asked}, but --gpus-per-client is 0: say which share of a GPU a client gets, such as 0.25")


def _check_folder(what: str, folder: str | Path, remedy: str) -> None:
    from kindred.server_app.config import ConfigError

    nearest = Path(folder)  # that exists
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    try:
        os.rmdir(tempfile.mkdtemp(dir=nearest))
    except OSError as error:
        raise ConfigError(f"{what}, but {nearest} cannot be written to ({error.strerror}); {remedy}") from None


def execute(config: Config, engine: Engine, cpus_per_client: int, gpus_per_client: float) -> Outcome:
    """Run in an engine, or go on with a run."""
    if engine is Engine.inline:
        return run_here(config, cpus_per_client)
    from kindred.server_app.simulation import run_simulation

    return run_simulation(
        config.run_config(), num_clients=config.num_clients,
        cpus_per_client=cpus_per_client, gpus_per_client=gpus_per_client, on_line=show,
    )  # fmt: skip


def run_here(config: Config, threads: int) -> Outcome:
    """Run in this process, with PyTorch on so many threads; `log.txt` is in the folder of the results."""
    from kindred.data import DataError
    from kindred.server_app.app import run_inline
    from kindred.server_app.config import ConfigError
    from kindred.server_app.simulation import Log, Outcome, keep_log

    file = io.StringIO()
    log = Log(file, show)
    with _flower_logs_to(log.add):
        try:
            results = run_inline(config, threads=threads).path
        except (ConfigError, DataError) as error:
            return Outcome(2, str(error), log.results)
        except KeyboardInterrupt:
            return Outcome(130, "ended by SIGINT", log.results)
        except Exception as error:  # as of a run in Flower's engine: a line, and the log with the rest
            reason = f"{type(error).__name__}: {error}"
            try:
                kept = keep_log(f"{file.getvalue()}{traceback.format_exc()}")
            except OSError:  # the reason matters more
                return Outcome(1, reason, log.results)
            return Outcome(1, f"{reason} (log: {kept})", log.results)
    _write_log(results / "log.txt", file.getvalue())
    return Outcome(0, "", results)


def _write_log(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:  # nothing hangs on it
        show(f"warning: {path} cannot be written ({error.strerror})")


@contextmanager
def _flower_logs_to(add: Callable[[str], None]) -> Iterator[None]:
    """Have Flower's logger hand over its lines, in the form in which it prints them, and do nothing else."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            first, *more = self.format(record).splitlines() or [""]
            for line in (f"{record.levelname} : {first}", *more):
                add(line)

    logger = logging.getLogger("flwr")
    before, logger.handlers = logger.handlers, [Handler(logging.INFO)]
    try:
        yield
    finally:
        logger.handlers = before


def report(folders: Sequence[Path]) -> None:
    """Print what came out of the runs, side by side; of several, draw the accuracies into the first one's folder."""
    from kindred.server_app.run_files import read_summary
    from kindred.server_app.summary import compare_runs, comparison_table

    print()
    if len(folders) > 1:
        compare_runs(folders, folders[0] / "comparison.png")
    elif folders:
        print_rich_table(comparison_table([read_summary(folders[0])]))


def _yes_or_no(value: bool) -> str:
    return "yes" if value else "no"
