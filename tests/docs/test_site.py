"""The site of docs/: its pages, its links, and its reference of all public names."""

import posixpath
import re
from pathlib import Path

import pytest

import tfgradcomp

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
NAVIGATION = re.findall(r"([\w./-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
LINK = re.compile(r"\]\((?![a-z]+:)([^()\s#]+)?(?:#([^()\s]+))?\)")
CODE = re.compile(r"^ *```.*?^ *```$|`[^`\n]*`", re.M | re.S)
DOCUMENTS = [
    *PAGES,
    *(path for page in NAVIGATION if (path := ROOT / page).exists()),
]
REFERENCE = {
    page.stem: re.findall(r"^::: (\S+)$", page.read_text(), re.M)
    for page in PAGES
    if page.parent.name == "api"
}
# What cannot be told from the objects: where constants are.
CONSTANTS = {
    "NAMES": "tfgradcomp.transports.auto",
    "GRPC": "tfgradcomp.planning.network",
    "MODELS": "tfgradcomp.planning.shapes",
    "NO_SOFTWARE": "tfgradcomp.planning.network",
    "TCP": "tfgradcomp.planning.network",
    "Fields": "tfgradcomp.core.field",
    "State": "tfgradcomp.core.component",
    "Vector": "tfgradcomp.core.split_vector",
}
# What functions return, and a function of another package.
FURTHER = {
    "tfgradcomp.planning.tuning.Tuning",
    "tfgradcomp.planning.tuning.Measured",
    "tfgradcomp.collectives.processes.assign_hosts",
}
SUBPACKAGES = [name for name in REFERENCE if name != "functions"]


def identifier(package, name):
    module = CONSTANTS.get(name) or getattr(package, name).__module__
    return f"{module}.{name}"


def anchors_of(path):
    """The anchors of the headings of a document, as they are on the site."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.M)
    plain = [re.sub(r"[^\w\s-]", "", heading.lower()).strip() for heading in headings]
    return {re.sub(r"[\s-]+", "-", heading) for heading in plain}


def test_every_page_is_in_the_navigation_once():
    pages = [str(page.relative_to(ROOT / "docs")) for page in PAGES]
    in_docs = [page for page in NAVIGATION if (ROOT / "docs" / page).exists()]
    assert sorted(in_docs) == pages
    assert len(NAVIGATION) == len(set(NAVIGATION))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_of_a_document_lead_somewhere(path):
    text = CODE.sub("", path.read_text())
    for target, anchor in LINK.findall(text):
        found = path.parent / target if target else path
        assert found.exists(), f"{path.name} links to {target}"
        # The reference makes anchors of its own, of the names in it.
        if anchor and found.parent.name == "api":
            assert anchor in REFERENCE[found.stem]
        elif anchor:
            name = posixpath.relpath(found, ROOT)
            assert anchor in anchors_of(found), f"{path.name}: {name}#{anchor}"


@pytest.mark.parametrize("name", SUBPACKAGES)
def test_reference_has_all_public_names(name):
    if name == "flower":
        pytest.importorskip("flwr", reason="needs Flower: make flower runs it")
    package = getattr(tfgradcomp, name)
    expected = {identifier(package, public) for public in package.__all__}
    assert set(REFERENCE[name]) == expected


def test_reference_has_all_names_of_the_package():
    named = {name for names in REFERENCE.values() for name in names}
    public = set(tfgradcomp.__all__) - {*SUBPACKAGES, "__version__"}
    assert {identifier(tfgradcomp, name) for name in public} <= named
    assert FURTHER <= set(REFERENCE["functions"])
    functions = public - {*tfgradcomp.optimizers.__all__}
    assert len(REFERENCE["functions"]) == len(functions) + len(FURTHER)


def test_every_wrapper_has_a_page_that_says_what_it_computes_and_when_to_use_it():
    index = ROOT / "docs/methods/all.md"
    row = re.compile(r"^\| (`\w+`.*?) \|.*\((\S+\.md)\) \|$", re.M)
    pages = {
        name: link
        for names, link in row.findall(index.read_text())
        for name in re.findall(r"`(\w+)`", names)
    }
    assert set(tfgradcomp.optimizers.__all__) <= set(pages)
    for name, link in pages.items():
        text = (index.parent / link).read_text()
        assert name in text, f"{link} does not name {name}"
        headings = ["## What it computes", "## Knobs"]
        if "/" not in link:
            headings += ["## When to use it", "## Figures"]
        assert [h for h in headings if h not in text] == [], link


def test_what_the_page_on_troubles_quotes_is_what_the_package_says():
    text = (ROOT / "docs/troubleshooting.md").read_text()
    rows = re.findall(r"^\| `([^`]+)`", text, re.M)
    quoted = [row for row in rows if row.count(" ") > 1]
    sources = "".join(path.read_text() for path in ROOT.glob("tfgradcomp/**/*.py"))
    # Sentences that are cut into several strings, joined.
    joined = re.sub(r'"\s*\n\s*f?"', "", sources)
    assert len(quoted) >= 15
    assert [sentence for sentence in quoted if sentence not in joined] == []
