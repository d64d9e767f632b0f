"""Suites on a checkpoint, one result file a suite, written anew after every task.

What a file holds of a task counts as done if it was measured with the same settings on the same weights, so a
run that was interrupted continues with the task it was in.
"""

import json
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import psutil  # type: ignore[import-untyped]
import torch
from datasets.fingerprint import Hasher
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from osdn.evaluation import harness
from osdn.evaluation.columns import Score, derive
from osdn.evaluation.data import MissingDataError, bars, load_data
from osdn.evaluation.perplexity import CONTEXT, Report, document_perplexity, position_perplexity
from osdn.evaluation.recall import ROOM, WINDOW
from osdn.evaluation.suites import FINEWEB_EDU, PG19, SUITES, Task, select
from osdn.models import OSDNForCausalLM
from osdn.models.checkpoints import load_model, load_tokenizer
from osdn.models.describe import model_name
from osdn.records import save_json
from osdn.training.data import load_source

FINEWEB_DOCUMENTS = 10_000  # the last of sample-10BT, as the paper's train[-10000:]
MOST_TOKENS = 4096  # scored at once: more is no faster on a CPU, and its logits take half a gigabyte
OTHERWISE = "name another folder with --output, or replace them with --overwrite"
FILES = ("*.safetensors", "*.json")  # what a checkpoint's numbers depend on


@dataclass(frozen=True)
class Settings:
    """What a user can choose."""

    checkpoint: str
    data_dir: Path | None = None
    window: int = WINDOW
    books: str | None = None  # texts for pg19 in place of PG-19's
    limit: int | None = None
    batch_size: int | None = None
    max_length: int | None = None
    device: str = "cpu"

    def check(self) -> None:
        if self.window <= ROOM:
            raise ValueError(
                f"the window is {self.window} tokens; {ROOM} of them are kept free: ask for more"
            )

    def of_task(self, task: Task) -> dict[str, Any]:
        """The settings that a task's numbers depend on."""
        chosen: dict[str, Any] = {"limit": self.limit, "max_length": self.max_length}
        chosen["data_dir"] = None if self.data_dir is None else str(self.data_dir.resolve())
        if task.name.endswith("_twice"):
            chosen["window"] = self.window
        if task.name == PG19:
            chosen["books"] = self.books
        return chosen


class Observer(Protocol):
    """Whoever shows progress."""

    def begin(self, suite: str, task: str) -> None: ...
    def report(self, done: int, total: int) -> None: ...
    def end(self) -> None: ...


@dataclass
class Outcome:
    files: dict[str, Path] = field(default_factory=dict)  # by suite
    missing: dict[str, str] = field(default_factory=dict)  # why, by task


class Evaluation:
    """A loaded checkpoint and the folder of its results."""

    def __init__(self, settings: Settings, output: Path | None, overwrite: bool = False) -> None:
        settings.check()
        self.settings = settings
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(settings.checkpoint)
        if self.tokenizer.eos_token_id is None:
            raise ValueError(f"the tokenizer of {settings.checkpoint} has no end-of-text token (eos_token)")
        self.model: PreTrainedModel = load_model(settings.checkpoint, settings.device)
        self.name = model_name(self.model, settings.checkpoint)
        self.folder = output or Path("runs/eval") / self.name
        self.weights = fingerprint(settings.checkpoint, self.model)
        self.done = self._finished(overwrite)
        self.again = set(self.done) if overwrite else set()  # to be measured anew, if they can be
        self.tokens_at_once = tokens_at_once(self.model)
        self.lm = harness.language_model(
            self.model, self.tokenizer, self.tokens_at_once, settings.batch_size, settings.max_length
        )

    def run(self, suites: list[str], observer: Observer) -> Outcome:
        """Every task of the suites; what cannot be had is noted and left out."""
        self._refuse_other_settings(suites)
        outcome = Outcome()
        for suite in select(suites):
            missing: dict[str, str] = {}
            for task in SUITES[suite]:
                observer.begin(suite, task.name)
                try:
                    if task.name not in self.done or task.name in self.again:
                        with bars(False):
                            self.done[task.name] = self._entry(task, observer.report)
                        self.again.discard(task.name)
                except MissingDataError as error:
                    missing[task.name] = f"{task.documents}: {error}"
                observer.end()
                if any(task.name in self.done for task in SUITES[suite]):
                    outcome.files[suite] = self._save(suite, missing)
            outcome.missing |= missing
        return outcome

    def _wanted(self, task: Task) -> dict[str, Any]:
        dtype = str(self.model.dtype).removeprefix("torch.")
        return self.settings.of_task(task) | {"weights": self.weights, "dtype": dtype}

    def _refuse_other_settings(self, suites: list[str]) -> None:
        """Results that took hours are not replaced because an option differs."""
        for task in tasks_of(suites):
            wanted = self._wanted(task)
            before = self.done.get(task.name, {}).get("settings", wanted)
            different = [
                f"{key} {before.get(key)}, now {x}" for key, x in wanted.items() if before.get(key) != x
            ]
            if different:
                held = f"{task.name} with other settings ({'; '.join(different)})"
                raise ValueError(f"{self.folder} holds {held}; {OTHERWISE}")
        for name, entry in self.done.items():
            if entry.get("settings", {}).get("weights", self.weights) != self.weights:
                raise ValueError(f"{self.folder} holds {name} of other weights; {OTHERWISE}")

    def _entry(self, task: Task, report: Report) -> dict[str, Any]:
        """Measures a task: what the result file says of it."""
        start = time.perf_counter()
        measured = self._measure(task, report)
        scores = measured.pop("scores")
        return {
            "settings": self._wanted(task),
            "results": {column: score.value for column, score in scores.items()},
            "errors": {column: score.error for column, score in scores.items() if score.error is not None},
            "data": task.documents if task.name != PG19 else self.settings.books or task.documents,
            "seconds": round(time.perf_counter() - start, 1),
            **measured,
        }

    def _measure(self, task: Task, report: Report) -> dict[str, Any]:
        settings = self.settings
        if task.name == FINEWEB_EDU:
            data = load_data(task.data, task.config, settings.data_dir)[task.split]
            count = min(settings.limit or FINEWEB_DOCUMENTS, len(data), FINEWEB_DOCUMENTS)
            data = data.select(range(len(data) - count, len(data))).select_columns(["text"])
            score = document_perplexity(
                self.model, self.tokenizer, data, self.tokens_at_once, report, context=self._context()
            )
            return {"scores": {"fineweb_edu_ppl": score}, "documents": count}
        if task.name == PG19:
            if settings.books is not None:
                texts = load_source(settings.books)["text"]
            else:
                texts = load_data(task.data, task.config, settings.data_dir)[task.split]["text"]
            count = min(settings.limit or len(texts), len(texts))
            read = 0

            def advance(done: int, total: int) -> None:
                nonlocal read
                read = done
                report(done, total)

            try:
                scores = position_perplexity(
                    self.model, self.tokenizer, texts, count, self.tokens_at_once, advance
                )
            except IndexError as error:  # of an embedding of positions
                raise MissingDataError("the model has too few positions for a block") from error
            return {"scores": scores, "documents": read}
        loaded = harness.load_task(task.name, self.tokenizer, settings.window, settings.data_dir)
        return harness.run_task(self.lm, task, loaded, settings.limit, report)

    def _context(self) -> int:
        """Tokens of a document that are read in one piece: as in training, or as many as the model can."""
        limit = self.settings.max_length
        if limit is None and not isinstance(self.model, OSDNForCausalLM):
            limit = getattr(self.model.config, "max_position_embeddings", None)
        return min(CONTEXT, limit or CONTEXT)

    def _save(self, suite: str, missing: dict[str, str]) -> Path:
        """Writes what is done of a suite, in this run or before."""
        entries = {task.name: self.done[task.name] for task in SUITES[suite] if task.name in self.done}
        scores = {
            column: Score(value, part["errors"].get(column))
            for part in entries.values()
            for column, value in part["results"].items()
        }
        everything = derive(scores)
        content = {
            "kind": "evaluation",
            "suite": suite,
            "model": self.name,
            "checkpoint": self.settings.checkpoint,
            "block": block(self.model),
            "baseline": getattr(self.model.config, "preconditioner", None) is None,
            "command": shlex.join(sys.argv),
            "seed": harness.SEED,
            "device": self.settings.device,
            "max_length": self.lm.max_length,
            "complete": len(entries) == len(SUITES[suite]),
            "results": {column: score.value for column, score in everything.items()},
            "errors": {c: score.error for c, score in everything.items() if score.error is not None},
            "missing": missing,
            "tasks": entries,
        }
        return save_json(self.folder / f"{suite}.json", content)

    def _finished(self, overwrite: bool) -> dict[str, Any]:
        """The tasks in the folder's files; a folder of another checkpoint is refused.

        With `overwrite`, those that this evaluation could have measured itself.
        """
        tasks: dict[str, Any] = {}
        for path in sorted(self.folder.glob("*.json")):
            try:
                content = json.loads(path.read_text(encoding="utf-8"))
                if not isinstance(content, dict) or content.get("kind") != "evaluation":
                    continue
                checkpoint, entries = content["checkpoint"], content["tasks"]
                for entry in entries.values():
                    _check_entry(entry)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(
                    f"{path} cannot be read ({error!r}); remove it or choose another folder"
                ) from error
            if checkpoint == self.settings.checkpoint:
                tasks |= entries
            elif not overwrite:
                raise ValueError(f"{self.folder} holds results of {checkpoint}; {OTHERWISE}")
        if overwrite:
            known = {task.name: task for tasks in SUITES.values() for task in tasks}
            tasks = {
                name: entry
                for name, entry in tasks.items()
                if name in known and entry.get("settings") == self._wanted(known[name])
            }
        return tasks


def _check_entry(entry: dict[str, Any]) -> None:
    """Raise an error unless an entry of a result file has what this module reads of it."""
    dict(entry.get("settings", {}))
    for part in (entry["results"], entry["errors"]):
        for value in part.values():
            float(value)


def tokens_at_once(model: PreTrainedModel) -> int:
    """How many tokens to score at once: a quarter of the free memory may go to their logits.

    `lm_eval` holds a token's logits, their logarithmic softmax and a copy: three times the vocabulary.
    """
    if model.device.type == "cuda":
        free = torch.cuda.mem_get_info(model.device)[0]
    else:
        free = psutil.virtual_memory().available
    return max(256, min(MOST_TOKENS, free // 4 // (3 * 4 * model.config.vocab_size)))


def fingerprint(checkpoint: str, model: PreTrainedModel) -> str:
    """Changes when the checkpoint does: by its files if it is a directory, else by its commit on the hub."""
    folder = Path(checkpoint)
    if not folder.is_dir():
        return f"{checkpoint}@{getattr(model.config, '_commit_hash', None)}"
    files = sorted(chain.from_iterable(folder.glob(pattern) for pattern in FILES))
    return str(Hasher.hash([(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]))


def block(model: PreTrainedModel) -> str:
    """Models that the paper would compare with each other share a block: a backbone of one shape."""
    if not isinstance(model, OSDNForCausalLM):
        return str(model.config.model_type)
    config = model.config
    return f"{config.backbone}, {config.num_hidden_layers} layers of width {config.hidden_size}"


def tasks_of(suites: list[str]) -> Iterator[Task]:
    """The tasks of some suites, one that two of them share once each."""
    return chain.from_iterable(SUITES[suite] for suite in select(suites))
