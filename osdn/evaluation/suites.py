"""The suites and their tasks: those of `lm_eval`, our own recall tasks, and two measures that it lacks.

A task fills one or two columns of the paper's tables; a column's metric is named as in the results of
`lm_eval`.
"""

from dataclasses import dataclass

from osdn.results.scores import CODE, CODE_TWICE, LONGBENCH, NEEDLES, RULER_LENGTHS

ACCURACY, NORMALISED, EXACT = "acc,none", "acc_norm,none", "exact_match,remove_whitespace"
CONTAINS = "contains,none"
INSTALLED = "installed"  # Python's sources on this machine instead of a data set
FINEWEB_EDU, PG19 = "fineweb_edu", "pg19"  # the measures that are not tasks of lm_eval


@dataclass(frozen=True)
class Task:
    name: str
    columns: dict[str, str]  # column -> metric
    data: str  # the data set on the hub
    config: str | None = None
    split: str = "validation"
    folder: str | None = None  # of the definition in lm_eval
    original: str | None = None  # the name in lm_eval, if it differs
    length: int | None = None  # tokens per prompt, for RULER

    @property
    def makes_its_data(self) -> bool:
        """Whether the documents are created when the task is loaded."""
        return self.length is not None or self.data == INSTALLED

    @property
    def source(self) -> str:
        """The data set and its configuration, for people to read."""
        return self.data if self.config in (None, "default") else f"{self.data} {self.config}"

    @property
    def documents(self) -> str:
        """The data set and its split."""
        return f"{self.source}, {self.split}"


def _choice(name: str, metric: str, data: str, config: str | None, split: str, folder: str) -> Task:
    return Task(name, {name: metric}, data, config, split, folder)


def _recall(column: str, data: str, folder: str) -> tuple[Task, Task]:
    single = Task(folder, {column: CONTAINS}, data, "default", folder=folder)
    return single, Task(f"{column}_twice", {f"{column}_twice": CONTAINS}, data, "default")


LAMBADA = Task(
    "lambada_openai",
    {"lambada_ppl": "perplexity,none", "lambada": ACCURACY},
    "EleutherAI/lambada_openai",
    "default",
    "test",
    "lambada",
)
_RECALL = (
    _recall("fda", "hazyresearch/based-fda", "fda"),
    _recall("swde", "hazyresearch/based-swde-v2", "swde"),
    _recall("squad", "hazyresearch/based-squad", "squad_completion"),
)
SUITES: dict[str, tuple[Task, ...]] = {
    "ppl": (
        Task(
            "wikitext",
            {"wikitext_ppl": "word_perplexity,none"},
            "EleutherAI/wikitext_document_level",
            "wikitext-2-raw-v1",
            "test",
            "wikitext",
        ),
        LAMBADA,
        Task(FINEWEB_EDU, {"fineweb_edu_ppl": ""}, "HuggingFaceFW/fineweb-edu", "sample-10BT", "train"),
    ),
    "recall": (*(single for single, _ in _RECALL), *(twice for _, twice in _RECALL)),
    "commonsense": (
        _choice("piqa", NORMALISED, "baber/piqa", None, "validation", "piqa"),
        _choice("hellaswag", NORMALISED, "Rowan/hellaswag", None, "validation", "hellaswag"),
        _choice("winogrande", ACCURACY, "allenai/winogrande", "winogrande_xl", "validation", "winogrande"),
        _choice("arc_easy", NORMALISED, "allenai/ai2_arc", "ARC-Easy", "test", "arc"),
        _choice("arc_challenge", NORMALISED, "allenai/ai2_arc", "ARC-Challenge", "test", "arc"),
        _choice("social_iqa", ACCURACY, "lighteval/siqa", None, "validation", "siqa"),
        _choice("boolq", ACCURACY, "aps/super_glue", "boolq", "validation", "super_glue/boolq"),
        LAMBADA,
        # Not in the paper, and not in its average.
        _choice("sciq", ACCURACY, "allenai/sciq", None, "test", "sciq"),
        _choice("openbookqa", NORMALISED, "allenai/openbookqa", "main", "test", "openbookqa"),
    ),
    "retrieval": (
        _choice("drop", "f1,none", "EleutherAI/drop", None, "validation", "drop"),
        _choice("nq_open", EXACT, "google-research-datasets/nq_open", None, "validation", "nq_open"),
        _choice("triviaqa", EXACT, "mandarjoshi/trivia_qa", "rc.nocontext", "validation", "triviaqa"),
    ),
    "longbench": tuple(
        _choice(
            name,
            "score,none",
            "Xnhyacinth/LongBench",
            name.removeprefix("longbench_"),
            "test",
            "longbench",
        )
        for name in LONGBENCH
    ),
    "pg19": (Task(PG19, {"pg19_ppl": ""}, "emozilla/pg19-test", None, "test"),),
    "ruler": tuple(
        Task(
            f"{needle}_{length // 1024}k",
            {f"{needle}_{length // 1024}k": f"{length},none"},
            "baber/paul_graham_essays",
            split="train",
            folder="ruler",
            original=needle,
            length=length,
        )
        for needle in NEEDLES
        for length in RULER_LENGTHS
    ),
    "code_recall": tuple(
        Task(name, {name: CONTAINS}, INSTALLED) for name in (*CODE, *CODE_TWICE, "code_alone")
    ),
}
EXTRA = ("ruler", "code_recall")  # not in the paper


def select(names: list[str]) -> list[str]:
    """The named suites, each once and in order; "all" means every suite of the paper."""
    if unknown := [name for name in names if name not in SUITES and name != "all"]:
        raise ValueError(f"there is no suite {', '.join(unknown)}; choose from {', '.join(SUITES)} and all")
    return [suite for suite in SUITES if suite in names or ("all" in names and suite not in EXTRA)]
