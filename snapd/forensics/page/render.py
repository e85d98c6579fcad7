"""One self-contained HTML file: a template, a style sheet, a script and the packed data.

The page's Content-Security-Policy allows this one script and this one style sheet, by their digests, and
nothing else: no request can leave it, whatever the log holds.
"""

import base64
import hashlib
import html
from importlib import resources
from typing import Final

from snapd.forensics.page.data import PageData
from snapd.forensics.page.pack import pack

_ASSETS: Final = "assets"
_SCRIPTS: Final = (
    "1-base.js", "2-model.js", "3-panes.js", "4-timeline.js", "5-arena.js", "6-histograms.js", "7-table.js",
    "8-story.js", "9-main.js",
)  # fmt: skip


def render(page: PageData) -> str:
    """Return the page as HTML."""
    style = _asset("page.css")
    script = '(() => {\n"use strict";\n' + "\n".join(_asset(name) for name in _SCRIPTS) + "})();\n"
    policy = (
        f"default-src 'none'; script-src 'sha256-{_digest(script)}'; style-src 'sha256-{_digest(style)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    values = {
        "csp": policy,
        "title": html.escape(page.title),
        "style": style,
        "data": pack(page),
        "script": script,
    }
    # Cut at the marks once: what is put in is never searched for marks again.
    parts: list[str] = []
    for piece in _asset("page.html").split("{{"):
        name, mark, rest = piece.partition("}}")
        parts += [values[name], rest] if mark else [piece]
    return "".join(parts)


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(_ASSETS, name).read_text("utf-8")


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
