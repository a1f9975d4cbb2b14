"""The content of a site's page: its data, what was asked of it, what left it, its model's values, and faults."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from kindred.client.journal import APP, CONNECTION, EVALUATION, FAULT, INTRODUCTION, NOTICE, TRAINING
from kindred.messages import ALONE
from kindred.metrics import METRICS
from kindred.server_app.headline import Headline

MOST_MESSAGES, MOST_FAULTS, MOST_RUNS = 200, 50, 5  # on the page: the latest ones
NUMBER = re.compile(r"\bfault \d+")  # each time that an error occurs, it has another one
RELOAD_SECONDS = 5.0  # after which a browser reloads the page
ADVICE = {
    INTRODUCTION: "The site takes no part until this is fixed; it is then asked again, without a restart.",
    NOTICE: "Fix what it names. An excluded site is asked again; for another option, restart `kindred site`.",
    TRAINING: "The server received this error in place of a reply; the round continues without the site.",
    EVALUATION: "The server received this error in place of a reply; the round continues without the site.",
    APP: "None of it was unpacked. To accept it, restart `kindred site` with --allow-app and this SHA-256.",
    CONNECTION: "`kindred site` keeps trying.",
    FAULT: "The server learns the number and the kind of this error alone. Fix its cause; a restart is not needed.",
}


def site_content(
    name: str, about: Mapping[str, Any], entries: Sequence[Mapping[str, Any]], *, running: bool = True
) -> dict[str, Any]:
    """Return the content of a site's page.

    Parameters
    ----------
    name : str
        Of the site.
    about : mapping
        `lines` about its data and what is reported of them, and `classes`, each with its numbers of training and test
        samples.
    entries : sequence of mapping
        The site's journal, see `kindred.client.journal`.
    running : bool (default: True)
        Whether `kindred site` runs; the browser then reloads the page regularly.
    """
    messages = [entry for entry in entries if entry["kind"] not in (APP, CONNECTION, FAULT)]
    measured = [entry for entry in messages if entry.get("metric") in METRICS and "round" in entry]
    headline = Headline(measured[-1]["metric"] if measured else "accuracy")
    return {
        "kind": "site",
        "title": f"Site {name}",
        "about": [
            *([f"as of {_time(entries[-1])}"] if entries else []),
            *([f"reloaded every {RELOAD_SECONDS:g} s"] if running else []),
        ],
        "reload": RELOAD_SECONDS if running else 0,
        "finished": False,
        "metric": headline.to_dict(),
        "doing": _doing(entries) if running else "`kindred site` has ended",
        "messages-in-all": len(messages),
        **{key: sum(entry.get(key, 0) for entry in messages) for key in ("bytes-in", "bytes-out")},
        "lines": about["lines"],
        "classes": about["classes"],
        "runs": _runs([entry for entry in measured if entry["metric"] == headline.name]),
        "names": _names(messages),
        "messages": [_row(entry) for entry in reversed(messages[-MOST_MESSAGES:])],
        "faults": _faults(entries),
    }


def _time(entry: Mapping[str, Any]) -> str:
    return f"{datetime.fromtimestamp(entry['at'], UTC):%Y-%m-%d %H:%M:%S} UTC"


def _doing(entries: Sequence[Mapping[str, Any]]) -> str:
    if not entries:
        return "no message has arrived yet: the site waits for a run"
    last = entries[-1]
    if "problem" in last or "over" in last:
        return str(last.get("problem") or last["over"])
    where = f"round {last['round']}: " if "round" in last else ""
    return f"{where}{last['kind']} answered after {last['seconds']:.1f} s; the site waits for the server"


def _row(entry: Mapping[str, Any]) -> list[str]:
    """Return round, kind, what left and its bytes, bytes received, seconds, time and run of a message, as texts."""
    counts = {
        "array": entry.get("arrays", 0),
        "number": len(entry.get("numbers", ())),
        "text": len(entry.get("texts", ())),
    }
    left = ", ".join(f"{count} {what}{'s' * (count > 1)}" for what, count in counts.items() if count)
    error = "the error's kind" if FAULT in entry else "the error's text"
    error = error if entry["kind"] != NOTICE and "bytes-out" not in entry else "nothing"
    return [
        str(entry.get("round", "–")), entry["kind"], left or error, _kilobytes(entry.get("bytes-out", 0)),
        _kilobytes(entry.get("bytes-in", 0)), f"{entry.get('seconds', 0.0):.1f} s", _time(entry),
        str(entry.get("run", "")),
    ]  # fmt: skip


def _kilobytes(number: float) -> str:
    return f"{number / 1e3:.1f} kB"


def _names(entries: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return the names of all numbers and texts that left the site, each with kind and number of the messages."""
    found: dict[tuple[str, str, str], int] = {}
    for entry in entries:
        for what in ("number", "text"):
            for name in entry.get(f"{what}s", ()):
                key = (name, what, entry["kind"])
                found[key] = found.get(key, 0) + 1
    return [[*key, str(count)] for key, count in sorted(found.items())]


def _runs(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the values of the site's model over rounds, for the latest runs; and of one trained alone, if known."""
    found: dict[str, dict[str, Any]] = {}
    for entry in entries:
        if "value" in entry:
            run = found.setdefault(entry["run"], {"run": entry["run"], "method": entry.get("method", ""), "at": {}})
            run["at"].setdefault(entry["round"], {}).update(
                {key: entry[key] for key in ("value", ALONE) if key in entry}
            )
    return [
        {
            "run": run["run"],
            "method": run["method"],
            "rounds": list(run["at"]),
            "federated": [values.get("value") for values in run["at"].values()],
            "alone": [values.get(ALONE) for values in run["at"].values()],
        }
        for run in reversed(list(found.values())[-MOST_RUNS:])
    ]


def _faults(entries: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return the faults and refusals, the latest first: time of the last one, how often, text, and what to do."""
    found: dict[tuple[str, str], list[Any]] = {}
    for entry in entries:
        if "problem" in entry:
            advice = ADVICE[FAULT if FAULT in entry else entry["kind"]]
            key = (NUMBER.sub("", entry["problem"]), advice)
            found[key] = [_time(entry), found.pop(key, ["", 0])[1] + 1, entry["problem"]]
    latest = reversed(list(found.items())[-MOST_FAULTS:])
    return [[at, str(count), text, advice] for (_, advice), (at, count, text) in latest]
