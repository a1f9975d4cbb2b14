"""Extensions: the example package as another author installs it, a fork, and unusable packages."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch

from kindred import extensions
from kindred.data import load_federation
from kindred.data.partitions import PARTITIONS, Scheme
from kindred.extensions import ExtensionError, Registry
from kindred.server_app import app as application
from kindred.server_app.config import Config

from .background_commands import PATIENCE
from .packages import install

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "extending"
DOCUMENT = (ROOT / "docs" / "extending.md").read_text()
TASK = {"datasets": "diabetes", "objectives": "upper-bound", "metrics": "pinball"}  # all in one file
NAMES = {"datasets": "tumours", "partitions": "amounts", "models": "linear", "methods": "blend"}
# A command, and the end of its output.
COMMANDS = re.findall(r"^    (kindred run .*(?:\\\n.*)*)\n\nends with\n\n((?:    .*\n)+)", DOCUMENT, re.M)


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    return install(EXAMPLE, tmp_path_factory.mktemp("example"))


def kindred(*arguments: str, path: Path, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run the command of the application in `root`, in an environment with the packages in `path`."""
    return subprocess.run(
        [sys.executable, "-m", "kindred", *arguments], capture_output=True, text=True,
        cwd=root, env=os.environ | {"PYTHONPATH": str(path)}, timeout=PATIENCE,
    )  # fmt: skip


def entry_points() -> set[tuple[str, str, str]]:
    """Return the example's entry points: group, name and value."""
    points = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]["entry-points"]
    return {(group, name, value) for group, entries in points.items() for name, value in entries.items()}


def in_the_table(lines: list[str]) -> dict[str, float]:
    """Mean accuracy by strategy, from the table at the end of a command's output."""
    start = max(number for number, line in enumerate(lines) if line.split()[:2] == ["strategy", "mean"])
    found = [re.match(r"\s*([a-z-]+) +(\d+\.\d+) +\d+\.\d+ +\d+\.\d+", line) for line in lines[start + 1 :]]
    return {match[1]: float(match[2]) for match in found if match}


def test_the_document_contains_the_example_unchanged() -> None:
    blocks = re.findall(r"^\[(\S+)\]\(\.\./(\S+)\):\n\n```python\n(.*?)```\n\n```toml\n(.*?)```", DOCUMENT, re.M | re.S)
    files = [path for path in sorted((EXAMPLE / "extending").glob("*.py")) if path.name != "__init__.py"]
    assert sorted(ROOT / link for _, link, _, _ in blocks) == files and len(files) == 5
    registered = entry_points()
    for shown, link, code, lines in blocks:
        assert shown == link
        assert code == (ROOT / link).read_text()
        stated = {(group, *entry) for group, entries in tomllib.loads(lines)["project"]["entry-points"].items()
                  for entry in entries.items()}  # fmt: skip
        assert stated <= registered and len(stated) == (len(TASK) if shown.endswith("task.py") else 1)
        registered -= stated
    assert not registered


def test_each_extension_is_one_file_and_one_line() -> None:
    stated = {(group.removeprefix("kindred."), name): value.partition(":")[0] for group, name, value in entry_points()}
    assert stated.keys() == NAMES.items() | TASK.items()
    assert {stated[entry] for entry in TASK.items()} == {"extending.task"}
    assert len({stated[entry] for entry in NAMES.items()} | {"extending.task"}) == len(NAMES) + 1


@pytest.mark.parametrize(
    ("command", "printed"),
    [
        *(pytest.param(*each, marks=pytest.mark.deployment, id=f"command-{n}") for n, each in enumerate(COMMANDS[:-1])),
        pytest.param(*COMMANDS[-1], id="together"),
    ],
)
def test_each_extension_alone_and_all_together_run_as_documented(installed, tmp_path, command, printed) -> None:
    arguments = command.replace("\\\n", " ").split()[1:]
    done = kindred(*arguments, f"--output-dir={tmp_path}", path=installed)
    assert done.returncode == 0, done.stderr
    there, documented = (in_the_table(text.splitlines()) for text in (done.stdout, printed))
    assert there.keys() == documented.keys() and documented
    for name, accuracy in documented.items():
        assert there[name] == pytest.approx(accuracy, abs=5)  # last bits differ between processors


def test_the_document_runs_each_extension_alone_and_all_together() -> None:
    names = [*NAMES.values(), TASK["datasets"]]
    used = [{name for name in names if re.search(rf"\b{name}\b", command)} for command, _ in COMMANDS]
    assert used == [*({name} for name in names), set(NAMES.values())]


def test_extensions_are_listed_with_built_in_ones(installed) -> None:
    methods, others = (kindred(command, path=installed) for command in ("strategies", "datasets"))
    assert methods.returncode == others.returncode == 0
    assert re.search(r"^ *blend +Blend +docs/extending.md", methods.stdout, re.M) and " fedavg " in methods.stdout
    assert re.search(r"^ *tumours +30 features", others.stdout, re.M)
    assert re.search(r"^ *amounts +classes uniform; .* dirichlet-alpha, with-replacement *$", others.stdout, re.M)
    assert re.search(r"^ *linear +Softmax regression", others.stdout, re.M)


@pytest.mark.deployment
def test_the_example_passes_the_conformance_suite(installed) -> None:
    (command,) = re.findall(r"^    python (-m pytest tests/test_conformance.py -k blend)$", DOCUMENT, re.M)
    done = subprocess.run(
        [sys.executable, *command.split(), "-q", "-p", "no:cacheprovider"],
        cwd=ROOT,
        text=True,
        capture_output=True,
        env=os.environ | {"PYTHONPATH": str(installed)},
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stdout
    assert re.search(r"^(1[5-9]|2\d) passed, \d+ deselected", done.stdout, re.M), done.stdout


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["own-share=2"], "blend: own-share is 2.0, allowed: 0 to 1"),
        (["own-share=half"], "blend: own-share is 'half', allowed: 0 to 1"),
        (["own-share=nan"], "blend: own-share is nan, allowed: 0 to 1"),
        (["ownshare=0.3"], "unknown setting ownshare; did you mean own-share?"),
        (["method-settings=own=0.3"], "method-settings has own, allowed: settings of added methods, own-share"),
        (["method-settings=own"], "method-settings is 'own', allowed: key=value, separated by blanks (str)"),
    ],
)
def test_an_invalid_setting_of_an_added_method_gets_one_line(installed, tmp_path, settings, message) -> None:
    done = kindred(
        "run",
        "--engine=inline",
        "--strategy=blend",
        f"--output-dir={tmp_path}",
        *(f"--set={setting}" for setting in settings),
        path=installed,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"kindred: {message}") and done.stderr.count("\n") == 1


@pytest.fixture(scope="module")
def fork(tmp_path_factory) -> tuple[Path, Path]:
    """The project with the four files in its folders and their lines in its pyproject.toml, and an installation."""
    folder = tmp_path_factory.mktemp("fork")
    clone = folder / "clone"
    shutil.copytree(ROOT, clone, ignore=shutil.ignore_patterns(".*", "__pycache__", "tests", "docs", "*.egg-info"))
    lines = [clone.joinpath("pyproject.toml").read_text()]
    for kind, name in NAMES.items():
        module = {"methods": "method", "models": "model"}.get(kind, kind[:-1])
        room, package = ("strategies", "kindred") if kind in ("methods", "models") else ("data", "kindred.data")
        code = (EXAMPLE / "extending" / f"{module}.py").read_text().replace(f"from {package}.", "from .")
        clone.joinpath(room, f"my_{module}.py").write_text(code)
        value = re.search(rf'"extending\.{module}:(\w+)"', (EXAMPLE / "pyproject.toml").read_text())[1]
        lines.append(f'[project.entry-points."kindred.{kind}"]\n{name} = "{package}.my_{module}:{value}"\n')
    clone.joinpath("pyproject.toml").write_text("\n".join(lines))
    return clone, install(clone, folder)


def test_a_fork_accepts_the_same_files_and_lines(fork, tmp_path) -> None:
    clone, installed = fork
    arguments = COMMANDS[-1][0].replace("\\\n", " ").split()[1:]
    done = kindred(*arguments, f"--output-dir={tmp_path}", path=installed, root=clone)
    assert done.returncode == 0, done.stderr
    assert in_the_table(done.stdout.splitlines()).keys() == {"blend"}


# --- Unusable packages --------------------------------------------------------------------------------


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Return a function that installs a package: (name, entry points, code of its module of that name)."""
    extensions.entry_points_by_group.cache_clear()

    def add(name: str, points: str, code: str = "") -> Path:
        about = tmp_path / f"{name}-1.dist-info"
        about.mkdir()
        about.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        about.joinpath("entry_points.txt").write_text(points)
        tmp_path.joinpath(f"{name}.py").write_text(code)
        return tmp_path

    monkeypatch.syspath_prepend(tmp_path)
    yield add
    extensions.entry_points_by_group.cache_clear()


@pytest.mark.parametrize(
    ("module", "code", "points", "message"),
    [
        (
            "away",
            "",
            "[kindred.methods]\nmine = nowhere:M",
            "'mine' of kindred.methods cannot be imported from away (nowhere:M): ModuleNotFoundError: No module named "
            "'nowhere'",
        ),
        (
            "broken",
            "x = 1 / 0",
            "[kindred.methods]\nmine = broken:M",
            "'mine' of kindred.methods cannot be imported from broken (broken:M): ZeroDivisionError: division by zero",
        ),
        (
            "other",
            "M = 3",
            "[kindred.methods]\nmine = other:M",
            "'mine' of kindred.methods, from other (other:M), is 3, allowed: a Method",
        ),
        (
            "lacks",
            "M = 3",
            "[kindred.methods]\nmine = lacks:N",
            "'mine' of kindred.methods cannot be imported from lacks (lacks:N): AttributeError: module 'lacks' has no "
            "attribute 'N'",
        ),
        (
            "again",
            "M = 3",
            "[kindred.methods]\nfedavg = again:M",
            "'fedavg' of kindred.methods is registered more than once, by kindred and by again (again:M): give it "
            "another "
            "name, or remove a package",
        ),
    ],
)
def test_an_unusable_extension_gives_one_line_and_code_2(packages, tmp_path, module, code, points, message) -> None:
    path = packages(module, points, code)
    name = re.search(r"\n(\w+) =", points)[1]
    listed = kindred("strategies", path=path)
    used = kindred("run", "--engine=inline", f"--strategy={name}", f"--output-dir={tmp_path / 'out'}", path=path)
    for done in (listed, used):
        assert (done.returncode, done.stdout, done.stderr) == (2, "", f"kindred: {message}\n")
    assert not (tmp_path / "out").exists()


def test_an_unused_package_has_no_effect(packages) -> None:
    done = kindred("datasets", path=packages("away", "[kindred.methods]\nmine = nowhere:M"))
    assert (done.returncode, done.stderr) == (0, "")


def test_an_extension_with_another_name_than_its_method_is_refused(packages, tmp_path) -> None:
    code = (
        "from kindred import FedAvg\nfrom kindred.registry import Method\n"
        "M = Method(title='Mine', paper='nowhere', travels='the model', strategy=FedAvg)\n"
    )
    path = packages("named", "[kindred.methods]\nmine = named:M", code)
    done = kindred("run", "--engine=inline", "--strategy=mine", f"--output-dir={tmp_path / 'out'}", path=path)
    assert (done.returncode, done.stderr) == (
        2,
        "kindred: the name of FedAvg is 'fedavg', and it is registered as 'mine': they must be the same\n",
    )


def test_two_packages_with_one_name_are_refused_when_it_is_used(packages) -> None:
    packages("one", "[kindred.things]\nsame = one:X\nown = one:X", "X = 'of one'")
    packages("two", "[kindred.things]\nsame = two:X", "X = 'of two'")
    things = Registry("kindred.things", str, {"first": "builtins:__name__"})
    assert list(things) == ["first", "own", "same"] and len(things) == 3
    assert "same" in things and "none" not in things
    assert (things["first"], things["own"], things.get("none")) == ("builtins", "of one", None)
    with pytest.raises(ExtensionError, match=r"by one \(one:X\) and by two \(two:X\)|by two .* and by one "):
        things["same"]
    with pytest.raises(KeyError):
        things["none"]


def test_looking_up_a_name_does_not_import_its_package(packages) -> None:
    packages("lazy", "[kindred.things]\nthing = lazy:X", "X = 'loaded'")
    things = Registry("kindred.things", str, {})
    assert "thing" in things and list(things) == ["thing"] and "lazy" not in sys.modules
    assert things["thing"] == "loaded" and "lazy" in sys.modules
    del sys.modules["lazy"]


def test_an_added_partition_divides_the_images(packages) -> None:
    code = (
        "import numpy as np\n"
        "from kindred.data.partitions import Scheme, draw, even\n"
        "S = Scheme('two each', lambda ask: draw(ask, *2 * [even(ask, np.full(ask.num_clients, 2))]))\n"
    )
    packages("halves", "[kindred.partitions]\nhalves = halves:S", code)
    from kindred.data.partitions import divide

    assert isinstance(PARTITIONS["halves"], Scheme)
    y = np.arange(12) % 2
    parts = divide(
        "halves",
        y,
        y,
        2,
        dataset="npz",
        num_clients=3,
        num_groups=1,
        samples_per_client=0,
        with_replacement=False,
        dirichlet_alpha=1.0,
        held_out=0,
        seed=0,
    )
    assert [sorted(y[images].tolist()) for images in parts.train] == [[0, 1]] * 3  # one of each class, of 6 each
    assert len(np.unique(np.concatenate(parts.train))) == 6 and len(parts.spare) == 12


def test_a_buffer_that_does_not_travel_is_none_of_the_buffers_that_a_method_knows(monkeypatch) -> None:
    class WithMask(torch.nn.Linear):
        def __init__(self) -> None:
            super().__init__(64, 10)
            self.register_buffer("mask", torch.ones(10), persistent=False)
            self.register_buffer("scale", torch.ones(10))

    monkeypatch.setattr(application, "make_model", lambda *_: WithMask())
    config = Config(strategy="heurfedamp", model="mlp")
    strategy, initial_arrays = application.prepare(config, load_federation(config.run_config()))
    assert strategy.buffers == ["scale"] and "mask" not in initial_arrays
