"""Monitoring a run: `Trainer` callbacks, one per concern."""

import json
import math
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from torch import Tensor
from transformers import TrainerCallback
from transformers import TrainerControl as Control
from transformers import TrainerState as State
from transformers import TrainingArguments as Arguments

from osdn.layers import OperatorInputs, TokenMixer
from osdn.layers.mixers import write_keys
from osdn.training.checkpoints import write_text

METRICS = "metrics.jsonl"


class Metrics(TrainerCallback):
    """Writes every log as a line of `metrics.jsonl`; the last step is always logged."""

    def on_step_end(self, args: Arguments, state: State, control: Control, **_: Any) -> None:
        control.should_log |= state.global_step == state.max_steps

    def on_log(self, args: Arguments, state: State, control: Control, logs: dict[str, Any], **_: Any) -> None:
        if state.is_world_process_zero and "train_runtime" not in logs:
            line = {"step": state.global_step, "time": time.time(), **logs}
            line.pop("epoch", None)  # a guess by the library, since a stream has no length
            line = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
            self.append(args.output_dir, line)

    @staticmethod
    def append(run: str | Path, line: dict[str, Any]) -> None:
        with Path(run, METRICS).open("a") as file:
            file.write(json.dumps(line) + "\n")

    @staticmethod
    def read(run: str | Path) -> list[dict[str, Any]]:
        """The lines of a run, without incomplete or damaged ones."""
        lines = []
        for line in Path(run, METRICS).read_text(errors="replace").splitlines():
            try:
                content = json.loads(line)
            except ValueError:
                continue
            if isinstance(content, dict) and isinstance(content.get("step"), int):
                lines.append(content)
        return lines

    @staticmethod
    def forget(run: Path, after: int) -> None:
        """Drop what was logged after the checkpoint that the run continues from."""
        if (run / METRICS).exists():
            earlier = [json.dumps(line) + "\n" for line in Metrics.read(run) if line["step"] <= after]
            write_text(run / METRICS, "".join(earlier))


class Progress(TrainerCallback):
    """A progress bar with loss, speed and time left on a terminal; one line per log elsewhere."""

    def __init__(self) -> None:
        self.console = Console(stderr=True)
        self.bar = Bar(
            TextColumn("{task.completed:,}/{task.total:,}"),
            BarColumn(),
            TextColumn("{task.description}"),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self.task: TaskID | None = None
        self.validation = ""  # the last one, shown until the next

    def on_train_begin(self, args: Arguments, state: State, control: Control, **_: Any) -> None:
        if state.is_world_process_zero:
            self.task = self.bar.add_task("", total=state.max_steps, completed=state.global_step)
            self.bar.start()

    def on_step_end(self, args: Arguments, state: State, control: Control, **_: Any) -> None:
        if self.task is not None:
            self.bar.update(self.task, completed=state.global_step)

    def on_log(self, args: Arguments, state: State, control: Control, logs: dict[str, Any], **_: Any) -> None:
        if self.task is None or "loss" not in logs:
            return
        if "validation_loss" in logs:
            self.validation = f"  validation {logs['validation_loss']:.4f}"
        text = (
            f"loss {logs['loss']:.4f}{self.validation}  norm {logs['grad_norm']:.2f}  "
            f"lr {logs['learning_rate']:.2e}  {logs['tokens_per_second']:,.0f} tokens/s  "
            f"mfu {100 * logs['mfu']:.0f} %"
        )
        if logs["skipped_steps"]:
            text += f"  skipped {logs['skipped_steps']}"
        self.bar.update(self.task, description=text)
        if self.bar.disable:
            seconds = (state.max_steps - state.global_step) * (logs["tokens"] / state.global_step)
            left = seconds / logs["tokens_per_second"]
            print(f"step {state.global_step}/{state.max_steps}  {text}  left {left:,.0f} s", file=sys.stderr)

    def stop(self) -> None:
        """Leave the terminal as it was, however training ended."""
        self.bar.stop()


class Stop(TrainerCallback):
    """On SIGTERM or SIGINT, saves after the current step and stops; a second signal has its usual effect."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.before: dict[signal.Signals, Any] = {}  # handlers

    def on_train_begin(self, args: Arguments, state: State, control: Control, **_: Any) -> None:
        self.before = {
            number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)
        }

    def _note(self, number: int, frame: Any) -> None:
        self.signal = signal.Signals(number)
        signal.signal(number, self.before[self.signal])

    def on_step_end(self, args: Arguments, state: State, control: Control, **_: Any) -> None:
        number = self.signal or 0
        if args.world_size > 1:  # signals arrive at different moments, but all must stop at the same step
            received = torch.tensor(int(number), device=args.device)
            dist.all_reduce(received, op=dist.ReduceOp.MAX)
            number = int(received)
        if number:
            self.signal = signal.Signals(number)
            control.should_save = control.should_training_stop = True

    def restore(self) -> None:
        """Bring back the former handlers, however training ended."""
        for number, handler in self.before.items():
            signal.signal(number, handler)


class Diagnostics(TrainerCallback):
    """Logs the residual ratio and scale of every layer every so many steps, from the batches of that step.

    A write changes its own residual by the factor 1 - beta * (k · w), whatever the state.  So the paper's
    residual ratio f(S_t) / f(S_{t-1}) is the square of that factor and only needs phase 1.  Layers whose
    update has no such ratio are left out.
    """

    def __init__(self, trainer: Any, every: int) -> None:
        self.trainer, self.every = trainer, every
        self.hooks: list[Any] = []
        self.seen: dict[int, list[dict[str, float]]] = {}

    def on_step_begin(self, args: Arguments, state: State, control: Control, **_: Any) -> None:
        if (state.global_step + 1) % self.every == 0:
            for layer, block in enumerate(self.trainer.model.model.layers):
                mixer = block.attn
                if not isinstance(mixer, TokenMixer):  # attention, in a hybrid
                    continue
                if mixer.update is not None and "q_geo" not in mixer.update.measured:
                    continue
                self.hooks.append(mixer.recurrence.register_forward_pre_hook(self._measure(layer)))

    def on_step_end(self, args: Arguments, state: State, control: Control, **_: Any) -> None:
        while self.hooks:
            self.hooks.pop().remove()
        if self.seen:
            self.trainer.more_logs |= {
                f"{name}/{layer}": sum(x[name] for x in measured) / len(measured)
                for layer, measured in self.seen.items()
                for name in measured[0]
            }
            self.seen = {}
            control.should_log = True

    def _measure(self, layer: int) -> Any:
        def hook(recurrence: Any, args: tuple[Any, ...]) -> None:
            self.seen.setdefault(layer, []).append(measure(args[0], recurrence.backend))

        return hook


class Validation(TrainerCallback):
    """Logs the loss on held-out rows every so many steps (0 is never) and at the end."""

    def __init__(self, trainer: Any, rows: list[dict[str, Tensor]], every: int) -> None:
        self.trainer, self.rows, self.every = trainer, rows, every

    def on_step_end(self, args: Arguments, state: State, control: Control, **_: Any) -> None:
        due = self.every and state.global_step % self.every == 0
        if due or state.global_step == state.max_steps:
            self.trainer.more_logs["validation_loss"] = self.trainer.validation_loss(self.rows)
            control.should_log = True


@torch.no_grad()
def measure(inputs: OperatorInputs, backend: str = "auto") -> dict[str, float]:
    """The mean residual ratio of a mixer's writes, and quantiles of its final scales."""
    inputs = inputs._replace(k=inputs.k.float())
    written, scale = write_keys(inputs, backend)  # [B, T, HV, K]
    read = inputs.k.repeat_interleave(written.shape[2] // inputs.k.shape[2], 2)
    result = {}
    if inputs.rule == "hypergradient" and scale is not None:
        low, median, high = torch.quantile(
            scale.flatten(-2), torch.tensor([0.05, 0.5, 0.95]).to(scale), dim=-1
        )
        result = {
            "scale_low": low.mean().item(),
            "scale_median": median.mean().item(),
            "scale_high": high.mean().item(),
        }
    factor = 1 - inputs.beta * (written * read).sum(-1)
    return {"residual_ratio": factor.square().mean().item(), **result}


def matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """The operations per second that `torch.mm` reaches on this device, the reference for utilisation."""
    n = 1024 if device.type == "cpu" else 8192
    a = torch.randn(n, n, device=device, dtype=dtype)
    best = math.inf
    for _ in range(4):
        start = time.perf_counter()
        torch.mm(a, a)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * n**3 / best
