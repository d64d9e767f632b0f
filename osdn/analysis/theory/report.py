"""Checks as tables for a terminal."""

from collections.abc import Sequence

from rich import box
from rich.table import Table

from osdn.analysis.theory.check import Check
from osdn.analysis.theory.suite import Violation


def statement_table(title: str, checks: Sequence[Check]) -> Table:
    """Both sides in logarithms (medians over the problems), how tight, and whether it holds."""
    table = _table(f"{title} (logarithms, medians)", "tightness", "verdict")
    for check in checks:
        table.add_row(*_sides(check), check.tightness, _coloured(check.verdict, check.passed))
    return table


def violation_table(violations: Sequence[Violation]) -> Table:
    """What became of each statement without one of its hypotheses."""
    table = _table("Each hypothesis broken on purpose (logarithms, medians)", "and it", "without")
    for v in violations:
        outcome = "holds" if v.check.holds else "fails"
        expected = outcome if v.as_expected else f"{outcome}, UNEXPECTED"
        table.add_row(*_sides(v.check), _coloured(expected, v.as_expected), "; ".join(v.check.violated))
    return table


def _table(title: str, *last: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("statement", no_wrap=True)
    table.add_column("left", justify="right")
    table.add_column("")
    table.add_column("right", justify="right")
    for name in last:
        table.add_column(name)
    return table


def _sides(check: Check) -> tuple[str, str, str, str]:
    left, right = (f"{side.median():.3f}" for side in (check.left, check.right))
    return check.statement, left, {"<=": "≤"}.get(check.relation, check.relation), right


def _coloured(text: str, good: bool) -> str:
    return f"[{'green' if good else 'bold red'}]{text}[/]"
