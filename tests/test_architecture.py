"""Allowed imports between packages, and what no file may contain."""

from __future__ import annotations

import ast
import importlib
import pickle
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import kindred
from kindred.lazy import lazy

ROOT = Path(__file__).parent.parent
FOLDERS = {
    "kindred": "strategies",
    "kindred.data": "data",
    "kindred.client_app": "client_app",
    "kindred.server_app": "server_app",
}
THIRD_PARTY = {
    "kindred": {"flwr", "torch", "torchvision", "numpy", "scipy", "sklearn", "threadpoolctl", "safetensors", "psutil"},
}
# Modules of ours that a package may import, in addition to its own.
ALLOWED = {
    "kindred": set(),
    "kindred.data": {"kindred.extensions", "kindred.lazy", "kindred.objectives", "kindred.torchvision_import"},
    "kindred.client_app": {"kindred"},
    "kindred.server_app": {"kindred"},
}
HEAVY = ("torch", "torchvision", "ray", "matplotlib", "sklearn", "scipy.cluster", "scipy.spatial", "scipy.special")
PACKAGES = sorted(FOLDERS, key=len, reverse=True)


def modules() -> dict[str, Path]:
    """Return every module of the package, by its name."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join([package, *parts]).removesuffix(".__init__")] = path
    return found


MODULES = modules()


def package_of(module: str) -> str:
    """Return the package that contains a module."""
    return next(package for package in PACKAGES if f"{module}.".startswith(f"{package}."))


def imports(name: str, path: Path) -> Iterator[tuple[ast.AST, str]]:
    """Yield each import of a module: the statement, and the module or name that it imports, absolute."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = absolute(name, path, node)
            yield from ((node, f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base)
                        for alias in node.names)  # fmt: skip


def absolute(name: str, path: Path, node: ast.ImportFrom) -> str:
    """Return the full name of what a module imports from."""
    base = node.module or ""
    if node.level:
        parts = (name if path.name == "__init__.py" else name.rpartition(".")[0]).split(".")
        base = ".".join([*parts[: len(parts) - node.level + 1], *([base] if base else [])])
    return base


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_only_what_they_may(package) -> None:
    own = [name for name in MODULES if package_of(name) == package]
    assert own
    for name in own:
        for _, module in imports(name, MODULES[name]):
            top = module.split(".")[0]
            assert top not in FOLDERS.values(), (name, module)  # one import name
            if top == "kindred" and name != "kindred.__main__":  # which starts the command line
                allowed = package_of(module) == package or any(
                    f"{module}.".startswith(f"{each}.") for each in ALLOWED[package])  # fmt: skip
                assert allowed, (name, module)
            elif top != "kindred" and package in THIRD_PARTY and top not in sys.stdlib_module_names:
                assert top in THIRD_PARTY[package], (name, module)


def test_the_python_entrance_is_all_that_the_package_names_of_other_packages() -> None:
    """`kindred.run` and `kindred.compare` are imported from the application when they are first used."""
    homes = {name: getattr(getattr(kindred, name), "__module__", "kindred") for name in kindred.__all__}
    others = {
        name: home for name, home in homes.items() if home.startswith("kindred.") and package_of(home) != "kindred"
    }
    assert others == {"run": "kindred.server_app.api", "compare": "kindred.server_app.api"}


def test_every_folder_of_the_package_is_in_the_wheel() -> None:
    packages = {name for name, path in MODULES.items() if path.name == "__init__.py"}
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert set(setuptools["packages"]) == packages
    assert setuptools["package-dir"] == FOLDERS


def test_type_checkers_find_the_package_s_names_where_python_does() -> None:
    (block,) = [node for node in ast.parse(MODULES["kindred"].read_text()).body if isinstance(node, ast.If)]
    homes = {alias.name: each.module for each in block.body for alias in each.names}
    assert homes.keys() == set(kindred.__all__) - {"REGISTRY", "Method", "__version__", "run", "compare"}
    for name, module in homes.items():
        assert getattr(kindred, name) is getattr(importlib.import_module(f"kindred.{module}"), name)


def test_nothing_is_pickled() -> None:
    for package in (*FOLDERS.values(), "benchmarks", "examples"):
        for path in (ROOT / package).rglob("*.py"):
            for statement, module in imports("", path):
                top = module.split(".")[0]
                assert top not in {"pickle", "cloudpickle", "dill", "shelve", "marshal"}, path
                # joblib is imported as a module, under its name, so that the check of calls below finds its functions.
                assert top != "joblib" or isinstance(statement, ast.Import), path
                assert top != "joblib" or not any(alias.asname for alias in statement.names), path
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call):
                    called = ast.unparse(node.func)
                    options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                    assert called != "torch.save", path
                    assert not called.startswith("joblib.") or called == "joblib.cpu_count", path
                    assert called != "torch.load" or options.get("weights_only") == "True", path
                    assert options.get("allow_pickle", "False") == "False", path


def test_methods_and_settings_import_no_heavy_package() -> None:
    code = (
        "import sys; from kindred import REGISTRY, make_client_app; import kindred.server_app.config\n"
        "for name, method in REGISTRY.items(): assert method.name == name\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_lazily_imported_module_equals_the_real_one_after_first_use() -> None:
    late = lazy("colorsys")
    sys.modules.pop("colorsys", None)
    copy = pickle.loads(pickle.dumps(late))
    assert "colorsys" not in sys.modules
    assert copy.rgb_to_hsv is late.rgb_to_hsv is sys.modules["colorsys"].rgb_to_hsv
    with pytest.raises(AttributeError, match="colorsys"):
        late.no_such_name  # noqa: B018
    with pytest.raises(ModuleNotFoundError):
        lazy("no_such_module").name  # noqa: B018


def test_a_lazily_imported_module_accepts_replaced_attributes(monkeypatch) -> None:
    late = lazy("colorsys")
    monkeypatch.setattr(late, "ONE_THIRD", 3)
    monkeypatch.setitem(vars(late), "TWO_THIRD", 6)
    module = importlib.import_module("colorsys")
    assert (late.ONE_THIRD, late.TWO_THIRD) == (module.ONE_THIRD, module.TWO_THIRD) == (3, 6)


def test_no_file_imports_inside_a_function() -> None:
    """Exceptions: torchvision, whose import is fixed where it fails, and names that `kindred` itself looks up."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = set()
    for name, path in MODULES.items():
        functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)]
        for node in [node for function in functions for node in ast.walk(function)]:
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if isinstance(node, ast.Import | ast.ImportFrom) or called.endswith(("import_module", "__import__")):
                found.add(name)
    assert found == {"kindred", "kindred.lazy", "kindred.torchvision_import"}


def test_type_checkers_and_python_find_the_same_modules() -> None:
    """`lazy` imports the module that the block `if TYPE_CHECKING` above it names."""
    seen = 0
    for name, path in MODULES.items():
        for block in ast.parse(path.read_text()).body:
            if isinstance(block, ast.If) and block.orelse:
                checked = {
                    alias.asname or alias.name: f"{absolute(name, path, node)}.{alias.name}"
                    if isinstance(node, ast.ImportFrom)
                    else alias.name
                    for node in block.body
                    if isinstance(node, ast.Import | ast.ImportFrom)
                    for alias in node.names
                }
                text = "\n".join(map(ast.unparse, block.orelse))
                late: dict[str, str] = {}
                exec(text, {"lazy": lambda module: module}, late)
                assert late.items() <= checked.items(), name
                seen += len(late)
    assert seen > 50


def test_there_are_no_circular_imports() -> None:
    """Lazy imports are included."""
    graph = {name: {module for _, module in imports(name, path) if module in MODULES} for name, path in MODULES.items()}
    done: set[str] = set()

    def follow(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, " -> ".join((*way[way.index(name) :], name))
        if name not in done:
            for module in sorted(graph[name] - {name}):
                follow(module, (*way, name))
            done.add(name)

    for name in MODULES:
        follow(name, ())


def private_names(name: str, path: Path) -> Iterator[str]:
    """Yield the names with an underscore that a file uses of our modules, or of objects imported from them."""
    tree, ours = ast.parse(path.read_text()), set()
    for node, module in imports(name, path):
        if module.split(".")[0] == "kindred":
            ours |= {alias.asname or alias.name for alias in node.names}
            yield from (alias.name for alias in node.names if is_private(alias.name.rpartition(".")[2]))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and ast.unparse(node.value) in ours:
            yield ast.unparse(node)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_no_private_name_is_used_in_another_file(tmp_path) -> None:
    others = [path for folder in ("benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")]
    found = {str(path): list(private_names(name, path)) for name, path in MODULES.items()}
    found |= {str(path): list(private_names("", path)) for path in others}
    assert not {path: names for path, names in found.items() if names}
    bad = tmp_path / "bad.py"
    bad.write_text("import kindred.data as d\nfrom kindred import FedAMP, _HOMES, __version__\nd._load()\nFedAMP._xi\n")
    assert sorted(set(private_names("", bad))) == ["FedAMP._xi", "_HOMES", "d._load"]
