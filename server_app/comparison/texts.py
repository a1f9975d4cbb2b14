"""Make the tables and remarks of a comparison from the content of comparison.json alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kindred.metrics import METRICS
from kindred.server_app.headline import Headline
from kindred.server_app.verdict import KINDS

from .metrics import COSTS, Metric, numbers_of
from .statistics import LOCAL

FEDAVG = "fedavg"

VERDICTS = {
    "helped : hurt : not shown": "the number of clients, once for each seed, for which a test shows the method better "
    "than local, worse, and neither",
    "gain over local": "the mean difference over all test samples, of right predictions in points, or of the absolute "
    "errors of a number, whatever the headline metric is; in brackets its 95 % interval over clients",
}
"""Columns of the verdict, and their meanings."""


def tables(content: Mapping[str, Any]) -> list[list[list[str]]]:
    """Return the tables of the headline metric, of cost and, if there are newcomers, of these.

    A table is lines of texts, titles first; an unknown number is "-".
    """
    strategies, metric = content["strategies"], (content["preset"] or {}).get("metric")
    methods = list(strategies.values())
    tests = [each["wilcoxon"] for each in methods]
    names = ["strategy", *strategies]
    results = [names, ["runs", *(f"{_finished(each)}/{len(content['seeds'])}" for each in methods)]]
    cost = [names]
    headline = Headline.of([content])
    for key, about in numbers_of(headline).items():
        cells = [cell(each["mean"].get(key), each["std"].get(key), about) for each in methods]
        papers = [each["paper"] or {} for each in methods]
        if key == metric:
            published = [cell(paper.get("mean"), paper.get("std"), about._replace(digits=2)) for paper in papers]
        else:
            published = [cell(paper.get(key), None, about) for paper in papers]
        table = cost if key in COSTS else results
        # Few methods report `floats`, and only runs with validation data have selected models.
        if key not in ("floats", headline.columns.selected) or set(cells) != {"-"}:
            table.append([about.title, *cells])
        if set(published) != {"-"}:
            table.append([f"paper, {about.title}", *published])
    results.append([f"p against {content['reference']}", *(_p(test["p"]) if test else "-" for test in tests)])
    results.append(
        [
            "better : worse : equal",
            *(f"{test['better']} : {test['worse']} : {test['equal']}" if test else "-" for test in tests),
        ]
    )
    verdicts = [each.get("verdict") for each in methods]
    if any(verdicts):
        for title, text_of in zip(VERDICTS, (_counts, _gain), strict=True):
            results.append([title, *(text_of(each) if each else "-" for each in verdicts)])
    found = [[list(line) for line in zip(*columns, strict=True)] for columns in (results, cost)]
    later = _newcomers(strategies, numbers_of(headline)[headline.columns.mean], headline)
    return [*found, later] if later else found


def metrics_table(content: Mapping[str, Any]) -> list[list[str]]:
    """Return the table of all metrics that the methods' clients report at the end; empty if there are none."""
    strategies = content["strategies"]
    names = [name for name in METRICS if any(name in each["all-metrics"] for each in strategies.values())]
    if not names:
        return []

    def text(each: Mapping[str, Any], name: str) -> str:
        known = each["all-metrics"].get(name, {"mean": None, "std": None})
        headline = Headline(name)
        number = Metric(headline.axis, "", headline.factor, 1 if headline.metric.percent else None)
        return cell(known["mean"], known["std"], number)

    return [
        ["strategy", *(Headline(name).axis for name in names)],
        *([method, *(text(each, name) for name in names)] for method, each in strategies.items()),
    ]


def _newcomers(strategies: Mapping[str, Any], number: Metric, headline: Headline) -> list[list[str]]:
    """Return the table of clients that came later; empty if there are none."""
    served = {name: each["newcomers"] for name, each in strategies.items() if each.get("newcomers")}
    if not served:
        return []
    rows = {name: (amounts, "method") for name, amounts in served.items()}
    if LOCAL not in rows:
        rows["alone"] = (next(iter(served.values())), "alone")
    if FEDAVG in rows:
        rows[f"{FEDAVG}, tuned"] = (served[FEDAVG], "tuned")
    titles = [f"{each['labelled']} labelled" for each in next(iter(served.values()))]
    return [
        [f"newcomers, {headline.axis}", *titles],
        *(
            [name, *(cell(each[way]["mean"], each[way]["std"], number) for each in amounts)]
            for name, (amounts, way) in rows.items()
        ),
    ]


def _counts(verdict: Mapping[str, Any]) -> str:
    return " : ".join(str(verdict[which]) for which in KINDS)


def _gain(verdict: Mapping[str, Any]) -> str:
    factor = 100 if verdict["percent"] else 1
    gain, low, high = (f"{factor * verdict[key]:+.3g}" for key in ("gain", "low", "high"))
    return f"{gain} ({low} to {high})"


def _finished(strategy: Mapping[str, Any]) -> int:
    return sum("summary" in run for run in strategy["runs"])


def cell(mean: float | None, std: float | None, metric: Metric) -> str:
    """Return the text of a table's cell; "-" if the number is not known."""
    if mean is None:
        return "-"
    text = metric.text(mean)
    return text if std is None else f"{text} ± {metric.text(std, 2)}"


def _p(p: float) -> str:
    return f"{p:.3f}" if p >= 0.001 else f"{p:.1e}"


def remarks(content: Mapping[str, Any]) -> list[str]:
    """Return the remarks that belong to the tables, one per line."""
    strategies, preset, lines = content["strategies"], content["preset"], []
    plural = Headline.of([content]).plural
    if content["scaled"]:
        scaled = content["scaled"].items()
        parts = [f"{key} {after:g} instead of {before:g}" for key, (before, after) in scaled if after != before]
        lines.append(
            f"At scale {content['scale']:g}, not the full runs: {', '.join(parts)}; settings of single methods "
            "that count rounds are scaled too."
            if parts
            else f"Scale {content['scale']:g} changes neither the rounds nor the samples, which are few already."
        )
    if preset:
        has_numbers = any(each["paper"] for each in strategies.values())
        lines.append(f"The paper's {'numbers' if has_numbers else 'figure'}: {preset['source']}; {preset['measures']}.")
        if preset["changed"]:
            changes = ", ".join(f"{key} {value}" for key, value in preset["changed"].items())
            lines.append(f"Different from the preset: {changes}.")
        both = {
            name: (each["paper"]["mean"], each["mean"][preset["metric"]])
            for name, each in strategies.items()
            if each["paper"] and each["mean"][preset["metric"]] is not None
        }
        if len(both) > 1:
            for who, column in (("paper", 0), ("here", 1)):
                means = {name: each[column] for name, each in both.items()}
                order = sorted(means, key=means.__getitem__, reverse=True)
                lines.append(f"Best first, {who}: {', '.join(order)}.")
    if any(each["wilcoxon"] for each in strategies.values()):
        same = "" if content["reference"] in strategies else " with the same value"
        lines.append(
            f"p: Wilcoxon's signed-rank test against {content['reference']}{same}, two-sided, over the clients' last "
            f"{plural} of all seeds together; pairs without a difference are excluded. Clients of a run learn "
            f"together, so their {plural} are not independent, and p is not corrected for the number of methods."
        )
    if any(each.get("newcomers") for each in strategies.values()):
        lines.append(
            f"newcomers: the {content['settings']['held-out-clients']} clients of each run that took no part, served "
            "after it with 0, 5, 20 and all of their labelled training samples; means over those with so many."
        )
    for name, each in strategies.items():
        if (verdict := each.get("verdict")) and (have := sum(verdict[key] for key in KINDS)) < verdict["of"]:
            lines.append(
                f"{name}: the verdict is over {have} of {verdict['of']} clients, all seeds together; the others' "
                "predictions are missing in one of the two runs."
            )
    if len(content["seeds"]) == 1:
        lines.append("One seed: there is no standard deviation.")
    for name, each in strategies.items():
        for run in each["runs"]:
            if "reason" in run:
                lines.append(f"{name}, seed {run['seed']}, failed: {run['reason']}")
            asked, answered = (run.get("summary", {}).get(key, 0) for key in ("asked", "answered"))
            if asked > answered:
                lines.append(
                    f"{name}, seed {run['seed']}: {asked - answered} of {asked} messages to train had no reply that "
                    "could be used; history.csv says why."
                )
    return lines
