"""The command line: `kindred run`, `compare`, `presets`, `strategies`, `datasets`."""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kindred import REGISTRY
from kindred.lazy import lazy
from kindred.server_app.terminal import Column, number, print_table, texts as text_columns
from kindred.versions import check_flower

from . import display
from .common import app, end, option, show

if TYPE_CHECKING:  # imported on first use, so that `kindred --help` is quick
    from kindred import data
    from kindred.client import models
    from kindred.server_app import config, engines, presets as papers, run_files, run_log, runs, summary
    from kindred.server_app.comparison import texts

    from . import commands
else:
    data, models = lazy("kindred.data"), lazy("kindred.client.models")
    config, engines = lazy("kindred.server_app.config"), lazy("kindred.server_app.engines")
    papers, texts = lazy("kindred.server_app.presets"), lazy("kindred.server_app.comparison.texts")
    run_files, run_log = lazy("kindred.server_app.run_files"), lazy("kindred.server_app.run_log")
    runs, summary = lazy("kindred.server_app.runs"), lazy("kindred.server_app.summary")
    commands = lazy("kindred.server_app.cli.commands")

# Options of more than one command.
Dataset = Annotated[str | None, option("dataset", "NAME", "Dataset; see `kindred datasets`.")]
DataDir = Annotated[str | None, option("data-dir", "PATH", "Folder, .npz file or .csv file of the dataset.")]
Partition = Annotated[str | None, option("partition", "NAME", "How clients' data differ; see `kindred datasets`.")]
Clients = Annotated[str | None, option("clients", "N", "Number of clients among which the data are divided.")]
MetricName = Annotated[
    str | None, option("metric", "NAME", "Headline metric: auroc, f1, brier, ...; a wrong name prints all.")
]
Rounds = Annotated[str | None, option("rounds", "N", "Number of training rounds.")]
EngineChoice = Annotated[
    str,
    option(
        "engine",
        "NAME",
        "local (default): clients in parallel, in processes of this program. inline: in this process. flower: Flower's "
        "simulation engine, clients in parallel.",
    ),
]
Workers = Annotated[int, option("workers", "N", "Processes of engine local (default 0: as CPUs and memory allow).")]
CpusPerClient = Annotated[int, option("cpus-per-client", "N", "CPUs for each client while it works (default 1).")]
GpusPerClient = Annotated[
    float, option("gpus-per-client", "SHARE", "Share of a GPU for each client while it works (default 0).")
]


def show_versions(asked: bool) -> None:
    """Print the versions of this package and of those that results depend on, if asked, and end."""
    if asked:
        show(", ".join(f"{package} {version}" for package, version in run_files.versions().items()))
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=show_versions, is_eager=True, help="Show versions of packages and exit."),
    ] = False,
) -> None:
    """Take the options of `kindred` itself."""


@app.command()
def run(
    strategy: Annotated[str | None, option("strategy", "NAME", "The method; see `kindred strategies`.")] = None,
    dataset: Dataset = None,
    data_dir: DataDir = None,
    partition: Partition = None,
    clients: Clients = None,
    rounds: Rounds = None,
    metric: MetricName = None,
    seed: Annotated[str | None, option("seed", "N", "Seed of all random draws.")] = None,
    output_dir: Annotated[
        str | None, option("output-dir", "PATH", "Folder in which the run makes its own folder.")
    ] = None,
    settings: Annotated[
        list[str] | None, option("set", "KEY=VALUE", "Any setting of docs/configuration.md; may be repeated.")
    ] = None,
    engine: EngineChoice = "local",
    workers: Workers = 0,
    cpus_per_client: CpusPerClient = 1,
    gpus_per_client: GpusPerClient = 0.0,
    resume: Annotated[Path | None, option("resume", "DIR", "Continue the interrupted run in this folder.")] = None,
    against: Annotated[
        str, option("against", "NAMES", "Methods to run afterwards, for comparison: local,fedavg.")
    ] = "",
    track: Annotated[str, option("track", "NAME", "Copy the finished run into mlflow or tensorboard.")] = "",
) -> None:
    """Run a federation on this machine."""
    named = {
        "strategy": strategy, "dataset": dataset, "data-dir": data_dir, "partition": partition,
        "num-clients": clients, "num-rounds": rounds, "metric": metric, "seed": seed,
        "output-dir": output_dir,
    }  # fmt: skip
    try:
        with display.displayed("starting") as shown:
            given = given_settings(named, settings or [])
            checked = run_files.run_settings(given, resume)
            # PyTorch is imported only here, so that a bad setting is reported at once.
            where = engines.Engine(engine, cpus_per_client, gpus_per_client, workers)
            others = [name.strip() for name in against.split(",") if name.strip()]
            results = runs.run_methods(checked, others, where, shown.show, track, given)
    except (config.ConfigError, data.DataError) as error:
        end(2, str(error))
    except run_log.RunFailed as error:
        end(error.code, str(error))
    except KeyboardInterrupt as error:
        end(130, str(error) or "ended by SIGINT")
    _print_results([result.folder for result in results])


@app.command()
def compare(
    strategies: Annotated[
        str,
        option(
            "strategies",
            "NAMES",
            "Methods: local,fedavg,heurfedamp. Add your own NAME for a variant, with --set NAME:strategy=METHOD.",
        ),
    ] = "",
    preset: Annotated[str, option("preset", "NAME", "A paper's settings and numbers; see `kindred presets`.")] = "",
    dataset: Dataset = None,
    data_dir: DataDir = None,
    partition: Partition = None,
    clients: Clients = None,
    rounds: Rounds = None,
    metric: MetricName = None,
    seeds: Annotated[
        str | None, option("seeds", "LIST", "Seeds; every method runs once with each: 0,1,2 (default 0).")
    ] = None,
    settings: Annotated[
        list[str] | None,
        option(
            "set",
            "KEY=VALUE",
            "Any setting of docs/configuration.md, for all methods; NAME:KEY=VALUE: for one method. May be repeated.",
        ),
    ] = None,
    vary: Annotated[
        list[str] | None,
        option("vary", "KEY=VALUES", "Run each method with each of these values of a setting: num-neighbours=1,2,5."),
    ] = None,
    scale: Annotated[
        float,
        option(
            "scale",
            "X",
            "Use only this fraction of the rounds and of each client's samples, for a small machine (default 1).",
        ),
    ] = 1.0,
    reference: Annotated[
        str, option("reference", "NAME", "The method that the others are tested against (default: the first).")
    ] = "",
    output_dir: Annotated[
        str | None, option("output-dir", "PATH", "Folder of the runs; finished runs in it are not repeated.")
    ] = None,
    engine: EngineChoice = "local",
    workers: Workers = 0,
    cpus_per_client: CpusPerClient = 1,
    gpus_per_client: GpusPerClient = 0.0,
    jobs: Annotated[
        int, option("jobs", "N", "Runs at once, each with its share of the workers and of the memory (default 1).")
    ] = 1,
) -> None:
    """Run methods with the same data and seeds, and print their results side by side.

    After an interruption the same command continues.
    """
    named = {
        "dataset": dataset, "data-dir": data_dir, "partition": partition, "num-clients": clients,
        "num-rounds": rounds, "metric": metric, "output-dir": output_dir,
    }  # fmt: skip
    try:
        for_all: list[str] = []
        own: dict[str, list[str]] = {}
        for assignment in settings or []:
            name, colon, rest = assignment.partition(":")
            if colon and "=" not in name and "=" in rest:
                own.setdefault(name, []).append(rest)
            else:
                for_all.append(assignment)
        with display.displayed("starting", at_once=jobs > 1) as shown:
            result, code = runs.compare_methods(
                [name.strip() for name in strategies.split(",") if name.strip()],
                given_settings(named, for_all),
                {name: given_settings({}, assignments) for name, assignments in own.items()},
                seeds=_whole_numbers("--seeds", seeds), reference=reference, scale=scale, preset=preset,
                vary=_varied(vary or []),
                engine=engines.Engine(engine, cpus_per_client, gpus_per_client, workers, jobs),
                on_line=shown.show, command=["kindred", *sys.argv[1:]],
            )  # fmt: skip
    except (config.ConfigError, data.DataError) as error:
        end(2, str(error))

    print(f"\n{result.content['title']}")
    for (first, *titles), *lines in texts.tables(result.content):
        print_table([Column(title) for title in (first, *titles)], lines)
    for line in texts.remarks(result.content):
        print(line)
    try:
        result.save()
    except OSError as error:
        reason = f"the comparison cannot be written to {result.folder} ({error.strerror or error})"
        end(1, f"{reason}; make room there, then repeat the command")
    print(f"comparison in {result.folder}")
    if code:
        raise typer.Exit(code)


@app.command()
def presets() -> None:
    """List the presets, papers' settings for `kindred compare --preset`."""
    every = [papers.load_preset(name) for name in papers.preset_names()]
    print_table(
        (
            Column("preset"),
            number("methods"),
            number("rounds"),
            number("seeds"),
            Column("from", whole=False),
        ),
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
    columns = (
        "strategy",
        "method",
        "from",
        "what travels in a round",
        "what stays at the client",
        "mixed networks",
        "public samples",
    )
    print_table(
        text_columns(*columns),
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
    print_table(
        text_columns("dataset", "samples"), ((name, source.description) for name, source in data.DATASETS.items())
    )
    print_table(
        text_columns("partition", "who has what", "settings that count"),
        ((name, scheme.description, ", ".join(scheme.settings)) for name, scheme in data.PARTITIONS.items()),
    )
    print_table(text_columns("model", "network"), ((name, _beginning(model)) for name, model in models.MODELS.items()))


def _beginning(thing: Any) -> str:
    """Return the first paragraph of a docstring, in one line."""
    return " ".join((thing.__doc__ or "").partition("\n\n")[0].split())


def main() -> None:
    """Run the command line."""
    try:
        check_flower()
    except ImportError as error:
        end(2, str(error))
    atexit.register(gc.freeze)  # the garbage collection at the interpreter's end would take most of a second
    try:
        all_commands = commands.app  # imports them
    except KeyboardInterrupt:
        sys.exit(130)
    all_commands(prog_name="kindred")


def given_settings(named: Mapping[str, str | None], assignments: Sequence[str]) -> dict[str, Any]:
    """Return the settings in a command's options and its --set, parsed by type; ConfigError if one is invalid."""
    texts = {key: text for key, text in named.items() if text is not None}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not key or not equals:
            raise config.ConfigError(f"--set is {assignment!r}, allowed: key=value")
        name, colon, own = key.partition(":")
        if colon:  # `compare` has taken these out
            raise config.ConfigError(
                f"--set is {assignment!r}, allowed: {own}={text}; NAME:KEY=VALUE, a setting of one method of several, "
                f"is for `kindred compare`"
            )
        if key in texts:
            raise config.ConfigError(f"{key} is given twice: {texts[key]!r} and {text!r}")
        texts[key] = text
    return {key: config.SETTINGS[key].parse(text) if key in config.SETTINGS else text for key, text in texts.items()}


def _varied(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Return the setting and the values of --vary, parsed by type; ConfigError if it is not written as one."""
    vary: dict[str, list[Any]] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        if not equals or key in vary:
            raise config.ConfigError(f"--vary is {text!r}, allowed: once, key=value,value")
        vary[key] = [given_settings({key: value.strip()}, [])[key] for value in values.split(",")]
    return vary


def _whole_numbers(option: str, text: str | None) -> list[int]:
    try:
        return [] if text is None else [int(word) for word in text.split(",")]
    except ValueError:
        raise config.ConfigError(f"{option} is {text!r}, allowed: whole numbers separated by commas") from None


def _print_results(folders: Sequence[Path]) -> None:
    """Print the results of the runs side by side; draw the accuracies of several into the first run's folder."""
    print()
    if len(folders) > 1:
        summary.compare_runs(folders, folders[0] / "comparison.png")
    elif folders:
        print_table(*summary.comparison_table([run_files.read_summary(folders[0])]))


def _yes_or_no(value: bool) -> str:
    return "yes" if value else "no"
