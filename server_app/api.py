"""The Python entrance: `kindred.run` and `kindred.compare`, as short as the commands of these names."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from kindred.data import DATASETS
from kindred.settings import kebab

from .comparison.result import ComparisonResult
from .config import ConfigError
from .engines import Engine
from .run_files import run_settings
from .run_log import RunFailed
from .run_result import RunResult
from .runs import compare_methods, run_methods

# Arguments that have a plainer name than their setting.
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
    cpus_per_client: int = 1,
    gpus_per_client: float = 0.0,
    progress: bool = True,
    **settings: Any,
) -> RunResult:
    """Run a federation on this machine.

    Parameters
    ----------
    method : str
        A name of `kindred.REGISTRY`.
    data : str or path
        A dataset's name, or an .npz file with x_train, y_train, x_test and y_test.
    clients : int
        Clients among whom the data are divided.
    rounds : int
        Rounds of training.
    seed : int
        Seed of everything random.
    partition : str
        How clients' data differ.
    output : path
        Folder in which the run makes a folder of its own; by default "results".
    resume : path
        The folder of a run that was cut short, to go on with.
    engine : str
        "inline": in this process. "flower": in Flower's simulation engine, clients in parallel; to be called in the
        main thread.
    cpus_per_client : int
        CPUs that a client at work has.
    gpus_per_client : float
        Share of a GPU that a client at work has ("flower").
    progress : bool
        Whether to print the lines of progress; without them, what goes wrong is a warning.
    **settings
        Any other setting of docs/configuration.md by its name in snake_case: sigma=1.0, local_epochs=1.

    Returns
    -------
    RunResult

    Raises
    ------
    ConfigError, DataError
        A setting that there is not, a value out of its range, data that cannot be used; the text is one line.
    RunFailed
        The run did not come to its end.
    """
    given = _given(
        {
            "method": method, "clients": clients, "rounds": rounds, "seed": seed, "partition": partition,
            "output": output, **_data(data),
        },
        settings,
    )  # fmt: skip
    where = Engine(engine, cpus_per_client, gpus_per_client)
    (result,) = run_methods(run_settings(given, resume), (), where, _printed if progress else _warned)
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
    reference: str = "",
    scale: float = 1.0,
    output: str | os.PathLike[str] | None = None,
    engine: str = "inline",
    cpus_per_client: int = 1,
    gpus_per_client: float = 0.0,
    progress: bool = True,
    **settings: Any,
) -> ComparisonResult:
    """Run methods with the same data and seeds; what is in the folder of the runs is not run again.

    Parameters
    ----------
    methods : sequence of str, or mapping
        The methods; or name -> settings of this method alone, where "method" says which one a name of your own is:
        {"fedavg": {}, "narrow": {"method": "fedamp", "sigma": 0.1}}. By default the preset's.
    seeds : sequence of int
        Each of a run of every method; by default the preset's, else 0.
    preset : str
        A paper's settings and numbers; `kindred presets` lists them.
    reference : str
        The method that the others are tested against; by default the first.
    scale : float
        The part of the rounds and of the images a client that is taken, for a small machine: above 0, at most 1.
    data, clients, rounds, partition, output, engine, cpus_per_client, gpus_per_client, progress, **settings
        As of `run`.

    Returns
    -------
    ComparisonResult
        Also where some of the runs failed, which its `failed` names.

    Raises
    ------
    ConfigError, DataError
        A setting that there is not, a value out of its range, data that cannot be used; the text is one line.
    RunFailed
        None of the runs came to its end.
    OSError
        The files of the comparison cannot be written.
    """
    if isinstance(methods, str) or not isinstance(methods, Iterable):
        raise ConfigError(f"methods is {methods!r}, allowed: a list of names, or a mapping from names to settings")
    if isinstance(seeds, str) or not isinstance(seeds, Iterable):
        raise ConfigError(f"seeds is {seeds!r}, allowed: a list of whole numbers")
    own = {name: _given({}, each) for name, each in methods.items()} if isinstance(methods, Mapping) else {}
    given = _given(
        {"clients": clients, "rounds": rounds, "partition": partition, "output": output, **_data(data)}, settings
    )
    names, plain_seeds = list(methods), [_plain(seed) for seed in seeds]
    result, code = compare_methods(
        names, given, own, seeds=plain_seeds, reference=reference, scale=scale, preset=preset,
        engine=Engine(engine, cpus_per_client, gpus_per_client), on_line=_printed if progress else _warned,
        command=_command(names, given, own, plain_seeds, preset, reference, scale),
    )  # fmt: skip
    result.save()
    if code >= 128:
        raise KeyboardInterrupt(f"the same call goes on; what there is by now is in {result.folder}")
    if result.failed and not result.runs:
        raise RunFailed(code, next(iter(result.failed.values())))
    return result


def _data(data: Any) -> dict[str, Any]:
    """Return the settings that say which data they are."""
    if data is None or isinstance(data, str) and (data in DATASETS or not data.endswith(".npz")):
        return {"dataset": data}
    if isinstance(data, str | os.PathLike):
        return {"dataset": "npz", "data_dir": data}
    raise ConfigError(f"data is a {type(data).__name__}, allowed: a dataset's name, or the path of an .npz file")


def _given(named: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings, kebab-case, from arguments; a named one that is None is not given."""
    given: dict[str, Any] = {}
    for name, value in [*((name, each) for name, each in named.items() if each is not None), *settings.items()]:
        key = SETTINGS.get(name, kebab(name))
        if key in given:
            raise ConfigError(f"{key} is given twice: {given[key]!r} and {_plain(value)!r}")
        given[key] = _plain(value)
    return given


def _plain(value: Any) -> Any:
    """Return numbers of numpy as Python's, and paths as texts."""
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
) -> list[str]:
    """Return the words of the command that does the same."""

    def text(value: Any) -> str:
        return str(value).lower() if isinstance(value, bool) else str(value)

    options = {
        "strategies": ",".join(names), "preset": preset, "seeds": ",".join(map(str, seeds)), "reference": reference,
        "scale": "" if scale == 1 else f"{scale:g}",
    }  # fmt: skip
    words = [f"--{name}={value}" for name, value in options.items() if value]
    words += [f"--set={key}={text(value)}" for key, value in given.items()]
    words += [f"--set={name}:{key}={text(value)}" for name, each in own.items() for key, value in each.items()]
    return ["kindred", "compare", *words]


def _printed(line: str) -> None:
    print(line, flush=True)


def _warned(line: str) -> None:
    """Have what goes wrong be a warning, and leave out all other lines."""
    if line.startswith(("warning: ", "error: ", "critical: ")) or ": failed, " in line:
        warnings.warn(line, stacklevel=2)
