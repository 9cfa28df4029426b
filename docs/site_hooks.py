"""Hooks of MkDocs: what the site has that does not stand in docs/.

Links in documents are those of the repository, so that they work where the documents
are read as files. Here they become links of the site: documents outside of docs/ that
mkdocs.yml names are pages, pictures and tables that those show are copied; of a link
to source code the text remains. Formulas become MathML, which needs no script. Some
pages have a notebook beside them.
"""

from __future__ import annotations

import html
import posixpath
import re
import sys
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs"))
from notebooks import notebook, page_of  # noqa: E402

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:)([^()\s#]+)(#[^()\s]*)?\)")
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.S)
# The head of a table of six columns or more. Drawings need the width, too.
WIDE = re.compile(r"^(?:\|[^|\n]*){6,}\|\n\|[-:| ]+\|$", re.M)
COPIED = (".png", ".svg", ".csv")


def outside(nav):
    """Yields the pages in a navigation that do not stand in docs/."""
    for item in nav:
        value = next(iter(item.values())) if isinstance(item, dict) else item
        if isinstance(value, list):
            yield from outside(value)
        elif (ROOT / value).is_file():
            yield value


def address(path):
    """Returns where a file of the repository is in the site."""
    return path.removeprefix("docs/")


def target(source, link):
    """Returns the file of the repository that a link in a document names."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def on_files(files, config):
    """Adds documents outside of docs/, what those show, and notebooks."""
    for page in outside(config.nav):
        files.append(File.generated(config, page, abs_src_path=str(ROOT / page)))
        for link in LINK.finditer((ROOT / page).read_text()):
            path = target(page, link[3])
            if path.endswith(COPIED) and not files.get_file_from_path(address(path)):
                source = str(ROOT / path)
                files.append(File.generated(config, path, abs_src_path=source))
    for page in config.extra["notebooks"]:
        content = notebook((ROOT / "docs" / page).read_text())
        name = notebook_of(page)
        files.append(File.generated(config, name, content=content))
    for path in sorted((ROOT / "docs").glob("notebooks/*.ipynb")):
        name = f"notebooks/{path.stem}.md"
        content = page_of(path.read_text(), path.name)
        files.append(File.generated(config, name, content=content))
    return files


def notebook_of(page):
    """Returns where the notebook of a page is in the site."""
    return page.removesuffix(".md") + ".ipynb"


def on_page_markdown(markdown, page, config, files):
    """Turns the repository's links into those of the site."""
    uri = page.file.src_uri
    source = uri if page.file.generated_by else f"docs/{uri}"

    def replace(link):
        mark, text, path, anchor = link.groups()
        site_path = address(target(source, path))
        if files.get_file_from_path(site_path) is None:
            if not (ROOT / target(source, path)).exists():
                return link[0]  # MkDocs warns.
            return text if text.startswith("`") else f"`{text}`"
        if site_path.endswith(".ipynb") and not page.file.generated_by:
            site_path = f"{site_path.removesuffix('.ipynb')}.md"
        relative = posixpath.relpath(site_path, posixpath.dirname(uri) or ".")
        return f"{mark}[{text}]({relative}{anchor or ''})"

    # Every other part is a block of code.
    parts = re.split(r"(^ *```.*?^ *```$)", markdown, flags=re.M | re.S)
    parts[::2] = [LINK.sub(replace, part) for part in parts[::2]]
    if WIDE.search(markdown) or ".svg)" in markdown:
        page.meta["hide"] = ["toc"]
        parts.append('\n\n<div class="wide-page"></div>\n')
    if uri in config.extra["notebooks"]:
        parts.append(f"\n\n[This page as a notebook]({notebook_of(uri)}){{download}}\n")
    return "".join(parts)


def on_page_content(content, **_):
    r"""Turns \( formulas \) into MathML."""

    def replace(formula):
        display = "inline" if formula[1] == "span" else "block"
        return convert(html.unescape(formula[2]), display=display)

    return FORMULA.sub(replace, content)
