"""The pictures of a comparison, by the names of their files, and the data that each is drawn from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kindred.messages import ClientId
from kindred.server_app.headline import Headline
from kindred.server_app.report.comparison_figures import comparison_figure, comparison_panels, sweep_figure
from kindred.server_app.report.weight_figure import weights_figure
from kindred.server_app.report.weights import Curves, changes, collaboration_curves
from kindred.server_app.run_files import folder_of_run, read_config
from kindred.server_app.tables import read_table

from .metrics import numbers_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def pictures(content: Mapping[str, Any], folder: Path) -> dict[str, Callable[[], Figure | None]]:
    """Return a function for each picture of a comparison, by its name.

    | picture | shows |
    | --- | --- |
    | comparison | headline metric over rounds; a panel for each value, if a setting of several methods is varied |
    | varied | headline metric over the values of the varied setting |
    | weights | the first client's weights over rounds in the first run of each variant, if all are of one method |

    Parameters
    ----------
    content : mapping
        The content of comparison.json.
    folder : Path
        The folder of the comparison.

    Returns
    -------
    dict
        name -> function that returns the figure, or None where there is nothing to draw.
    """
    found: dict[str, Callable[[], Figure | None]] = {"comparison": lambda: _over_rounds(content, folder)}
    if content["varied"]:
        found["varied"] = lambda: _over_values(content)
    if len({each["strategy"] for each in content["strategies"].values()}) == 1 < len(content["strategies"]):
        found["weights"] = lambda: _weights(content, folder)
    return found


def _over_rounds(content: Mapping[str, Any], folder: Path) -> Figure:
    strategies, varied, headline = content["strategies"], content["varied"], Headline.of([content])
    rounds = {
        name: [read_table(folder_of_run(folder, run) / "rounds.csv") for run in each["runs"] if "folder" in run]
        for name, each in strategies.items()
    }
    if not varied or len({each["of"] for each in strategies.values() if each["value"]}) == 1:
        return comparison_figure(list(rounds.items()), headline, content["title"])
    panels = [
        (
            f"{varied['setting']} {value}",
            [(each["of"], rounds[name]) for name, each in strategies.items() if each["value"] in (value, "")],
        )
        for value in varied["values"]
    ]
    return comparison_panels(panels, headline, content["title"])


def _over_values(content: Mapping[str, Any]) -> Figure:
    headline = Headline.of([content])
    metric = (content["preset"] or {}).get("metric", headline.columns.mean)
    methods: dict[str, dict[str, tuple[float, float | None]]] = {}
    for each in content["strategies"].values():
        if each["mean"][metric] is not None:
            methods.setdefault(each["of"], {})[each["value"]] = (each["mean"][metric], each["std"][metric])
    varied = content["varied"]
    measure = numbers_of(headline)[metric].meaning
    return sweep_figure(varied["setting"], varied["values"], methods, headline, measure, content["title"])


def _weights(content: Mapping[str, Any], folder: Path) -> Figure | None:
    panels: list[Curves] = []
    groups: dict[ClientId, int] | None = None
    names: Sequence[str] = ()
    for name, each in content["strategies"].items():
        run = next((run for run in each["runs"] if "folder" in run), None)
        if run is None:
            continue
        place = folder_of_run(folder, run)
        about = read_config(place)
        names = about.get("names") or ()
        if known := about.get("groups"):
            groups = dict(enumerate(known))
        curves = collaboration_curves(place / "collaboration", run["summary"]["rounds"], groups, 1, names)
        panels += [curve._replace(about=f"{curve.about}, {name}") for curve in curves]
    if not any(map(changes, panels)):
        return None
    return weights_figure(panels, groups, f"Weights over rounds: {content['title']}", names)
