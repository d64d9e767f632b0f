"""How large a reproduction is: models, seeds, text, steps and questions, all in one place.

`LAPTOP` is the one to change for another budget; docs/reproduction.md says why its numbers are what they are.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

# Each is a shipped config `tiny/NAME`, except those that say otherwise.
TUNED = "delta_net bias=-2"
BEST = "osdn-newton-block-8"  # of the referee
STEADY = "osdn-newton-block-8 retention=0.999"  # the same, for long documents
STILL = "osdn-apf eta=0"  # a learned retention and no online step: what of APF's effect is the step's?
CHANGED: dict[str, tuple[str, dict[str, Any]]] = {
    TUNED: ("tiny/delta_net", {"beta_bias": -2.0}),
    STILL: ("tiny/osdn-apf", {"preconditioner": {"retention": "learned", "eta": 0.0}}),
    STEADY: (
        "tiny/osdn-newton-block-8",
        {"preconditioner": {"rule": "newton", "block_size": 8, "retention": 0.999}},
    ),
}
DELTA_NET = ("delta_net", "osdn", "osdn-apf", STILL, TUNED, BEST, STEADY)
ABLATIONS = ("osdn-d0", "osdn-d0-free", "osdn-beta-unaware")
BLOCKS = {  # the models by the plain delta rule that they are compared with
    "delta_net": (*DELTA_NET, *ABLATIONS),
    "gdn": ("gdn", "osgdn", "osgdn-apf"),
    "kda": ("kda", "oskda", "oskda-apf"),
}


@dataclass(frozen=True)
class Profile:
    name: str
    seeds: dict[str, int]  # how many, of each model
    vocab_size: int
    width: int
    layers: int
    heads: int
    steps: int
    tokens_per_step: int
    seq_len: int  # tokens read at once
    context_len: int
    learning_rate: float
    initializer_range: float
    primer_tokens: int  # of random words listed twice, with which training begins
    exercises: float  # share of the text after them that consists of exercises in looking things up
    shuffle: int  # how far pieces of text may move; the primer must stay at the beginning
    validation_tokens: int
    window: int  # tokens of one reading in the recall tasks
    questions: int  # of each recall task
    books: int  # held-out files of 20,480 tokens and more
    prompts: int  # of each task in the mechanism diagnostic
    prefill: int
    decode: int  # tokens, in the throughput
    repeats: int  # of its timings
    measured_steps: int  # of the short runs that the estimate of hours comes from
    precisions: tuple[str, ...]  # to choose from; the faster is taken

    @property
    def runs(self) -> list[tuple[str, int]]:
        """Model and seed, all models with the first seed first: a report can be made early."""
        most = max(self.seeds.values())
        return [(model, seed) for seed in range(most) for model, n in self.seeds.items() if seed < n]

    @property
    def tokens(self) -> int:
        """The number of tokens that one run is trained on."""
        return self.steps * self.tokens_per_step

    def with_seeds(self, seeds: int) -> "Profile":
        """The same profile with at least so many seeds of every model."""
        return replace(self, seeds={model: max(n, seeds) for model, n in self.seeds.items()})

    def sizes(self, model: str) -> dict[str, Any]:
        """The model's shape; Gated DeltaNet has fewer key channels and more values, as in the paper."""
        sizes = {
            "vocab_size": self.vocab_size,
            "hidden_size": self.width,
            "intermediate_size": 2 * self.width,
            "num_hidden_layers": self.layers,
            "num_heads": self.heads,
            "initializer_range": self.initializer_range,
        }
        if baseline_of(model) == "gdn":
            sizes |= {
                "head_k_dim": 3 * self.width // (4 * self.heads),
                "head_v_dim": 3 * self.width // (2 * self.heads),
            }
        return sizes


def baseline_of(model: str) -> str:
    """The plain delta rule of a model's block."""
    return next(plain for plain, models in BLOCKS.items() if model in models)


MINUTES = Profile(
    name="minutes",
    seeds={"delta_net": 2, "osdn": 2, "osdn-d0": 2},
    vocab_size=512,
    width=32,
    layers=1,
    heads=2,
    steps=40,
    tokens_per_step=2048,
    seq_len=2048,
    context_len=512,
    learning_rate=1e-2,
    initializer_range=0.1,
    primer_tokens=10_000,
    exercises=0.3,
    shuffle=20,
    validation_tokens=8192,
    window=200,
    questions=8,
    books=2,
    prompts=2,
    prefill=256,
    decode=16,
    repeats=5,
    measured_steps=4,
    precisions=("float32",),
)

LAPTOP = Profile(
    name="laptop",
    seeds={model: 6 if model in DELTA_NET else 3 for models in BLOCKS.values() for model in models},
    vocab_size=3072,
    width=128,
    layers=2,
    heads=2,
    steps=3000,
    tokens_per_step=2048,
    seq_len=2048,
    context_len=512,
    learning_rate=5e-3,
    initializer_range=0.09,
    primer_tokens=1_500_000,
    exercises=0.7,
    shuffle=500,
    validation_tokens=131_072,
    window=128,
    questions=300,
    books=12,
    prompts=16,
    prefill=2048,
    decode=128,
    repeats=50,
    measured_steps=16,
    precisions=("float32", "bfloat16"),
)

PROFILES = {profile.name: profile for profile in (MINUTES, LAPTOP)}

# What the paper trained: its main table, its ablations, and the pair at 1.3B.
PAPER = {
    "340m": (
        *("delta_net", "osdn", "osdn-apf", "gdn", "osgdn", "osgdn-apf", "kda", "oskda", "oskda-apf"),
        *("osdn-d0", "osdn-d0-free"),
    ),
    "1.3b": ("delta_net", "osdn-apf"),
}
SUITES = ("ppl", "recall", "commonsense", "retrieval", "longbench", "pg19")
DIAGNOSED = ("fda_twice", "swde_twice", "squad_twice")


def paper_commands() -> Iterator[str]:
    """The paper's own runs as the commands of a node with eight GPUs, comments between them."""
    for size, models in PAPER.items():
        tokens = "10.7 billion tokens" if size == "340m" else "100 billion tokens"
        yield f"# {size}: {tokens} for each of {len(models)} models"
        for model in models:
            folder = f"runs/{size}/{model}"
            suites = [
                x for x in SUITES if size == "340m" or x in ("ppl", "recall", "commonsense", "longbench")
            ]
            yield f"torchrun --nproc-per-node 8 -m osdn train {size}/{model}"
            evaluated = " ".join(f"--suite {suite}" for suite in suites)
            yield (
                f"accelerate launch --num-processes 8 -m osdn eval {folder}/model {evaluated} --device cuda "
                f"--output {folder}/eval"
            )
            if model.startswith(("delta_net", "osdn")):
                tasks = " ".join(f"--task {task}" for task in DIAGNOSED)
                yield f"osdn diagnose {folder}/model {tasks} --device cuda --output {folder}"
        folders = " ".join(f"runs/{size}/{model}/model" for model in models)
        yield f"osdn bench throughput {folders} --device cuda --output runs/{size}"
    yield "# the tables"
    yield "osdn report runs"
