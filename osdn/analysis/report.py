"""One page of all results there are: the paper's tables and figures, in its order, with what was measured.

A table is a list of columns, a column a function of one model's results.  What a function does not find is
`None` and shows as not run, so the page can be made at any time, from a first trial to the whole sweep.
Results are found by what they are, wherever they lie: JSON files with a "kind", and runs of the trainer.
"""

import html
import io
import json
import re
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from matplotlib.figure import Figure

from osdn.analysis import figures
from osdn.evaluation import columns
from osdn.evaluation.columns import SINGLE, Score, baseline_of, changes, derive
from osdn.evaluation.compare import title
from osdn.evaluation.figures import bars, pg19
from osdn.evaluation.paper import BUCKETS, RESIDUAL_RATIOS, THROUGHPUT
from osdn.models import PRESETS
from osdn.training.monitor import METRICS, Metrics
from osdn.training.plot import drawable, loss_curve
from osdn.training.plot import final_loss as last_loss

ABLATIONS = ("delta_net-340m", "osdn-340m", "osdn-d0", "osdn-d0-free", "osdn-apf-340m")
NOT_RUN = '<td class="none" title="not run">·</td>'


@dataclass
class Results:
    """What was found, by model: a preset's name, or whatever the result calls it."""

    evaluations: dict[str, dict[str, Score]] = field(default_factory=dict)
    diagnoses: dict[str, dict[str, Any]] = field(default_factory=dict)
    throughputs: dict[str, dict[str, Any]] = field(default_factory=dict)
    trainings: dict[str, Path] = field(default_factory=dict)
    labs: list[tuple[Path, list[dict[str, Any]]]] = field(default_factory=list)
    operators: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # by CPU or GPU
    files: list[Path] = field(default_factory=list)

    def models(self) -> list[str]:
        """The paper's models in its order, then others that there are results of."""
        found = [*self.evaluations, *self.diagnoses, *self.throughputs, *self.trainings]
        paper = [name for name in PRESETS if name.endswith(("-340m", "-1.3b"))]
        return [*paper, *dict.fromkeys(name for name in found if name not in paper)]


@dataclass(frozen=True)
class Column:
    title: str
    value: Callable[[Results, str], float | None]
    digits: int = 3
    signed: bool = False


@dataclass(frozen=True)
class Section:
    title: str
    note: str
    columns: list[Column]
    draw: Callable[[Results], list[Figure]] | None = None
    models: tuple[str, ...] | None = None  # None is all


def collect(paths: Iterable[Path]) -> Results:
    """Reads every result under the paths; of several of one kind and model the newest counts."""
    results = Results()
    candidates: list[Path] = []
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist")
        found = [path] if path.is_file() else [*path.rglob("*.json"), *path.rglob(METRICS)]
        candidates += [p for p in found if not any(part.startswith("checkpoint-") for part in p.parts)]
    for path in sorted(set(candidates), key=lambda p: p.stat().st_mtime):
        if path.name == METRICS:
            if not any(line.get("loss") is not None for line in Metrics.read(path.parent)):
                continue  # it has only begun
            results.trainings[_trained_model(path.parent)] = path.parent
            results.files.append(path)
        elif _take(results, path):
            results.files.append(path)
    _complete(results)
    return results


def _complete(results: Results) -> None:
    """Adds the scores that follow from others, of the same model or of its baseline."""
    for model, row in results.throughputs.items():
        if row.get("change") is not None and row["baseline"] == baseline_of(model):
            results.evaluations.setdefault(model, {})["throughput_change"] = Score(row["change"])
    scores = {model: derive(found) for model, found in results.evaluations.items()}
    results.evaluations = {
        model: {**found, **changes(found, scores.get(baseline_of(model) or "", {}))}
        for model, found in scores.items()
    }


def _take(results: Results, path: Path) -> bool:
    """Whether a file is a result; if so it is taken in."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError):
        return False
    if not isinstance(content, dict):
        return False
    kind = content.get("kind")
    if kind == "diagnosis":
        results.diagnoses[content["model"]] = content
    elif kind == "throughput":
        results.throughputs.update(
            {row["model"]: {**row, "device": content["device"]} for row in content["rows"]}
        )
    elif kind == "operators":
        results.operators[content.get("gpu") or content["machine"]["cpu"]] = content["tables"]
    elif kind == "evaluation":
        numbers = {k: v for k, v in content["results"].items() if isinstance(v, (int, float))}
        scores = {k: Score(v, content.get("errors", {}).get(k)) for k, v in numbers.items()}
        results.evaluations.setdefault(content["model"], {}).update(scores)
    elif path.name == "summary.json" and content.get("rows") and "variant" in content["rows"][0]:
        results.labs.append((path.parent, content["rows"]))
    else:
        return False
    return True


def _trained_model(run: Path) -> str:
    """The preset that a run trained under its own name, else the name of its directory."""
    name = run.resolve().name
    config = run / "config.yaml"
    settings = yaml.safe_load(config.read_text()) if config.is_file() else {}
    preset = str(settings.get("model", {}).get("preset"))
    return preset if preset.rpartition("-")[0] == name else name


def score(key: str) -> Callable[[Results, str], float | None]:
    def value(results: Results, model: str) -> float | None:
        found = results.evaluations.get(model, {}).get(key)
        return None if found is None else found.value

    return value


def evaluated(table: columns.Table) -> list[Column]:
    """The columns of an evaluation's table."""
    return [Column(c.title, score(c.key), c.digits, c.signed) for c in table.columns]


def measured(key: str, task: str | None = None) -> Callable[[Results, str], float | None]:
    """A number of the mechanism diagnostic, of one task or of all."""

    def value(results: Results, model: str) -> float | None:
        result = results.diagnoses.get(model, {})
        summary = result.get("tasks", {}).get(task) if task else result.get("all")
        return summary[key]["value"] if summary else None

    return value


def timed(key: str) -> Callable[[Results, str], float | None]:
    return lambda results, model: results.throughputs.get(model, {}).get(key)


def final_loss(results: Results, model: str) -> float | None:
    """The mean over the last 256 steps, as in the paper's training figure."""
    if model not in results.trainings:
        return None
    return last_loss(results.trainings[model], 256)


def printed(table: dict[str, dict[str, float]], key: str) -> Callable[[Results, str], float | None]:
    return lambda results, model: table.get(model, {}).get(key)


def printed_throughput(place: int) -> Callable[[Results, str], float | None]:
    return lambda results, model: THROUGHPUT[model][place] if model in THROUGHPUT else None


def draw_mechanism(results: Results) -> list[Figure]:
    named = {drawable(title(model)): result for model, result in results.diagnoses.items()}
    if not named:
        return []
    drawn = [figures.contraction(named), figures.heads(named)]
    return [*drawn, figures.scale(named)] if any(result["scale"] for result in named.values()) else drawn


def draw_summary(results: Results) -> list[Figure]:
    """The paper's visual summary: bars of the main results."""
    panels = {
        column.title: {
            drawable(title(model)): scores[column.key]
            for model in results.models()
            if column.key in (scores := results.evaluations.get(model, {}))
        }
        for column in columns.MAIN.columns
    }
    panels = {name: values for name, values in panels.items() if values}
    return [bars(panels)] if panels else []


def draw_pg19(results: Results) -> list[Figure]:
    curves = {
        drawable(title(model)): [scores[bucket] for bucket in BUCKETS]
        for model, scores in results.evaluations.items()
        if all(bucket in scores for bucket in BUCKETS)
    }
    return [pg19(curves)] if curves else []


def draw_losses(results: Results) -> list[Figure]:
    curves = {drawable(title(model)): loss_curve(run) for model, run in results.trainings.items()}
    return [figures.losses(curves)] if curves else []


def section(table: columns.Table, draw: Callable[[Results], list[Figure]] | None = None) -> Section:
    return Section(table.title, table.note, evaluated(table), draw)


# In the order of the paper.
SECTIONS = [
    section(columns.MAIN),
    section(columns.PERPLEXITY),
    section(columns.RECALL),
    Section("Mechanism diagnostic", "Residual ratios of every write; the paper's q_geo in the last column.", [
        Column("q_geo", measured("q_geo")), Column("q_arith", measured("q_arith")),
        *(Column(f"{task.upper()} twice", measured("q_geo", f"{task}_twice")) for task in SINGLE),
        Column("docs twice", measured("q_geo", "topics_twice")),
        Column("paper", printed(RESIDUAL_RATIOS, "q_geo")),
    ], draw_mechanism),
    section(columns.COMMON),
    section(columns.GENERAL, draw_summary),
    section(columns.GENERATION),
    section(columns.PG19, draw_pg19),
    Section("Ablations on DeltaNet", "A learned first scale, projected or free, and forgetting.", [
        *evaluated(columns.GENERAL), Column(columns.DRIFT.title, score(columns.DRIFT.key), 2, True),
    ], None, ABLATIONS),
    section(columns.LONG),
    Section("Training loss", "Mean cross-entropy of the last 256 steps.", [
        Column("final", final_loss),
    ], draw_losses),
    Section("Inference throughput", "Ours, and at the right the paper's on an H100.", [
        Column("tokens/s", timed("tokens_per_second"), 1), Column("prefill ms", timed("prefill_ms"), 0),
        Column("decode ms", timed("decode_ms"), 0), Column("Δ %", timed("change"), 1, True),
        Column("state MiB", timed("state_mib")), Column("paper", printed_throughput(0), 1),
        Column("its Δ %", printed_throughput(2), 1, True),
    ]),
]  # fmt: skip


def write_report(results: Results, path: Path) -> Path:
    """The page."""
    sections = []
    for section in SECTIONS:
        drawn = section.draw(results) if section.draw else []
        sections.append(
            f"<h2>{html.escape(section.title)}</h2><p>{html.escape(section.note)}</p>"
            f"{_table(results, section)}{''.join(map(_svg, drawn))}"
        )
    sections += [_lab(folder, rows) for folder, rows in results.labs]
    sections += [
        _operators(device, table) for device, tables in results.operators.items() for table in tables
    ]
    files = "".join(f"<li>{html.escape(str(file))}</li>" for file in results.files) or "<li>none</li>"
    body = "\n".join(sections) + f"<h2>Read from</h2><ul>{files}</ul>"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(PAGE.replace("@BODY@", body), encoding="utf-8")
    return path


def _table(results: Results, section: Section) -> str:
    head = "".join(f"<th>{html.escape(column.title)}</th>" for column in section.columns)
    rows, block = [], None
    for model in section.models or results.models():
        cells = "".join(_cell(column, column.value(results, model)) for column in section.columns)
        backbone = (PRESETS.get(model, {}).get("backbone"), model.rpartition("-")[2])
        rule = ' class="rule"' if block not in (None, backbone) else ""
        block = backbone
        rows.append(f"<tr{rule}><th>{html.escape(title(model))}</th>{cells}</tr>")
    return f'<div class="scroll"><table><thead><tr><th></th>{head}</tr></thead>{"".join(rows)}</table></div>'


def _cell(column: Column, value: float | None) -> str:
    if value is None:
        return NOT_RUN
    return f"<td>{value:{'+' if column.signed else ''},.{column.digits}f}</td>"


def _lab(folder: Path, rows: list[dict[str, Any]]) -> str:
    metrics = list(dict.fromkeys(row["metric"] for row in rows))
    cells = {(row["variant"], row["metric"]): row["value"] for row in rows}
    head = "".join(f"<th>{html.escape(metric)}</th>" for metric in metrics)
    body = ""
    for variant in dict.fromkeys(row["variant"] for row in rows):
        body += f"<tr><th>{html.escape(str(variant))}</th>"
        for metric in metrics:
            value = cells.get((variant, metric))
            body += NOT_RUN if value is None else (
                f"<td>{value['mean']:.3f} <small>[{value['low']:.3f}, {value['high']:.3f}]</small></td>"
            )  # fmt: skip
        body += "</tr>"
    title = f"Lab: {folder.name}, means over seeds with 95 % intervals"
    table = f'<div class="scroll"><table><thead><tr><th></th>{head}</tr></thead>{body}</table></div>'
    return f"<h2>{html.escape(title)}</h2>{table}"


def _operators(device: str, table: dict[str, Any]) -> str:
    columns = {"best ms": "min", "median ms": "median"}
    if any("implied" in row for row in table["ms"].values()):
        columns["implied by an H100's data sheet"] = "implied"
    head = "".join(f"<th>{name}</th>" for name in columns)
    body = ""
    for name, row in table["ms"].items():
        cells = "".join(f"<td>{row[key]:.3f}</td>" if key in row else NOT_RUN for key in columns.values())
        body += f"<tr><th>{html.escape(name)}</th>{cells}</tr>"
    return (
        f"<h2>Operators: {html.escape(table['title'])}</h2><p>On {html.escape(device)}.</p>"
        f'<div class="scroll"><table><thead><tr><th></th>{head}</tr></thead>{body}</table></div>'
    )


def _svg(figure: Figure) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg")
    return _clean(text.getvalue())


def _clean(svg: str) -> str:
    """A drawing to put into a page: no prologue, and names that no other drawing on the page has."""
    prefix = f"d{zlib.crc32(svg.encode())}-"
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{prefix}', svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\1{prefix}", svg)
    return f'<figure class="scroll">{svg}</figure>'


PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Online Scaled DeltaNet: results</title>
<link rel="icon" href="data:,">
<style>
body { margin: 0 auto; max-width: 66rem; padding: 1rem; color: #20242c; background: #fff;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.6rem; margin: .3rem 0; }
h2 { font-size: 1.15rem; margin: 2rem 0 .3rem; }
p { color: #5a6372; font-size: .9rem; margin: .2rem 0 .5rem; }
.scroll { overflow-x: auto; margin: .5rem 0; }
svg { max-width: 100%; height: auto; }
table { border-collapse: collapse; font-size: .86rem; font-variant-numeric: tabular-nums; }
th, td { padding: .22rem .7rem .22rem 0; text-align: right; white-space: nowrap; font-weight: normal; }
th:first-child { text-align: left; position: sticky; left: 0; background: #fff; font-weight: 600; }
thead th { color: #5a6372; border-bottom: 1px solid #c9ced8; }
tr.rule > * { border-top: 1px dashed #c9ced8; }
.none { color: #8f98a8; } small { color: #6b7482; }
li { font-size: .82rem; overflow-wrap: anywhere; }
</style>
</head>
<body>
<h1>Online Scaled DeltaNet: results</h1>
<p>The paper's tables and figures, in its order, with what was measured here. A dot is what was not run.</p>
@BODY@
</body>
</html>
"""
