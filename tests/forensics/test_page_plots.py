"""The pictures: there, of a good size, and not empty."""

import io
import os
import subprocess
import sys
import warnings
from itertools import islice
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("duckdb", reason="logs are read with DuckDB: pip install 'kv-snapd[forensics]'")
pytest.importorskip(
    "pyarrow", reason="logs are read with DuckDB and pyarrow: pip install 'kv-snapd[forensics]'"
)
pytest.importorskip("matplotlib", reason="plots need matplotlib: pip install 'kv-snapd[forensics]'")
np = pytest.importorskip("numpy")
Image = pytest.importorskip("PIL.Image", reason="pictures are looked at with pillow")

from page_log import Night  # noqa: E402
from page_made import made_page  # noqa: E402

from snapd.forensics.lines import LogInput  # noqa: E402
from snapd.forensics.page import write_pngs  # noqa: E402
from snapd.forensics.page.palette import LIVE, QUARANTINED, colour  # noqa: E402
from snapd.forensics.page.plots import DPI, WIDTH_IN, draw_each, ok_share  # noqa: E402
from snapd.forensics.report import build_report  # noqa: E402
from snapd.forensics.tables import LogTables  # noqa: E402


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("plots")
    log_path = directory / "d-to-p-sync.jsonl"
    Night(log_path, 600)
    with LogInput([str(log_path)]) as log, LogTables(log) as tables:
        report = build_report(tables, log)
        found = write_pngs(tables, report, directory / "out")
        (one,) = write_pngs(tables, report, directory / "all.PNG")
    return {path.stem: path for path in [*found, one]}


def pixels(path: Path) -> "np.ndarray":
    return np.asarray(Image.open(path).convert("RGB"))


def has(image: "np.ndarray", ink: str) -> bool:
    want = [int(ink[at : at + 2], 16) for at in (1, 3, 5)]
    return bool((np.abs(image.astype(int) - want).max(axis=2) <= 2).any())


def test_there_is_one_picture_for_each_plot_and_one_of_all(written: dict[str, Path]) -> None:
    assert set(written) == {"outcomes", "timeline", "states", "arenas", "all"}
    heights = {name: pixels(path).shape[0] for name, path in written.items()}
    assert heights.pop("all") == pytest.approx(sum(heights.values()), abs=8)
    for path in written.values():
        assert pixels(path).shape[1] == WIDTH_IN * DPI
        assert pixels(path).std() > 15


def test_what_was_logged_is_to_be_seen(written: dict[str, Path]) -> None:
    assert has(pixels(written["outcomes"]), colour("ok").light)
    assert has(pixels(written["outcomes"]), colour("transfer-timeout").light)
    assert has(pixels(written["timeline"]), colour("transfer-timeout").light)
    assert has(pixels(written["arenas"]), LIVE.light) and has(pixels(written["arenas"]), QUARANTINED.light)


def test_any_title_and_no_attempts_make_pictures_without_a_warning() -> None:
    page = msgspec.structs.replace(made_page(30), title="$\\frac{1}{$ 日本 \n\x00")
    empty = msgspec.structs.replace(made_page(0), end_s=0.0, arenas=[])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for data in (page, empty):
            for _, png in draw_each(data):
                assert Image.open(io.BytesIO(png)).size[0] == WIDTH_IN * DPI


@pytest.mark.parametrize("seed", [2, 3])
def test_a_single_attempt_is_to_be_seen_in_its_states(seed: int) -> None:
    made = made_page(1, seed=seed)
    assert made.rows.reason.tolist() == [0]
    image = np.asarray(Image.open(io.BytesIO(dict(draw_each(made))["states"])).convert("RGB")).astype(int)
    green = [int(colour("ok").light[at : at + 2], 16) for at in (1, 3, 5)]
    # The legend's own patch has some 500 pixels.
    assert (np.abs(image - green).max(axis=2) <= 2).sum() > 2_000


@pytest.mark.parametrize(
    ("ok", "attempts", "text"),
    [
        (20_000, 20_000, "100.0 % of 20,000"),
        (19_999, 20_000, "99.9 % of 20,000"),
        (0, 0, "no attempt has ended"),
    ],
)
def test_one_failure_is_not_rounded_away(ok: int, attempts: int, text: str) -> None:
    page = msgspec.structs.replace(made_page(0), attempts=attempts, attempts_ok=ok)
    assert ok_share(page).startswith(text)


def test_the_same_data_make_the_same_picture() -> None:
    first, second = (dict(islice(draw_each(made_page(50)), 2)) for _ in range(2))
    assert first == second


def test_matplotlib_is_loaded_only_to_draw() -> None:
    code = (
        "import sys, snapd.forensics.page.extract, snapd.forensics.page.plots; "
        "sys.exit('matplotlib' in sys.modules or 'numpy' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ)
