"""Who may import whom, and what no file may contain."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("strategies", "data", "server_app", "client_app")
THIRD_PARTY = {
    "strategies": {"flwr", "torch", "torchvision", "numpy", "scipy", "sklearn", "threadpoolctl", "safetensors"},
}
# strategies.compat is where torchvision's ways are known, strategies.extensions where names are looked up.
ALLOWED = {"strategies": set(), "data": {"strategies.compat", "strategies.extensions"},
           "client_app": {"data", "strategies"}, "server_app": {"data", "strategies"}}


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(level, module) of each import: level 0 is absolute."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.level, node.module or ""


def sources(package: str) -> list[Path]:
    found = sorted((ROOT / package).rglob("*.py"))
    assert found
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_only_what_they_may(package) -> None:
    for path in sources(package):
        for level, module in imports(path):
            top = module.split(".")[0]
            if level == 0 and (top in PACKAGES or top == "kindred"):
                assert any(f"{module}.".startswith(f"{allowed}.") for allowed in ALLOWED[package]), (path, module)
            elif level == 0 and package in THIRD_PARTY and top not in sys.stdlib_module_names:
                assert top in THIRD_PARTY[package], (path, module)


def test_nothing_is_pickled() -> None:
    for package in (*PACKAGES, "benchmarks", "examples"):
        for path in (ROOT / package).rglob("*.py"):
            modules = {module.split(".")[0] for _, module in imports(path)}
            assert not modules & {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}, path
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call):
                    called = ast.unparse(node.func)
                    options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                    assert called != "torch.save", path
                    assert called != "torch.load" or options.get("weights_only") == "True", path
                    assert options.get("allow_pickle", "False") == "False", path


def test_a_server_half_and_the_settings_do_not_wait_for_pytorch() -> None:
    code = ("import sys; import strategies.fedamp, strategies.baselines.fedavg, strategies.baselines.local, "
            "server_app.config; print([m for m in ('torch', 'ray', 'matplotlib') if m in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
