"""The page in a real browser: Debian's chromium, driven by playwright, without a network."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

pytest.importorskip("duckdb", reason="the page is made of DuckDB's tables: pip install 'kv-snapd[forensics]'")
pytest.importorskip(
    "pyarrow", reason="the page is made of DuckDB's tables: pip install 'kv-snapd[forensics]'"
)
pytest.importorskip("numpy")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

from page_log import HOSTILE, Night  # noqa: E402
from page_made import SPAN_S, made_page  # noqa: E402

from snapd.forensics.lines import LogInput  # noqa: E402
from snapd.forensics.page import write_html  # noqa: E402
from snapd.forensics.page.data import READY  # noqa: E402
from snapd.forensics.page.palette import colour  # noqa: E402
from snapd.forensics.page.render import render  # noqa: E402
from snapd.forensics.report import build_report  # noqa: E402
from snapd.forensics.tables import LogTables  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="chromium is not installed: apt-get install chromium"
)

# Runs an action, waits until its frame has been drawn, and returns how long that took.
TIMED = """async (action) => {
  const begin = performance.now();
  new Function(action)();
  await new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)));
  return performance.now() - begin;
}"""
TYPE = "const s = document.getElementById('search'); s.value = {!r}; s.dispatchEvent(new Event('input'))"


class Shown(NamedTuple):
    """A page that is open, and what went wrong on it."""

    page: Any
    troubles: list[str]

    def rows(self) -> list[str]:
        return self.page.locator("#table tbody tr[data-row]").all_inner_texts()

    def text(self, selector: str) -> str:
        return self.page.locator(selector).inner_text()

    def settle(self) -> None:
        self.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)))")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    args = ["--no-sandbox"] if os.geteuid() == 0 else []
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=args)
        yield chromium
        chromium.close()


def shown(browser: Any, path: Path, **options: Any) -> Shown:
    """Open a file; every request but for the file itself, and every word on the console, is a trouble."""
    page = browser.new_page(viewport={"width": 1280, "height": 800}, **options)
    troubles: list[str] = []
    page.on("request", lambda r: None if r.url == path.as_uri() else troubles.append(f"request: {r.url}"))
    page.on("console", lambda m: troubles.append(f"console: {m.type} {m.text}"))
    page.on("pageerror", lambda e: troubles.append(f"error: {e}"))
    page.goto(path.as_uri())
    try:
        page.wait_for_selector("body[data-ready]", timeout=20_000)
    except playwright.TimeoutError:
        pytest.fail(f"the page was not drawn: {troubles}")
    return Shown(page, troubles)


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Night, Path]]:
    directory = tmp_path_factory.mktemp("night")
    made = Night(directory / "d-to-p-sync.jsonl", 1_500)
    with LogInput([str(directory)]) as log, LogTables(log) as tables:
        write_html(tables, build_report(tables, log), directory / "page.html")
    yield made, directory / "page.html"


@pytest.fixture
def view(browser: Any, night: tuple[Night, Path]) -> Iterator[Shown]:
    page = shown(browser, night[1])
    yield page
    page.page.close()
    assert page.troubles == []


def drag(view: Shown, selector: str, begin: float, end: float) -> None:
    """Drag over a pane, from and to shares of its width."""
    pane = view.page.locator(selector)
    pane.scroll_into_view_if_needed()
    box = pane.bounding_box()
    y = box["y"] + box["height"] / 3
    view.page.mouse.move(box["x"] + begin * box["width"], y)
    view.page.mouse.down()
    view.page.mouse.move(box["x"] + end * box["width"], y, steps=3)
    view.page.mouse.up()
    view.settle()


def test_the_first_glance_tells_rate_reasons_and_the_worst_time(
    view: Shown, night: tuple[Night, Path]
) -> None:
    outcomes = night[0].outcomes
    assert view.text("#ok-text").startswith(f"{outcomes['ok']:,} of {sum(outcomes.values()):,} ")
    counts = dict(
        zip(
            view.page.locator("#reasons .name").all_inner_texts(),
            view.page.locator("#reasons .num").all_inner_texts(),
            strict=True,
        )
    )
    assert {name: int(count.replace(",", "")) for name, count in counts.items() if name != "open"} == outcomes
    assert "not OK, mostly" in view.text("#worst")
    assert "1 restart" in view.text("#subtitle")


def test_a_search_finds_a_session_and_nothing_else(view: Shown, night: tuple[Night, Path]) -> None:
    session = next(s for s, _, reason in night[0].ended if reason == "transfer-timeout" and s != HOSTILE)
    count = sum(1 for s, _, _ in night[0].ended if s == session)
    view.page.fill("#search", session.upper())
    view.settle()
    rows = view.rows()
    assert len(rows) >= min(count, 5)
    assert all(session in row for row in rows)
    assert view.text("#table-scope").startswith(f"{count} of ")


def test_a_search_finds_an_attempt_by_its_handle(view: Shown, night: tuple[Night, Path]) -> None:
    session, handle, reason = next(e for e in night[0].ended if e[1] and e[2] == "transfer-failed")
    view.page.fill("#search", str(handle))
    view.settle()
    (row,) = view.rows()
    assert session in row and reason in row


def test_a_click_tells_the_story(view: Shown, night: tuple[Night, Path]) -> None:
    session, handle, _ = next(e for e in night[0].ended if e[2] == "reserve-timeout")
    view.page.fill("#search", str(handle))
    view.settle()
    view.page.click("#table tr[data-row='0']")
    assert view.text("#story-title") == session
    story = view.text("#story")
    assert "raise reserve_timeout_ms" in story
    assert "rank 1 · slab.quarantined" in story and "undrained" in story
    assert story.index("RESERVED") < story.index("ABORTED: reserve-timeout") < story.index("slab.released")
    assert str(handle) in story
    view.page.keyboard.press("Escape")
    assert not view.page.is_visible("#story")


def test_the_table_is_used_with_the_keyboard(view: Shown) -> None:
    view.page.focus("#table")
    for key in ("ArrowDown", "ArrowDown", "Enter"):
        view.page.keyboard.press(key)
    second = view.page.locator("#table tr[data-row='1'] bdi").inner_text()
    assert view.text("#story-title") == second
    view.page.keyboard.press("Escape")
    assert view.page.evaluate("document.activeElement.id") == "table"


def test_a_click_on_a_bar_tells_its_story(view: Shown) -> None:
    view.page.click("#worst button")
    view.settle()
    pane = view.page.locator("#timeline")
    x = pane.locator("canvas").evaluate(
        """(canvas) => {
          const line = canvas.getContext('2d').getImageData(0, 8, canvas.width, 1);
          const row = new Uint32Array(line.data.buffer);
          const runs = [...row.keys()].filter((x) => x > 70 && [1, 2, 3].every((d) => row[x - d] === row[x]));
          return runs.find((x) => row[x] !== row[row.length - 5]);
        }"""
    )
    pane.hover(position={"x": x, "y": 8})
    told = view.text("#tip b")
    pane.click(position={"x": x, "y": 8})
    assert view.text("#story-title") == told


def test_the_panes_tell_what_is_under_the_mouse(view: Shown) -> None:
    for selector, at, word in (
        ("#outcomes", (0.5, 0.8), "ok"),
        (".arena:nth-child(1) .pane:last-child", (0.5, 0.5), "largest hole"),
    ):
        pane = view.page.locator(selector)
        pane.scroll_into_view_if_needed()
        box = pane.bounding_box()
        view.page.mouse.move(box["x"] + at[0] * box["width"], box["y"] + at[1] * box["height"])
        assert word in view.text("#tip")
        assert view.page.locator(".cross:visible").count() == view.page.locator(".pane").count()
    view.page.mouse.move(0, 0)
    assert not view.page.is_visible("#tip")


def test_a_piece_of_an_arena_leads_to_its_attempt(view: Shown) -> None:
    view.page.click("#worst button")
    view.settle()
    pane = view.page.locator(".arena:nth-child(1) .pane").first
    pane.scroll_into_view_if_needed()
    place = pane.locator("canvas").evaluate(
        """(canvas) => {
          const row = canvas.height - 8;
          const line = canvas.getContext('2d').getImageData(0, row, canvas.width, 1);
          const pixels = new Uint32Array(line.data.buffer), white = 0xffffffff;
          const isRun = (x) => [1, 2, 3].every((d) => pixels[x - d] === pixels[x]);
          return {x: [...pixels.keys()].find((x) => x > 70 && pixels[x] !== white && isRun(x)), y: row};
        }"""
    )
    pane.hover(position=place)
    told = view.text("#tip b")
    assert "about" in view.text("#tip")
    pane.click(position=place)
    assert view.text("#story-title") == told


def test_times_are_shown_in_utc_or_in_local_time(browser: Any, night: tuple[Night, Path]) -> None:
    view = shown(browser, night[1], timezone_id="Asia/Kolkata")
    assert view.text("#subtitle").startswith("2025-12-31 16:53:20 to ")
    first = view.rows()[0]
    view.page.click("#zone-local")
    view.settle()
    assert view.text("#subtitle").startswith("2025-12-31 22:23:20 to ")
    assert view.rows()[0] != first
    assert view.troubles == []
    view.page.close()


def test_brushing_the_timeline_changes_everything_below(view: Shown) -> None:
    before = view.text("#table-scope"), view.text("#time-scope"), view.text("#outcomes-scope")
    drag(view, "#timeline", 0.40, 0.55)
    after = view.text("#table-scope"), view.text("#time-scope"), view.text("#outcomes-scope")
    assert all(a != b for a, b in zip(before, after, strict=True))
    chosen = int(after[0].split(" of ")[0].replace(",", ""))
    assert 0 < chosen < 700
    counts = [int(text.replace(",", "")) for text in view.page.locator("#reasons .num").all_inner_texts()]
    assert sum(counts) == chosen
    view.page.dblclick("#outcomes")
    view.settle()
    assert view.text("#table-scope") == before[0]


def test_the_window_moves_with_the_overview_and_the_keys(view: Shown) -> None:
    drag(view, "#overview", 0.2, 0.4)
    first = view.text("#time-scope")
    drag(view, "#overview", 0.3, 0.6)
    moved = view.text("#time-scope")
    assert moved != first
    assert moved.split("(")[1] == first.split("(")[1], "it is as long as before"
    view.page.focus("#outcomes")
    view.page.keyboard.press("+")
    view.settle()
    assert view.text("#time-scope").split("(")[1] != moved.split("(")[1]
    view.page.keyboard.press("0")
    view.settle()
    assert view.text("#time-scope") == "all of the log"


def test_the_window_stays_inside_the_log_and_is_never_empty(view: Shown) -> None:
    view.page.focus("#outcomes")
    view.page.keyboard.press("+")
    for _ in range(12):
        view.page.keyboard.press("ArrowLeft")
    view.settle()
    assert view.text("#time-scope").startswith(view.text("#subtitle").split(" to ")[0])
    for _ in range(60):
        view.page.keyboard.press("+")
    view.settle()
    assert "(2.88\u202fms)" in view.text("#time-scope"), "a ten-millionth of eight hours"


def test_a_reason_is_chosen_with_a_click(view: Shown, night: tuple[Night, Path]) -> None:
    view.page.click("#reasons button:has-text('session-not-resident')")
    view.settle()
    assert view.text("#table-scope").startswith(f"{night[0].outcomes['session-not-resident']} of ")
    assert all("session-not-resident" in row for row in view.rows())
    view.page.click("#chips button")
    view.settle()
    assert "ok" in "".join(view.rows())


def test_a_click_on_a_head_sorts_and_a_second_one_turns_it_round(view: Shown) -> None:
    button = "#table th[data-column=bytes] button"
    view.page.click(button)
    view.settle()
    assert view.page.get_attribute("#table th[data-column=bytes]", "aria-sort") == "descending"
    largest = view.rows()[0]
    view.page.click(button)
    view.settle()
    assert view.page.get_attribute("#table th[data-column=bytes]", "aria-sort") == "ascending"
    assert view.rows()[0] != largest
    view.page.evaluate("document.getElementById('table').scrollTop = 1e9")
    view.settle()
    assert view.rows()[-1] == largest
    assert view.page.locator("#table tbody tr").count() < 60, "only rows that can be seen are there"


def test_sessions_are_listed_with_their_failures(view: Shown, night: tuple[Night, Path]) -> None:
    view.page.click("#by-session")
    view.settle()
    assert view.text("#table-scope").startswith(f"{len({s for s, _, _ in night[0].ended}):,} sessions")
    cells = view.page.locator("#table tr[data-row='0'] td").all_inner_texts()
    ended = [reason for session, _, reason in night[0].ended if session == cells[0]]
    assert int(cells[3]) in (len(ended) - ended.count("ok"), len(ended) - ended.count("ok") + 1)


def test_a_session_id_is_never_taken_for_html(view: Shown) -> None:
    view.page.fill("#search", "onerror")
    view.settle()
    assert HOSTILE in view.rows()[0]
    view.page.click("#table tr[data-row='0']")
    assert view.text("#story-title") == HOSTILE
    box = view.page.locator("#timeline").bounding_box()
    view.page.mouse.move(box["x"] + 200, box["y"] + 10)
    assert view.page.locator("img").count() == 0
    assert view.page.title() == "d-to-p-sync.jsonl"


def test_any_characters_in_a_session_id_are_shown_as_text(browser: Any, tmp_path: Path) -> None:
    ends_script = "</script><script>document.title='owned'</script>"
    turned = "abc\u202egnp.exe\n\x00"
    names = [ends_script, turned, "{{script}}", "\ud800 alone", "Zoë 日本 😀", ""]
    path = tmp_path / "page.html"
    path.write_text(render(made_page(60, sessions=names)), "utf-8")
    view = shown(browser, path)
    seen = set(view.page.locator("#table tbody bdi").all_inner_texts())
    assert {ends_script, "abc\\u202egnp.exe\\u000a\\u0000", "{{script}}", "? alone", "Zoë 日本 😀"} <= seen
    assert view.page.title() == "made.jsonl"
    assert view.troubles == []
    view.page.close()


def test_nothing_can_be_fetched_or_run_even_if_somebody_tried(
    browser: Any, night: tuple[Night, Path]
) -> None:
    view = shown(browser, night[1])
    blocked = view.page.evaluate(
        """async () => {
          const reports = [];
          document.addEventListener('securitypolicyviolation', (e) => reports.push(e.effectiveDirective));
          await fetch('http://127.0.0.1:9/x').catch(() => {});
          const image = document.createElement('img');
          image.src = 'http://127.0.0.1:9/y';
          const script = document.createElement('script');
          script.textContent = 'window.ran = 1';
          const holder = document.createElement('div');
          holder.innerHTML = '<b onclick="window.ran = 1">x</b>';
          document.body.append(image, script, holder);
          holder.firstChild.click();
          await new Promise((done) => setTimeout(done, 50));
          return [reports.sort(), window.ran];
        }"""
    )
    reports, ran = blocked
    assert {"connect-src", "img-src", "script-src-elem", "script-src-attr"} <= set(reports)
    assert ran is None
    view.page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_pane_shows_something_in_light_and_dark(
    browser: Any, night: tuple[Night, Path], scheme: str
) -> None:
    view = shown(browser, night[1], color_scheme=scheme)
    colours = view.page.evaluate(
        """() => [...document.querySelectorAll('.pane canvas, .histograms canvas')].map((canvas) => {
          const image = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
          return new Set(new Uint32Array(image.data.buffer)).size;
        })"""
    )
    view.settle()
    assert len(colours) == 3 + 2 * 2 + 6
    assert min(colours[:7]) > 3
    ground = view.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(int(part) for part in ground[4:-1].split(",")) < 200) == (scheme == "dark")
    assert view.troubles == []
    view.page.close()


def test_one_failure_among_many_is_neither_rounded_away_nor_hidden(browser: Any, tmp_path: Path) -> None:
    made = made_page(20_000)
    reason, last_state = made.rows.reason * 0, made.rows.last_state * 0 + READY
    reason[10_000] = made.reasons.index("transfer-timeout")
    rows = msgspec.structs.replace(
        made.rows, reason=reason, last_state=last_state, ready_ms=made.rows.ready_ms + 1
    )
    one = msgspec.structs.replace(made, rows=rows, attempts_ok=19_999, reason_counts=[19_999, 1, 0, 0])
    path = tmp_path / "page.html"
    path.write_text(render(one), "utf-8")
    view = shown(browser, path, color_scheme="light")
    assert view.text("#ok-rate") == "99.9\u202f%"
    assert view.page.locator("#reasons .share").all_inner_texts()[:2] == ["99.9\u202f%", "<\u202f0.1\u202f%"]
    red, green, blue = (int(colour("transfer-timeout").light[at : at + 2], 16) for at in (1, 3, 5))
    pixel = 255 << 24 | blue << 16 | green << 8 | red
    found = view.page.locator("#timeline canvas").evaluate(
        """(canvas, pixel) => {
          const image = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
          return new Uint32Array(image.data.buffer).includes(pixel >>> 0);
        }""",
        pixel,
    )
    assert found
    view.page.close()


def test_100_000_attempts_stay_usable(browser: Any, tmp_path: Path) -> None:
    made = made_page(100_000)
    path = tmp_path / "page.html"
    path.write_text(render(made), "utf-8")
    view = shown(browser, path)
    ready_ms = view.page.get_attribute("body", "data-ready")
    assert view.text("#table-scope") == "100,000 of 100,000"
    timed = {
        "search": view.page.evaluate(TIMED, TYPE.format("agent-00042")),
        "sort": view.page.evaluate(
            TIMED, "document.querySelector('#table th[data-column=total] button').click()"
        ),
    }
    assert view.text("#table-scope") == "20 of 100,000"
    totals = written_totals(made, 42)
    assert len(view.rows()) == 20
    assert "agent-00042" in view.rows()[0]
    assert view.page.locator("#table tr[data-row='0'] td").nth(6).inner_text() == totals[-1]
    timed["clear"] = view.page.evaluate(TIMED, TYPE.format(""))
    timed["zoom"] = view.page.evaluate(TIMED, "document.getElementById('zoom-in').click()")
    half = ((made.rows.start_s <= SPAN_S * 0.75) & (made.rows.start_s >= SPAN_S * 0.25)).sum()
    assert abs(int(view.text("#table-scope").split(" of ")[0].replace(",", "")) - half) < half / 50
    timed["by reason"] = view.page.evaluate(TIMED, "document.querySelector('#reasons button').click()")
    timed["sessions"] = view.page.evaluate(TIMED, "document.getElementById('by-session').click()")
    print(f"\npage {path.stat().st_size / 1e6:.1f} MB, drawn after {ready_ms} ms; until the next frame:")
    print(", ".join(f"{name} {ms:.0f} ms" for name, ms in timed.items()))
    assert view.troubles == []
    view.page.close()


def written_totals(made: Any, session: int) -> list[str]:
    """The total times of a session's attempts, in order, as the page writes those of some seconds."""
    rows = made.rows
    own = rows.session == session
    total = (rows.reserved_ms + rows.transferring_ms + rows.ready_ms)[own]
    return [f"{float(f'{ms / 1000:.3g}'):g}\u202fs" for ms in sorted(total.tolist())]
