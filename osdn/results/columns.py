"""The columns of the paper's tables, in its order: their titles, digits, and which value is best."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from osdn.results import paper
from osdn.results.paper import BUCKETS
from osdn.results.scores import CODE, COMMONSENSE, LONGBENCH, RULER, SINGLE


@dataclass(frozen=True)
class Column:
    title: str
    key: str
    digits: int = 3
    better: Callable[[list[float]], float] | None = max  # picks the best of several values; None: none is
    signed: bool = False

    def renamed(self, title: str, key: str) -> "Column":
        return replace(self, title=title, key=key)


@dataclass(frozen=True)
class PaperTable:
    title: str
    note: str
    columns: tuple[Column, ...]
    printed: tuple[paper.Printed, ...]  # the paper's tables with these columns
    more: str = ""  # also include every column whose key starts with this

    def figures(self, model: str) -> dict[str, float]:
        """What the paper prints here for one of its models."""
        return {k: v for table in self.printed for k, v in table.rows.get(model, {}).items()}

    def models(self) -> list[str]:
        """The models in the paper's table, in its order."""
        return list(dict.fromkeys(model for table in self.printed for model in table.rows))


def _ppl(title: str, key: str) -> Column:
    return Column(title, key, 2, min)


_SHORT = {"hellaswag": "HSwag", "winogrande": "WinoG.", "arc_easy": "ARC-E", "arc_challenge": "ARC-C"}
_SHORT |= {"social_iqa": "SIQA", "boolq": "BoolQ", "lambada": "LAMB.", "piqa": "PIQA", "squad": "SQuAD"}
_DRIFT = Column("Δ", "pg19_drift", 2, min, True)

# In the order of the paper.
MAIN = PaperTable(
    "Main results",
    "LM is the geometric mean of WikiText and LAMBADA; recall is accuracy.",
    (
        _ppl("LM", "lm_ppl"), _ppl("PG-19", "pg19_ppl"), Column("recall, all", "recall"),
        Column("single", "recall_single"), Column("repeated", "recall_repeated"),
        Column("Δ repeated", "repeated_change", signed=True), Column("common.", "commonsense"),
        Column("LongBench", "longbench"), Column("tokens/s Δ %", "throughput_change", 1, signed=True),
    ),
    (paper.MAIN,),
)  # fmt: skip
PERPLEXITY = PaperTable(
    "Language-model perplexity",
    "ΔNLL is log LM minus the baseline's.",
    (
        _ppl("FW-Edu", "fineweb_edu_ppl"), _ppl("WikiText", "wikitext_ppl"), _ppl("LAMBADA", "lambada_ppl"),
        _ppl("LM", "lm_ppl"), Column("ΔNLL", "nll_change", 3, min, True),
    ),
    (paper.PERPLEXITY, paper.PERPLEXITY_1_3B),
)  # fmt: skip
RECALL = PaperTable(
    "In-context recall",
    "Contains-accuracy. Twice: the context is read twice.",
    (
        *(Column(_SHORT.get(task, task.upper()), task) for task in SINGLE), Column("single", "recall_single"),
        *(Column(f"{_SHORT.get(task, task.upper())} twice", f"{task}_twice") for task in SINGLE),
        Column("repeated", "recall_repeated"), Column("overall", "recall"),
    ),
    (paper.RECALL, paper.RECALL_1_3B),
)  # fmt: skip
COMMON = PaperTable(
    "Commonsense reasoning",
    "Normalised accuracy for PIQA, HellaSwag, ARC and OpenBookQA, accuracy for the rest. "
    "The average is the paper's, without SciQ and OpenBookQA.",
    (
        *(Column(_SHORT[task], task) for task in COMMONSENSE),
        Column("average", "commonsense"),
        Column("SciQ", "sciq"),
        Column("OBQA", "openbookqa"),
    ),
    (paper.COMMONSENSE, paper.COMMONSENSE_1_3B),
)
GENERAL = PaperTable(
    "General checks",
    "The averages side by side.",
    (
        Column("common.", "commonsense"), Column("recall", "recall"), Column("LongBench", "longbench"),
        _ppl("PG-19", "pg19_ppl"),
    ),
    (paper.GENERAL, paper.LONGBENCH_1_3B),
)  # fmt: skip
GENERATION = PaperTable(
    "Retrieval",
    "F1 for DROP, exact match for the others.",
    (
        Column("DROP", "drop"), Column("NQ-Open", "nq_open"), Column("TriviaQA", "triviaqa"),
        Column("average", "retrieval"),
    ),
    (paper.RETRIEVAL,),
)  # fmt: skip
PG19 = PaperTable(
    "PG-19 by position",
    "Perplexity by 2K-token bucket; Δ is 18–20K minus 2–4K.",
    (
        *(_ppl(f"{2 * i}–{2 * i + 2}K", bucket) for i, bucket in enumerate(BUCKETS)),
        _ppl("final", "pg19_ppl"), _DRIFT,
    ),
    (paper.PG19,),
)  # fmt: skip
DIAGNOSTIC = PaperTable(
    "Mechanism diagnostic",
    "Residual ratio: the share of its own error that a write leaves. Lower means that more is removed.",
    (
        Column("q_geo", "q_geo", 3, min), Column("q_arith", "q_arith", 3, min),
        *(Column(f"{_SHORT.get(task, task.upper())} twice", f"q_{task}_twice", 3, min) for task in SINGLE),
        Column("docs twice", "q_topics_twice", 3, min),
    ),
    (paper.RESIDUALS,),
    more="q_",
)  # fmt: skip
ABLATIONS = PaperTable(
    "Ablations",
    "Variants of a preset with the baseline of their block; Δ loss is the difference in final training loss.",
    (
        *GENERAL.columns, _DRIFT, Column("loss", "final_loss", 3, min),
        Column("Δ loss", "loss_change", 3, min, True),
    ),
    (paper.ABLATIONS,),
)  # fmt: skip
TRAINING = PaperTable(
    "Training loss",
    "Cross-entropy: final is the mean over the last tenth of the steps, at most 256.",
    (
        Column("final", "final_loss", 3, min), Column("validation", "validation_loss", 3, min),
        Column("Δ final", "loss_change", 3, min, True), Column("tokens, M", "training_mtokens", 2, None),
    ),
    (),
)  # fmt: skip
THROUGHPUT = PaperTable(
    "Inference throughput",
    "One sequence: the prompt in one call, then greedy decoding. The paper's figures are from an H100.",
    (
        Column("tokens/s", "tokens_per_second", 1, None), Column("prefill ms", "prefill_ms", 0, None),
        Column("decode ms", "decode_ms", 0, None), Column("Δ %", "throughput_change", 1, None, True),
        Column("paired Δ %", "paired_change", 1, None, True), Column("state MiB", "state_mib", 3, None),
    ),
    (paper.THROUGHPUT,),
)  # fmt: skip
LONG = PaperTable(
    "LongBench",
    "Its 14 English tasks; the paper prints only their average.",
    (
        *(Column(task.removeprefix("longbench_"), task) for task in LONGBENCH),
        Column("average", "longbench"),
    ),
    (paper.MAIN,),
)  # fmt: skip
_NEEDLES = {"niah_single": "S-NIAH", "niah_multikey": "MK-NIAH"}
NIAH = PaperTable(
    "Needles in haystacks",
    "Needle tasks of RULER (Hsieh et al. 2024) by prompt length: the share of needles found.",
    (
        *(
            Column(f"{_NEEDLES[kind]}-{number} {length.upper()}", f"{kind}_{number}_{length}")
            for kind, number, length in (task.rsplit("_", 2) for task in RULER)
        ),
        Column("average", "ruler"),
    ),
    (),
)
RECALL_IN_CODE = PaperTable(
    "Recall in Python's sources",
    "Contains-accuracy on held-out files. Twice: the document is read twice; cue: it is not read at all.",
    (
        *(Column(task.removeprefix("code_"), task) for task in CODE), Column("single", "code_single"),
        *(Column(f"{task.removeprefix('code_')} twice", f"{task}_twice") for task in CODE),
        Column("repeated", "code_repeated"), Column("overall", "code_recall"),
        Column("cue", "code_alone", better=None),
    ),
    (),
)  # fmt: skip
BY_SUITE = {
    "ppl": PERPLEXITY, "recall": RECALL, "commonsense": COMMON, "retrieval": GENERATION, "longbench": LONG,
    "pg19": PG19, "ruler": NIAH, "code_recall": RECALL_IN_CODE,
}  # fmt: skip
# In the paper's order.
TABLES = (
    MAIN, PERPLEXITY, RECALL, DIAGNOSTIC, COMMON, GENERAL, GENERATION, PG19, ABLATIONS, LONG, NIAH,
    RECALL_IN_CODE, TRAINING, THROUGHPUT,
)  # fmt: skip
