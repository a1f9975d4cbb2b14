"""Runs and comparisons from settings, for `kindred run` and `compare` and for the Python functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kindred.data import DataError, Federation, load_federation

from . import tracking
from .app import metric_remarks
from .checks import check, check_machine, check_method
from .comparison.plan import make_plan
from .comparison.result import ComparisonResult
from .comparison.runs import carry_out
from .comparison.statistics import LOCAL
from .config import Config, ConfigError, unused
from .engines import Engine, execute
from .jobs import execute_runs
from .presets import load_preset
from .run_log import Outcome, RunFailed
from .run_result import RunResult
from .schema_text import schema_lines
from .verdict import paired_gains, verdict_of


def run_methods(
    config: Config,
    against: Iterable[str],
    engine: Engine,
    on_line: Callable[[str], None],
    track: str = "",
    given: Iterable[str] = (),
) -> list[RunResult]:
    """Run a method, then others with the same settings.

    Parameters
    ----------
    config : Config
    against : iterable of str
        The other methods. After a run in Flower's engine they run in engine "local".
    engine : Engine
    on_line : callable
        Called with each line of progress.
    track : str
        A tool of `tracking.TOOLS` into which the runs are copied; "" for none.
    given : iterable of str
        The settings that were not left at their defaults; those that no method uses are named.

    Raises
    ------
    ConfigError, DataError
        The settings, the data or the machine must be changed. Nothing was run, unless a run itself raised it.
    RunFailed
        A run failed.
    KeyboardInterrupt
        SIGINT ended a run.
    """
    others = [config.for_method(name) for name in dict.fromkeys(against) if name != config.strategy]
    check([config, *others], engine)
    if track:
        tracking.check_tool(track)
    for line in unused([*given], [config, *others]):
        on_line(line)
    on_line(f"{config.strategy} on {config.dataset}, {config.partition}, {config.num_clients} clients")
    _describe(config, on_line)
    results = [_result(execute(config, engine, on_line))]
    here = replace(engine, name="local") if engine.name == "flower" else engine
    for other in others:
        on_line(f"\n{other.strategy}")
        results.append(_result(execute(other, here, on_line)))
    _judge(results, on_line)
    for result in results if track else ():
        on_line(tracking.track(result, track))
    return results


def _judge(results: Sequence[RunResult], on_line: Callable[[str], None]) -> None:
    """Add the verdict to the results of each method that ran beside `local`, and print all verdicts."""
    alone = next((each for each in results if each.settings["strategy"] == LOCAL), None)
    for result in results:
        if alone and result is not alone:
            objective = load_federation(result.settings).task.objective
            gains = paired_gains(result.folder, alone.folder, objective, result.settings["seed"])
            if found := verdict_of(gains, result.settings["seed"]):
                result.add_verdict(found)
        if verdict := result.summary.get("verdict"):
            on_line(f"\n{result.settings['strategy']}: {verdict['sentence']}")


def _describe(config: Config, on_line: Callable[[str], None]) -> None:
    """Print the schema of data that are no images, and remarks: on the data, on the batch size, on the metric."""
    federation = load_federation(config.run_config())
    lines = [] if federation.task.inputs.kind == "image" else schema_lines(federation.task)
    for line in (*lines, *federation.remarks, *_batch_remarks(config, federation), *metric_remarks(config, federation)):
        on_line(line)


def _batch_remarks(config: Config, federation: Federation) -> list[str]:
    largest = int(federation.train_sizes.max())
    if config.batch_size <= largest:
        return []
    return [f"batch-size is {config.batch_size}, and no client has more than {largest} training samples"]


def _result(outcome: Outcome) -> RunResult:
    if outcome.code == 0 and outcome.results:
        return RunResult(outcome.results)
    if outcome.code == 2:
        raise ConfigError(outcome.reason)
    if outcome.code == 130:
        raise KeyboardInterrupt(outcome.reason)
    raise RunFailed(outcome.code, outcome.reason) from outcome.error


def compare_methods(
    names: Sequence[str],
    given: Mapping[str, Any],
    own: Mapping[str, Mapping[str, Any]],
    *,
    seeds: Sequence[int],
    reference: str,
    scale: float,
    preset: str,
    vary: Mapping[str, Sequence[Any]],
    engine: Engine,
    on_line: Callable[[str], None],
    command: Sequence[str],
) -> tuple[ComparisonResult, int]:
    """Run methods with the same data and seeds; finished runs are not repeated.

    Parameters
    ----------
    names, given, own, seeds, reference, scale, vary
        As in `make_plan`.
    preset : str
        The name of a preset, or "".
    engine : Engine
    on_line : callable
        Called with each line of progress.
    command : sequence of str
        The words of an equivalent command, for the record.

    Returns
    -------
    result : ComparisonResult
        Its files have not been written yet.
    code : int
        0: every run is finished. 1: some failed. 128 + n: ended by signal n; the result has the runs up to then.

    Raises
    ------
    ConfigError, DataError
        The settings, the data or the machine must be changed: no method can be run, and nothing was run.
    """
    plan = make_plan(
        names, given, own, seeds=seeds, reference=reference, scale=scale, vary=vary,
        preset=load_preset(preset) if preset else None,
    )  # fmt: skip
    for _, config in plan.runs:
        check_machine(config, engine)
    unusable: dict[str, ConfigError | DataError] = {}
    for name, config in plan.configs.items():
        try:
            check_method(config)
        except (ConfigError, DataError) as error:
            unusable[name] = error
    if len(unusable) == len(plan.configs):
        raise next(iter(unusable.values()))
    on_line(f"{plan.title}: {', '.join(plan.configs)}")
    for line in unused([*given], [*plan.configs.values()]):
        on_line(line)
    _describe(next(config for name, config in plan.configs.items() if name not in unusable), on_line)
    reasons = {name: str(error) for name, error in unusable.items()}
    engine = replace(engine, jobs=min(engine.jobs, len(plan.runs)))
    content, code = carry_out(plan, lambda runs: execute_runs(runs, engine, on_line), on_line, reasons, command)
    return ComparisonResult(content, plan.folder), code
