"""The site builds without a network and without a warning, and loads nothing from elsewhere."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from shown import DOCS, PROJECT

BUILD_S = 100
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HAS_TOOL = all(importlib.util.find_spec(name) for name in ("sphinx", "furo", "myst_parser"))
needs_tool = pytest.mark.skipif(not HAS_TOOL, reason="Sphinx is not installed: pip install 'kv-snapd[docs]'")

# What a browser loads by itself, by tag; what a reader may click is not among it.
LOADED = {
    "audio": ("src",), "embed": ("src",), "iframe": ("src",), "img": ("src", "srcset"), "image": ("href",),
    "input": ("src",), "link": ("href",), "object": ("data",), "script": ("src",),
    "source": ("src", "srcset"), "track": ("src",), "use": ("href", "xlink:href"), "video": ("src", "poster"),
}  # fmt: skip
ELSEWHERE = re.compile(r"^\s*(?:[a-z][a-z0-9+.-]*:)?//", re.IGNORECASE)
IN_STYLES = re.compile(r"""url\(\s*['"]?([^'")]+)|@import\s+['"]([^'"]+)""", re.IGNORECASE)


def _conf() -> ModuleType:
    # As Sphinx does, without a trace in docs/.
    module = ModuleType("conf")
    module.__file__ = str(DOCS / "conf.py")
    exec(compile((DOCS / "conf.py").read_text(), module.__file__, "exec"), module.__dict__)
    return module


# Sphinx as `make docs` runs it, but that nothing can be connected to.
BUILD = """
import socket, sys
def connect(*arguments):
    raise OSError("a build connects to nobody")
socket.socket.connect = socket.socket.connect_ex = socket.create_connection = socket.getaddrinfo = connect
from sphinx.cmd.build import main
sys.exit(main(["-q", "-W", "--keep-going", "-b", "html", "-d", *sys.argv[1:]]))
"""


def _build(docs: Path, out: Path) -> "subprocess.CompletedProcess[str]":
    arguments = [str(out / "doctrees"), str(docs), str(out / "html")]
    return subprocess.run(
        [sys.executable, "-c", BUILD, *arguments],
        capture_output=True,
        text=True,
        timeout=BUILD_S,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    built = _build(DOCS, out)
    assert built.returncode == 0, built.stderr
    return out / "html"


class _Loads(HTMLParser):
    """Collects what a page loads."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._in_style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._in_style = tag == "style"
        for name, value in attrs:
            if name in LOADED.get(tag, ()):
                self.found.append(value or "")
            elif name == "style":
                self.found += styles(value or "")

    def handle_data(self, data: str) -> None:
        if self._in_style:
            self.found += styles(data)

    def handle_endtag(self, tag: str) -> None:
        self._in_style = False


def styles(text: str) -> list[str]:
    """Return what a style sheet loads."""
    return [one or other for one, other in IN_STYLES.findall(text)]


def loads(page: str) -> list[str]:
    """Return what a page loads."""
    parser = _Loads()
    parser.feed(page)
    parser.close()
    return parser.found


# --- the navigation ------------------------------------------------------------------------------


def test_every_page_is_in_the_navigation_once() -> None:
    conf = _conf()
    names = [name for names in conf.NAVIGATION.values() for name in names]
    assert sorted(names) == sorted({path.stem for path in DOCS.glob("*.md")} - {conf.root_doc})
    assert all(re.search(rf"^{re.escape(name)}$", conf.navigation(), re.MULTILINE) for name in names)


def test_the_first_page_leads_to_every_page() -> None:
    conf = _conf()
    linked = set(re.findall(r"\]\(([\w-]+)\.md\)", (DOCS / "index.md").read_text()))
    # The page on benchmarks leads to that one.
    assert linked | {"benchmarks-control"} >= {name for names in conf.NAVIGATION.values() for name in names}


# --- the build -----------------------------------------------------------------------------------


@needs_tool
def test_the_site_builds_without_a_warning_and_has_every_page(site: Path) -> None:
    assert {path.stem for path in DOCS.glob("*.md")} <= {path.stem for path in site.glob("*.html")}


@needs_tool
def test_no_page_and_no_style_sheet_loads_anything_from_another_host(site: Path) -> None:
    from_pages = {(path.name, what) for path in site.rglob("*.html") for what in loads(path.read_text())}
    from_styles = {(path.name, what) for path in site.rglob("*.css") for what in styles(path.read_text())}
    from_drawings = {(path.name, what) for path in site.rglob("*.svg") for what in loads(path.read_text())}
    assert any(what.startswith("_static/styles/furo") for _, what in from_pages)
    found = from_pages | from_styles | from_drawings
    assert [(name, what) for name, what in sorted(found) if ELSEWHERE.match(what)] == []


@pytest.mark.parametrize(
    "page",
    [
        '<script src="https://cdn.example/a.js"></script>',
        '<link rel="stylesheet" href="//fonts.example/css">',
        '<img src="HTTP://img.example/a.png">',
        '<style>@import "https://a.example/a.css";</style>',
        '<p style="background: url(https://a.example/b.png)">',
        "<style>@font-face { src: url('https://a.example/f.woff2') }</style>",
        '<svg><use href="https://a.example/s.svg#x"/></svg>',
    ],
)
def test_what_is_loaded_from_another_host_is_found(page: str) -> None:
    assert any(ELSEWHERE.match(what) for what in loads(page))


@pytest.mark.parametrize(
    "page",
    ['<a href="https://a.example/">', '<img src="_images/a.svg">', '<img src="data:image/png;base64,AA">'],
)
def test_a_link_to_click_and_what_lies_beside_the_page_are_not(page: str) -> None:
    assert not any(ELSEWHERE.match(what) for what in loads(page))


@needs_tool
def test_the_state_machine_is_a_drawing_and_needs_no_script(site: Path) -> None:
    for page in ("state-machine.html", "concepts.html"):
        text = (site / page).read_text()
        assert "_images/state-machine.svg" in text
        assert "mermaid" not in text


@needs_tool
def test_parts_of_the_readme_and_the_changelog_are_on_the_site(site: Path) -> None:
    assert "KVPool" in (site / "start.html").read_text()
    assert re.search(
        r'<section id="minimal-|<section id="a-minimal-p-and-d"', (site / "start.html").read_text()
    )
    assert "Unreleased" in (site / "changelog.html").read_text()


def test_links_in_parts_of_other_files_lead_from_where_the_pages_are() -> None:
    part = _conf().section("README.md", "Reading on")
    assert "](transports.md)" in part
    assert "](../CHANGELOG.md)" in part
    assert "](docs/" not in part


def test_a_part_that_is_not_there_is_an_error() -> None:
    conf = _conf()
    assert conf.section("README.md", "A minimal P and D").startswith("## A minimal P and D\n")
    assert "## Beside" not in conf.section("README.md", "A minimal P and D")
    with pytest.raises(LookupError, match="no heading"):
        conf.section("README.md", "A maximal P and D")


@needs_tool
def test_a_page_without_a_place_and_links_that_lead_nowhere_fail_the_build(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    for name in ("conf.py", "index.md", "state-machine.svg"):
        shutil.copy(DOCS / name, docs)
    shutil.copy(PROJECT / "CHANGELOG.md", tmp_path)
    for name in {name for names in _conf().NAVIGATION.values() for name in names}:
        (docs / f"{name}.md").write_text(f"# {name}\n")
    (docs / "replay.md").write_text("# Replaying\n\n```mermaid\nflowchart\n```\n")
    assert _build(docs, tmp_path).returncode == 0
    (docs / "nowhere.md").write_text("# Nowhere\n")
    (docs / "gpu.md").write_text(
        "# GPUs\n\n[a](no-page.md) [b](start.md#no-heading) [c](#no-place) ![d](no.png)\n"
    )
    built = _build(docs, tmp_path)
    assert built.returncode != 0
    for what in ("nowhere.md", "no-page.md", "no-heading", "no-place", "no.png"):
        assert what in built.stderr


# --- in a browser --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
    args = ["--no-sandbox"] if os.geteuid() == 0 else []
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=args)
        yield chromium
        chromium.close()


@needs_tool
def test_a_browser_asks_nobody_for_anything_and_finds_words(site: Path, browser: Any) -> None:
    page = browser.new_page()
    troubles: list[str] = []
    page.on(
        "request", lambda request: None if request.url.startswith("file:") else troubles.append(request.url)
    )
    page.on("console", lambda message: troubles.append(message.text))
    page.on("pageerror", lambda error: troubles.append(str(error)))
    for name in ("index", "state-machine", "reference-config", "reasons", "start"):
        page.goto((site / f"{name}.html").as_uri())
    page.goto((site / "search.html").as_uri() + "?q=quarantine")
    page.wait_for_selector("#search-results li", timeout=60_000)
    assert troubles == []
