"""The report: which claims show, then the paper's tables and figures in its order, from one file of results.

A cell is a mean over seeds with half of its 95 % interval; a second table has the paired differences from the
block's baseline.  The paper's figures at 340M stand below each model, in grey.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from osdn.models.describe import PAPER_STATE_MIB
from osdn.reproduction.claims import NOT, RULE, SHOWS, UNSEEN, Finding, answers, findings
from osdn.reproduction.profiles import ABLATIONS, PROFILES
from osdn.reproduction.results import Content, difference, estimate, mean_rows, values
from osdn.reproduction.runner import Layout
from osdn.results import paper, plots
from osdn.results.document import fill
from osdn.results.names import title
from osdn.results.page import figure, section, table, write_page
from osdn.results.paper import BUCKETS
from osdn.results.scores import CODE, CODE_TWICE, Score
from osdn.results.statistics import Estimate, median_interval, t_interval
from osdn.results.style import GREY, INK, legend_label, panel, save, styled
from osdn.results.tables import NONE, Cell, Row, Table, markdown, number

PAGE, TABLES = "report.html", "tables.md"
COMMAND = "osdn reproduce"
THE_PAPERS = "the paper's, 340M"
HEADINGS = {
    SHOWS: "Shows at this scale",
    NOT: "Does not show at this scale",
    UNSEEN: "Cannot be seen with these intervals",
}


@dataclass(frozen=True)
class Shown:
    """A column: its heading, our key and the paper's, and whether less is better."""

    head: str
    key: str
    theirs: str = ""
    digits: int = 3
    less: bool = False


@dataclass(frozen=True)
class Spec:
    title: str
    note: str
    columns: tuple[Shown, ...]
    printed: paper.Printed | None = None
    ablations: bool = False  # only those and what they change
    figures: str = ""  # what the names of the figures below its tables begin with


_LM = Shown("validation", "lm_ppl", "lm_ppl", 2, True)
_LONG = Shown("long documents", "pg19_ppl", "pg19_ppl", 2, True)
_DRIFT = Shown("drift", "pg19_drift", "pg19_drift", 2, True)
_RECALL = Shown("recall, all", "code_recall", "recall")
_SINGLE = Shown("single", "code_single", "recall_single")
_TWICE = Shown("twice", "code_repeated", "recall_repeated")


def _kind(task: str) -> str:
    return task.removeprefix("code_").replace("_", " ")


# In the paper's order, with the columns that can be measured here.
SPECS = (
    Spec(
        "Main results",
        "Perplexity on held-out files and on long ones; recall is contains-accuracy on questions about "
        "held-out files, after one reading and after two. The paper's LM column is WikiText and LAMBADA, its "
        "long documents are PG-19, its recall is FDA, SWDE and SQuAD: compare differences, not values.",
        (_LM, _LONG, _RECALL, _SINGLE, _TWICE),
        paper.MAIN,
    ),
    Spec(
        "Language-model perplexity",
        "Of held-out files, and its logarithm, the loss in nats per token. The paper's column is its own "
        "held-out text, FineWeb-Edu.",
        (
            Shown("validation", "lm_ppl", "fineweb_edu_ppl", 2, True),
            Shown("loss", "validation_loss", digits=4, less=True),
        ),
        paper.PERPLEXITY,
    ),
    Spec(
        "In-context recall",
        "Cue: the question without its document, which nobody should be able to answer.",
        (
            *(Shown(_kind(task), task) for task in CODE), _SINGLE,
            *(Shown(_kind(task), task) for task in CODE_TWICE), _TWICE, _RECALL, Shown("cue", "code_alone"),
        ),
        paper.RECALL,
    ),
    Spec(
        "Mechanism diagnostic",
        "Residual ratio of every write on the prompts that are read twice: the share of its own error that a "
        "write leaves.",
        (
            Shown("q_geo", "q_geo", "q_geo", less=True), Shown("q_arith", "q_arith", "q_arith", less=True),
            Shown("1st reading", "q_first_reading", less=True),
            Shown("2nd reading", "q_second_reading", less=True),
        ),
        paper.RESIDUALS,
        figures="residual_ratio",
    ),
    Spec(
        "Long documents by position",
        "Perplexity by 2K-token bucket of held-out files; drift is 18–20K less 2–4K.",
        (
            *(Shown(f"{2 * i}–{2 * i + 2}K", b, b, 2, True) for i, b in enumerate(BUCKETS)), _LONG, _DRIFT,
        ),
        paper.PG19,
        figures="long_documents",
    ),
    Spec(
        "Ablations",
        "Variants of OSDN on the DeltaNet backbone.",
        (_RECALL, _LM, _LONG, _DRIFT, Shown("final loss", "final_loss", less=True)),
        paper.ABLATIONS,
        ablations=True,
    ),
    Spec(
        "Training loss",
        "The mean over the last tenth of the steps.",
        (Shown("final", "final_loss", less=True),),
        figures="loss",
    ),
)  # fmt: skip
ABSENT = (
    "The paper's tables of commonsense, LongBench and retrieval are not here: they need data sets that "
    "cannot be made on the spot."
)


def write_report(content: Content, folder: Path) -> list[Path]:
    """The page, the tables in Markdown, the figures, and the tables inside `folder.md` if it has a place."""
    folder.mkdir(parents=True, exist_ok=True)
    drawings = figures(content)
    (folder / TABLES).write_text(in_markdown(content), encoding="utf-8")
    paths = [_page(content, drawings, folder / PAGE), folder / TABLES]
    paths += save({name: drawing for name, (drawing, _) in drawings.items()}, folder, ("svg",))
    document = folder.with_suffix(".md")
    if fill(document, COMMAND, part_of_document(content, folder)):
        paths.append(document)
    return paths


def part_of_document(content: Content, folder: Path) -> str:
    """What stands in the document next to the folder: the tables, one level lower, with the figures."""
    captions = {f"{folder.name}/{name}.svg": caption for name, (_, caption) in figures(content).items()}
    return in_markdown(content, 3, captions)


def lead(content: Content) -> str:
    p, text, choice = content["profile"], content["text"], content["machine_choice"]
    sizes = [model["parameters"] for model in content["models"].values()]
    layout = Layout(**choice["layout"])
    seeds = sorted(set(p["seeds"].values()))
    several = f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f"{seeds[0]}"
    tokens = p["steps"] * p["tokens_per_step"]
    return (
        f"{len(content['models'])} models of {min(sizes):,} to {max(sizes):,} parameters, "
        f"{several} seeds each, {tokens / 1e6:.2f} million tokens per run, vocabulary {p['vocab_size']:,}. "
        f"The text: {p['primer_tokens'] / 1e6:.2f} million tokens of random words, then files of Python's "
        f"standard library and the installed packages, {100 * p['exercises']:.0f} % of them as exercises in "
        f"looking things up ({text['tokens'] / 1e6:.1f} million tokens in all, digest {text['digest']}). "
        f"{content['hours']:.1f} hours as {layout} in {choice['precision']} on "
        f"{' and '.join(content['cpus'])}, {content['machine']['cores']} cores."
    )


def in_markdown(content: Content, level: int = 2, captions: Mapping[str, str] | None = None) -> str:
    """The report with headings of this level, and with the figures whose files and captions are given."""
    verdicts = "\n".join(f"- **{heading}**: {claims}" for heading, claims in summary(content))
    parts = [lead(content), f"{'#' * level} What shows", RULE, verdicts]
    for part in sections(content):
        for item in part.items:
            if isinstance(item, Table):
                parts.append(markdown([item], level).rstrip())
            else:
                known = (captions or {}).items()
                parts += [f"![{text}]({file})" for file, text in known if Path(file).stem.startswith(item)]
    return "\n\n".join([*parts, ABSENT]) + "\n"


def summary(content: Content) -> Iterator[tuple[str, str]]:
    """For each verdict, the claims that got it."""
    claims = findings(content)
    for verdict, heading in HEADINGS.items():
        group: dict[str, list[str]] = {}  # the models of each claim
        for finding in claims:
            if finding.verdict == verdict:
                group.setdefault(finding.words, []).append(finding.model)
        listed = "; ".join(f"{words}: {', '.join(models)}" for words, models in group.items())
        yield f"{heading} ({sum(map(len, group.values()))} of {len(claims)})", f"{listed or 'none'}."


def claim_table(content: Content) -> Table:
    """Every claim with what was measured and what the paper reports."""
    rows, claims = [], findings(content)
    for verdict, heading in HEADINGS.items():
        group = [finding for finding in claims if finding.verdict == verdict]
        rows += [Row(heading, [], rule=True, heading=True)] if group else []
        for finding in group:
            cells = [
                finding.measured,
                finding.difference,
                _share(finding.ours.mean),
                finding.printed or NONE,
                _share(finding.theirs),
            ]
            rows.append(Row(f"{finding.model}: {finding.words}", [Cell(text) for text in cells]))
    note = (
        "Values of the block's plain delta rule (or of the model that is named, or of the first reading) and "
        "of the model; their difference, paired by seed, with its 95 % interval."
    )
    heads = ["here", "difference", "%", "paper, 340M", "%"]
    return Table("The paper's claims", heads, rows, note, corner="claim")


def _share(x: float | None) -> str:
    return number(x, 1, True) if x is not None and np.isfinite(x) else NONE


@dataclass(frozen=True)
class Section:
    title: str
    items: tuple[Table | str, ...]  # a string is what the names of figures begin with


def sections(content: Content) -> list[Section]:
    """The claims, the paper's tables in its order, then what it leaves open, speed and sizes."""
    claims = claim_table(content)
    parts = [Section(claims.title, ("claims", claims))]
    for spec in SPECS:
        if made := spec_tables(content, spec):
            parts.append(Section(spec.title, (*made, spec.figures) if spec.figures else tuple(made)))
    more = (answer_table(content), speed_table(content), size_table(content))
    return parts + [Section(t.title, (t,)) for t in more if t.rows]


def tables(content: Content) -> list[Table]:
    return [item for part in sections(content) for item in part.items if isinstance(item, Table)]


def spec_tables(content: Content, spec: Spec) -> list[Table]:
    """A table of values, and one of differences from the baselines."""
    models = [m for m in content["models"] if not spec.ablations or _in_ablations(m)]
    known = [c for c in spec.columns if any(values(content, m, c.key) for m in models)]
    if not known or (spec.ablations and not any(m in ABLATIONS for m in models)):
        return []
    ours: list[Row] = []
    differences: list[Row] = []
    for model in models:
        base = content["models"][model]["baseline"]
        cells = [value_cell(estimate(values(content, model, c.key)), c.digits) for c in known]
        ours.append(Row(title(model), cells, rule=model == base))
        ours += _printed(spec, known, model)
        if model != base and base in content["models"]:
            cells = [difference_cell(difference(content, model, base, c.key), c) for c in known]
            first = not differences or content["models"][_last(differences, models)]["baseline"] != base
            differences.append(Row(title(model), cells, rule=first))
            differences += _printed(spec, known, model, base)
    heads = [f"{c.head} {'↓' if c.less else '↑'}" if c.key != "code_alone" else c.head for c in known]
    result = [Table(spec.title, heads, ours, spec.note)]
    if differences:
        result.append(Table(f"{spec.title}: differences from the baseline", heads, differences, DIFFERENCES))
    return result


DIFFERENCES = "From DeltaNet, GDN or KDA, paired by seed, with 95 % intervals; bold where these exclude zero."


def _last(rows: Sequence[Row], models: Sequence[str]) -> str:
    """The model of the last row that is not the paper's."""
    label = next(row.label for row in reversed(rows) if not row.faint)
    return next(model for model in models if title(model) == label)


def _in_ablations(model: str) -> bool:
    return model in ("delta_net", "osdn", "osdn-apf", *ABLATIONS)


def value_cell(e: Estimate | None, digits: int) -> Cell:
    if e is None:
        return Cell()
    half = f"±{number(e.high - e.mean, digits)}" if e.seeds > 1 else ""
    return Cell(number(e.mean, digits), half, score=Score(e.mean))


def difference_cell(e: Estimate | None, column: Shown) -> Cell:
    if e is None:
        return Cell()
    d = column.digits
    clear = e.low > 0 or e.high < 0
    interval = f"[{number(e.low, d, True)}, {number(e.high, d, True)}]" if e.seeds > 1 else ""
    good = None if not clear or column.key == "code_alone" else (e.mean < 0) == column.less
    return Cell(number(e.mean, d, True), interval, best=clear, good=good, score=Score(e.mean))


def _printed(spec: Spec, columns: Sequence[Shown], model: str, base: str | None = None) -> list[Row]:
    """What the paper printed for a model, or its difference to the baseline there."""
    if spec.printed is None:
        return []
    rows = spec.printed.rows
    ours, theirs = rows.get(f"{model}-340m", {}), rows.get(f"{base}-340m", {})
    if not any(c.theirs in ours for c in columns):
        return []
    cells = []
    for c in columns:
        known = c.theirs in ours and (base is None or c.theirs in theirs)
        x = ours[c.theirs] - (theirs[c.theirs] if base else 0.0) if known else None
        cells.append(Cell(number(x, c.digits, base is not None)))
    return [Row(THE_PAPERS, cells, faint=True)]


def answer_table(content: Content) -> Table:
    """What the paper does not compare."""
    rows = [
        Row(
            f"{finding.model}: {finding.words}",
            [Cell(text) for text in (finding.verdict, finding.measured, finding.difference)],
        )
        for finding in answers(content)
    ]
    note = (
        "OSDN-APF without the online step, whose scale can only sink; DeltaNet with a write gate that starts "
        "at a strength of 0.12 in place of 0.5; and Newton's method in place of the paper's step. A verdict "
        "is given where the 95 % interval leaves zero out."
    )
    return Table("What the paper does not compare", ["verdict", "here", "difference"], rows, note, left=(0,))


def speed_table(content: Content) -> Table:
    rows = []
    for model in content["models"]:
        if (row := content["throughput"].get(model)) is None:
            continue
        cells = [number(row.get(key), d) for key, d in (("tokens_per_second", 0), ("prefill_ms", 1))]
        cells += [number(row.get(key), d) for key, d in (("decode_ms", 1), ("state_mib", 3))]
        change = Cell()
        if row.get("changes"):
            e = median_interval(row["changes"])
            change = Cell(f"{e.mean:+.1f}", f"[{e.low:+.1f}, {e.high:+.1f}]")
        plain = model == content["models"][model]["baseline"]
        rows.append(Row(title(model), [*map(Cell, cells), change], rule=plain))
        theirs = paper.THROUGHPUT.rows.get(f"{model}-340m", {})
        if theirs:
            cells = [number(theirs["tokens_per_second"], 1), NONE]
            cells += [number(theirs["decode_ms"], 1), number(PAPER_STATE_MIB[f"{model}-340m"], 3)]
            cells.append(number(theirs.get("throughput_change"), 1, True))
            rows.append(Row(f"{THE_PAPERS}, H100", [Cell(text) for text in cells], faint=True))
    p = content["profile"]
    note = (
        f"One sequence: {p['prefill']:,} tokens in one call, then {p['decode']} greedy ones. All are medians "
        f"over repeats; Δ is the median of the comparisons with the baseline within each repeat, with its "
        f"95 % interval."
    )
    heads = ["tokens/s", "prefill ms", "decode ms", "state MiB", "Δ %"]
    return Table("Inference throughput", heads, rows, note)


def size_table(content: Content) -> Table:
    rows = []
    for model, described in content["models"].items():
        seeds = sum(run["model"] == model for run in content["runs"])
        plain = model == described["baseline"]
        rows.append(Row(title(model), [Cell(f"{described['parameters']:,}"), Cell(f"{seeds}")], rule=plain))
    return Table("Models", ["parameters", "seeds"], rows)


def _page(content: Content, drawings: dict[str, tuple[Figure, str]], path: Path) -> Path:
    items = "".join(
        f"<li><b>{escape(heading)}</b>: {escape(text)}</li>" for heading, text in summary(content)
    )
    body = [f'<ul class="verdicts">{items}</ul><p class="note">{escape(RULE)}</p>']
    for part in sections(content):
        inside: list[str] = []
        for item in part.items:
            if isinstance(item, Table):
                inside.append(table(item, heading=item.title != part.title))
            else:
                inside += [figure(*drawings[name]) for name in drawings if name.startswith(item)]
        body.append(section(part.title, *inside))
    body.append(f'<p class="note">{escape(ABSENT)}</p>')
    name = f"The paper at laptop scale: profile {content['profile']['name']}"
    return write_page(path, name, f"<p>{escape(lead(content))}</p>", body, command(content))


def command(content: Content) -> str:
    """The command that measured these results."""
    name, seeds = content["profile"]["name"], content["profile"]["seeds"]
    usual = name in PROFILES and seeds == PROFILES[name].seeds
    return f"{COMMAND} --profile {name}" + ("" if usual else f" --seeds {min(seeds.values())}")


def figures(content: Content) -> dict[str, tuple[Figure, str]]:
    """Every figure with its caption."""
    drawings: dict[str, tuple[Figure, str]] = {}
    compared = [
        finding for finding in findings(content) if np.isfinite([finding.ours.low, finding.ours.high]).all()
    ]
    if compared:
        caption = (
            "Differences in per cent of the baseline (drift: of its perplexity): dots with 95 % intervals "
            "from this run, diamonds from the paper's figures at 340M. An arrow marks an interval that goes "
            "on."
        )
        drawings["claims"] = claim_plot(compared), caption
    for plain in dict.fromkeys(model["baseline"] for model in content["models"].values()):
        block = [m for m, model in content["models"].items() if model["baseline"] == plain]
        drawings[f"residual_ratio_{plain}"] = (
            plots.contraction({title(m): _diagnosis(content, m) for m in block}),
            "Residual ratio on prompts that are read twice, with 95 % intervals over seeds.",
        )
        drawings[f"long_documents_{plain}"] = (
            plots.perplexity_by_position({title(m): _buckets(content, m) for m in block}),
            "Perplexity by position in held-out files, with 95 % intervals over seeds.",
        )
        runs = {title(m): _loss_lines(content, m) for m in block}
        drawings[f"loss_{plain}"] = (
            plots.losses(runs),
            "Training loss, means over seeds. The text begins with random words, listed twice in longer and "
            "longer lists; then come files and exercises.",
        )
    return drawings


def _runs(content: Content, model: str) -> list[dict[str, Any]]:
    return [run for run in content["runs"] if run["model"] == model]


def _loss_lines(content: Content, model: str) -> list[dict[str, Any]]:
    """The mean loss over seeds, as lines of a log."""
    curves = [np.array(run["loss"]) for run in _runs(content, model)]  # [points, 2] each
    tokens, losses = curves[0][:, 0], np.mean([curve[:, 1] for curve in curves], axis=0)
    per_step = content["profile"]["tokens_per_step"]
    return [{"tokens": t, "step": t / per_step, "loss": x} for t, x in zip(tokens, losses)]


def _buckets(content: Content, model: str) -> list[Score]:
    """The perplexity of every bucket with half of its interval."""
    estimates = [t_interval(list(values(content, model, bucket).values())) for bucket in BUCKETS]
    return [Score(e.mean, e.high - e.mean if e.seeds > 1 else None) for e in estimates]


def _diagnosis(content: Content, model: str) -> dict[str, Any]:
    """The residual ratios of a model in the form of `osdn diagnose`, with intervals over seeds."""
    runs = _runs(content, model)
    places = [run["second_reading_at"] for run in runs if run["second_reading_at"] is not None]
    rows = mean_rows([run["ratio_by_position"] for run in runs])
    overall = estimate(values(content, model, "q_geo"))
    return {
        "all": {
            "by_position": [row and _interval(row) for row in rows],
            "boundary": sum(places) / len(places) if places else None,
            "q_geo": overall and _interval(overall),
        }
    }


def _interval(e: Estimate) -> dict[str, float]:
    low, high = (e.low, e.high) if e.seeds > 1 else (e.mean, e.mean)
    return {"value": e.mean, "low": low, "high": high}


@styled
def claim_plot(compared: Sequence[Finding]) -> Figure:
    """Each claim's difference with its interval, and what the paper found."""
    drawing, axes = panel("difference from the baseline, %", "", (8.4, 0.8 + 0.24 * len(compared)))
    colour = {SHOWS: "#1c8a4c", NOT: "#b23a48", UNSEEN: GREY}
    # an interval may be far wider
    reach = 1.5 * max([20.0, *(abs(finding.theirs or 0.0) for finding in compared)])
    for i, finding in enumerate(compared):
        low, high = max(finding.ours.low, -reach), min(finding.ours.high, reach)
        axes.plot([low, high], [-i, -i], color=colour[finding.verdict], lw=1.6)
        axes.plot(finding.ours.mean, -i, "o", ms=4.5, color=colour[finding.verdict])
        if finding.ours.high > reach:  # the interval goes on
            axes.plot(reach, -i, ">", ms=5, color=colour[finding.verdict], clip_on=False)
        if finding.ours.low < -reach:
            axes.plot(-reach, -i, "<", ms=5, color=colour[finding.verdict], clip_on=False)
        if finding.theirs is not None:
            axes.plot(finding.theirs, -i, "D", ms=4, mfc="white", mec=INK)
    axes.axvline(0, color=INK, lw=0.8)
    axes.set_xlim(-reach, reach)
    axes.set_yticks(
        [-i for i in range(len(compared))],
        [legend_label(f"{finding.model}: {finding.words}") for finding in compared],
    )
    axes.set_ylim(-len(compared) + 0.4, 0.6)
    for verdict in dict.fromkeys(finding.verdict for finding in compared):
        axes.plot([], [], "o-", ms=4.5, color=colour[verdict], label=verdict)
    axes.plot([], [], "D", ms=4, mfc="white", mec=INK, label="the paper's, 340M")
    axes.legend(loc="lower center", bbox_to_anchor=(0.3, 1.0), ncols=4)
    return drawing
