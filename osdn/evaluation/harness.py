"""`lm_eval` as the engine: its tasks and ours, on a model that is loaded already.

It needs little help.  Its search for a batch size tries ever smaller batches until memory suffices, which on
a CPU ends in swapping or in being killed, so that there batches are sized by their tokens; and its progress
bars are handed to whoever shows progress.
"""

import io
import logging
import os
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lm_eval
import lm_eval.tasks
import numpy as np
from jinja2 import UndefinedError
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from osdn.evaluation.columns import COMPARED, Score
from osdn.evaluation.data import mirrored
from osdn.evaluation.perplexity import Report, perplexity
from osdn.evaluation.recall import WINDOW
from osdn.evaluation.suites import SUITES, Task

OWN_TASKS = Path(__file__).parent / "tasks"
RESAMPLES = 1000  # for the standard error of LAMBADA's perplexity, which lm_eval bootstraps
WRONG_DATA = (KeyError, IndexError, TypeError, AttributeError, UndefinedError)  # what tasks raise at it
SEED = 0  # of the bootstrap; answers are greedy
GENERATED_TOKENS = 16_384  # of prompts that a CPU continues at once
MOST_PROMPTS = 32


class TokenBatchedLM(HFLM):
    """A model whose batches have about the same number of tokens, whatever the length of requests."""

    def __init__(self, *args: Any, tokens_at_once: int, **kwargs: Any) -> None:
        super().__init__(*args, batch_size="auto", **kwargs)
        self.tokens_at_once = tokens_at_once
        self._next, self._size = 0, 1

    def _batch_scheduler(self, pos: int, n_reordered_requests: Any) -> int:
        """The size of the batch that request `pos` is in; requests come from long to short."""
        if pos == 0 or pos >= self._next:
            _, context, continuation = n_reordered_requests[pos]
            length = min(len(context) + len(continuation), self.max_length)
            self._size = max(1, self.tokens_at_once // length)
            self._next = pos + self._size
        return self._size

    def _detect_batch_size(self, requests: Any = None, pos: int = 0) -> int:
        return max(1, self.tokens_at_once // self.max_length)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Prompts need no logits but their last token's, so that more of them fit."""
        longest = max(len(self.tok_encode(request.args[0])) for request in requests)
        size = GENERATED_TOKENS // min(longest, self.max_length)
        with patch.object(self, "batch_size_per_gpu", min(max(size, 1), MOST_PROMPTS)):
            return super().generate_until(requests, disable_tqdm=disable_tqdm)


def language_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tokens_at_once: int,
    batch_size: int | None = None,
    max_length: int | None = None,
) -> HFLM:
    """A model for `lm_eval`; without a batch size one is found."""
    options = {"tokenizer": tokenizer, "backend": "causal", "max_length": max_length}
    with _quiet():
        if batch_size is None and model.device.type == "cpu":
            return TokenBatchedLM(model, tokens_at_once=tokens_at_once, **options)
        return HFLM(model, batch_size=batch_size or "auto", **options)


def load_task(name: str, tokenizer: Any, window: int = WINDOW, data_dir: str | Path | None = None) -> Any:
    """One of our tasks or of `lm_eval`'s, with its data."""
    root = Path(lm_eval.tasks.__file__).parent
    known = {task.name: task for tasks in SUITES.values() for task in tasks}
    folder = known[name].folder if name in known else None
    folders = [OWN_TASKS, *([root / folder] if folder else [])]
    metadata = {"tokenizer": tokenizer, "window": window, "data_dir": data_dir}
    # lm_eval defines thousands of tasks; reading those of one folder saves seconds.
    manager = TaskManager(include_path=folders, include_defaults=name not in known, metadata=metadata)
    if name not in manager.all_tasks:
        raise ValueError(f"{name} is not a task of lm_eval; `lm_eval ls tasks` lists them")
    try:
        with _quiet(), mirrored(data_dir):
            task = manager.load([name])["tasks"][name]
            _leave_out_unanswered(task)
    except WRONG_DATA as error:  # lm_eval prepares all documents, and tries a task on the first
        raise ValueError(f"{name}: the data is not in the format of the task ({error!r})") from error
    if name == "squad_completion":  # as of 0.4.13 its own 48 tokens and newline lose to lm_eval's defaults
        task.set_config("generation_kwargs", {"until": ["\n"], "max_gen_toks": 48, "do_sample": False})
    return task


def _leave_out_unanswered(task: Any) -> None:
    """Recall looks for the answer in a text, and an empty one is in every text."""
    task.unanswered = 0
    if "value" in task.features:
        data = task.dataset["validation"]
        answered = [i for i, value in enumerate(data["value"]) if value.strip()]
        task.unanswered = len(data) - len(answered)
        task.dataset["validation"] = data.select(answered)


def run_task(lm: HFLM, task: Task, loaded: Any, limit: int | None, report: Report) -> dict[str, Any]:
    """The scores of a task by column, and what else a result file should say of it."""
    _check_room(lm, task.name, loaded)
    _check_documents(task.name, loaded, limit)
    random.seed(SEED)
    with _quiet(), _reporting(report):
        # Not simple_evaluate, which for every call lists the machine's packages and its repository's state.
        output = lm_eval.evaluate(lm, {"tasks": {task.name: loaded}}, limit=limit, bootstrap_iters=RESAMPLES)
    metrics, samples = output["results"][task.name], output["samples"][task.name]
    scores = {column: _score(metrics, samples, metric) for column, metric in task.columns.items()}
    details: dict[str, Any] = {"documents": len({sample["doc_id"] for sample in samples})}
    if compared := {column: metric for column, metric in task.columns.items() if column in COMPARED}:
        details["by_document"] = {
            column: [sample[metric.partition(",")[0]] for sample in samples]
            for column, metric in compared.items()
        }
    if loaded.unanswered:
        details["unanswered"] = loaded.unanswered
    details["metrics"] = {k: v for k, v in metrics.items() if isinstance(v, (int, float))}
    if "cut" in loaded.features:
        details["cut"] = sum(sample["doc"]["cut"] for sample in samples)
    return {"scores": scores, **details}


def _check_documents(name: str, loaded: Any, limit: int | None) -> None:
    """Refuse documents with something else where a task wants text.

    A template makes "None" of a missing text without a word.  Whether a task reads what is missing is found
    out by putting something else there.
    """
    documents = loaded.eval_docs
    for i, document in enumerate(islice(documents, limit)):
        missing = {field: "?" for field, value in document.items() if value is None}
        try:
            asked = _asked(loaded, document)
            if missing and _asked(loaded, document | missing) != asked:
                raise TypeError(f"{' or '.join(missing)} is missing")
        except (*WRONG_DATA, ValueError) as error:
            raise ValueError(
                f"{name}: document {i} of {len(documents)} is not in the format of the task ({error}); "
                f"mend or remove it"
            ) from error


def _asked(loaded: Any, document: dict[str, Any]) -> tuple[Any, ...]:
    """What a task makes of a document: its prompt, its answer, the choices or the score of saying nothing."""
    text, target = loaded.doc_to_text(document), loaded.doc_to_target(document)
    if loaded.OUTPUT_TYPE == "generate_until":
        return text, target, loaded.process_results(document, [""])
    choices = loaded.doc_to_choice(document) if loaded.OUTPUT_TYPE == "multiple_choice" else []
    if wrong := [choice for choice in choices if not isinstance(choice, str)]:
        raise TypeError(f"a choice is {wrong[0]!r:.60}")
    return text, target, choices


def _check_room(lm: HFLM, name: str, loaded: Any) -> None:
    if loaded.OUTPUT_TYPE == "generate_until":
        count = (loaded.config.generation_kwargs or {}).get("max_gen_toks", lm.max_gen_toks)
        if count >= lm.max_length:
            raise ValueError(
                f"{name} generates {count} tokens, and the model may see {lm.max_length}: raise --max-length"
            )


def _score(metrics: dict[str, Any], samples: list[dict[str, Any]], metric: str) -> Score:
    """A metric with its standard error, which `lm_eval` does not give for all."""
    name, _, filtered = metric.partition(",")
    error = metrics.get(f"{name}_stderr,{filtered}")
    if not isinstance(error, float):
        values = np.array([sample[name] for sample in samples], dtype=float)  # [N], or [N, 2] with words
        if values.ndim == 2:
            error = perplexity(-values[:, 0], values[:, 1]).error
        else:
            error = float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else None
    return Score(float(metrics[metric]), error)


@contextmanager
def _quiet() -> Iterator[None]:
    """`lm_eval` and what it calls without warnings, which come with every batch."""
    logger = logging.getLogger("lm_eval")
    level, verbosity = logger.level, transformers_logging.get_verbosity()
    logger.setLevel(logging.ERROR)
    transformers_logging.set_verbosity_error()
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logger.setLevel(level)
        transformers_logging.set_verbosity(verbosity)


@contextmanager
def _reporting(report: Report) -> Iterator[None]:
    """`lm_eval` without prints, its progress bars handed to `report`."""
    bar = _bar(report)
    with ExitStack() as stack:
        for module in ("lm_eval.models.huggingface", "lm_eval.api.model", "lm_eval.api.task", "tqdm"):
            stack.enter_context(patch(f"{module}.tqdm", bar))
        stack.enter_context(patch.dict(os.environ, DISABLE_MULTIPROC="1"))  # no pool for a second's work
        stack.enter_context(redirect_stdout(io.StringIO()))
        yield


def _bar(report: Report) -> Callable[..., Any]:
    """The part of tqdm that `lm_eval` uses."""

    class Bar:
        def __init__(self, iterable: Any = None, *, total: int | None = None, **_: Any) -> None:
            self.iterable, self.done = iterable, 0
            self.total = len(iterable) if total is None and iterable is not None else total or 0

        def __iter__(self) -> Iterator[Any]:
            for item in self.iterable:
                yield item
                self.update()

        def update(self, n: int = 1) -> None:
            self.done += n
            report(self.done, self.total)

        def close(self) -> None:
            pass

    return Bar
