"""Hooks of MkDocs: links to files outside docs/, formulas, and the pages of methods.

The pages are read in the repository too, so their links to code and to the files of the root are those that work there,
such as ../strategies/fedamp.py. On the site such a link leads to a page that is generated from the file: Markdown is
rendered, and code is shown with line numbers. If the link's text is a name in code, it leads to the line that defines
the name. A link to a folder leads to a list of its files.

Formulas become MathML here, which browsers show without a script. A formula that cannot be converted fails the build.
"""

from __future__ import annotations

import ast
import html
import posixpath
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from griffe import Extension, Function
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from kindred import REGISTRY

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
ROOT_PAGES = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md", "readme.md": "README.md"}
PAGES_OF = {name: page for page, name in ROOT_PAGES.items()}
LANGUAGES = {".py": "python", ".toml": "toml", ".css": "css", ".html": "html", ".js": "javascript"}
METHODS = "Methods"  # section of the navigation that lists the page of each method

LINK = re.compile(r"(?<=\]\()[^)\s]+(?=[)\s])|(?<=src=\")[^\"]+(?=\")")
FENCE = re.compile(r"^( *)(`{3,}|~{3,}).*?^\1\2[`~]*$", re.M | re.S)
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.S)
REPEATED_DEFAULT = re.compile(r"(\(default: [^)<]*\)</code>),\s+default:\s+<code>.*?</code>")
CODE_LINK = re.compile(r'(<a href="[^"#]*\bsource/([^"#]+\.py)\.html)("><code>([\w.]+)</code></a>)')
# Where mkdocstrings reads the code (see `make tree`): in the clone it is in strategies/, or in the folder of that name.
TREE = re.compile(r"\.venv/types/kindred/(data/|server_app/|client_app/)?")
OPENING = re.compile(r"(?<!\\)[{}]")
# Commands that the converter does not know, in those that it does.
REPLACEMENTS = {
    r"\begin{aligned}": r"\begin{array}{rl}",
    r"\end{aligned}": r"\end{array}",
    r"\arg": r"\operatorname{arg}",
    r"\argmin": r"\operatorname*{arg min}",
    r"\argmax": r"\operatorname*{arg max}",
}
MATHML = "{http://www.w3.org/1998/Math/MathML}"
ElementTree.register_namespace("", MATHML[1:-1])
REPLACED = re.compile(r"\\(?:begin|end){aligned}|\\arg(?:min|max)?(?![A-Za-z])")
CHILDREN = {"mfrac": 2, "msub": 2, "msup": 2, "munder": 2, "mover": 2, "mroot": 2, "msubsup": 3, "munderover": 3}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the methods' pages to the navigation, in the registry's order."""
    known = {f"methods/{name}.md": method.title for name, method in REGISTRY.items()}
    pages: list[Any] = [{title: page} for page, title in known.items() if (DOCS / page).is_file()]
    if (DOCS / "methods" / "index.md").is_file():
        pages = ["methods/index.md", *pages]
    for section in config.nav or []:
        if METHODS in section:
            section[METHODS] = [*pages, *section[METHODS]]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for every file outside docs/ that a page links to."""
    for page, name in ROOT_PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    linked = {
        path
        for file in files.documentation_pages()
        for link in LINK.findall(without_code(file.content_string))
        if (path := repository_path(file.src_uri, link)) and not path.is_relative_to(DOCS)
    }
    for path in sorted({each for start in linked for each in [start, *files_below(start)]}):
        if page_of(path) not in ROOT_PAGES:
            files.append(File.generated(config, page_of(path), content=source_page(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to files outside docs/ to their pages."""
    here = page.file.src_uri

    def changed(link: re.Match[str]) -> str:
        path = repository_path(here, link[0])
        if path is None or (path.is_relative_to(DOCS) and here not in ROOT_PAGES):
            return link[0]
        target = path.relative_to(DOCS).as_posix() if path.is_relative_to(DOCS) else page_of(path)
        return posixpath.relpath(target, posixpath.dirname(here) or ".") + "".join(link[0].partition("#")[1:])

    blocks = [(found.start(), found.end()) for found in FENCE.finditer(markdown)]
    parts, last = [], 0
    for start, end in [*blocks, (len(markdown), len(markdown))]:
        parts += [LINK.sub(changed, markdown[last:start]), markdown[start:end]]
        last = end
    return "".join(parts)


def on_page_content(html_text: str, /, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Convert formulas to MathML, lead names to their lines; leave out repeated defaults and what has no entries."""
    empty = {"toc": not any(heading.children for heading in page.toc), "navigation": page.parent is None}
    page.meta.setdefault("hide", [part for part, is_empty in empty.items() if is_empty])
    html_text = REPEATED_DEFAULT.sub(r"\1", html_text)
    html_text = TREE.sub(lambda found: found[1] or "strategies/", html_text)
    html_text = CODE_LINK.sub(lambda found: f"{found[1]}{line_anchor(ROOT / found[2], found[4])}{found[3]}", html_text)
    return FORMULA.sub(lambda found: mathml(html.unescape(found[3]), found[2] == "[", page.file.src_uri), html_text)


class SettingDefaults(Extension):
    """Defaults of arguments in the reference: the value itself where the code says `SIGMA.default`."""

    def on_function_instance(self, *, func: Function, **kwargs: Any) -> None:
        """Replace the defaults of one function."""
        for parameter in func.parameters:
            if re.fullmatch(r"[A-Z_]+\.default", text := str(parameter.default)):
                setting = getattr(import_module(func.module.path), text.partition(".")[0])
                parameter.default = repr(setting.default)


def mathml(formula: str, block: bool, where: str) -> str:
    """Return a formula of TeX as MathML.

    Raises
    ------
    PluginError
        The formula cannot be converted. The converter passes over some mistakes; they are found in its result.
    """
    text = formula.strip()
    try:
        if OPENING.findall(text).count("{") != OPENING.findall(text).count("}"):
            raise ValueError("its braces do not match")
        known = REPLACED.sub(lambda found: REPLACEMENTS[found[0]], text)
        tree = ElementTree.fromstring(convert(known, display="block" if block else "inline"))
        for element in tree.iter():
            name, first = element.tag.removeprefix(MATHML), element[0] if len(element) else None
            if "\\" in (element.text or ""):
                raise ValueError(f"unknown command {element.text}")
            if name == "mspace" and element.get("linebreak"):
                raise ValueError("browsers ignore a line break outside of aligned, array or cases")
            if len(element) != CHILDREN.get(name, len(element)):
                raise ValueError(f"an argument is missing ({name})")
            if name == "mo" and element.text in ("|", "\N{DOUBLE VERTICAL LINE}") and "stretchy" not in element.attrib:
                element.set("stretchy", "false")  # as that of brackets, which \left and \right alone let grow
            if name == "msub" and first is not None and first.text in ("min", "max"):
                element.tag = f"{MATHML}munder"  # in a line of text the index stays beside
                first.set("movablelimits", "true")
    except Exception as error:
        raise PluginError(f"{where}: formula {text!r}: {error or type(error).__name__}") from None
    result = ElementTree.tostring(tree, encoding="unicode")
    return f'<div class="formula">{result}</div>' if block else result


def without_code(markdown: str) -> str:
    """Return Markdown without its fenced blocks."""
    return FENCE.sub("", markdown)


def repository_path(page: str, link: str) -> Path | None:
    """Return the file or folder of the repository that a page's link leads to; None where there is none."""
    target = link.partition("#")[0]
    if not target or "://" in target:
        return None
    folder = ROOT if page in ROOT_PAGES else (DOCS / page).parent
    path = Path(posixpath.normpath((folder / target).as_posix()))
    return path if path.is_relative_to(ROOT) and path != ROOT and path.exists() else None


def line_anchor(path: Path, name: str) -> str:
    """Return the anchor of the line that defines a function, class or method in a file; "" if none does."""
    node: Any = ast.parse(path.read_text())
    for part in name.split("."):
        below = ast.walk(node) if node else ()  # what is not nested first
        definitions = (each for each in below if isinstance(each, ast.FunctionDef | ast.ClassDef))
        node = next((each for each in definitions if each.name == part), None)
    return f"#__codelineno-0-{node.lineno}" if node else ""


def page_of(path: Path) -> str:
    """Return the page that is generated from a file or folder outside docs/."""
    name = path.relative_to(ROOT).as_posix()
    return PAGES_OF.get(name) or f"source/{name}" + ("/index.md" if path.is_dir() else ".md")


def files_below(path: Path) -> Iterator[Path]:
    """Yield the text files in a folder and the folders below it, and these folders."""
    if path.is_dir():
        for each in path.iterdir():
            if each.is_dir() and each.name[0] not in "._" and not each.name.endswith(".egg-info"):
                yield from (each, *files_below(each))
            elif each.suffix in (*LANGUAGES, ".md", ".typed"):
                yield each


def source_page(path: Path) -> str:
    """Return the Markdown page that shows a file, or lists a folder."""
    name = path.relative_to(ROOT).as_posix()
    head = f"---\ntitle: {name}\nsearch:\n  exclude: true\nhide: [navigation, toc]\n---\n\n# {name}\n\n"
    if path.is_dir():
        here = posixpath.dirname(page_of(path))
        below = {
            each.relative_to(path).as_posix(): posixpath.relpath(page_of(each), here) for each in files_below(path)
        }
        entries = [f"- [`{each}`]({page})" for each, page in sorted(below.items())]
        return head + "\n".join(entries)
    return f'{head}~~~~~~{{ .{LANGUAGES.get(path.suffix, "text")} linenums="1" }}\n{path.read_text()}\n~~~~~~\n'
