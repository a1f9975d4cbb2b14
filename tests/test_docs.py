"""The documentation site: its pages, its reference, its links and formulas, and the Python that its pages show."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from importlib import import_module, util
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import yaml
from PIL import Image

import kindred
from kindred import REGISTRY, data
from kindred.data import partitions

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = {path.relative_to(DOCS).as_posix(): path.read_text() for path in sorted(DOCS.rglob("*.md"))}
# Before a block of Python: why it is not run here.
MARKER = re.compile(r"<!-- (?:not run: \S.*|run by (tests/\w+\.py)) -->")


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    specification = util.spec_from_file_location("docs_hooks", DOCS / "hooks.py")
    module = util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def page_of(path: str) -> Any:
    """Return a page without headings, in a section of the navigation."""
    return SimpleNamespace(file=SimpleNamespace(src_uri=path), toc=[], meta={}, parent="a section")


def leaves(nav: Any) -> Iterator[str]:
    """Yield the pages of a navigation, from all its levels."""
    if isinstance(nav, str):
        yield nav
    else:
        for each in nav.values() if isinstance(nav, dict) else nav:
            yield from leaves(each)


def test_the_navigation_has_every_page_once(hooks) -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    listed = Counter(leaves(hooks.on_config(type("Config", (), config)).nav))
    assert set(listed) == set(PAGES) | {"changelog.md", "contributing.md"}
    assert set(listed.values()) == {1}
    methods = {Path(page).stem for page in PAGES if page.startswith("methods/")} - {"index"}
    assert methods <= set(REGISTRY)


def test_the_reference_has_every_public_name_once_and_no_private_one() -> None:
    shown = Counter(name for page, text in PAGES.items() for name in re.findall(r"^::: (\S+)", text, re.M))
    assert set(shown.values()) == {1}
    # The two names of `kindred` that are looked up in the application are documented where they are written.
    late = {"run", "compare"}
    public = {f"kindred.{name}" for name in kindred.__all__ if name not in late}
    public |= {f"kindred.server_app.api.{name}" for name in late}
    public |= {f"kindred.data.{name}" for name in data.__all__}
    public |= {f"kindred.data.partitions.{name}" for name in partitions.__all__ if name not in data.__all__}
    assert public <= set(shown)
    objects = {}
    for name in shown:
        assert not any(part.startswith("_") for part in name.split(".") if part != "__version__"), name
        home, _, last = name.rpartition(".")
        value = getattr(import_module(home), last)
        if isinstance(value, type) or callable(value):
            assert objects.setdefault(value, name) == name  # under one name alone


def test_links_to_files_outside_the_documents_lead_to_pages(hooks) -> None:
    def changed(page: str, markdown: str) -> str:
        return hooks.on_page_markdown(markdown, page_of(page), None, None)

    assert changed("architecture.md", "[a](../strategies/fedamp.py)") == "[a](source/strategies/fedamp.py.md)"
    assert changed("architecture.md", "[a](../strategies/parts)") == "[a](source/strategies/parts/index.md)"
    assert changed("methods/fedamp.md", "[a](../../strategies/fedamp.py)") == "[a](../source/strategies/fedamp.py.md)"
    assert changed("python.md", "[a](../README.md#your-own-run)") == "[a](readme.md#your-own-run)"
    assert changed("contributing.md", "[a](docs/scale.md#measured)") == "[a](scale.md#measured)"
    for kept in ("[a](scale.md)", "[a](#b)", "[a](https://flower.ai)", "![a](images/comparison.png)"):
        assert changed("choosing.md", kept) == kept
    block = "```python\n[a](../strategies/fedamp.py)\n```\n"
    assert changed("choosing.md", block) == block


def test_formulas_become_mathml_and_a_bad_one_fails_the_build(hooks) -> None:
    page = type(
        "Page", (), {"file": type("File", (), {"src_uri": "methods/fedamp.md"}), "toc": [], "meta": {}, "parent": None}
    )
    text = r'<p><span class="arithmatex">\(\xi_{ij} &lt; \frac{1}{2}\)</span></p>'
    result = hooks.on_page_content(text, page=page, config=None, files=None)
    assert "<mfrac>" in result and "\N{GREEK SMALL LETTER XI}" in result and "arithmatex" not in result
    block = hooks.on_page_content(r'<div class="arithmatex">\[w\]</div>', page=page, config=None, files=None)
    assert 'display="block"' in block
    assert "<mtable>" in hooks.mathml(r"\begin{aligned} a &= b \\ c &= \arg\min_w F(w) \end{aligned}", True, "")
    for bad in (
        r"\frac{1}",
        r"\nosuchcommand{x}",
        "{a",
        "a}",
        r"x_i^",
        r"a \\ b",
        r"\begin{nothing}a & b\end{nothing}",
    ):
        with pytest.raises(Exception, match="methods/fedamp.md: formula"):
            hooks.mathml(bad, False, "methods/fedamp.md")


def test_a_name_in_code_leads_to_the_line_that_defines_it(hooks) -> None:
    page = page_of("methods/federico.md")

    def changed(path: str, name: str) -> str:
        text = f'<a href="../source/{path}.html"><code>{name}</code></a>'
        result = hooks.on_page_content(text, page=page, config=None, files=None)
        assert result.replace(found := re.search(r'html([^"]*)"', result)[1], "") == text
        return found

    for path, name, start in (
        ("strategies/federico.py", "collaborator_weights", "def collaborator_weights("),
        ("strategies/parts/federico_losses.py", "Losses.update", "    def update("),
        ("strategies/federico.py", "FedeRiCo", "class FedeRiCo("),
        ("strategies/fedamp.py", "alpha_at", "    def alpha_at("),
    ):
        line = int(changed(path, name).removeprefix("#__codelineno-0-"))
        assert (ROOT / path).read_text().splitlines()[line - 1].startswith(start)
    assert changed("strategies/federico.py", "nowhere") == ""
    assert page.meta["hide"] == ["toc"]  # a page of a section keeps its navigation
    path = hooks.on_page_content(".venv/types/kindred/fedamp.py .venv/types/kindred/data/", page, None, None)
    assert path == "strategies/fedamp.py data/"


class Block(NamedTuple):
    line: int
    code: str
    marker: re.Match[str] | None


def python_blocks(text: str) -> Iterator[Block]:
    """Yield the fenced blocks of Python of a page, with the marker above each."""
    for found in re.finditer(r"^(?P<fence>`{3,}) *python\b.*\n(?P<code>(?:.*\n)*?)(?P=fence)$", text, re.M):
        above = text[: found.start()].rstrip().rpartition("\n")[2]
        yield Block(text[: found.start("code")].count("\n"), found["code"], MARKER.fullmatch(above))


@pytest.mark.parametrize("page", [page for page, text in PAGES.items() if any(python_blocks(text))])
def test_the_python_of_a_page_runs(page, tmp_path, monkeypatch) -> None:
    """In order and in one namespace, but for blocks under a marker.

    A marker is a line above the block: `<!-- not run: WHY -->`, or `<!-- run by tests/test_NAME.py -->`.
    """
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for block in python_blocks(PAGES[page]):
        if block.marker is None:
            code = compile("\n" * block.line + block.code, str(DOCS / page), "exec")  # tracebacks name the page's line
            exec(code, namespace)
        elif test := block.marker[1]:
            assert Path(page).name in (ROOT / test).read_text(), f"{test} does not read {page}"


def test_the_script_of_index_md_makes_a_file_of_images_from_folders(tmp_path, monkeypatch, capsys) -> None:
    (script,) = (block.code for block in python_blocks(PAGES["index.md"]) if "x_train=x[~test]" in block.code)
    for label, name in enumerate(("cat", "dog")):
        (tmp_path / "photographs" / name).mkdir(parents=True)
        for number in range(5):
            Image.new("L", (40, 30), 100 * label + number).save(tmp_path / "photographs" / name / f"{number}.png")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["folder_to_npz.py", "photographs"])
    exec(compile(script, "folder_to_npz.py", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out == "10 images of 2 classes: cat, dog\n"
    with np.load("mine.npz") as found:
        assert {name: array.shape for name, array in found.items()} == {
            "x_train": (8, 32, 32, 3), "y_train": (8,), "x_test": (2, 32, 32, 3), "y_test": (2,)
        }  # fmt: skip
        assert found["y_test"].tolist() == [0, 1] and found["x_test"][1, 0, 0].tolist() == [100, 100, 100]


def test_no_block_of_python_escapes() -> None:
    """Such as one in a list, with other fences or with none, which the test above would not see."""
    for page, text in PAGES.items():
        seen = len(list(python_blocks(text)))
        assert len(re.findall(r"^\s*(?:`{3,}|~{3,}) *\{? *\.?(?:python|py|pycon)\b", text, re.M)) == seen, page
        unfenced = re.sub(r"^(`{3,}).*?^\1$", "", text, flags=re.M | re.S)
        assert not re.search(r"\n\n {4}(?:import |from \w+ import |\w+ = \w+[.(])", unfenced), page
