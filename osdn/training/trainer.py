"""A training run, from settings to a directory for `from_pretrained`, on `transformers.Trainer`.

The library provides the engine (accumulation, mixed precision, DDP, FSDP2).  This module adds what a long run
needs: it reads packed rows from a saved position in the stream, skips steps whose gradient is not finite,
only saves complete checkpoints, and resumes when it is started again.
"""

import fcntl
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import yaml  # type: ignore[import-untyped]
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, broadcast_object_list
from filelock import FileLock, Timeout
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import DataLoader
from torch.utils.tensorboard import SummaryWriter
from transformers import PreTrainedTokenizerBase, Trainer, TrainingArguments, set_seed
from transformers.integrations import TensorBoardCallback
from transformers.trainer_callback import PrinterCallback
from transformers.utils.logging import disable_progress_bar

from osdn import bfloat16
from osdn.models import OSDNConfig, OSDNForCausalLM, describe_model
from osdn.models.modeling_osdn import OSDNBlock
from osdn.terminal import printable
from osdn.training import checkpoints
from osdn.training.data import load_source, load_tokenizer
from osdn.training.memory import LESS_MEMORY, check_memory
from osdn.training.monitor import Diagnostics, Metrics, Progress, Stop, Validation, matmul_flops
from osdn.training.packing import (
    BEGINNING,
    IGNORED_LABEL,
    Corpus,
    PackedRows,
    Pieces,
    Position,
    held_out_rows,
)
from osdn.training.record import is_finished, print_header, recorded_precision, save_record
from osdn.training.settings import RunSettings
from osdn.training.shards import load_shards

logger = logging.getLogger(__name__)

MEASURED_TOKENS = 512  # for measuring which precision is faster

# Besides the directory and how often to save and log, what may change when a run continues.
CHANGEABLE = (
    "training.gradient_checkpointing",
    "training.max_skipped_steps",
    "training.parallelism",
    "validation.every",
)


class TrainingError(RuntimeError):
    """A run cannot continue; the message says why and what to do."""


class PackedTrainer(Trainer):
    """`Trainer` on a stream of packed rows."""

    is_fsdp_enabled: bool

    def __init__(
        self, settings: RunSettings, rows: PackedRows, skipped_steps: int = 0, **kwargs: Any
    ) -> None:
        self.settings, self.rows, self.skipped_steps = settings, rows, skipped_steps
        super().__init__(**kwargs)
        self.position = rows.position
        self.train_flops = (
            3 * describe_model(self.model).forward_flops
        )  # per token; a backward costs two forwards
        self.peak_flops = matmul_flops(self.args.device, torch.bfloat16 if self.args.bf16 else torch.float32)
        self.step_loss = torch.zeros((), device=self.args.device)  # of this step's batches so far
        self.loss_sum, self.loss_steps = torch.zeros_like(self.step_loss), 0  # since the last log
        self.logged = (0, 0.0)  # step and time of the last log
        self.more_logs: dict[str, float] = {}  # added to the next log

    def create_accelerator_and_postprocess(self) -> None:
        """Enable FSDP2 on CPUs too: accelerate supports it only on GPUs and silently uses DDP elsewhere."""
        super().create_accelerator_and_postprocess()
        if self.args.fsdp and not self.is_fsdp_enabled:
            state = self.accelerator.state
            state.fsdp_plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
            state.distributed_type = DistributedType.FSDP
            self.is_fsdp_enabled = True

    def _init_training_state(self, max_steps: int, *args: Any) -> tuple[int, int]:
        """How often to save and log comes from this command, not from the checkpoint."""
        trained: tuple[int, int] = super()._init_training_state(max_steps, *args)
        self.state.compute_steps(self.args, max_steps)
        return trained

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Read shards ourselves, because the library's loader runs code from them."""
        with _naming_checkpoint(resume_from_checkpoint):
            if not self.is_fsdp_enabled:
                super()._load_from_checkpoint(resume_from_checkpoint, model)
                return
            model = model or self.model
            state = {"model": get_model_state_dict(model)}
            load_shards(Path(resume_from_checkpoint, checkpoints.SHARDS), state)
            set_model_state_dict(model, state["model"])

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Continue at the learning rate of the current schedule: the checkpoint's may have been shorter."""
        if checkpoint is None:
            return
        with _naming_checkpoint(checkpoint):
            self._load_optimizer_state(checkpoint)
        schedule = self.lr_scheduler
        rates = [rate * at(schedule.last_epoch) for rate, at in zip(schedule.base_lrs, schedule.lr_lambdas)]
        for group, rate in zip(self.optimizer.param_groups, rates):
            group["lr"] = rate
        schedule._last_lr = rates  # this is what gets logged

    def _load_optimizer_state(self, checkpoint: str) -> None:
        if not self.is_fsdp_enabled:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        state = {"optimizer": get_optimizer_state_dict(self.model, self.optimizer)}
        load_shards(Path(checkpoint, checkpoints.OPTIMIZER_SHARDS), state)
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint, "scheduler.pt"), weights_only=True))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with _naming_checkpoint(checkpoint):
            super()._load_rng_state(checkpoint)

    def get_train_dataloader(self) -> DataLoader:
        gpu = self.args.device.type != "cpu"
        return DataLoader(self.rows, batch_size=None, num_workers=int(gpu), pin_memory=gpu)

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        self.position = Position(*inputs.pop("position"))
        if self.logged[1] == 0.0:
            self.logged = (self.state.global_step, time.perf_counter())
        loss: Tensor = super().training_step(model, inputs, *args, **kwargs)
        self.step_loss += loss
        return loss

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """The weights of products; the paper's recipe decays no vectors and scalars."""
        return [name for name, x in model.named_parameters() if x.ndim > 1]

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        """Clip the gradient; drop it if it is not finite, so that the optimizer skips the step."""
        norm: Tensor = super()._clip_grad_norm(model)
        loss, self.step_loss = self.step_loss, torch.zeros_like(self.step_loss)
        if torch.isfinite(norm):
            self.loss_sum, self.loss_steps = self.loss_sum + loss, self.loss_steps + 1
            return norm
        model.zero_grad(set_to_none=True)
        self.skipped_steps += 1
        logger.warning("step %d: the gradient is not finite; skipped", self.state.global_step + 1)
        if self.skipped_steps > self.settings.training.max_skipped_steps:
            raise TrainingError(
                f"{self.skipped_steps} steps had a gradient that is not finite, more than "
                f"training.max_skipped_steps ({self.settings.training.max_skipped_steps}); lower "
                f"optimizer.learning_rate, or look at the data around {self.position}"
            )
        return norm

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log the mean loss of the steps that were not skipped (NaN if all were), time and throughput."""
        logs.pop("train_loss", None)  # the library's mean over the whole run includes skipped steps
        if "loss" in logs:
            logs["loss"] = float(self.accelerator.reduce(self.loss_sum, "mean") / self.loss_steps)
            logs["loss_steps"] = self.loss_steps
            self.loss_sum, self.loss_steps = torch.zeros_like(self.loss_sum), 0
            step, now = self.state.global_step, time.perf_counter()
            tokens, seconds = self.settings.training.tokens_per_step, now - self.logged[1]
            rate = (step - self.logged[0]) * tokens / seconds
            self.logged = (step, now)
            logs["tokens"] = step * tokens
            logs["seconds"] = seconds
            logs["tokens_per_second"] = rate
            logs["mfu"] = rate * self.train_flops / (self.peak_flops * self.args.world_size)
            logs["skipped_steps"] = self.skipped_steps
            logs |= self.more_logs
            self.more_logs = {}
        super().log(logs, start_time)

    @torch.no_grad()
    def validation_loss(self, rows: list[dict[str, Tensor]]) -> float:
        """The mean loss of the rows, shared among the devices; its time does not count as training."""
        start, device, ranks = time.perf_counter(), self.args.device, self.args.world_size
        total = torch.zeros(2, dtype=torch.float64, device=device)  # sum and number of losses
        self.model.eval()
        for i in range(self.args.process_index, -(-len(rows) // ranks) * ranks, ranks):
            row = {name: x.to(device) for name, x in rows[i % len(rows)].items()}
            loss = self.model(**row, num_items_in_batch=1, skip_logits=True, use_cache=False).loss
            if i < len(rows):  # beyond that, a device only participates: FSDP2 needs all in every forward
                total += torch.stack([loss.double(), (row["labels"] != IGNORED_LABEL).sum().double()])
        self.model.train()
        total = self.accelerator.reduce(total, "sum")
        self.logged = (self.logged[0], self.logged[1] + time.perf_counter() - start)
        return float(total[0] / total[1])

    def _get_output_dir(self, trial: Any) -> str:
        return os.path.join(self.args.output_dir, checkpoints.STAGING)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        run, name = Path(self.args.output_dir), f"checkpoint-{self.state.global_step}"
        staged = run / checkpoints.STAGING / name
        try:
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            if self.is_world_process_zero():
                self._complete(staged)
                checkpoints.publish(staged, run / name)
                checkpoints.prune(run, self.settings.checkpoints.keep)
        except (Exception, CheckpointException) as error:  # each library raises its own for a full disk
            shutil.rmtree(staged, ignore_errors=True)
            good = checkpoints.newest_good(run)
            raise TrainingError(
                f"{name} could not be written ({error}); {run} has {shutil.disk_usage(run).free / 1e9:.1f} GB"
                f" free. {f'{good.name} is intact' if good else 'There is no earlier checkpoint'}: free some "
                f"space and run the same command to continue."
            ) from error
        self.accelerator.wait_for_everyone()

    def _complete(self, staged: Path) -> None:
        """Add what the library leaves out of a checkpoint, and remove its pickle."""
        (staged / "training_args.bin").unlink(missing_ok=True)  # nothing reads it
        self.model.config.save_pretrained(staged)
        self.processing_class.save_pretrained(staged)
        place = {
            **self.position._asdict(),
            "skipped_steps": self.skipped_steps,
            "data": self.rows.pieces.fingerprint,
        }
        (staged / checkpoints.POSITION).write_text(json.dumps(place))


def train(settings: RunSettings) -> Path:
    """Start or resume a run, train it to the end, and return the directory of the finished model."""
    run, devices = Path(settings.output_dir), int(os.environ.get("WORLD_SIZE", "1"))
    result, steps = run / "model", settings.training.steps
    config = settings.model_config()
    settings, precision_reason = with_precision(settings, config, devices)
    if _planned_steps(run, settings) == steps and result.exists() and is_finished(run):
        if (reason := checkpoints.damage(result, checkpoints.MODEL_FILES)) is None:
            logger.warning("%s is already finished; a larger training.steps extends it", run)
            return result
        logger.warning("%s is damaged (%s); creating it again", result, printable(reason))
    arguments, tokenizer = training_arguments(settings, devices), load_tokenizer(settings.data.tokenizer)
    check_vocabulary(config, tokenizer)
    check_memory(config, settings, arguments.device, devices)
    if settings.optimizer.warmup_steps >= steps and arguments.process_index == 0:
        logger.warning(
            "optimizer.warmup_steps (%d) is not below training.steps (%d): the learning rate never peaks",
            settings.optimizer.warmup_steps,
            steps,
        )
    with arguments.main_process_first():
        corpus = load_corpus(settings, tokenizer)
    disable_progress_bar()  # the library's, for saving and loading
    set_seed(settings.training.seed)
    config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    model = OSDNForCausalLM(config)

    first = arguments.process_index == 0
    with _locked(run) if first else nullcontext():
        start: list[Any] = [_prepare(run, settings) if first else None]
        checkpoint, finished = (broadcast_object_list(start) if devices > 1 else start)[0]
        if not finished:
            step = checkpoints.step_of(checkpoint) if checkpoint else 0
            if first:
                print_header(
                    settings, config, model.num_parameters(), arguments, corpus, step, precision_reason
                )
                save_record(settings, config, arguments, corpus, finished=False)
            if step < steps:
                _run(settings, arguments, model, tokenizer, corpus, checkpoint)
            if first:
                checkpoints.convert(checkpoints.checkpoints(run)[0], result)
        if first:
            save_record(settings, config, arguments, corpus, finished=True)
    return result


def _run(
    settings: RunSettings,
    arguments: TrainingArguments,
    model: OSDNForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    corpus: Corpus,
    checkpoint: Path | None,
) -> None:
    if checkpoint and checkpoints.is_sharded(checkpoint) != bool(arguments.fsdp):
        raise ValueError(
            f"{checkpoint} was written by {'one process' if arguments.fsdp else 'several processes'} with "
            f"training.parallelism fsdp2; continue it in the same way, or extract the model with "
            f"`osdn convert`"
        )
    position, skipped_steps = _read_position(checkpoint, corpus.train) if checkpoint else (BEGINNING, 0)
    rows = PackedRows(
        corpus.train, settings.data.seq_len, arguments.process_index, arguments.world_size, position
    )
    trainer = PackedTrainer(
        settings, rows, skipped_steps, model=model, args=arguments, processing_class=tokenizer
    )
    trainer.remove_callback(PrinterCallback)
    stop, progress = Stop(), Progress()
    for callback in (Metrics(), progress, stop):
        trainer.add_callback(callback)
    if arguments.process_index == 0:
        trainer.add_callback(
            TensorBoardCallback(SummaryWriter(os.path.join(settings.output_dir, "tensorboard")))
        )
    if settings.logging.diagnostics_every:
        trainer.add_callback(Diagnostics(trainer, settings.logging.diagnostics_every))
    if corpus.validation_rows:  # after the diagnostics, which must not see its batches
        trainer.add_callback(Validation(trainer, corpus.validation_rows, settings.validation.every))
    try:
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            raise TrainingError(f"the device ran out of memory: {error}\n{LESS_MEMORY}") from error
        raise
    finally:
        stop.restore()
        progress.stop()
    if stop.signal is not None:
        if arguments.process_index == 0:
            step = trainer.state.global_step
            name = stop.signal.name
            logger.warning(
                "stopped by %s; checkpoint-%d is saved, run the same command to continue", name, step
            )
        raise SystemExit(128 + stop.signal)


def _read_position(checkpoint: Path, pieces: Pieces) -> tuple[Position, int]:
    """A checkpoint's position in the data, which must not have changed, and its number of skipped steps."""
    with _naming_checkpoint(checkpoint):
        place = json.loads((checkpoint / checkpoints.POSITION).read_text())
        data = place.pop("data", None)  # missing in older checkpoints
        skipped_steps = place.pop("skipped_steps")
        position = Position(**place)
    if data not in (None, pieces.fingerprint):
        raise ValueError(
            f"the data has changed since {checkpoint} was written (its fingerprint is {pieces.fingerprint}, "
            f"it was {data}), so the run cannot continue. Restore the data, or train on the new data in "
            f"another output_dir; `osdn convert` extracts the weights."
        )
    return position, skipped_steps


@contextmanager
def _naming_checkpoint(checkpoint: str | Path | None) -> Iterator[None]:
    """Name the checkpoint in loading errors: even with valid checksums it may belong to another model."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise TrainingError(
            f"{checkpoint} cannot be loaded ({error}); move it away to continue from the previous one"
        ) from error


def with_precision(settings: RunSettings, config: OSDNConfig, devices: int) -> tuple[RunSettings, str]:
    """The settings with "auto" replaced by a precision, and the reason for it.

    A resumed run keeps its precision.  On a CPU, one block of the model is timed in both.
    """
    training = settings.training
    if training.precision != "auto":
        if training.precision == "bfloat16":
            bfloat16.avoid_broken_amx()
        return settings, "set in the config"
    if before := recorded_precision(Path(settings.output_dir)):
        chosen, reason = before, "as when the run started"
    elif torch.cuda.is_available():
        chosen, reason = "bfloat16", "the default on a GPU"
    elif devices > 1:
        chosen, reason = (
            "float32",
            "the default for several processes on a CPU; set training.precision for bfloat16",
        )
    else:
        with torch.random.fork_rng(devices=[]):
            block = OSDNBlock(config, layer_idx=0)
            x = torch.randn(1, min(settings.data.seq_len, MEASURED_TOKENS), config.hidden_size)
        ratio = bfloat16.speedup(block, x)
        chosen = "bfloat16" if ratio > bfloat16.WORTHWHILE else "float32"
        reason = f"bfloat16 was {ratio:.2f} times as fast as float32 for one block"
    return replace(settings, training=replace(training, precision=chosen)), reason


def training_arguments(settings: RunSettings, devices: int) -> TrainingArguments:
    """The settings as the library's arguments."""
    optimizer, training = settings.optimizer, settings.training
    gpu, sharded = torch.cuda.is_available(), training.parallelism == "fsdp2" and devices > 1
    arguments = TrainingArguments(
        output_dir=settings.output_dir,
        max_steps=training.steps,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=settings.accumulation(devices),
        gradient_checkpointing=training.gradient_checkpointing,
        learning_rate=optimizer.learning_rate,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": optimizer.min_lr_ratio},
        warmup_steps=optimizer.warmup_steps,
        optim="adamw_torch_fused",
        adam_beta1=optimizer.betas[0],
        adam_beta2=optimizer.betas[1],
        adam_epsilon=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.max_grad_norm,
        seed=training.seed,
        bf16=training.precision == "bfloat16",
        use_cpu=not gpu,
        ddp_backend="gloo" if devices > 1 and not gpu else None,
        ddp_find_unused_parameters=False,
        fsdp=sharded,
        fsdp_config={"state_dict_type": "SHARDED_STATE_DICT", "transformer_layer_cls_to_wrap": ["OSDNBlock"]}
        if sharded
        else None,
        save_steps=settings.checkpoints.every,
        logging_steps=settings.logging.every,
        logging_nan_inf_filter=False,
        disable_tqdm=True,
        report_to=["wandb"] if find_spec("wandb") else [],
        ignore_data_skip=True,  # the rows already start at the saved position
        use_cache=True,  # for the saved configuration; packed rows never use a cache
    )
    # The library would split a packed row over all GPUs that one process sees.
    arguments._n_gpu = min(arguments.n_gpu, 1)
    if sharded:  # with autocast, FSDP2 and DDP compute the same; gradients are reduced in float32
        arguments.fsdp_plugin_args["mixed_precision_policy"] = MixedPrecisionPolicy(
            reduce_dtype=torch.float32
        )
    return arguments


def load_corpus(settings: RunSettings, tokenizer: PreTrainedTokenizerBase) -> Corpus:
    train, validation = load_pieces(settings, tokenizer), settings.validation
    if validation.split is None:
        return Corpus(train)
    try:
        pieces = _pieces(settings, validation.split, tokenizer, seed=0)  # the same for every seed of the run
        return Corpus(train, pieces, held_out_rows(pieces, settings.data.seq_len, validation.tokens))
    except ValueError as error:
        raise ValueError(f"validation.split is {validation.split!r}: {error}") from error


def load_pieces(settings: RunSettings, tokenizer: PreTrainedTokenizerBase) -> Pieces:
    """The training data."""
    return _pieces(settings, settings.data.split, tokenizer, settings.training.seed)


def _pieces(settings: RunSettings, split: str, tokenizer: PreTrainedTokenizerBase, seed: int) -> Pieces:
    data = settings.data
    source = load_source(
        data.source,
        name=data.name,
        split=split,
        text_column=data.text_column,
        streaming=data.streaming,
    )
    return Pieces(source, tokenizer, data.context_len, seed, data.shuffle)


def check_vocabulary(config: OSDNConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    if len(tokenizer) > config.vocab_size:
        raise ValueError(
            f"data.tokenizer has {len(tokenizer):,} tokens, but model.vocab_size is {config.vocab_size:,}; "
            f"set it to {len(tokenizer)} or more, or use another tokenizer"
        )


@contextmanager
def _locked(run: Path) -> Iterator[None]:
    """Keep other processes from training in the run's directory.

    If the file system allows it, the directory itself is locked, since a lock file in it could be deleted.
    """
    run.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        directory = os.open(run, os.O_RDONLY)
        stack.callback(os.close, directory)
        try:
            try:
                fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise
            except OSError:  # NFS can only lock files
                stack.enter_context(FileLock(run / ".lock", blocking=False))
        except (BlockingIOError, Timeout):
            raise ValueError(f"another process is training in {run}; wait for it or stop it") from None
        yield


def _prepare(run: Path, settings: RunSettings) -> tuple[Path | None, bool]:
    """Prepare the run's directory; return the checkpoint to continue from and whether the run is finished."""
    planned, model = _planned_steps(run, settings), run / "model"
    damaged = model.exists() and checkpoints.damage(model, checkpoints.MODEL_FILES) is not None
    if planned == settings.training.steps and model.exists() and not damaged:
        return None, True
    shutil.rmtree(run / checkpoints.STAGING, ignore_errors=True)
    good, newest = checkpoints.newest_good(run), checkpoints.checkpoints(run)
    if good is None and newest:
        raise ValueError(f"every checkpoint in {run} is damaged; remove them to start over")
    if good is None and model.exists():
        why = "is damaged" if damaged else "already exists"
        raise ValueError(
            f"{model} {why}, and there is no checkpoint to continue from; choose another output_dir, or "
            f"remove {run}"
        )
    for unusable in newest[: newest.index(good)] if good else []:
        checkpoints.set_aside(unusable)  # to make room for new ones
    if damaged:
        checkpoints.set_aside(model)
    Metrics.forget(run, after=checkpoints.step_of(good) if good else 0)
    if good and planned is not None and planned < settings.training.steps:
        _extend(run, settings, planned, good)
    checkpoints.write_text(run / "config.yaml", settings.to_yaml())
    return good, False


def _extend(run: Path, settings: RunSettings, planned: int, checkpoint: Path) -> None:
    """Make a run longer than planned; its finished model is kept as `model-<steps>`."""
    result, steps, step = run / "model", settings.training.steps, checkpoints.step_of(checkpoint)
    if result.exists():
        result.rename(run / f"model-{planned}")
    before, after = (settings.optimizer.rate_at(step, n) for n in (planned, steps))
    if before == after:  # still warming up: a run of this length would be at the same point
        return
    Metrics.append(run, {"step": step, "time": time.time(), "extended_to": steps})
    logger.warning(
        "extending the run from %d to %d steps: its cosine schedule now ends later, so the learning rate "
        "jumps from %.2e to %.2e at step %d, and the result differs from a single run of %d steps",
        planned,
        steps,
        before,
        after,
        step,
        steps,
    )


def _planned_steps(run: Path, settings: RunSettings) -> int | None:
    """How many steps the run in the directory has; None if there is no run.  Other settings are an error."""
    if not checkpoints.checkpoints(run) and not (run / "model").exists():
        return None  # nothing to continue: the settings may change
    try:
        there = _fixed_settings((run / "config.yaml").read_text())
        planned = there.pop("training.steps")
    except FileNotFoundError:
        return None
    except (yaml.YAMLError, UnicodeDecodeError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{run / 'config.yaml'} is damaged, so it is unclear whether it belongs to this run. If you know "
            f"that it does, remove the file and run the same command; otherwise choose another output_dir"
        ) from error
    here = _fixed_settings(settings.to_yaml())
    steps = here.pop("training.steps")
    if different := [key for key in here | there if here.get(key) != there.get(key)]:
        values = ", ".join(f"{key} is {there.get(key)!r}, not {here.get(key)!r}" for key in different)
        raise ValueError(
            f"{run} has a run with other settings: {values}; choose another output_dir or remove it"
        )
    if steps < planned:
        raise ValueError(
            f"{run} has a run of {planned} steps; training.steps can be increased but not reduced to {steps}"
        )
    return int(planned)


def _fixed_settings(text: str) -> dict[str, Any]:
    """The settings that must not change during a run."""
    content: dict[str, Any] = yaml.safe_load(text)
    sections = ("model", "data", "optimizer", "training", "validation")
    flat = {f"{name}.{key}": value for name in sections for key, value in content.get(name, {}).items()}
    for name in CHANGEABLE:
        flat.pop(name, None)
    return {"name": content.get("name"), **flat}
