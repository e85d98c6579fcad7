"""The page's file: what is packed comes out again, and nothing of the log is taken for anything but data."""

import base64
import gzip
import hashlib
import html.parser
import json
import os
import re
import struct
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("duckdb", reason="logs are read with DuckDB: pip install 'kv-snapd[forensics]'")
pytest.importorskip(
    "pyarrow", reason="logs are read with DuckDB and pyarrow: pip install 'kv-snapd[forensics]'"
)
np = pytest.importorskip("numpy")

from page_log import HOSTILE, Night, opened  # noqa: E402
from page_made import made_page  # noqa: E402

from snapd.errors import ExtraMissing, Reason  # noqa: E402
from snapd.forensics import page as page_package  # noqa: E402
from snapd.forensics.page import write_html  # noqa: E402
from snapd.forensics.page.data import PageData  # noqa: E402
from snapd.forensics.page.extract import page_data  # noqa: E402
from snapd.forensics.page.files import replace_file  # noqa: E402
from snapd.forensics.page.pack import pack  # noqa: E402
from snapd.forensics.page.palette import COLOURS, OPEN, OTHER, colour  # noqa: E402
from snapd.forensics.page.render import render  # noqa: E402

TYPES = {"u8": "u1", "u16": "<u2", "u32": "<u4", "f32": "<f4", "f64": "<f8"}


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory) -> tuple[Night, Path]:
    path = tmp_path_factory.mktemp("night") / "d-to-p-sync.jsonl"
    return Night(path, 400), path


@pytest.fixture(scope="module")
def page(night: tuple[Night, Path]) -> PageData:
    with opened(night[1]) as (tables, report):
        return page_data(tables, report)


def test_what_is_packed_comes_out_again(page: PageData) -> None:
    raw = gzip.decompress(base64.b64decode(pack(page)))
    (length,) = struct.unpack("<I", raw[:4])
    header = json.loads(raw[4 : 4 + length])
    columns = {
        name: np.frombuffer(raw, TYPES[kind], count, offset)
        for name, kind, offset, count in header["columns"]
    }
    assert (columns["handle"] == page.rows.handle).all()
    assert (columns["start_s"] == page.rows.start_s).all()
    assert (columns["arena1_live"] == page.arenas[1].live.ravel()).all()
    assert all(offset % 8 == 0 for _, _, offset, _ in header["columns"])
    assert header["sessions"] == page.sessions and HOSTILE in header["sessions"]


def test_the_same_log_makes_the_same_page(page: PageData) -> None:
    assert render(page) == render(page)


class _Tags(html.parser.HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_the_policy_allows_exactly_the_script_and_the_style_that_are_there() -> None:
    text = render(made_page(10))
    tags = _Tags(text)
    policy = next(a["content"] for _, a in tags.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and policy.startswith("default-src 'none'; ")
    for directive, tag in (("script-src", "script"), ("style-src", "style")):
        assert text.count(f"<{tag}>") == 1
        inside = text.split(f"<{tag}>")[1].split(f"</{tag}>")[0]
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}';" in policy
    assert "unsafe" not in policy
    inline = [a for _, a in tags.tags if any(name.startswith("on") or name == "style" for name in a)]
    assert inline == []


def test_the_page_points_nowhere() -> None:
    text = render(made_page(10))
    for _, attributes in _Tags(text).tags:
        for name in ("src", "href", "action", "srcset", "poster"):
            assert (attributes.get(name) or "#").startswith(("#", "data:")), attributes
    assert not re.search(r"@import|url\(|https?://", text)


def test_the_script_never_makes_html_or_code_of_text() -> None:
    assets = resources.files("snapd.forensics.page").joinpath("assets")
    scripts = [asset for asset in assets.iterdir() if asset.name.endswith(".js")]
    assert len(scripts) == 9
    for script in scripts:
        found = re.findall(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|"
            r"createContextualFragment|\bfetch\(|XMLHttpRequest|import\(",
            script.read_text("utf-8"),
        )
        assert found == [], script.name


def test_a_hostile_name_of_the_file_is_escaped(tmp_path: Path) -> None:
    path = tmp_path / "<svg onload=alert(1)>.jsonl"
    Night(path, 5)
    with opened(path) as (tables, report):
        write_html(tables, report, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text("utf-8")
    assert "<svg" not in text and "&lt;svg onload=alert(1)&gt;.jsonl" in text
    assert HOSTILE not in text


def test_a_page_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, link = tmp_path / "page.html", tmp_path / "link.html"
    target.write_text("old")
    link.symlink_to(target)
    replace_file(link, b"new")
    assert target.read_text() == "new" and link.is_symlink()
    with pytest.raises(OSError, match="No such file"):
        replace_file(tmp_path / "nowhere" / "page.html", b"new")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("no space left")))
        with pytest.raises(OSError, match="no space left"):
            replace_file(target, b"newer")
    assert target.read_text() == "new"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    replace_file(pipe, b"newest")
    assert os.read(reader, 100) == b"newest"
    os.close(reader)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.html", "page.html", "pipe"]


def test_a_signal_as_soon_as_the_page_is_there_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.open

    def interrupted(path: Path, *arguments: Any, **options: Any) -> None:
        real(path, *arguments, **options).close()
        assert list(tmp_path.iterdir()) == [path]
        raise SystemExit(143)

    monkeypatch.setattr(Path, "open", interrupted)
    with pytest.raises(SystemExit):
        replace_file(tmp_path / "page.html", b"new")
    assert not list(tmp_path.iterdir())


def test_a_page_has_the_usual_permissions(tmp_path: Path) -> None:
    former = os.umask(0o027)
    try:
        replace_file(tmp_path / "page.html", b"new")
    finally:
        os.umask(former)
    assert (tmp_path / "page.html").stat().st_mode & 0o777 == 0o640


def test_a_missing_package_is_named_with_what_to_do(
    night: tuple[Night, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(night[1]) as (tables, report):
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        with pytest.raises(ExtraMissing, match=r"matplotlib.*pip install 'kv-snapd\[forensics\]'"):
            page_package.write_pngs(tables, report, tmp_path)
        monkeypatch.setitem(sys.modules, "numpy", None)
        with pytest.raises(ExtraMissing, match=r"numpy.*pip install 'kv-snapd\[forensics\]'"):
            write_html(tables, report, tmp_path / "page.html")


def test_every_reason_that_ends_an_attempt_has_a_colour_of_its_own() -> None:
    never_an_outcome = {
        Reason.LEASE_EXPIRED, Reason.ROUND_ABORTED, Reason.STALE_HANDLE, Reason.WRONG_STATE,
        Reason.UNKNOWN_TYPE, Reason.PERMISSION_DENIED,
    }  # fmt: skip
    assert set(COLOURS) == (set(Reason) - never_an_outcome) | {OPEN}
    assert len({c.light for c in COLOURS.values()}) == len({c.dark for c in COLOURS.values()}) == len(COLOURS)
    assert colour("something new") == OTHER
