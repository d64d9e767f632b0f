"""Runs suites on a checkpoint; each suite has one result file, which is rewritten after every task.

A file records the model's identity, and for each task the protocol and the data.  A task in it counts as done
if weights, protocol and data are the same, so an interrupted run continues with the task it was in.
"""

import json
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, Protocol

import psutil  # type: ignore[import-untyped]
import torch
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from osdn.evaluation import harness
from osdn.evaluation.data import MissingDataError, dataset_progress, load_split
from osdn.evaluation.perplexity import BLOCK, CONTEXT, Report, document_perplexity, position_perplexity
from osdn.evaluation.processes import Processes
from osdn.evaluation.recall import ROOM, WINDOW
from osdn.evaluation.suites import FINEWEB_EDU, INSTALLED, PG19, SUITES, Task, select
from osdn.models.checkpoints import load_model, load_tokenizer
from osdn.models.identity import identify
from osdn.results.scores import Score, derive
from osdn.results.store import digest, now, save_json
from osdn.training.data import checked, load_source

FINEWEB_DOCUMENTS = 10_000  # the last ones of sample-10BT, like the paper's train[-10000:]
MOST_TOKENS = 4096  # scored at once on a CPU: more is no faster, and these logits take half a gigabyte
OTHERWISE = "name another folder with --output, or replace them with --overwrite"


@dataclass(frozen=True)
class EvaluationSettings:
    """What a user can choose."""

    checkpoint: str
    data_dir: Path | None = None
    window: int = WINDOW
    books: str | None = None  # texts to use instead of PG-19
    limit: int | None = None
    batch_size: int | None = None
    max_length: int | None = None
    device: str = "cpu"
    dtype: str | None = None  # passed to `load_model`
    quantize: str | None = None  # passed to `load_model`
    name: str | None = None  # replaces the model's own name

    def check(self) -> None:
        if self.window <= ROOM:
            raise ValueError(
                f"the window is {self.window} tokens; it must be more than {ROOM}, which are reserved"
            )


class Observer(Protocol):
    """Shows progress."""

    def begin(self, suite: str, task: str) -> None: ...
    def report(self, done: int, total: int) -> None: ...
    def end(self) -> None: ...


@dataclass
class Outcome:
    files: dict[str, Path] = field(default_factory=dict)  # by suite
    missing: dict[str, str] = field(default_factory=dict)  # task -> reason


class Evaluation:
    """A loaded checkpoint and the folder of its results."""

    def __init__(self, settings: EvaluationSettings, output: Path | None, overwrite: bool = False) -> None:
        settings.check()
        self.settings, self.processes = settings, Processes.launched()
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(settings.checkpoint)
        if self.tokenizer.eos_token_id is None:
            raise ValueError(f"the tokenizer of {settings.checkpoint} has no end-of-text token (eos_token)")
        self.model: PreTrainedModel = load_model(
            settings.checkpoint, self.processes.device(settings.device), settings.dtype, settings.quantize
        )
        self.identity = identify(self.model, settings.checkpoint, settings.name)
        self.folder = output or Path("runs/eval") / self.identity.model
        self.max_length = settings.max_length or harness.position_limit(self.model.config)
        self._last: tuple[str, Any] | None = None
        self.done = self._finished(overwrite)
        self.again = set(self.done) if overwrite else set()  # to be measured again if possible
        self.tokens_at_once = tokens_at_once(self.model)
        self.lm = harness.language_model(
            self.model,
            self.tokenizer,
            self.tokens_at_once,
            settings.batch_size,
            self.max_length,
            self.processes,
        )
        self.processes.wait()  # until all have read the finished results

    def run(self, suites: list[str], observer: Observer) -> Outcome:
        """Run every task of the suites; tasks without data are skipped and reported."""
        self._reject_other_settings(suites)
        outcome = Outcome()
        for suite in select(suites):
            missing: dict[str, str] = {}
            for task in SUITES[suite]:
                observer.begin(suite, task.name)
                try:
                    if task.name not in self.done or task.name in self.again:
                        with dataset_progress(False):
                            self.done[task.name] = self._entry(task, observer.report)
                        self.again.discard(task.name)
                except MissingDataError as error:
                    missing[task.name] = f"{task.documents}: {error}"
                observer.end()
                if self.processes.is_first and any(task.name in self.done for task in SUITES[suite]):
                    outcome.files[suite] = self._save(suite, missing)
            outcome.missing |= missing
        return outcome

    def _protocol(self, task: Task) -> dict[str, Any]:
        """The settings that affect the numbers of a task."""
        small = f", {self.settings.quantize} weights" if self.settings.quantize else ""
        protocol = {
            "limit": self.settings.limit,
            "max_length": self.max_length,
            "dtype": str(self.model.dtype).removeprefix("torch.") + small,
        }
        if task.name.endswith("_twice") or task.data == INSTALLED:
            protocol["window"] = self.settings.window
        if task.name == FINEWEB_EDU:  # documents are read in pieces of this length, as in training
            protocol["context"] = min(CONTEXT, self.max_length or CONTEXT)
        if task.name == PG19:  # blocks are read in full
            protocol["block"] = BLOCK
            del protocol["max_length"]
        if task.length is not None:
            protocol["length"] = task.length
        return protocol

    def _documents(self, task: Task) -> Dataset:
        """The rows that a task evaluates, unmodified."""
        limit, books = self.settings.limit, self.settings.books
        if task.makes_its_data:
            rows = Dataset.from_list(list(self._loaded(task).eval_docs))
        elif task.name == PG19 and books is not None:
            rows = load_source(books, split=self._books_split)
        else:
            rows = load_split(task.data, task.config, task.split, self.settings.data_dir)
        if task.name == PG19:
            long_enough = (i for i, text in enumerate(rows["text"]) if self._has_block(text))
            return rows.select(list(islice(long_enough, limit))).select_columns(["text"])
        if task.name == FINEWEB_EDU:
            count = min(limit or FINEWEB_DOCUMENTS, len(rows), FINEWEB_DOCUMENTS)
            return rows.select(range(len(rows) - count, len(rows))).select_columns(["text"])
        return rows.select(range(min(limit or len(rows), len(rows))))

    @property
    def _books_split(self) -> str:
        """Held-out files of Python's and other packages' sources; other books have one split."""
        return "validation" if self.settings.books in ("stdlib", "installed") else "train"

    def _has_block(self, text: str) -> bool:
        return len(self.tokenizer(checked(text), verbose=False).input_ids) >= BLOCK

    def _data(self, task: Task, rows: Dataset) -> dict[str, Any]:
        """The data of a task as it is recorded in a result."""
        source, split = task.source, task.split
        if task.name == PG19 and self.settings.books is not None:
            source, split = self.settings.books, self._books_split
        return {"source": source, "split": split, "documents": len(rows), "digest": digest(rows)}

    def _reject_other_settings(self, suites: list[str]) -> None:
        """Do not overwrite results that took hours just because an option or the data changed."""
        for task in tasks_of(suites):
            if task.name in self.done and task.name not in self.again:
                different = self._differences(task, self.done[task.name])
                if different:
                    contents = f"{task.name} with other settings ({'; '.join(different)})"
                    raise ValueError(f"{self.folder} holds {contents}; {OTHERWISE}")

    def _differences(self, task: Task, before: dict[str, Any]) -> list[str]:
        protocol = self._protocol(task)
        different = [
            f"{key} {before['protocol'].get(key)}, now {x}"
            for key, x in protocol.items()
            if before["protocol"].get(key) != x
        ]
        if different:
            return different
        try:
            with dataset_progress(False):
                data = self._data(task, self._documents(task))
        except MissingDataError:  # keep results whose data is no longer available
            return []
        if data["digest"] == before["data"]["digest"]:
            return []
        return [f"data {_in_words(before['data'])}, now {_in_words(data)}"]

    def _entry(self, task: Task, report: Report) -> dict[str, Any]:
        """Measure a task and return its entry for the result file."""
        start = time.perf_counter()
        rows = self._documents(task)
        measured = self._measure(task, rows, report)
        scores = measured.pop("scores")
        return {
            "date": now(),
            "protocol": self._protocol(task),
            "data": self._data(task, rows),
            "results": {column: score.value for column, score in scores.items()},
            "errors": {column: score.error for column, score in scores.items() if score.error is not None},
            "seconds": round(time.perf_counter() - start, 1),
            **measured,
        }

    def _measure(self, task: Task, rows: Dataset, report: Report) -> dict[str, Any]:
        settings = self.settings
        if task.name == FINEWEB_EDU:
            context = self._protocol(task)["context"]
            score = document_perplexity(
                self.model,
                self.tokenizer,
                rows,
                self.tokens_at_once,
                report,
                context=context,
                processes=self.processes,
            )
            return {"scores": {"fineweb_edu_ppl": score}, "documents": len(rows)}
        if task.name == PG19:
            if (longest := settings.max_length) is not None and longest < BLOCK:
                raise MissingDataError(f"--max-length is {longest:,}, and a block has {BLOCK:,} tokens")
            try:
                scores = position_perplexity(
                    self.model,
                    self.tokenizer,
                    rows["text"],
                    len(rows),
                    self.tokens_at_once,
                    report,
                    processes=self.processes,
                )
            except IndexError as error:  # raised by a position embedding
                raise MissingDataError("the model has too few positions for a block") from error
            return {"scores": scores, "documents": len(rows)}
        return harness.run_task(self.lm, task, self._loaded(task), settings.limit, report)

    def _loaded(self, task: Task) -> Any:
        """A task of `lm_eval` with its data; the last one is cached, since it may be slow to create."""
        if self._last is None or self._last[0] != task.name:
            loaded = harness.load_task(
                task.name, self.tokenizer, self.settings.window, self.settings.data_dir
            )
            self._last = task.name, loaded
        return self._last[1]

    def _save(self, suite: str, missing: dict[str, str]) -> Path:
        """Write the finished tasks of a suite, from this run and earlier ones."""
        entries = {task.name: self.done[task.name] for task in SUITES[suite] if task.name in self.done}
        scores = {
            column: Score(value, part["errors"].get(column))
            for part in entries.values()
            for column, value in part["results"].items()
        }
        derived = derive(scores)
        content = {
            "kind": "evaluation",
            "suite": suite,
            **self.identity.record(),
            "command": shlex.join(sys.argv),
            "seed": harness.SEED,
            "device": self.settings.device,
            "complete": len(entries) == len(SUITES[suite]),
            "results": {column: score.value for column, score in derived.items()},
            "errors": {c: score.error for c, score in derived.items() if score.error is not None},
            "missing": missing,
            "tasks": entries,
        }
        return save_json(self.folder / f"{suite}.json", content)

    def _finished(self, overwrite: bool) -> dict[str, Any]:
        """The finished tasks in the folder's files; a folder with results of other weights is rejected.

        With `overwrite`, only those with the protocol of this evaluation.
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
                    f"{path} cannot be read ({error!r}); remove it or choose another folder with --output"
                ) from error
            if self._is_ours(content):
                tasks |= entries
            elif not overwrite:
                raise ValueError(
                    f"{self.folder} holds results of {checkpoint} with weights {content.get('weights')}, but "
                    f"the weights of {self.settings.checkpoint} are {self.identity.weights}; {OTHERWISE}"
                )
        if overwrite:
            known = {task.name: task for tasks in SUITES.values() for task in tasks}
            tasks = {
                name: entry
                for name, entry in tasks.items()
                if name in known and entry.get("protocol") == self._protocol(known[name])
            }
        return tasks

    def _is_ours(self, content: dict[str, Any]) -> bool:
        """Whether results are for these weights; weights without a digest are compared by path."""
        if self.identity.weights is None:
            return bool(content["checkpoint"] == self.identity.checkpoint)
        return bool(content.get("weights") == self.identity.weights)


def _check_entry(entry: dict[str, Any]) -> None:
    """Raise an error unless an entry of a result file has everything that this module reads."""
    entry["protocol"].items()
    if not entry["results"]:
        raise ValueError("a task has no results")
    str(entry["data"]["digest"])
    for part in (entry["results"], entry["errors"]):
        for value in part.values():
            float(value)


def tokens_at_once(model: PreTrainedModel) -> int:
    """How many tokens to score at once, so that their logits take at most a quarter of the free memory.

    For each token, `lm_eval` holds the logits, their log-softmax and a copy: three times the vocabulary.
    """
    if model.device.type == "cuda":
        free, most = torch.cuda.mem_get_info(model.device)[0], sys.maxsize
    else:
        free, most = psutil.virtual_memory().available, MOST_TOKENS
    return max(256, min(most, free // 4 // (3 * 4 * model.config.vocab_size)))


def tasks_of(suites: list[str]) -> Iterator[Task]:
    """The tasks of some suites; a task that two suites share appears twice."""
    return chain.from_iterable(SUITES[suite] for suite in select(suites))


def _in_words(data: dict[str, Any]) -> str:
    return f"{data['documents']} documents of {data['source']}, digest {data['digest']}"
