"""How Sphinx makes the site of these pages: `make docs`, without a network.

The pages are plain Markdown, so that they read well where they lie, too. What only the site needs is put in
while it is built: the navigation, a drawing in the place of a diagram that a script would have to draw, and
parts of files that lie elsewhere.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from sphinx.application import Sphinx

DOCS: Final = Path(__file__).parent

# Every page is in here once; one that is not fails the build, and so does one that is not there, unless it is
# optional.
NAVIGATION: Final = {
    "Begin": ("start", "concepts", "deployment"),
    "Engines": ("engines-sglang", "engines-vllm", "kv-events", "transports", "gpu"),
    "Operating": (
        "operating", "reasons", "troubleshooting", "metrics", "top", "bounds", "reliability", "security",
    ),
    "Looking back": ("forensics", "forensics-page", "forensics-proof", "replay", "simulation"),
    "Reference": ("reference-config", "reference-wire", "reference-log", "state-machine"),
    "Inside": ("design-notes", "benchmarks", "benchmarks-control", "changelog"),
}  # fmt: skip

project = "snapd"
author = "The snapd authors"
# No year: the same sources make the same pages.
copyright = "the snapd authors, Apache-2.0"  # noqa: A001 - Sphinx wants this name
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
root_doc = "index"
exclude_patterns: list[str] = []
myst_heading_anchors = 4
html_theme = "furo"
html_title = "snapd"
# Nothing that other pages, or other hosts, would have to serve.
html_copy_source = False
html_show_sourcelink = False
# A page that is read from a disk may not fetch others, which the summaries are made of.
html_show_search_summary = False
# Options begin with two dashes, and stay so.
smartquotes = False
html_use_index = False
html_domain_indices = False

_LIST: Final = re.compile(r"<!-- navigation: begin -->.*<!-- navigation: end -->", re.DOTALL)
_FROM: Final = re.compile(r"<!-- from: (\S+) (.*?) -->.*?<!-- from: end -->", re.DOTALL)
_DIAGRAM: Final = re.compile(r"```mermaid\n.*?```", re.DOTALL)


def navigation() -> str:
    """Return the navigation as directives: one captioned list a part."""
    lists = (
        "\n".join(("```{toctree}", f":caption: {caption}", ":maxdepth: 1", "", *names, "```"))
        for caption, names in NAVIGATION.items()
    )
    return "\n\n".join(lists)


def section(path: str, heading: str) -> str:
    """Return a file of the project from the line of a heading to the next one like it; all of it without one.

    Its links are made to lead from here.

    Raises:
        LookupError: no such heading is there.
    """
    text = (DOCS.parent / path).read_text(encoding="utf-8")
    if heading:
        found = re.search(rf"^(#+) {re.escape(heading)}\n.*?(?=^\1 |\Z)", text, re.DOTALL | re.MULTILINE)
        if found is None:
            raise LookupError(f"{path} has no heading {heading!r}")
        text = found.group()
    return re.sub(r"\]\((?!\w+:|#|docs/)", "](../", text).replace("](docs/", "](")


def on_source_read(_app: "Sphinx", docname: str, source: list[str]) -> None:
    """Put in what only the site needs."""
    if docname == root_doc:
        source[0] = _LIST.sub(lambda _: navigation(), source[0])
    elif docname == "state-machine":
        source[0] = _DIAGRAM.sub("![The states of an attempt](state-machine.svg)", source[0])
    elif docname == "changelog":
        source[0] = section("CHANGELOG.md", "")
    # No other diagram has a drawing: it is shown as it is written.
    source[0] = source[0].replace("```mermaid\n", "```text\n")
    source[0] = _FROM.sub(lambda found: section(found[1], found[2]), source[0])


def setup(app: "Sphinx") -> dict[str, bool]:
    """Connect what is above."""
    app.connect("source-read", on_source_read)
    return {"parallel_read_safe": True}
