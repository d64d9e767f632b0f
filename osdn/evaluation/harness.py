"""`lm_eval` as the engine: its tasks and ours, on a model that is already loaded.

Three things are changed.  `lm_eval` finds a batch size by trying smaller and smaller batches until memory
suffices, which on a CPU ends in swapping or being killed, and it assumes that every model has a maximum
length.  Here batches are sized by their tokens, and anything longer than a batch is read in pieces.
Truncated prompts are counted.  Progress is reported through a callback.
"""

import io
import logging
import os
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lm_eval
import lm_eval.tasks
import numpy as np
import torch
from jinja2 import UndefinedError
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from osdn.evaluation.data import mirrored
from osdn.evaluation.perplexity import SEGMENT, Report, perplexity, read_in_pieces
from osdn.evaluation.processes import ALONE, Processes
from osdn.evaluation.recall import WINDOW
from osdn.evaluation.ruler import haystacks
from osdn.evaluation.suites import SUITES, Task
from osdn.models import OSDNConfig
from osdn.results.scores import COMPARED, Score

OWN_TASKS = Path(__file__).parent / "tasks"
RESAMPLES = 1000  # for the standard error of LAMBADA's perplexity, which lm_eval bootstraps
# what tasks raise for bad data
WRONG_DATA = (KeyError, IndexError, TypeError, AttributeError, UndefinedError)
SEED = 0  # of the bootstrap; answers are greedy
GENERATED_TOKENS = 16_384  # most prompt tokens read at once before generating
MOST_PROMPTS = 32
UNLIMITED = 2**31  # tokens: `lm_eval` needs a maximum length
POSITIONS = ("n_positions", "max_position_embeddings", "n_ctx")  # as in `lm_eval`
WITHOUT_POSITIONS = {"linear_attention", "delta_rule", "conv"}  # kinds of layers, by `config.layer_types`


class TokenBatchedLM(HFLM):
    """A model whose batches have about the same number of tokens, regardless of the length of requests.

    Without a maximum length nothing is truncated.  With one, `cut` holds how many tokens each prompt lost.
    (With several processes, `lm_eval` repeats requests so that all have equally many; a prompt counts once.)
    """

    def __init__(
        self,
        *args: Any,
        tokens_at_once: int,
        batch_size: int | None = None,
        max_length: int | None = None,
        processes: Processes = ALONE,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, batch_size=batch_size or "auto", max_length=max_length or UNLIMITED, **kwargs)
        self.tokens_at_once = tokens_at_once
        self.processes = processes
        if processes.accelerator is not None:  # `lm_eval` does this only for models that it loads itself
            self.accelerator = processes.accelerator
            self._rank, self._world_size = processes.rank, processes.count
        self.cut: dict[Any, int] = {}
        self._next, self._size, self._generating = 0, 1, False

    def _batch_scheduler(self, pos: int, n_reordered_requests: Any) -> int:
        """The size of the batch that contains request `pos`; requests are sorted from long to short."""
        if pos == 0 or pos >= self._next:
            request = n_reordered_requests[pos]
            if self._generating:  # a prompt only needs the logits of its last token, so more prompts fit
                length = min(len(self.tok_encode(request[0])), self.max_length)
                size = min(GENERATED_TOKENS // max(length, 1), MOST_PROMPTS)
            else:
                size = self.tokens_at_once // self._length(request)
            self._size = max(1, size)
            self._next = pos + self._size
        return self._size

    def _detect_batch_size(self, requests: Any = None, pos: int = 0) -> int:
        """The batch size for windows of the maximum length; 0 lets `_batch_scheduler` size prompt batches."""
        return 0 if self._generating else max(1, self.tokens_at_once // self.max_length)

    def _length(self, request: Any) -> int:
        _, context, continuation = request
        return min(len(context) + len(continuation), self.max_length)

    def _loglikelihood_tokens(
        self, requests: list[Any], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Scores of continuations; a request longer than a batch is read in pieces."""
        for _, context, after in requests:
            self._count_cut((*context, -1, *after), len(context) + len(after) - self.max_length - 1)
        long = [self._length(request) > self.tokens_at_once for request in requests]
        short = [request for request, is_long in zip(requests, long) if not is_long]
        scores = iter(super()._loglikelihood_tokens(short, disable_tqdm, override_bs) if short else [])
        return [
            self._score_in_pieces(*request[1:]) if is_long else next(scores)
            for request, is_long in zip(requests, long)
        ]

    def _score_in_pieces(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        """The log-likelihood of a continuation, and whether it is the greedy one."""
        ids = torch.tensor([(context + continuation)[-(self.max_length + 1) :]])
        start = ids.shape[1] - 1 - len(continuation)  # the first label that counts
        total, greedy = 0.0, True
        for logits, labels in read_in_pieces(self.model, ids):
            logits, labels = logits[0, max(start, 0) :], labels[0, max(start, 0) :]
            start -= SEGMENT
            if len(labels):
                total -= float(F.cross_entropy(logits, labels, reduction="sum"))
                greedy &= bool((logits.argmax(-1) == labels).all())
        return total, greedy

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """A document longer than the maximum length is read in windows: it counts as cut by 0 tokens."""
        if self.max_length < UNLIMITED:
            texts = (request.args[0] for request in requests)
            self.cut |= {text: 0 for text in texts if len(self.tok_encode(text)) > self.max_length}
        return super().loglikelihood_rolling(requests, disable_tqdm)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        self._generating = True
        try:
            return super().generate_until(requests, disable_tqdm)
        finally:
            self._generating = False

    def tok_batch_encode(
        self,
        strings: list[str],
        padding_side: str = "left",
        left_truncate_len: int | None = None,
        truncation: bool = False,
    ) -> tuple[Tensor, Tensor]:
        ids, mask = super().tok_batch_encode(strings, padding_side, None, truncation)
        if left_truncate_len is None:
            return ids, mask
        for text, length in zip(strings, mask.sum(1).tolist()):
            self._count_cut(text, length - left_truncate_len)
        return ids[:, -left_truncate_len:], mask[:, -left_truncate_len:]

    def _model_generate(self, context: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if context.shape[1] > GENERATED_TOKENS:
            kwargs["prefill_chunk_size"] = GENERATED_TOKENS
        return super()._model_generate(context, *args, **kwargs)

    def _count_cut(self, prompt: Any, tokens: int) -> None:
        if tokens > 0:
            self.cut[prompt] = tokens


def position_limit(config: PreTrainedConfig) -> int | None:
    """How many positions a model has; None for a recurrent model, whose length is unlimited."""
    config = config.get_text_config()
    if set(getattr(config, "layer_types", None) or [""]) <= WITHOUT_POSITIONS:
        return None
    if isinstance(config, OSDNConfig) and config.attention and config.attention["rope_theta"] is None:
        return None
    return next((int(getattr(config, name)) for name in POSITIONS if getattr(config, name, None)), None)


def language_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tokens_at_once: int,
    batch_size: int | None = None,
    max_length: int | None = None,
    processes: Processes = ALONE,
) -> TokenBatchedLM:
    """Wrap a model for `lm_eval`; without a batch size, batches are sized by their tokens."""
    with _quiet():
        return TokenBatchedLM(
            model,
            tokenizer=tokenizer,
            backend="causal",
            tokens_at_once=tokens_at_once,
            batch_size=batch_size,
            max_length=max_length or position_limit(model.config),
            processes=processes,
        )


def load_task(name: str, tokenizer: Any, window: int = WINDOW, data_dir: str | Path | None = None) -> Any:
    """Load a task of ours or of `lm_eval`, with its data."""
    root = Path(lm_eval.tasks.__file__).parent
    known = next((task for tasks in SUITES.values() for task in tasks if task.name == name), None)
    folders = [OWN_TASKS, *([root / known.folder] if known and known.folder else [])]
    metadata = {"tokenizer": tokenizer, "window": window, "data_dir": data_dir}
    if known and known.length:  # RULER's tasks load the tokenizer themselves
        metadata |= {"pretrained": tokenizer.name_or_path, "max_seq_lengths": [known.length]}
    original = known.original or name if known else name
    # lm_eval defines thousands of tasks; reading only one folder saves seconds.
    manager = TaskManager(include_path=folders, include_defaults=known is None, metadata=metadata)
    if original not in manager.all_tasks:
        raise ValueError(f"{name} is not a task of lm_eval; `lm_eval ls tasks` lists them")
    makes_haystacks = known is not None and known.length is not None  # of RULER
    try:
        with _quiet(), mirrored(data_dir), haystacks(data_dir) if makes_haystacks else nullcontext():
            task = manager.load([original])["tasks"][original]
            _drop_unanswered(task)
    except WRONG_DATA as error:  # lm_eval prepares all documents and tries the task on the first
        raise ValueError(f"{name}: the data does not fit the task ({error!r})") from error
    if name == "squad_completion":  # as of 0.4.13, lm_eval's defaults override its 48 tokens and newline
        task.set_config("generation_kwargs", {"until": ["\n"], "max_gen_toks": 48, "do_sample": False})
    return task


def _drop_unanswered(task: Any) -> None:
    """Drop documents with an empty answer, which recall would find in every text."""
    task.unanswered = 0
    if "value" in task.features:
        data = task.dataset["validation"]
        answered = [i for i, value in enumerate(data["value"]) if value.strip()]
        task.unanswered = len(data) - len(answered)
        task.dataset["validation"] = data.select(answered)


def run_task(
    lm: TokenBatchedLM, task: Task, loaded: Any, limit: int | None, report: Report
) -> dict[str, Any]:
    """The scores of a task by column and other facts for its result; empty except in the first process."""
    _check_room(lm, task.name, loaded)
    _check_documents(task.name, loaded, limit)
    random.seed(SEED)
    lm.cut.clear()
    with _quiet(), _reporting(report):
        # simple_evaluate would list the machine's packages and the repository's state on every call
        output = lm_eval.evaluate(
            lm, {"tasks": {loaded.task_name: loaded}}, limit=limit, bootstrap_iters=RESAMPLES
        )
    counts = {"prompts": len(lm.cut), "tokens": sum(lm.cut.values())}
    truncated = {name: lm.processes.total(count) for name, count in counts.items()}
    if not lm.processes.is_first:
        return {"scores": {}}
    metrics = output["results"][loaded.task_name]
    # Several processes return theirs one after another; errors are paired by document.
    samples = sorted(output["samples"][loaded.task_name], key=lambda sample: sample["doc_id"])
    scores = {column: _score(metrics, samples, metric) for column, metric in task.columns.items()}
    details: dict[str, Any] = {
        "documents": len({sample["doc_id"] for sample in samples}),
        "truncated": truncated,
    }
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


def prompt_texts(loaded: Any, limit: int | None = None) -> list[str]:
    """The prompts of an evaluation, one per document, without the choices that follow them."""
    random.seed(SEED)
    with _quiet(), _reporting(lambda done, total: None):
        loaded.build_all_requests(limit=limit, rank=0, world_size=1)
    return [instance.args[0] for instance in loaded.instances if instance.idx == 0]


def _check_documents(name: str, loaded: Any, limit: int | None) -> None:
    """Reject documents whose fields do not fit the task.

    A template silently turns a missing text into "None".  To find out whether the task reads a missing field,
    put something else there and see whether the prompt changes.
    """
    documents = loaded.eval_docs
    for i, document in enumerate(islice(documents, limit)):
        missing = {field: "?" for field, value in document.items() if value is None}
        try:
            asked = _question(loaded, document)
            if missing and _question(loaded, document | missing) != asked:
                raise TypeError(f"{' or '.join(missing)} is missing")
        except (*WRONG_DATA, ValueError) as error:
            raise ValueError(
                f"{name}: document {i} of {len(documents)} does not fit the task ({error}); fix or remove it"
            ) from error


def _question(loaded: Any, document: dict[str, Any]) -> tuple[Any, ...]:
    """What a task asks about a document: prompt, answer, and the choices or the score of an empty answer."""
    text, target = loaded.doc_to_text(document), loaded.doc_to_target(document)
    if loaded.OUTPUT_TYPE == "generate_until":
        return text, target, loaded.process_results(document, [""])
    choices = loaded.doc_to_choice(document) if loaded.OUTPUT_TYPE == "multiple_choice" else []
    if wrong := [choice for choice in choices if not isinstance(choice, str)]:
        raise TypeError(f"a choice is {wrong[0]!r:.60}, not text")
    return text, target, choices


def _check_room(lm: TokenBatchedLM, name: str, loaded: Any) -> None:
    if loaded.OUTPUT_TYPE == "generate_until":
        count = (loaded.config.generation_kwargs or {}).get("max_gen_toks", lm.max_gen_toks)
        if count >= lm.max_length:
            raise ValueError(
                f"{name} generates {count} tokens, but --max-length is {lm.max_length}: raise it"
            )


def _score(metrics: dict[str, Any], samples: list[dict[str, Any]], metric: str) -> Score:
    """A metric with its standard error, which `lm_eval` does not always provide."""
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
    """Silence the warnings of `lm_eval` and the libraries it calls, which would appear for every batch."""
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
    """Silence the prints of `lm_eval` and send its progress to `report`."""
    bar = _bar(report)
    with ExitStack() as stack:
        for module in ("lm_eval.models.huggingface", "lm_eval.api.model", "lm_eval.api.task", "tqdm"):
            stack.enter_context(patch(f"{module}.tqdm", bar))
        stack.enter_context(patch.dict(os.environ, DISABLE_MULTIPROC="1"))  # no pool for one second of work
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
