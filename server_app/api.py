"""The Python interface: `kindred.run` and `kindred.compare`, like the commands of these names."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from kindred.data import DATASETS
from kindred.settings import kebab, meant_by

from . import config
from .comparison.result import ComparisonResult
from .config import ConfigError
from .engines import Engine
from .run_files import run_settings
from .run_log import RunFailed
from .run_result import RunResult
from .runs import compare_methods, run_methods

# Arguments whose names differ from their settings'.
SETTINGS = {"method": "strategy", "clients": "num-clients", "rounds": "num-rounds", "output": "output-dir"}


def run(
    method: str | None = None,
    data: str | os.PathLike[str] | None = None,
    *,
    clients: int | None = None,
    rounds: int | None = None,
    seed: int | None = None,
    partition: str | None = None,
    output: str | os.PathLike[str] | None = None,
    resume: str | os.PathLike[str] | None = None,
    engine: str = "inline",
    workers: int = 0,
    cpus_per_client: int = 1,
    gpus_per_client: float = 0.0,
    track: str = "",
    progress: bool = True,
    **settings: Any,
) -> RunResult:
    """Run a federation on this machine.

    Parameters
    ----------
    method : str
        A name of `kindred.REGISTRY`.
    data : str or path
        A dataset's name; an .npz file with x_train, y_train, x_test and y_test, or x and y; or a .csv file.
    clients : int
        Number of clients among which the data are divided.
    rounds : int
        Rounds of training.
    seed : int
        Seed of all random draws.
    partition : str
        How clients' data differ.
    output : path
        Folder in which the run makes its own folder; by default "results".
    resume : path
        Folder of an interrupted run, to continue.
    engine : str
        "inline": in this process. "local": clients in parallel, in worker processes. "flower": clients in parallel, in
        Flower's simulation engine; call it from the main thread.
    workers : int
        Processes of "local"; 0: as many as CPUs and memory allow.
    cpus_per_client : int
        CPUs for each client while it works.
    gpus_per_client : float
        Fraction of a GPU for each client while it works.
    track : {"", "mlflow", "tensorboard"}
        The tool into which the finished run is copied.
    progress : bool
        Whether to print lines of progress; if not, only problems are shown, as warnings.
    **settings
        Any other setting of docs/configuration.md by its name in snake_case: sigma=1.0, local_epochs=1.

    Returns
    -------
    RunResult

    Raises
    ------
    ConfigError, DataError
        A setting does not exist, a value is out of its range, or data cannot be used; the text is one line.
    RunFailed
        The run did not finish.
    """
    with _named_like_arguments():
        given = _given(
            {
                "method": method, "clients": clients, "rounds": rounds, "seed": seed, "partition": partition,
                "output": output, **_data(data),
            },
            settings,
        )  # fmt: skip
        where = Engine(engine, cpus_per_client, gpus_per_client, workers)
        (result,) = run_methods(run_settings(given, resume), (), where, _printed if progress else _warned, track, given)
    return result


def compare(
    methods: Sequence[str] | Mapping[str, Mapping[str, Any]] = (),
    data: str | os.PathLike[str] | None = None,
    *,
    seeds: Sequence[int] = (),
    clients: int | None = None,
    rounds: int | None = None,
    partition: str | None = None,
    preset: str = "",
    vary: Mapping[str, Sequence[Any]] | None = None,
    reference: str = "",
    scale: float = 1.0,
    output: str | os.PathLike[str] | None = None,
    engine: str = "inline",
    workers: int = 0,
    cpus_per_client: int = 1,
    gpus_per_client: float = 0.0,
    jobs: int = 1,
    progress: bool = True,
    **settings: Any,
) -> ComparisonResult:
    """Run methods with the same data and seeds; finished runs in the output folder are not repeated.

    Parameters
    ----------
    methods : sequence of str, or mapping
        The methods; or name -> settings of this method alone. "method" names the method if the name is your own:
        {"fedavg": {}, "narrow": {"method": "fedamp", "sigma": 0.1}}. By default the preset's.
    seeds : sequence of int
        Every method runs once with each seed; by default the preset's, else 0.
    preset : str
        A paper's settings and numbers; `kindred presets` lists them.
    vary : mapping
        A setting's name in snake_case -> two or more values: {"num_neighbours": [1, 2, 5]}. Each method that uses the
        setting runs once with each value, under a name such as "federico-5". By default the preset's.
    reference : str
        The method that the others are tested against; by default the first.
    scale : float
        Fraction of the rounds and of each client's samples that is used, for a small machine: above 0, at most 1.
    jobs : int
        Runs at once, each with its share of the workers and of the memory. More than one start processes: a script then
        needs ``if __name__ == "__main__":`` around the call, which is made in the main thread.
    data, clients, rounds, partition, output, engine, workers, cpus_per_client, gpus_per_client, progress, **settings
        As in `run`.

    Returns
    -------
    ComparisonResult
        Its `failed` names the runs that failed, if only some did.

    Raises
    ------
    ConfigError, DataError
        A setting does not exist, a value is out of its range, or data cannot be used; the text is one line.
    RunFailed
        None of the runs finished.
    OSError
        The files of the comparison cannot be written.
    """
    if isinstance(methods, str) or not isinstance(methods, Iterable):
        raise ConfigError(f"methods is {methods!r}, allowed: a list of names, or a mapping from names to settings")
    if isinstance(seeds, str) or not isinstance(seeds, Iterable):
        raise ConfigError(f"seeds is {seeds!r}, allowed: a list of whole numbers")
    with _named_like_arguments():
        own = {name: _given({}, each) for name, each in methods.items()} if isinstance(methods, Mapping) else {}
        given = _given(
            {"clients": clients, "rounds": rounds, "partition": partition, "output": output, **_data(data)}, settings
        )
        varied = _varied({} if vary is None else vary)
        names, plain_seeds = list(methods), [_plain(seed) for seed in seeds]
        result, code = compare_methods(
            names, given, own, seeds=plain_seeds, reference=reference, scale=scale, preset=preset, vary=varied,
            engine=Engine(engine, cpus_per_client, gpus_per_client, workers, jobs),
            on_line=_printed if progress else _warned,
            command=_command(names, given, own, plain_seeds, preset, reference, scale, varied),
        )  # fmt: skip
    result.save()
    if code >= 128:
        raise KeyboardInterrupt(f"interrupted; the same call continues, results so far are in {result.folder}")
    if result.failed and not result.runs:
        raise RunFailed(code, next(iter(result.failed.values())))
    return result


@contextmanager
def _named_like_arguments() -> Iterator[None]:
    """Name arguments of Python, not options of a command, in the text of a ConfigError."""
    try:
        yield
    except ConfigError as error:
        text = str(error).replace("--strategies", "methods").replace("--set ", "")
        text = re.sub(r"(?<!\S)--([a-z]+(?:-[a-z]+)*)", lambda option: option[1].replace("-", "_"), text)
        raise ConfigError(text) from None


def _data(data: Any) -> dict[str, Any]:
    """Return the settings that select the data."""
    if data is None or isinstance(data, str) and (data in DATASETS or not data.lower().endswith((".npz", ".csv"))):
        return {"dataset": data}
    if isinstance(data, str | os.PathLike):
        return {"dataset": "csv" if os.fspath(data).lower().endswith(".csv") else "npz", "data_dir": data}
    raise ConfigError(f"data is {data!r}, allowed: a dataset's name, or the path of an .npz or .csv file")


def _varied(vary: Any) -> dict[str, list[Any]]:
    """Return the values of each varied setting, kebab-case."""
    if not isinstance(vary, Mapping) or any(
        isinstance(each, str) or not isinstance(each, Iterable) for each in vary.values()
    ):
        raise ConfigError(f"vary is {vary!r}, allowed: a mapping from a setting to a list of values")
    return {SETTINGS.get(name, kebab(name)): [_plain(value) for value in values] for name, values in vary.items()}


def _given(named: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings, kebab-case, from arguments; a named argument of None counts as not given."""
    given: dict[str, Any] = {}
    for name, value in [*((name, each) for name, each in named.items() if each is not None), *settings.items()]:
        key = SETTINGS.get(name, kebab(name))
        if key not in config.SETTINGS and (meant := meant_by(name, named)) and key not in config.added_settings():
            raise ConfigError(f"unknown setting {name}; did you mean {meant}?")
        if key in given:
            raise ConfigError(f"{key} is given twice: {given[key]!r} and {_plain(value)!r}")
        given[key] = _plain(value)
    return given


def _plain(value: Any) -> Any:
    """Return a NumPy number as a Python number and a path as text; other values unchanged."""
    if isinstance(value, np.generic):
        return value.item()
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _command(
    names: Sequence[str],
    given: Mapping[str, Any],
    own: Mapping[str, Mapping[str, Any]],
    seeds: Sequence[int],
    preset: str,
    reference: str,
    scale: float,
    vary: Mapping[str, Sequence[Any]],
) -> list[str]:
    """Return the words of the equivalent command."""

    def text(value: Any) -> str:
        return str(value).lower() if isinstance(value, bool) else str(value)

    options = {
        "strategies": ",".join(names), "preset": preset, "seeds": ",".join(map(str, seeds)), "reference": reference,
        "scale": "" if scale == 1 else f"{scale:g}",
    }  # fmt: skip
    words = [f"--{name}={value}" for name, value in options.items() if value]
    words += [f"--vary={key}={','.join(map(text, values))}" for key, values in vary.items()]
    words += [f"--set={key}={text(value)}" for key, value in given.items()]
    words += [f"--set={name}:{key}={text(value)}" for name, each in own.items() for key, value in each.items()]
    return ["kindred", "compare", *words]


def _printed(line: str) -> None:
    print(line, flush=True)


def _warned(line: str) -> None:
    """Turn lines about problems into warnings, and drop all other lines."""
    if line.startswith(("warning: ", "error: ", "critical: ")) or ": failed, " in line:
        warnings.warn(line, stacklevel=2)
