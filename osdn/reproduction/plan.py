"""What a reproduction runs: every job is an `osdn` command, and the files it leaves say whether it is done.

A run is a model with a seed: it is trained, evaluated and diagnosed, in this order.  Then its measurements go
into one small file; a run with that file is finished, whether or not its weights are still there.  The speed
of all models is measured last, when nothing else runs.
"""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from osdn.evaluation.perplexity import BLOCK
from osdn.reproduction.profiles import CHANGED, Profile, baseline_of
from osdn.reproduction.text import SOURCE, VOCABULARY, write_text
from osdn.results.scores import CODE_TWICE
from osdn.results.store import METRICS, TRAINING, save_json
from osdn.training.data import SourceFiles, load_tokenizer

BEGUN = "reproduction.json"  # what the folder is for: profile and text
THROUGHPUT = "throughput.json"
PACKAGES = "requirements.txt"  # what was installed, and so what the text is made of
OUTCOMES = ("code_recall.json", "pg19.json")
FREE = ("seeds", "repeats")  # of a profile: may change within a folder, what is finished stays valid


@dataclass(frozen=True)
class Job:
    """A command of `osdn`, and the files that it leaves, each with the field that says it is complete."""

    kind: str  # train, evaluate, diagnose, ...
    of: str  # the model and seed, or what else it is about
    arguments: tuple[str, ...]
    leaves: tuple[tuple[Path, str | None], ...]
    model: str | None = None
    steps: int = 0  # of a training, whose progress can be read

    @property
    def name(self) -> str:
        return f"{self.kind} {self.of}"

    @property
    def command(self) -> str:
        return shlex.join(["osdn", *self.arguments])

    def is_done(self) -> bool:
        return all(_has(path, name) for path, name in self.leaves)

    def share(self) -> float:
        """How much of it is done, as far as its files tell."""
        if not self.steps:
            return 0.0
        log = self.leaves[0][0].with_name(METRICS)
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        steps = [int(match[1]) for line in lines[-2:] if (match := re.match(r'\{"step": (\d+)', line))]
        return max(steps, default=0) / self.steps

    def recall(self) -> str:
        """What an evaluation found, in words; empty for other jobs."""
        if self.kind != "evaluate":
            return ""
        results = json.loads(self.leaves[0][0].read_text(encoding="utf-8"))["results"]
        return f", recall {results['code_recall']:.3f}, cue alone {results['code_alone']:.3f}"


def _has(path: Path, name: str | None) -> bool:
    """Whether a result is there and complete."""
    try:
        return path.exists() and (name is None or bool(json.loads(path.read_text())[name]))
    except (ValueError, KeyError, TypeError):
        return False


@dataclass(frozen=True)
class Plan:
    profile: Profile
    folder: Path  # absolute: commands and configs name files in it

    @property
    def tokenizer(self) -> Path:
        return self.folder / "tokenizer"

    @property
    def books(self) -> Path:
        return self.folder / "books"

    @property
    def text(self) -> Path:
        return self.folder / "text.jsonl"

    def begin(self) -> None:
        """Write the folder's purpose and the config of every model; reject a folder of another profile."""
        path = self.folder / BEGUN
        profile = _fixed(json.loads(json.dumps(asdict(self.profile))))
        fingerprint = SourceFiles(SOURCE).fingerprint
        if path.exists():
            before = json.loads(path.read_text(encoding="utf-8"))
            if _fixed(before["profile"]) != profile:
                raise ValueError(f"{self.folder} holds a run of another profile; choose another --output")
            if before["text"]["fingerprint"] != fingerprint:
                raise ValueError(
                    f"the text has changed since {self.folder} was begun: it needs Python "
                    f"{before['versions']['python']} with the packages in {self.folder / PACKAGES}. Install "
                    f"them in a new environment, or choose another --output"
                )
        if not path.exists() or not self.text.exists():  # a folder may come without its large files
            training, validation = write_text(self.profile, self.text)
        if not path.exists():
            documents = {"training": training, "validation": validation}
            text = {"source": SOURCE, "fingerprint": fingerprint, **documents}
            (self.folder / PACKAGES).write_text(installed_packages())
            save_json(path, {"kind": "reproduction-plan", "profile": profile, "text": text})
        training = json.loads(path.read_text(encoding="utf-8"))["text"]["training"]
        for model in self.profile.seeds:
            config = self.config(model)
            config.parent.mkdir(exist_ok=True)
            config.write_text(yaml.safe_dump(self._settings(model, training), sort_keys=False))

    def config(self, model: str) -> Path:
        return self.folder / "configs" / f"{slug(model)}.yaml"

    def run_folder(self, model: str, seed: int) -> Path:
        return self.folder / "runs" / slug(model) / f"seed{seed}"

    def finished(self, model: str, seed: int) -> Path:
        """The file with all that a run measured; it is there when the run is finished."""
        return self.folder / "finished" / f"{slug(model)}-seed{seed}.json"

    @property
    def speeds(self) -> Path:
        """The file with the speed of every model; it is there when all have been timed."""
        return self.folder / "finished" / THROUGHPUT

    def _settings(self, model: str, training: int) -> dict[str, Any]:
        """The config of a model; it is trained on the first `training` documents, the others are held out."""
        p = self.profile
        base, changes = CHANGED.get(model, (f"tiny/{model}", {}))
        return {
            "base": base,
            "name": model,
            "model": {**p.sizes(model), **changes},
            "data": {
                "source": str(self.text),
                "split": f"train[:{training}]",
                "tokenizer": str(self.tokenizer),
                "seq_len": p.seq_len,
                "context_len": p.context_len,
                "shuffle": p.shuffle,
            },
            "optimizer": {"learning_rate": p.learning_rate, "warmup_steps": max(1, p.steps // 20)},
            "training": {"steps": p.steps, "tokens_per_step": p.tokens_per_step},
            "validation": {"split": f"train[{training}:]", "every": 0, "tokens": p.validation_tokens},
            "checkpoints": {"every": max(1, p.steps // 5), "keep": 1},
            "logging": {"every": max(1, p.steps // 100)},
        }

    def vocabulary(self) -> Job:
        p = self.profile
        arguments = ("tokenizer", "train", VOCABULARY, self.tokenizer, "--vocab-size", p.vocab_size)
        return _job("make", "the vocabulary", arguments, {self.tokenizer / "tokenizer.json": None})

    def write_books(self) -> None:
        """The first held-out files that are long enough, as much of each as one block takes."""
        if len(list(self.books.glob("*.txt"))) == self.profile.books:
            return
        tokenizer = load_tokenizer(str(self.tokenizer))
        self.books.mkdir(exist_ok=True)
        count = 0
        for text in SourceFiles(SOURCE).texts("validation"):
            if len(text) < BLOCK:  # tokens are rarely shorter than a character
                continue
            places = tokenizer(text, return_offsets_mapping=True, verbose=False)["offset_mapping"]
            if len(places) > BLOCK + SPARE:
                (self.books / f"{count:02}.txt").write_text(
                    text[: places[BLOCK + SPARE][0]], encoding="utf-8", newline=""
                )
                count += 1
            if count == self.profile.books:
                return
        raise ValueError(
            f"the installed packages have {count} held-out files of {BLOCK:,} tokens, and the profile asks "
            f"for {self.profile.books}; install more packages"
        )

    def training(
        self, model: str, seed: int, precision: str, folder: Path | None = None, *more: str, steps: int = 0
    ) -> Job:
        """Train a model; `folder`, `steps` and more replacements are for the short runs of the estimate."""
        run = folder or self.run_folder(model, seed)
        replaced = (f"output_dir={run}", f"training.seed={seed}", f"training.precision={precision}", *more)
        if steps:
            replaced = (*replaced, f"training.steps={steps}")
        arguments = ("train", self.config(model), *replaced)
        of, leaves = f"{model}, seed {seed}", {run / TRAINING: "finished"}
        return _job("train", of, arguments, leaves, model, steps or self.profile.steps)

    def evaluations(self, model: str, seed: int, folder: Path | None = None) -> list[Job]:
        """What is measured of a trained model."""
        p, run, of = self.profile, folder or self.run_folder(model, seed), f"{model}, seed {seed}"
        suites = ("--suite", "code_recall", "--suite", "pg19", "--books", self.books)
        questions = ("--window", p.window, "--limit", max(p.questions, p.books))
        tasks = [word for task in CODE_TWICE for word in ("--task", task)]
        prompts = ("--count", p.prompts, "--window", p.window, "--length", 2 * p.window)
        return [
            _job(
                "evaluate",
                of,
                ("eval", run / "model", *suites, *questions, "--output", run / "eval"),
                {run / "eval" / name: "complete" for name in OUTCOMES},
                model,
            ),
            _job(
                "diagnose",
                of,
                ("diagnose", run / "model", *tasks, *prompts, "--output", run),
                {run / "diagnosis.json": None},
                model,
            ),
        ]

    def chains(self, precision: str) -> list[list[Job]]:
        """One list of jobs per unfinished run: each needs the one before it."""
        return [
            [self.training(model, seed, precision), *self.evaluations(model, seed)]
            for model, seed in self.profile.runs
            if not self.finished(model, seed).exists()
        ]

    def throughput(self, precision: str) -> list[Job]:
        """Time the first seed of each model.  Where its weights are gone, a model with one step of training
        stands in: speed does not depend on them.
        """
        if self.speeds.exists():
            return []
        folders, stand_ins = [], []
        for model in self.profile.seeds:
            run = self.run_folder(model, 0)
            if self.finished(model, 0).exists() and not (run / "model").exists():
                run = self.folder / "timed" / slug(model)
                few = f"validation.tokens={self.profile.seq_len}"
                stand_in = self.training(model, 0, precision, run, few, steps=1)
                stand_ins.append(replace(stand_in, kind="make", of=f"a {model} to time"))
            folders.append(run)
        return [*stand_ins, self.timing(folders, self.folder)]

    def timing(self, runs: Sequence[Path], output: Path) -> Job:
        """Time the models of some runs."""
        p = self.profile
        sizes = ("--prefill", p.prefill, "--decode", p.decode, "--repeats", p.repeats, "--output", output)
        arguments = ("bench", "throughput", *(run / "model" for run in runs), *sizes)
        return _job("time", "all models", arguments, {output / THROUGHPUT: None})


SPARE = 8  # tokens beyond a block: cut text may have fewer tokens than the same part of the whole


def slug(model: str) -> str:
    """A model's name in file names.

    >>> slug("delta_net bias=-2")
    'delta_net-bias-2'
    """
    return re.sub(r"[^a-z0-9_.]+", "-", model)


def _fixed(profile: Mapping[str, Any]) -> dict[str, Any]:
    """What all runs of a folder have in common."""
    return {name: value for name, value in profile.items() if name not in FREE}


def installed_packages() -> str:
    """Every installed package with its version, except this one, as pip reads them."""
    packages = {d.metadata["Name"]: d.version for d in distributions() if d.metadata["Name"] != "osdn"}
    return "".join(f"{name}=={packages[name]}\n" for name in sorted(packages, key=str.lower))


def _job(
    kind: str,
    of: str,
    arguments: Sequence[object],
    leaves: Mapping[Path, str | None],
    model: str | None = None,
    steps: int = 0,
) -> Job:
    return Job(kind, of, tuple(map(str, arguments)), tuple(leaves.items()), model, steps)


def cost_key(job: Job) -> str:
    """Jobs with the same key take about as long: a training depends on its backbone."""
    return f"train {baseline_of(job.model)}" if job.kind == "train" and job.model else job.kind
