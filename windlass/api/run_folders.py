"""Calls about runs that are there: verifying, listing, reporting, deleting."""

from collections.abc import Sequence
from pathlib import Path

from windlass import teacher_cache
from windlass.checkpoint.verify import VerifyReport
from windlass.data.integrity import is_cache
from windlass.errors import UserError
from windlass.files import writable, write
from windlass.planning import prices as costs
from windlass.release import folder as exports
from windlass.reports import comparison_page, run_page
from windlass.reports.comparison import RunComparison
from windlass.reports.live import LivePage, LiveServer
from windlass.reports.run_summary import Account, account
from windlass.run_folder import folder as folders
from windlass.run_folder import runs as standings
from windlass.run_folder import verify as verifying
from windlass.run_folder.runs import RUNS, Standing, check_deletable, find


def verify(run: str | Path | None) -> VerifyReport | exports.ExportReport:
    """Compare all that a run computes from with its hashes; change nothing.

    That is every file and array of its checkpoints, its recipe and tokenizer, and its prepared
    data. In place of a run it may be an export, a cache of prepared data, or that of a teacher.
    """
    place = None if run is None else Path(run).expanduser()
    if place is not None and exports.is_export(place):
        return exports.verify(place)
    if place is not None and is_cache(place):
        return verifying.verify_cache(place)
    if place is not None and teacher_cache.is_cache(place):
        return verifying.verify_teacher(place)
    return verifying.verify(find(run))


def runs(folder: str | Path = RUNS) -> list[Standing]:
    """Runs in a folder, newest first: step, loss, size and state of each."""
    return [standings.standing(place) for place in standings.within(Path(folder).expanduser())]


def standing(run: str | Path) -> Standing:
    """Step, loss, size and state of one run."""
    return standings.standing(find(run))


def report(run: str | Path | None) -> Account:
    """Report of a run, beside its plan; written to report.html in its folder."""
    summary = account(find(run), costs.load())
    _write(summary.standing.folder / folders.REPORT, run_page.page(summary))
    return summary


def compare(*names: str | Path, page: str | Path | None = None) -> RunComparison:
    """Comparison of runs: speed, memory, cost, losses after as many steps, and what differs.

    Its page, with the curves of all runs in one plot, is written to the file `page`, if given.
    """
    if len(names) < 2:
        raise UserError("which runs? windlass compare RUN RUN puts two or more side by side")
    catalogue = costs.load()
    comparison = RunComparison([account(find(name), catalogue) for name in names])
    if page is not None:
        _write(Path(page).expanduser(), comparison_page.page(comparison))
    return comparison


def watch(*names: str | Path | None, port: int = 0) -> LiveServer:
    """Server of the live page of a run, or of the comparison of several, on this machine alone.

    `watch("quickstart").serve_forever()` serves it; port 0 is a free one, and `url` has it.
    """
    catalogue = costs.load()

    def page(every: Sequence[Account]) -> str:
        if len(every) > 1:
            return comparison_page.page(RunComparison(every), is_live=True)
        return run_page.page(every[0], is_live=True)

    places = [find(name) for name in names or (None,)]
    live = LivePage(places, lambda place: account(place, catalogue), page)
    live.get()  # what cannot be read is refused here
    return LiveServer(live, port)


def _write(file: Path, page: str) -> None:
    with writable(file):
        write(file, page.encode(errors="replace"))  # half a character of a name


def delete(*names: str | Path) -> list[Path]:
    """Delete runs, without confirmation; returns what was in their folders and is not theirs.

    Where one of them is no run, or is being trained, none is deleted.
    """
    places = list(dict.fromkeys(map(find, names)))
    for place in places:
        check_deletable(place)
    return [path for place in places for path in standings.delete(place)]
