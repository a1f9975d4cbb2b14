"""Which method for these clients? Methods run with the same data and seeds, and what came out side by side.

A comparison is a `Plan`: names with the settings of each, and seeds. `carry_out` runs what has not been run yet and
gives the content of comparison.json; the tables, the CSV file, the Markdown file and the picture are made of that
alone. A run is known by the hash of its settings and images, so that whatever lies in `output-dir` is not run again,
whoever ran it, and what was cut short is gone on with.

    compare-WHAT-HASH/comparison.json   everything; the same comparison always has the same folder
    compare-WHAT-HASH/comparison.csv    a line for each run, and for the mean and deviation of each method
    compare-WHAT-HASH/comparison.md     the table, settings, runs and notes, to be read
    compare-WHAT-HASH/comparison.png    accuracy over rounds, mean and deviation over seeds
    compare-WHAT-HASH/report.html       all of it in one page
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import wilcoxon

from kindred.client.state import replacing
from kindred.data import DATASETS, PARTITIONS, DataError, load_federation
from kindred.data.federation import KEYS

from .app import images_of
from .config import Config, ConfigError
from .presets import Preset
from .report.content import REPORT, write_report
from .report.figures import comparison_figure
from .results import (
    _read_config,
    _versions,
    failing_is_a_warning,
    is_finished,
    read_summary,
    save_figure,
    table_lines,
    what_data,
    write_json,
)
from .simulation import Outcome
from .tables import read_table

LOCAL = "local"  # the name of the method that every client's accuracy is held against
SHARED = (*KEYS, "seed", "output-dir", "resume")  # settings in which methods that are compared cannot differ
BESIDE = ("output-dir", "resume", "checkpoint-every", "keep-checkpoints")  # settings that change no result
IN_ROUNDS = ("num-rounds", "alpha-decay-every", "warmup-rounds")  # what a scale shrinks, besides images
LEAST_ROUNDS, LEAST_IMAGES = 2, 10  # below which a scale does not go
INTERRUPTED = 128  # codes from here on are signals


class Metric(NamedTuple):
    """A number of a run: in tables it is multiplied by `factor` and has `digits` after the point."""

    title: str
    meaning: str
    factor: float
    digits: int


METRICS = {
    "accuracy-best": Metric("best %", "mean test accuracy over clients, in the best round (BMTA)", 100, 1),
    "accuracy": Metric("last %", "mean test accuracy over clients, in the end", 100, 1),
    "accuracy-weighted": Metric("by size %", "the same, clients weighted by their test images", 100, 1),
    "accuracy-p10": Metric("bottom decile %", "accuracy below which a tenth of the clients lie, in the end", 100, 1),
    "better-than-local": Metric(
        "above local %", "share of the clients that are better than with local, in the end", 100, 1
    ),
    "bytes": Metric("MB", "payload of all messages, both ways, 10^6 bytes", 1e-6, 1),
    "floats": Metric("numbers sent", "numbers sent both ways, in millions, as PerFed-CKT's paper counts them", 1e-6, 1),
    "samples-trained": Metric(
        "trained, 1000s", "images that clients trained on, each time counted, in thousands", 1e-3, 1
    ),
    "samples-predicted": Metric(
        "predicted, 1000s", "images that clients predicted for, other than to evaluate or train, in thousands", 1e-3, 1
    ),
    "seconds": Metric("seconds", "of the rounds, without start and end", 1, 1),
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is compared.

    Attributes
    ----------
    common : Config
        What all methods have.
    configs : dict
        The methods' names, in order, and the settings of each with the first seed.
    own : dict
        name -> the settings, kebab-case, that were given for this method alone.
    seeds : list of int
    reference : str
        The name that the others are tested against.
    scale : float
    scaled : dict
        setting -> its value before and after scaling.
    preset : Preset, optional
    changed : dict
        setting, or name:setting -> what the command says in place of the preset.
    """

    common: Config
    configs: dict[str, Config]
    own: dict[str, dict[str, Any]]
    seeds: list[int]
    reference: str
    scale: float
    scaled: dict[str, list[float]]
    preset: Preset | None
    changed: dict[str, Any]

    @property
    def what(self) -> str:
        """The preset, or the data."""
        return self.preset.name if self.preset else what_data(self.common.run_config())

    @property
    def title(self) -> str:
        """In a line: what is compared, with which seeds, at which scale."""
        seeds = f"seed{'s' if len(self.seeds) > 1 else ''} {', '.join(map(str, self.seeds))}"
        return f"{self.what}, {seeds}" + (f", scale {self.scale:g}" if self.scale != 1 else "")

    @property
    def runs(self) -> list[tuple[str, Config]]:
        """The name and the settings of every run, seed by seed, so that there is soon something whole."""
        return [(name, replace(config, seed=seed)) for seed in self.seeds for name, config in self.configs.items()]

    @property
    def folder(self) -> Path:
        """Where the comparison is written: always the same for the same runs and reference."""
        runs = [(name, run_hash(config.run_config())) for name, config in self.configs.items()]
        key = sha256(json.dumps([runs, self.seeds, self.reference, self.scale]).encode()).hexdigest()[:8]
        return Path(self.common.output_dir) / f"compare-{self.what.replace(', ', '-')}-{key}"


def make_plan(
    names: Sequence[str],
    given: Mapping[str, Any],
    own: Mapping[str, Mapping[str, Any]],
    *,
    seeds: Sequence[int] = (),
    reference: str = "",
    scale: float = 1.0,
    preset: Preset | None = None,
) -> Plan:
    """Put together what a command and a preset say; what the command says counts.

    Parameters
    ----------
    names : sequence of str
        Methods, or names whose own settings say which method they are. None: the preset's.
    given : mapping
        Settings for all, kebab-case.
    own : mapping
        name -> settings for it alone.
    seeds : sequence of int
        None: the preset's, else 0.
    reference : str
        "": the preset's if it is among the names, else the first.
    scale : float
        More than 0, at most 1: the part of the rounds and of the images that is taken.
    preset : Preset, optional

    Raises
    ------
    ConfigError, DataError
        What cannot be compared.
    """
    from_preset = preset.strategies if preset else {}
    names = list(dict.fromkeys(names or from_preset))
    if not names:
        raise ConfigError(
            "--strategies is not given, allowed: names of `kindred strategies`, separated by commas; or give a --preset"
        )
    for name in names:
        if not re.fullmatch(r"[\w.+-]+", name):
            raise ConfigError(f"--strategies has {name!r}, allowed: letters, digits and . _ + -")
    if not 0 < scale <= 1:
        raise ConfigError(f"--scale is {scale:g}, allowed: more than 0, at most 1")
    if stray := [name for name in own if name not in names]:
        raise ConfigError(f"--set {stray[0]}: is for no method that is compared; these are {', '.join(names)}")
    for key, instead in (("strategy", "--strategies"), ("seed", "--seeds"), ("resume", "the command again")):
        if key in given or key != "strategy" and any(key in alone for alone in own.values()):
            raise ConfigError(f"--set {key} is not for a comparison: use {instead}")
    reference = reference or (preset.reference if preset and preset.reference in names else names[0])
    if reference not in names:
        raise ConfigError(f"--reference is {reference!r}, allowed: {', '.join(names)}")
    seeds = list(dict.fromkeys(seeds)) or (preset.seeds if preset else [0])

    base = dict(preset.settings) if preset else {}
    common = Config.from_run_config({**base, **given, "seed": seeds[0]}).absolute()
    configs, own_settings = {}, {}
    for name in names:
        alone = dict(own.get(name, {}))
        if shared := [key for key in alone if key in SHARED]:
            raise ConfigError(
                f"--set {name}:{shared[0]} is for one method alone, allowed: for all, --set "
                f"{shared[0]}={alone[shared[0]]}; what is compared has the same data and seeds"
            )
        listed = {key: value for key, value in from_preset.get(name, {}).items() if key not in given}
        settings = {"strategy": name, **base, **listed, **given, **alone}
        configs[name] = Config.from_run_config({**settings, "seed": seeds[0]}).absolute()
        own_settings[name] = [key for key in {**listed, **alone} if key != "strategy"]

    before = common
    if scale != 1:
        images = images_a_client(common)
        common = shrunk(common, scale, images)
        configs = {name: shrunk(config, scale, images) for name, config in configs.items()}
        old, new = before.run_config() | {"samples-per-client": images}, common.run_config()
        scaled = {key: [old[key], new[key]] for key in ("num-rounds", "samples-per-client")}
    changed = {key: value for key, value in given.items() if preset and key not in (*BESIDE, "data-dir")}
    changed |= {f"{name}:{key}": value for name in own if preset for key, value in own[name].items()}
    return Plan(
        common=common, configs=configs, seeds=list(seeds), reference=reference, scale=scale,
        own={name: {key: configs[name].settings()[key] for key in keys} for name, keys in own_settings.items()},
        scaled=scaled if scale != 1 else {}, preset=preset, changed=changed,
    )  # fmt: skip


def images_a_client(config: Config) -> float:
    """What samples-per-client says, or where it is 0 what the clients have on average, of what it counts."""
    if config.samples_per_client:
        return config.samples_per_client
    federation = load_federation(config.run_config())
    return round(float((federation.sizes if PARTITIONS[config.partition].total else federation.train_sizes).mean()), 1)


def shrunk(config: Config, scale: float, images: float) -> Config:
    """The settings with a part of the rounds, and of `images` images a client."""

    def part(number: float, least: int) -> int:
        return min(int(number), max(least, round(scale * number)))

    return Config.from_run_config(
        {
            **config.run_config(),
            **{key: part(config.run_config()[key], LEAST_ROUNDS if key == "num-rounds" else 1) for key in IN_ROUNDS},
            "samples-per-client": part(images, LEAST_IMAGES),
        }
    )


def run_hash(settings: Mapping[str, Any], images: str | None = None) -> str:
    """The name of a run: of its images (`app.images_of`) and of all settings that its results depend on.

    These are all but where folders lie and how the state is kept. Of a run that has no record of its images a data-dir
    counts where it says which they are.
    """
    beside = (*BESIDE, "data-dir") if images or DATASETS[settings["dataset"]].num_classes else BESIDE
    kept = {key: value for key, value in settings.items() if key not in beside} | ({"images": images} if images else {})
    return sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def known_runs(output_dir: Path) -> dict[str, Path]:
    """The folders of the runs in a folder of results by `run_hash`; of equal runs a finished one, the last."""
    found: dict[str, Path] = {}
    for path in sorted(output_dir.glob("*/config.json")):
        try:
            config = _read_config(path.parent)
            key = run_hash(config["settings"], config.get("images"))
        except (ConfigError, KeyError, TypeError):  # of something else, or of another version
            continue
        if key not in found or is_finished(path.parent) or not is_finished(found[key]):
            found[key] = path.parent
    return found


def carry_out(
    plan: Plan,
    execute: Callable[[Config], Outcome],
    say: Callable[[str], None],
    unusable: Mapping[str, str],
    command: Sequence[str],
) -> tuple[dict[str, Any], int]:
    """Run what has not been run, and sum up.

    Parameters
    ----------
    plan : Plan
    execute : callable
        Runs what the settings say, or goes on with it.
    say : callable
        Called with lines of progress.
    unusable : mapping
        name -> why it is not to be run.
    command : sequence of str
        The words of the command, for the record.

    Returns
    -------
    content : dict
        As in comparison.json.
    code : int
        0: every run is there. 1: some failed. 128 + n: ended by signal n, with what there was by then.
    """
    known = known_runs(Path(plan.common.output_dir))
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in plan.configs}
    code = 0
    todo = plan.runs
    for number, (name, config) in enumerate(todo, 1):
        head = f"run {number}/{len(todo)}  {name}, seed {config.seed}"
        key = run_hash(config.run_config(), _images(config))
        folder = known.get(key) or known.get(run_hash(config.run_config()))  # the latter: of no record
        if folder and is_finished(folder):
            how, outcome = "reused", Outcome(0, "", folder)
            say(f"{head}: reused, {folder}{_unlike(folder)}")
        elif name in unusable:
            how, outcome = "failed", Outcome(2, unusable[name])
        elif folder:
            how = "resumed"
            say(f"{head}: resumed, {folder}")
            outcome = execute(replace(config, resume=str(folder)))
        else:
            how = "run"
            say(head)
            outcome = execute(config)
        if outcome.code >= INTERRUPTED:
            code = outcome.code
            say(f"{head}: {outcome.reason}; the same command goes on")
            break
        run: dict[str, Any] = {"seed": config.seed, "how": how, "hash": key}
        if outcome.code == 0:
            folder = known[key] = outcome.results
            run |= {
                "folder": os.path.relpath(folder, plan.folder),
                "versions": _read_config(folder).get("versions"),
                "summary": read_summary(folder),
            }
        else:
            code = 1
            reason = " ".join(outcome.reason.split())
            if how == "resumed":
                reason += f"; remove {folder} to have it run anew"
            say(f"{head}: failed, {reason}")
            run |= {"how": "failed", "reason": reason}
        runs[name].append(run)
    return content_of(plan, runs, command), code


def _images(config: Config) -> str | None:
    """What says which images a run would have; None where it cannot have them, of which the run itself will tell."""
    try:
        return images_of(config, load_federation(config.run_config()))
    except DataError:
        return None


def _unlike(folder: Path) -> str:
    """In which ways a run of the same settings may still be another one."""
    before = _read_config(folder)
    told = [
        f"{name} was {version}"
        for name, version in (before.get("versions") or {}).items()
        if version != _versions().get(name)
    ]
    if not before.get("images"):
        told.append("which images it had is not on record")
    return f" ({', '.join(told)})" if told else ""


# --- The figures --------------------------------------------------------------------------------------


def content_of(plan: Plan, runs: Mapping[str, list[dict[str, Any]]], command: Sequence[str]) -> dict[str, Any]:
    """The content of comparison.json, which docs/comparing.md describes; folders of runs are relative to its own."""
    summaries = {name: {run["seed"]: run["summary"] for run in runs[name] if "summary" in run} for name in runs}
    preset = plan.preset
    strategies = {}
    for name, config in plan.configs.items():
        for run in runs[name]:
            if "summary" in run:
                run["metrics"] = metrics_of(run["summary"], summaries.get(LOCAL, {}).get(run["seed"]), name == LOCAL)
        measured = [run["metrics"] for run in runs[name] if "metrics" in run]
        values = {key: [each[key] for each in measured if each[key] is not None] for key in METRICS}
        paper = preset.paper.get(name) if preset else None
        strategies[name] = {
            "strategy": config.strategy,
            "settings": plan.own[name],
            "runs": runs[name],
            "mean": {key: float(np.mean(each, dtype=float)) if each else None for key, each in values.items()},
            "std": {
                key: float(np.std(each, ddof=1, dtype=float)) if len(each) > 1 else None for key, each in values.items()
            },
            "wilcoxon": signed_rank(*paired(summaries[name], summaries[plan.reference]))
            if name != plan.reference
            else None,
            "paper": paper and {key: each if key == "floats" else round(each / 100, 6) for key, each in paper.items()},
        }
    settings = plan.common.run_config()
    return {
        "title": plan.title,
        "command": shlex.join(command),
        "finished": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        "platform": f"{platform.platform()}, {os.cpu_count()} CPUs",
        "versions": _versions(),
        "scale": plan.scale,
        "scaled": plan.scaled,
        "preset": preset and {
            "name": preset.name, "source": preset.source, "measures": preset.measures, "metric": preset.metric,
            "notes": preset.notes, "changed": plan.changed,
        },
        "settings": {key: value for key, value in settings.items() if key not in ("strategy", "seed", "resume")},
        "seeds": plan.seeds,
        "reference": plan.reference,
        "metrics": {key: metric._asdict() for key, metric in METRICS.items()},
        "strategies": strategies,
    }  # fmt: skip


def metrics_of(summary: Mapping[str, Any], local: Mapping[str, Any] | None, is_local: bool = False) -> dict[str, Any]:
    """A run's numbers by the names of `METRICS`; None where there is none.

    Parameters
    ----------
    summary : mapping
        Of the run.
    local : mapping, optional
        That of the run of the same seed in which every client learns alone.
    is_local : bool
        Whether it is the same: a method is not better than itself.
    """
    derived = {"bytes": summary["bytes-down"] + summary["bytes-up"], "better-than-local": None}
    if local and not is_local:
        ours, alone = paired({0: summary}, {0: local})
        if len(ours):
            derived["better-than-local"] = float((_differences(ours, alone) > 0).mean())
    return {key: derived.get(key, summary.get(key)) for key in METRICS}


def paired(
    ours: Mapping[int, Mapping[str, Any]], others: Mapping[int, Mapping[str, Any]]
) -> tuple[np.ndarray, np.ndarray]:
    """The last accuracies, (n,) each, of the clients that have one in both, of all seeds that both have."""
    pairs = []
    for seed in ours.keys() & others.keys():
        theirs = accuracies(others[seed])
        pairs += [(mine, theirs[client]) for client, mine in accuracies(ours[seed]).items() if client in theirs]
    first, second = np.array(sorted(pairs), dtype=float).reshape(-1, 2).T
    return first, second


def accuracies(summary: Mapping[str, Any]) -> dict[Any, float]:
    """client -> its last accuracy, of those that have one."""
    return {each["client"]: each["accuracy"] for each in summary["clients"] if each["accuracy"] is not None}


def _differences(ours: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Of accuracies that are fractions of few images: equal where they are equal but for the last bits."""
    return np.round(ours - others, 12)


def signed_rank(ours: np.ndarray, reference: np.ndarray) -> dict[str, Any] | None:
    """Wilcoxon's signed-rank test (1945) of accuracies (n,) against the reference's, pair by pair.

    Two-sided: the hypothesis to reject is that differences lie symmetrically about 0. Pairs without a difference are
    left out (Wilcoxon's way); equal differences share their ranks. Without any difference p is 1.

    Returns
    -------
    dict or None
        `pairs`, of which `better`, `worse` and `equal`; `median-difference`; `statistic`, the smaller sum of ranks;
        `p`; `alternative` and `zeros`, what is said above. None without pairs.
    """
    differences = _differences(ours, reference)
    if not len(differences):
        return None
    told = differences[differences != 0]
    test = wilcoxon(told, alternative="two-sided") if len(told) else None
    return {
        "pairs": len(differences),
        "better": int((differences > 0).sum()),
        "worse": int((differences < 0).sum()),
        "equal": int((differences == 0).sum()),
        "median-difference": float(np.median(differences)),
        "statistic": float(test.statistic) if test else 0.0,
        "p": float(test.pvalue) if test else 1.0,
        "alternative": "two-sided",
        "zeros": "left out",
    }


# --- What is written ----------------------------------------------------------------------------------


def tables(content: Mapping[str, Any]) -> list[list[list[str]]]:
    """Two tables, of accuracy and of cost, as lines of texts, the titles first; what is not known is "-"."""
    strategies, metric = content["strategies"], (content["preset"] or {}).get("metric")
    methods = list(strategies.values())
    tests = [each["wilcoxon"] for each in methods]
    names = ["strategy", *strategies]
    accuracy = [names, ["runs", *(f"{_finished(each)}/{len(content['seeds'])}" for each in methods)]]
    cost = [names]
    for key, about in METRICS.items():
        cells = [_cell(each["mean"][key], each["std"][key], about) for each in methods]
        papers = [each["paper"] or {} for each in methods]
        if key == metric:
            published = [_cell(paper.get("mean"), paper.get("std"), about._replace(digits=2)) for paper in papers]
        else:
            published = [_cell(paper.get(key), None, about) for paper in papers]
        table = accuracy if about.factor == 100 else cost
        if key != "floats" or set(cells) != {"-"}:  # which few methods count
            table.append([about.title, *cells])
        if set(published) != {"-"}:
            table.append([f"paper, {about.title}", *published])
    accuracy.append([f"p against {content['reference']}", *(_p(test["p"]) if test else "-" for test in tests)])
    accuracy.append(
        [
            "better : worse : equal",
            *(f"{test['better']} : {test['worse']} : {test['equal']}" if test else "-" for test in tests),
        ]
    )
    return [[list(line) for line in zip(*columns, strict=True)] for columns in (accuracy, cost)]


def _finished(strategy: Mapping[str, Any]) -> int:
    return sum("summary" in run for run in strategy["runs"])


def _cell(mean: float | None, std: float | None, metric: Metric) -> str:
    if mean is None:
        return "-"
    text = f"{metric.factor * mean:.{metric.digits}f}"
    return text if std is None else f"{text} ± {metric.factor * std:.{metric.digits}f}"


def _p(p: float) -> str:
    return f"{p:.3f}" if p >= 0.001 else f"{p:.1e}"


def remarks(content: Mapping[str, Any]) -> list[str]:
    """What has to be said beside the table, a line each."""
    strategies, preset, lines = content["strategies"], content["preset"], []
    if content["scaled"]:
        parts = [f"{key} {after:g} instead of {before:g}" for key, (before, after) in content["scaled"].items()]
        lines.append(
            f"At scale {content['scale']:g}, not in full: {', '.join(parts)}; settings of one method that "
            "count rounds are shrunk alike."
        )
    if preset:
        lines.append(f"The paper's numbers: {preset['source']}; {preset['measures']}.")
        if preset["changed"]:
            changes = ", ".join(f"{key} {value}" for key, value in preset["changed"].items())
            lines.append(f"Other than in the preset: {changes}.")
        both = {
            name: (each["paper"]["mean"], each["mean"][preset["metric"]])
            for name, each in strategies.items()
            if each["paper"] and each["mean"][preset["metric"]] is not None
        }
        if len(both) > 1:
            for who, column in (("paper", 0), ("here", 1)):
                order = sorted(both, key=lambda name, column=column: -both[name][column])
                lines.append(f"Best first, {who}: {', '.join(order)}.")
    if any(each["wilcoxon"] for each in strategies.values()):
        lines.append(
            f"p: Wilcoxon's signed-rank test against {content['reference']}, two-sided, over the clients' last "
            "accuracies, those of all seeds together; pairs without a difference are left out. Clients of a run learn "
            "together, so their accuracies are not independent, and p is not corrected for the number of methods."
        )
    if len(content["seeds"]) == 1:
        lines.append("One seed: there is no deviation.")
    for name, each in strategies.items():
        lines += [f"{name}, seed {run['seed']}, failed: {run['reason']}" for run in each["runs"] if "reason" in run]
    return lines


def write(content: Mapping[str, Any], folder: Path) -> None:
    """Write the files, the report of them last; a picture or report that cannot be made is a warning."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "comparison.json", content)
    for name, data in (("comparison.csv", as_csv(content)), ("comparison.md", as_markdown(content).encode())):
        with replacing(folder / name) as temporary:
            temporary.write_bytes(data)
    methods = [
        (name, [read_table(folder / run["folder"] / "rounds.csv") for run in each["runs"] if "folder" in run])
        for name, each in content["strategies"].items()
    ]
    with failing_is_a_warning(folder / "comparison.png"):
        save_figure(comparison_figure(methods, content["title"]), folder / "comparison.png")
    with failing_is_a_warning(folder / REPORT):
        write_report(folder)


def as_csv(content: Mapping[str, Any]) -> bytes:
    """A line for each run, and lines with the seeds "mean" and "std"; accuracies are in [0, 1]."""
    about = {
        "scale": content["scale"],
        "preset": content["preset"] and content["preset"]["name"],
        "command": content["command"],
    }
    rows: list[dict[str, Any]] = []
    for name, each in content["strategies"].items():
        for run in each["runs"]:
            rows.append(
                {
                    "strategy": name,
                    "seed": run["seed"],
                    **run.get("metrics", {}),
                    **about,
                    "folder": run.get("folder"),
                    "versions": _told(run.get("versions")),
                    "failed": run.get("reason"),
                }
            )
        test = {f"wilcoxon-{key}": value for key, value in (each["wilcoxon"] or {}).items()}
        paper = each["paper"] or {}
        told = _told(content["versions"])
        rows.append(
            {
                "strategy": name,
                "seed": "mean",
                **each["mean"],
                **about,
                **test,
                "versions": told,
                "reference": content["reference"],
                "paper": paper.get("mean"),
                "paper-floats": paper.get("floats"),
            }
        )
        rows.append(
            {"strategy": name, "seed": "std", **each["std"], **about, "paper": paper.get("std"), "versions": told}
        )
    last = ("scale", "preset", "folder", "failed", "versions", "command")
    columns = dict.fromkeys(("strategy", "seed", *METRICS, "paper", "paper-floats", "reference"))
    columns |= dict.fromkeys(key for row in rows for key in row if key not in last)
    return table_lines([*columns, *last], rows, header=True)


def _told(versions: Mapping[str, Any] | None) -> str:
    return ", ".join(f"{name} {version}" for name, version in (versions or {}).items() if version)


def as_markdown(content: Mapping[str, Any]) -> str:
    """The comparison to be read: table, remarks, settings, runs, notes."""
    strategies, preset = content["strategies"], content["preset"]
    accuracy, cost = tables(content)
    defaults = Config().run_config()
    set_to = [
        f"`{key}` = {value}"
        for key, value in content["settings"].items()
        if value != defaults[key] and key != "output-dir"
    ]
    parts = [
        f"# {content['title']}",
        "",
        f"    {content['command']}",
        "",
        f"{content['finished']}, {content['platform']}; {_told(content['versions'])}.",
        "",
        *_rows(accuracy),
        "",
        *_rows(cost),
        "",
        *(f"- {line}" for line in remarks(content)),
        "",
        "## Columns",
        "",
        *(
            f"- {metric.title}: {metric.meaning}"
            for metric in METRICS.values()
            if metric.title in accuracy[0] + cost[0]
        ),
        "",
        "Mean ± standard deviation (of a sample) over seeds.",
        "",
        "## Settings",
        "",
        "Of all, where they are not the default: " + (", ".join(set_to) or "none") + ".",
        "",
        *(
            f"- {name}"
            + (f" ({each['strategy']})" if name != each["strategy"] else "")
            + ": "
            + (", ".join(f"`{key}` = {value}" for key, value in each["settings"].items()) or "nothing of its own")
            for name, each in strategies.items()
        ),
        "",
        "## Runs",
        "",
        *_rows(
            [
                ["strategy", "seed", "", "best %", "last %", "folder"],
                *(
                    [
                        name,
                        str(run["seed"]),
                        run["how"],
                        *(
                            _cell(run.get("metrics", {}).get(key), None, METRICS[key])
                            for key in ("accuracy-best", "accuracy")
                        ),
                        run.get("folder") or run["reason"],
                    ]
                    for name, each in strategies.items()
                    for run in each["runs"]
                ),
            ]
        ),
    ]
    if preset:
        parts += ["", f"## Preset {preset['name']}", "", *(f"- {note}" for note in preset["notes"])]
    return "\n".join(parts) + "\n"


def _rows(lines: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table, of which the first are the titles."""
    first, *others = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
    return [first, "|" + " --- |" * len(lines[0]), *others]
