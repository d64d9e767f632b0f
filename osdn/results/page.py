"""One look for every page: a self-contained template, sections, and figures as inline SVG."""

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from matplotlib.figure import Figure

from osdn.results.store import environment
from osdn.results.style import svg
from osdn.results.tables import Table, html_table


def write_page(path: Path, title: str, lead: str, body: Iterable[str], command: str) -> Path:
    """Write a page; `lead` and `body` are HTML."""
    current = environment()
    versions = ", ".join(f"{name} {version}" for name, version in current["versions"].items())
    cpu = current["machine"]["cpu"]
    foot = (
        f"Made by <code>{escape(command)}</code> on {current['date'][:10]}, {escape(cpu)}; "
        f"{escape(versions)}."
    )
    parts = {"@TITLE@": escape(title), "@LEAD@": lead, "@BODY@": "\n".join(body), "@FOOT@": foot}
    text = PAGE
    for mark, part in parts.items():
        text = text.replace(mark, part)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def section(title: str, *body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{''.join(body)}</section>"


def table(content: Table, heading: bool = True) -> str:
    """A table with its note, and with its title unless the section already has it."""
    title = f"<h3>{escape(content.title)}</h3>" if heading else ""
    note = f'<p class="note">{escape(content.note)}</p>' if content.note else ""
    return f"{title}{note}{html_table(content)}"


def figures(captioned: Sequence[tuple[Figure, str]]) -> str:
    """Figures with captions, side by side where there is room."""
    inside = "".join(figure(drawing, caption) for drawing, caption in captioned)
    return f'<div class="figures">{inside}</div>'


def figure(drawing: Figure, caption: str = "") -> str:
    figcaption = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f"<figure>{svg(drawing)}{figcaption}</figure>"


# Shadows at the edges of a table show that it can be scrolled: two covers move with the table, two shadows
# stay.
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>@TITLE@</title>
<link rel="icon" href="data:,">
<style>
:root { color-scheme: light; --ink: #20242c; --soft: #525a67; --line: #dfe3ea; --link: #1d5fa8; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 66rem; padding: 1.2rem 1rem 3rem; color: var(--ink); background: #fff;
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: .4rem 0 .3rem; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .5rem; padding-top: .8rem; border-top: 1px solid var(--line); }
h3 { font-size: .95rem; margin: 1.1rem 0 .2rem; }
p { margin: .5rem 0; max-width: 46rem; }
a { color: var(--link); overflow-wrap: anywhere; }
.lead { color: var(--soft); font-size: 1.05rem; }
.note, figcaption, footer { color: var(--soft); font-size: .88rem; line-height: 1.45; }
.verdicts { margin: .8rem 0; padding: 0; list-style: none; max-width: 46rem; }
.verdicts li { padding: .45rem 0 .45rem .9rem; border-left: 3px solid var(--link); margin: .5rem 0; }
.hero { display: grid; gap: .5rem 2rem; align-items: center;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); }
.figures { display: grid; gap: 1.4rem; align-items: start;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }
figure { margin: .5rem 0; min-width: 0; }
svg { display: block; height: auto; max-width: 100%; }
svg text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, sans-serif !important; }
.scroll { overflow-x: auto; margin: .4rem 0 .8rem; scrollbar-width: thin;
  background: linear-gradient(to right, #fff 40%, #fff0) left / 2.5rem 100% local no-repeat,
    linear-gradient(to left, #fff 40%, #fff0) right / 2.5rem 100% local no-repeat,
    linear-gradient(to right, #20242c38, #20242c00) left / .8rem 100% scroll no-repeat,
    linear-gradient(to left, #20242c38, #20242c00) right / .8rem 100% scroll no-repeat; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { padding: .28rem .8rem .28rem 0; text-align: right; white-space: nowrap; font-weight: normal;
  border-bottom: 1px solid #eef0f4; }
td.words, th.words { text-align: left; }
th:first-child { text-align: left; font-weight: 600; padding-left: .2rem; position: sticky; left: 0;
  background: #fff; }
thead th { color: var(--soft); font-weight: 600; border-bottom: 1px solid #c9ced8; vertical-align: bottom; }
tr.rule:not(:first-child) > * { border-top: 2px solid #c9ced8; }  /* wider: else the line above it wins */
tr.faint > * { color: #6d7582; font-weight: normal; font-style: italic; }
tr.heading > th { padding-top: .7rem; }
.good { color: #1c6b3c; } .bad { color: #a32020; font-weight: 600; }
small { color: var(--soft); }
pre { background: #f6f7f9; padding: .7rem .9rem; border-radius: 4px; overflow-x: auto; font-size: .8rem;
  line-height: 1.4; margin: 0; }
footer { margin-top: 2.5rem; border-top: 1px solid var(--line); padding-top: .8rem; overflow-wrap: anywhere; }
@media (max-width: 36rem) {
  th:first-child { white-space: normal; min-width: 6.2rem; max-width: 10rem; overflow-wrap: break-word; }
}
</style>
</head>
<body>
<h1>@TITLE@</h1>
<div class="lead">@LEAD@</div>
@BODY@
<footer>@FOOT@</footer>
</body>
</html>
"""
