"""One model, one task, one seed: the training loop of the lab.

Models that are to be compared see the same batches in the same order and start from the same weights, those
of the plain backbone; online scaling adds none, or a few that have no effect at first.

A run with `budgets` measures the model after part of its steps as if training had ended there.  A cosine
schedule cannot do that: halfway through, its learning rate is still high.  So the rate is constant after a
warm-up, and for every budget a copy of the model branches off and decays the rate to zero by the end of that
budget, on the batches that come next anyway (Hägele et al. 2024, https://arxiv.org/abs/2405.18392).
"""

import copy
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from osdn.lab.variants import Variant
from osdn.models import OSDNForCausalLM
from osdn.zoo import causal_lm

POINTS = 50  # points of a learning curve
DECAY = 0.2  # share of a budget over which the learning rate decays
OnStep = Callable[[float, float], None]


class Task(Protocol):
    """What a model can train on: batches of inputs and labels `[B, T]`, aligned by position."""

    @property
    def vocab_size(self) -> int: ...
    def adapt(self, model: Any) -> None: ...
    def batches(self, seed: int, size: int) -> Iterator[tuple[Tensor, Tensor]]: ...
    def logits(self, model: Any, inputs: Tensor, labels: Tensor) -> Tensor: ...
    def evaluate(self, model: Any, seed: int) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Run:
    """Everything that determines a result; `budgets` are increasing shares of the steps, ending in 1."""

    task: Any  # a Task that is a dataclass
    variant: Variant
    seed: int
    width: int = 64
    layers: int = 2
    steps: int = 200
    batch: int = 32
    learning_rate: float = 5e-3
    backend: str = field(default="auto", repr=False)
    budgets: tuple[float, ...] = ()

    def settings(self) -> dict[str, Any]:
        task = asdict(self.task)
        if "folder" in task:
            task["folder"] = ""  # where its text lies does not change a result
        return asdict(self) | {
            "task": task,
            "experiment": type(self.task).__name__,
            "variant": self.variant.label,
        }

    def ends(self) -> list[tuple[int, int]]:
        """For every budget, the steps after which its decay starts and ends."""
        ends = [max(1, round(share * self.steps)) for share in self.budgets]
        return [(end - max(1, round(DECAY * end)), end) for end in ends]

    @property
    def updates(self) -> int:
        """The number of steps computed, including those of the branches."""
        return self.steps + sum(end - start for start, end in self.ends()[:-1])


class Learner:
    """A model, its optimizer, and its learning curve as rows of step, loss and accuracy."""

    def __init__(self, run: Run, on_step: OnStep | None = None) -> None:
        self.run, self.model, self.curve = run, build(run), list[dict[str, float]]()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=run.learning_rate, betas=(0.9, 0.98), weight_decay=0.1, fused=True
        )
        self.step, self.recent, self.on_step = 0, list[tuple[float, float]](), on_step

    def learn(self, batch: tuple[Tensor, Tensor], rate: float) -> None:
        """Take one step; `rate` is a share of the learning rate."""
        inputs, labels = batch
        logits = self.run.task.logits(self.model, inputs, labels)
        loss, grad, right = cross_entropy(logits.detach(), labels[labels >= 0])
        self.optimizer.zero_grad()
        logits.backward(grad)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * self.run.learning_rate
        self.optimizer.step()
        self.step += 1
        self.recent.append((loss, right))
        if self.on_step is not None:
            self.on_step(*self.recent[-1])
        if self.step * POINTS // self.run.steps > (self.step - 1) * POINTS // self.run.steps:
            means = torch.tensor(self.recent, dtype=torch.float64).mean(0)
            self.curve.append({"step": self.step, "loss": means[0].item(), "accuracy": means[1].item()})
            self.recent = []

    def branch(self) -> "Learner":
        """A copy that trains independently of this learner."""
        return copy.deepcopy(self, {id(self.run): self.run, id(self.on_step): self.on_step})


def cross_entropy(logits: Tensor, answers: Tensor) -> tuple[float, Tensor, float]:
    """The mean loss, its gradient, and the share of answers that have the largest logit.

    Computed together, they take less than half of the time that they take one by one.
    """
    count, index = len(logits), answers[:, None]
    largest, own = logits.amax(-1, keepdim=True), logits.gather(-1, index)
    probabilities = (logits - largest).exp_()
    total = probabilities.sum(-1, keepdim=True)
    loss = (total.log() + (largest - own)).mean()
    grad = probabilities.div_(count * total).scatter_add_(-1, index, torch.full_like(own, -1 / count))
    return loss.item(), grad, (own == largest).double().mean().item()


def train(run: Run, on_step: OnStep | None = None) -> tuple[nn.Module, Any]:
    """The trained model and its learning curve; `on_step(loss, accuracy)` is called after every step."""
    learner = Learner(run, on_step)
    batches = run.task.batches(run.seed, run.batch)
    for step, batch in zip(range(run.steps), batches):
        learner.learn(batch, warmup_cosine(step, run.steps))
    return learner.model.eval(), learner.curve


def train_in_budgets(run: Run, on_step: OnStep | None = None) -> Iterator[Learner]:
    """Yields, for every budget, a learner whose rate has decayed by the end of that budget."""
    trunk = Learner(run, on_step)
    batches = run.task.batches(run.seed, run.batch)
    warmup = max(1, run.ends()[0][1] // 10)
    for start, end in run.ends():
        while trunk.step < start:
            trunk.learn(next(batches), min(1, (trunk.step + 1) / warmup))
        branch = trunk if end == run.steps else trunk.branch()
        coming = [next(batches) for _ in range(start, end)]
        for i, batch in enumerate(coming):
            branch.learn(batch, 1 - (i + 1) / (len(coming) + 1))
        branch.model.eval()
        yield branch
        batches = itertools.chain(coming, batches)


def execute(run: Run, on_step: OnStep | None = None) -> dict[str, Any]:
    """Train and evaluate.

    With budgets, the numbers of each are in `budgets`; writes are saved only for the last one, to keep the
    files of many runs small.
    """
    if not run.budgets:
        model, curve = train(run, on_step)
        return {"settings": run.settings(), "curve": curve, **run.task.evaluate(model, run.seed)}
    by_budget = []
    for learner in train_in_budgets(run, on_step):
        measured = run.task.evaluate(learner.model, run.seed)
        numbers = {name: round(x, 6) for name, x in measured.items() if isinstance(x, float)}
        by_budget.append({"steps": learner.step, **numbers})
    writes = {"writes": measured["writes"]} if "writes" in measured else {}
    return {"settings": run.settings(), **by_budget[-1], "budgets": by_budget, **writes}


def build(run: Run) -> Any:
    """The model before training; variants of a backbone start with the same values in all shared weights."""
    config = run.variant.config(
        run.width, num_hidden_layers=run.layers, vocab_size=run.task.vocab_size, backend=run.backend
    )
    torch.manual_seed(run.seed)
    if run.variant.row is not None:
        model = causal_lm(run.variant.row, config)
    else:
        no_change = {"preconditioner": None, "update_rule": None}
        plain = OSDNForCausalLM(type(config)(**config.to_diff_dict() | no_change))
        model = OSDNForCausalLM(config)
        shapes = {name: x.shape for name, x in model.state_dict().items()}
        shared = {name: x for name, x in plain.state_dict().items() if shapes[name] == x.shape}
        model.load_state_dict(shared, strict=False)
    torch.manual_seed(run.seed)  # what a task adds must not depend on how many numbers the mixers drew
    run.task.adapt(model)
    return model.train()


def warmup_cosine(step: int, steps: int) -> float:
    """Linear warm-up over a tenth of the steps, then a cosine decay."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))
