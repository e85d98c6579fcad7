"""The page and the pictures of ``snapd forensics``: one HTML file that fetches nothing, and PNG files.

Source: design, section 10.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from snapd.errors import ExtraMissing

if TYPE_CHECKING:
    from snapd.forensics.report import Report
    from snapd.forensics.tables import LogTables
    from snapd.forensics.violations import ProofReport

__all__ = ["write_html", "write_pngs"]


def write_html(
    tables: "LogTables", report: "Report", path: Path, *, proof: "ProofReport | None" = None
) -> None:
    """Write the page of what *tables* have selected.

    Args:
        tables: the log.
        report: its figures.
        path: the file; what it held before is replaced, at once and only when the page is whole.
        proof: what was proved of the log; its violations are shown at the top.

    Raises:
        ExtraMissing: numpy is not installed.
        OSError: the file cannot be written.
    """
    _require("numpy", "drawing the page")
    from snapd.forensics.page.extract import page_data
    from snapd.forensics.page.files import replace_file
    from snapd.forensics.page.render import render

    replace_file(path, render(page_data(tables, report, proof)).encode("utf-8"))


def write_pngs(
    tables: "LogTables", report: "Report", path: Path, *, proof: "ProofReport | None" = None
) -> list[Path]:
    """Write the main plots of what *tables* have selected, and return their files.

    Args:
        tables: the log.
        report: its figures.
        path: a directory, which is made if it is not there, for one file a plot; or a name that ends in
            ``.png``, for one file with all of them.
        proof: as for ``write_html``.

    Raises:
        ExtraMissing: numpy or matplotlib is not installed.
        OSError: a file cannot be written.
    """
    _require("numpy", "drawing plots")
    _require("matplotlib", "drawing plots")
    from snapd.forensics.page.extract import page_data
    from snapd.forensics.page.files import replace_file
    from snapd.forensics.page.plots import draw_all, draw_each

    page = page_data(tables, report, proof)
    if path.suffix.lower() == ".png":
        replace_file(path, draw_all(page))
        return [path]
    path.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for name, png in draw_each(page):
        replace_file(path / f"{name}.png", png)
        written.append(path / f"{name}.png")
    return written


def _require(module: str, what: str) -> None:
    import importlib

    try:
        importlib.import_module(module)
    except ImportError:
        raise ExtraMissing(
            f"{what} needs {module}, which is not installed: pip install 'kv-snapd[forensics]'"
        ) from None
