"""`ToolkitTrainer`: the HF Trainer with attestation, a record and a loadable saved model."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import DistributedDataParallelKwargs, FullyShardedDataParallelPlugin
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import EvalLoopOutput, unwrap_peft_model
from transformers.training_args import ParallelMode

from toolkit.checkpoints.folders import checkpoint_folder
from toolkit.checkpoints.resume_request import LAST, requested_checkpoint
from toolkit.checkpoints.resuming import Resumed, find_checkpoint
from toolkit.checkpoints.saver import (
    CheckpointSaver,
    Form,
    losses_before,
    read_model,
    read_random_state,
    read_states,
)
from toolkit.configs.requested import (
    accumulation_dtype,
    agreed_strategy,
    requested_accumulation_dtype,
    requests_checkpointing,
)
from toolkit.data.packing import keep_texts_apart
from toolkit.engines.backend import backend_of, side_effect_free, strategy_of_plugins
from toolkit.engines.fsdp2 import original_classes
from toolkit.engines.masters import clip_in_fp32, moments_of, stepping_on_masters
from toolkit.engines.wrapped import Wrapped
from toolkit.errors import UsageError
from toolkit.launching.progress import progressed
from toolkit.launching.ranks import say
from toolkit.measuring.attestation import Requested
from toolkit.measuring.finite import require_finite
from toolkit.measuring.forwards import LearnedRows
from toolkit.measuring.heartbeat import Choice, heartbeat_for
from toolkit.measuring.launcher import check_launch
from toolkit.measuring.observed import judging_loss
from toolkit.measuring.recorder import Recorder
from toolkit.records.evidence import IGNORED
from toolkit.records.json_files import SCHEMA, write_json
from toolkit.records.record import RECORD_FILE, STEPS_FILE
from toolkit.strategies import Strategy
from toolkit.training.adapters import has_lora
from toolkit.training.arguments import output_dir_of, syncs_each_batch
from toolkit.training.card import card_of_trainer
from toolkit.training.evaluation import perplexity
from toolkit.training.fingerprint import facts_of_trainer
from toolkit.training.observers import Observer, TrainerEvents
from toolkit.training.run_folder import check_names, lock_run_folder
from toolkit.training.saving import full_state_dict, save_model
from toolkit.training.speed import Speed
from toolkit.training.speed.lean_batches import Collate
from toolkit.training.speed_arguments import SpeedArguments, check_speed


class TokenMean:
    """Follows one evaluation of a Trainer on one rank, and takes its loss by tokens.

    The Trainer (transformers 5.23) repeats each batch's loss as many times as a batch has rows and
    takes the mean: a batch of few tokens counts like one of many, and rows that Accelerate repeats
    to fill the last batches count again.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._accelerator = trainer.accelerator
        self._sums = torch.zeros(2, dtype=torch.float64, device=self._accelerator.device)

    def leave_out_repeats(self, inputs: dict[str, Any]) -> None:
        """Ignore the labels of rows that only fill up the last batches."""
        state, labels = self._accelerator.gradient_state, inputs.get("labels")
        if not isinstance(labels, torch.Tensor) or not self._accelerator.even_batches:
            return
        if not state.end_of_dataloader or state.remainder <= 0:
            return
        # The rows of a batch over all ranks stand in the order of ranks.
        here = state.remainder - self._accelerator.process_index * len(labels)
        if here < len(labels):
            inputs["labels"] = labels.clone()
            inputs["labels"][max(0, here) :] = IGNORED

    def add(self, loss: torch.Tensor, labels: Any, items: Any) -> None:
        """Add the loss of a batch, as `Trainer.compute_loss` returns it.

        Args:
            loss: Divided by `items`.
            labels: (B, T); any other shape is no batch of tokens, and is left out.
            items: Divisor of the loss; None: the loss was divided by the batch's own tokens.
        """
        if not isinstance(labels, torch.Tensor) or labels.dim() != 2:
            return
        if items is None:
            shifted = labels[..., 1:] if self._trainer._loss_shifts_labels else labels
            weight = (shifted != IGNORED).sum()
        else:
            # Tokens of all ranks; in turn, the loss is multiplied by the number of ranks.
            together = self._trainer.args.average_tokens_across_devices
            weight = torch.as_tensor(items) / (self._accelerator.num_processes if together else 1)
        weight = weight.to(self._sums)
        summed = torch.where(weight > 0, loss.detach().to(self._sums) * weight, 0)
        self._sums += torch.stack([summed, weight])

    def put_into(self, metrics: dict[str, float], prefix: str) -> None:
        """Replace the Trainer's loss with loss and perplexity by tokens; every rank calls it."""
        total, tokens = self._accelerator.reduce(self._sums, "sum").tolist()
        if tokens:
            metrics[f"{prefix}_loss"] = total / tokens
            metrics[f"{prefix}_perplexity"] = perplexity(total / tokens)


class ToolkitTrainer(Trainer):
    """`transformers.Trainer` with a record; takes the same arguments and those below.

    It refuses to run as a silent `nn.DataParallel`, attests the backend before and after the
    first step, writes `record.json` into `output_dir`, and saves a model that `from_pretrained`
    loads under every backend. A `sample_id` column is recorded, and kept from the model.

    Args:
        recorder: Records the run; None makes one from the launcher's environment.
        saver: Saves the checkpoints; None makes one from the arguments.
        observers: Called when the training is prepared and after each of its steps.
        scheduled_steps: Steps until the learning rate has decayed; later steps are only timed, and
            not logged. None: all steps.
        steps_per_epoch: Of the data from which `train_dataset` was made, for the logs' `epoch`;
            None: it is one epoch itself.
        ddp_bucket_view: Under DDP, have gradients be views of its buckets: 4 bytes a parameter
            less in fp32.
        speed: The switches of `toolkit.train` for speed, put on the model and its batches here.
        guards: The reaction when a loss is not finite, a gradient norm explodes, or ranks differ in
            weights or data order: `stop` all ranks with a `GuardError`, `warn`, or `off`. A
            recorder that is passed brings its own guards.
        checkpoint_form: `native`: checkpoints that the same strategy and number of ranks goes on
            from bit for bit. `portable`: that any other goes on from too.
    """

    def __init__(
        self,
        *args: Any,
        recorder: Recorder | None = None,
        saver: CheckpointSaver | None = None,
        observers: Sequence[Observer] = (),
        scheduled_steps: int | None = None,
        steps_per_epoch: int | None = None,
        ddp_bucket_view: bool = False,
        speed: SpeedArguments | None = None,
        guards: Choice = "stop",
        checkpoint_form: Form = "native",
        **kwargs: Any,
    ) -> None:
        switches = None if speed is None else _switched_on(speed, *args, **kwargs)
        # Read while the Trainer is made.
        self._ddp_bucket_view = ddp_bucket_view or bool(speed and speed.gradients_in_buckets)
        self._scheduled_steps = scheduled_steps
        super().__init__(*args, **kwargs)
        if switches is not None:
            self.data_collator = switches.collating(cast("Collate", self.data_collator))
            observers = [switches, *observers]
        if self.label_smoother is not None and self._predicts_next_tokens():
            self.label_smoother = partial(self.label_smoother, shift_labels=True)
        # This filter would log a loss that is not finite as 0.0.
        self.args.logging_nan_inf_filter = False
        if self.args.parallel_mode == ParallelMode.NOT_DISTRIBUTED:
            raise UsageError(
                f"One process sees {self.args.n_gpu} GPUs, and the Trainer would wrap the model in "
                "nn.DataParallel with a batch that many times larger. Start one process a GPU "
                "(accelerate launch --config_file accelerate_configs/ddp.yaml ...), or show it "
                "one GPU only (CUDA_VISIBLE_DEVICES=0)."
            )
        keep_texts_apart(self.model)
        self._guards: Choice = guards
        self._record_folder = output_dir_of(self.args)
        self.recorder = recorder or _recorder_for(
            self.args, self.model, guards, self._record_folder
        )
        # Without `every`: the Trainer's own flow decides when it saves.
        self.saver = saver or CheckpointSaver(
            output_dir=output_dir_of(self.args),
            facts=facts_of_trainer(self, _strategy_of(self.args)),
            recorder=self.recorder,
            form=checkpoint_form,
            limit=self.args.save_total_limit,
        )
        self._resumed: Resumed | None = None
        self.record: dict[str, Any] | None = None
        self._token_mean: TokenMean | None = None
        # Of the user's own rows: those of `toolkit.train` are checked before, but for its fillers.
        self._learned_rows: LearnedRows | None = None
        self._judges_loss = type(self).compute_loss is not ToolkitTrainer.compute_loss
        """Whether a subclass computes the loss, until its first micro-batch was judged."""

        # A saver that is passed decides when to save; else the Trainer's own flow does.
        events = TrainerEvents(
            self, observers, saver=saver, steps_per_epoch=steps_per_epoch, last_log=scheduled_steps
        )
        self.add_callback(events)

    def _predicts_next_tokens(self) -> bool:
        """Whether labels have to be shifted for the model's logits.

        The Trainer (transformers 5.24) asks the wrapped model's class name when it smooths labels.
        FSDP2 changes that name, and classes of a user's own are not in its table: either way it
        would train each token to predict itself.
        """
        names = {kind.__name__ for kind in type(unwrap_peft_model(self.model)).__mro__}
        known = not names.isdisjoint(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
        return known or self._loss_shifts_labels

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """Train as `transformers.Trainer` does.

        Args:
            resume_from_checkpoint: A folder, or True for the newest in `output_dir` that is whole.
            kwargs: As `transformers.Trainer.train` takes them.

        Raises:
            UsageError: on every rank, before anything is loaded, when the checkpoint is damaged or
                of another training, when another run is working in `output_dir`, or when it holds
                a `record.json` or `steps.jsonl` that no run has left there.
        """
        check = partial(
            check_names, output_dir_of(self.args), (RECORD_FILE, STEPS_FILE), flag="output_dir"
        )
        with lock_run_folder(output_dir_of(self.args), check) as lock:
            request = None
            if resume_from_checkpoint is not None and resume_from_checkpoint is not False:
                name = LAST if resume_from_checkpoint is True else resume_from_checkpoint
                values = {"output_dir": self.args.output_dir, "resume_from_checkpoint": str(name)}
                request = requested_checkpoint(values)
            resumed = None if request is None else find_checkpoint(request, self.saver.facts)
        if resumed is not None and resumed.moved is not None and self.is_world_process_zero():
            say(resumed.moved)
        self._learned_rows = rows = LearnedRows()
        try:
            with lock or nullcontext():
                output = self.train_from(resumed, **kwargs)
                self.finish_record()
        finally:  # they may be why a guard stops the run
            for note in rows.notes() if self.is_world_process_zero() else ():
                say(note)
        return output

    def train_from(self, resumed: Resumed | None, **kwargs: Any) -> Any:
        """Train from a checkpoint that all ranks have verified, and write no record."""
        if resumed is not None and not (resumed.folder / TRAINER_STATE_NAME).is_file():
            raise UsageError(
                f"{resumed.folder} has no {TRAINER_STATE_NAME}: no Trainer saved it. Go on from it "
                "with toolkit.train --engine loop."
            )
        self._resumed = resumed
        folder = None if resumed is None else str(resumed.folder)
        try:
            return super().train(resume_from_checkpoint=folder, **kwargs)
        finally:
            self.recorder.close()

    def _hp_search_setup(self, trial: Any) -> None:
        # Called by each training, once `model_init` has made its model (transformers 5.24).
        super()._hp_search_setup(trial)
        if self.model_init is not None:
            keep_texts_apart(self.model)
        if self.hp_search_backend is not None and trial is not None:
            self._record_trial(trial)
        if self._resumed is not None:
            self.recorder.resumed_after(self._resumed.step, losses_before(self._resumed.folder))
        self.recorder.loaded(self.model)

    def _record_trial(self, trial: Any) -> None:
        """Record a trial of a search as a run of its own, in the folder of its checkpoints."""
        self.recorder.close()
        self._record_folder = Path(self._get_output_dir(trial))
        self._record_folder.mkdir(parents=True, exist_ok=True)
        self.recorder = _recorder_for(self.args, self.model, self._guards, self._record_folder)
        self.saver.recorder = self.recorder
        self.saver.facts = facts_of_trainer(self, _strategy_of(self.args))

    def finish_record(self) -> None:
        """Gather the records of all ranks, and write `record.json`; every rank calls it."""
        described = {"schema": SCHEMA, "engine": "trainer", "status": "ok", "reason": None}
        described |= {"resumed": None if self._resumed is None else self._resumed.facts()}
        self.record = described | self.recorder.finish()
        if self.is_world_process_zero():
            write_json(self._record_folder / RECORD_FILE, self.record)

    @staticmethod
    def get_optimizer_cls_and_kwargs(
        args: TrainingArguments, model: PreTrainedModel | None = None
    ) -> tuple[Any, Any]:
        kind, options = Trainer.get_optimizer_cls_and_kwargs(args, model)
        return stepping_on_masters(model, kind, options)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        # Evidence may end the training before the schedule does, too.
        return super().create_scheduler(self._scheduled_steps or num_training_steps, optimizer)

    def prepared(
        self, *, report: Callable[[int, dict[str, float]], None] = lambda step, values: None
    ) -> Wrapped:
        """Return the wrapped objects of the training."""
        return Wrapped(
            accelerator=self.accelerator,
            model=self.model_wrapped,
            optimizer=self.optimizer,
            scheduler=self.lr_scheduler,
            report=report,
        )

    def training_step(
        self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> torch.Tensor:
        ids = inputs.pop("sample_id", None)
        tokens = inputs["input_ids"].numel() if "input_ids" in inputs else 0
        labels = inputs.get("labels")
        supervised = None if labels is None else (labels[..., 1:] != IGNORED).sum()
        if self._learned_rows is not None:
            self._learned_rows.count(labels)
        with self._judging_loss(model) as problem:
            loss = super().training_step(model, inputs, num_items_in_batch)
            if (said := problem(loss)) is not None:
                raise UsageError(said)
        self.recorder.micro_batch(
            loss, tokens=tokens, supervised=supervised, sample_ids=ids, labels=labels
        )
        return loss

    @contextmanager
    def _judging_loss(self, model: Any) -> Iterator[Callable[[torch.Tensor], str | None]]:
        """Yield the check of a micro-batch's loss, which does nothing but in a subclass's first."""
        micro_batches = self.current_gradient_accumulation_steps if self._judges_loss else 1
        if micro_batches == 1:
            yield lambda loss: None
            return
        self._judges_loss = False  # judging waits for the device
        name = type(self).__name__
        with judging_loss(model, micro_batches=micro_batches, of=name) as problem:
            yield problem

    def get_batch_samples(self, epoch_iterator: Any, *args: Any, **kwargs: Any) -> Any:
        # This method also counts tokens over all ranks, which is no waiting for data.
        return super().get_batch_samples(self._timed(epoch_iterator), *args, **kwargs)

    def _timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            with self.recorder.waiting_for_data():
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        # The Trainer has no argument for these options (transformers 5.23).
        built = super()._build_accelerator_args(**kwargs)
        for handler in built["kwargs_handlers"]:
            if isinstance(handler, DistributedDataParallelKwargs):
                handler.gradient_as_bucket_view = self._ddp_bucket_view
        # From pinned memory: a copy that blocks would wait for all the work of the device.
        built["dataloader_config"].non_blocking |= self.args.dataloader_pin_memory
        return built

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if moments_of(self.model) is not None:
            clip_in_fp32(self.accelerator)

    def evaluation_loop(
        self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any
    ) -> EvalLoopOutput:
        """Evaluate by tokens, each row once, without an effect on later training steps."""
        self._token_mean = mean = TokenMean(self)
        try:
            with self.recorder.aside(), ExitStack() as stack:
                if self.is_in_train:
                    stack.enter_context(side_effect_free(self.accelerator, self.model_wrapped))
                output = super().evaluation_loop(
                    *args, metric_key_prefix=metric_key_prefix, **kwargs
                )
                mean.put_into(cast("dict[str, float]", output.metrics), metric_key_prefix)
        finally:
            self._token_mean = None
        return output

    def prediction_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        progressed()
        inputs.pop("sample_id", None)
        if self._token_mean is not None:
            self._token_mean.leave_out_repeats(inputs)
        return super().prediction_step(model, inputs, *args, **kwargs)

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        labels = inputs.get("labels")  # taken out of the inputs for some losses
        computed = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if self._token_mean is not None:
            loss = computed[0] if isinstance(computed, tuple) else computed
            self._token_mean.add(loss, labels, num_items_in_batch)
        return computed

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        super().log(logs, start_time)
        if "loss" in logs:
            names = ("loss", "grad_norm", "learning_rate")
            self.recorder.logged(
                self.state.global_step, **{key: logs[key] for key in names if key in logs}
            )

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the whole model, loadable with `from_pretrained`; every rank calls it.

        The stock Trainer saves models without transformers' `from_pretrained`, and checkpoints of
        the model alone (`save_only_model`). The exception is ZeRO-3 without
        `stage3_gather_16bit_weights_on_model_save`, where the Trainer 5.23 saves no weights.
        """
        if _internal_call:
            wrapped = cast("torch.nn.Module", self.model_wrapped)
            if not backend_of(wrapped).trainer_saves_whole():
                weights = full_state_dict(self.accelerator, wrapped)
                with original_classes(wrapped):
                    self._save(output_dir, state_dict=weights)
                return
            super().save_model(output_dir, _internal_call)
            return
        self.recorder.check_before_save(self.model_wrapped)
        folder = Path(output_dir) if output_dir else output_dir_of(self.args)
        unwrapped = self.accelerator.unwrap_model(self.model_wrapped)
        if not isinstance(unwrapped, PreTrainedModel) and not has_lora(unwrapped):
            require_finite(self.model_wrapped, folder)
            super().save_model(output_dir, _internal_call)
            return
        save_model(
            self.accelerator,
            self.model_wrapped,
            folder,
            tokenizer=self.processing_class,
            card=card_of_trainer(self),
        )
        if self.args.push_to_hub:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save(self, *args: Any, **kwargs: Any) -> None:
        # The Trainer's method pickles the arguments with the Hub token (transformers 5.23).
        token, self.args.hub_token = self.args.hub_token, None
        try:
            super()._save(*args, **kwargs)
        finally:
            self.args.hub_token = token

    # Checkpoints: the methods below replace the Trainer's checkpoints (5.23) with the toolkit's.

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        # Transformers 5.23 has no hook before it; every rank comes here.
        if not self.args.save_only_model:
            self._keep_checkpoint(Path(self._get_output_dir(trial=trial)))
            return
        with self.recorder.aside():
            self.recorder.check_before_save(self.model_wrapped)
        if not self.recorder.has_bad_step():
            require_finite(self.model_wrapped, Path(self._get_output_dir(trial=trial)))
            super()._save_checkpoint(model, trial)

    def _keep_checkpoint(self, output_dir: Path) -> None:
        """Save as `Trainer._save_checkpoint` does, but as one commit, unless a step went bad."""
        state = self.state
        self.store_flos()
        best_before = state.best_model_checkpoint
        best = checkpoint_folder(output_dir, state.best_global_step or 0)
        # The best checkpoint may be the one that is being saved.
        if state.best_global_step and (
            best.is_dir() or state.best_global_step == state.global_step
        ):
            state.best_model_checkpoint = str(best)
        folder = self.saver.save(
            self.prepared(),
            state.global_step,
            output_dir=output_dir,
            write_more=self._write_state,
            keep=[Path(state.best_model_checkpoint)] if state.best_model_checkpoint else [],
        )
        if folder is None:
            state.best_model_checkpoint = best_before
        elif self.args.push_to_hub:
            self._push_from_checkpoint(str(folder))

    def _write_state(self, draft: Path) -> None:
        """Write the Trainer's state, with the states of its callbacks in it."""
        states = cast("dict[str, Any]", self.state.stateful_callbacks)
        for callback in [*self.callback_handler.callbacks, self.control]:
            if not isinstance(callback, ExportableState):
                continue
            name = type(callback).__name__
            if isinstance(states[name], list):
                states[name].append(callback.state())
            else:
                states[name] = callback.state()
        self.state.save_to_json(str(draft / TRAINER_STATE_NAME))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self._resumed is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> Any:
        if self._resumed is None:
            return super()._prepare_for_training(
                max_steps, train_dataloader, resume_from_checkpoint
            )
        # The Trainer would load the checkpoint itself, and DeepSpeed's part wrongly.
        everything = super()._prepare_for_training(max_steps, train_dataloader, None)
        read_states(self._resumed.folder, self.prepared(), step=self._resumed.step)
        return everything

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self._resumed is not None:
            read_random_state(self._resumed.folder, self.accelerator)

    def _load_best_model(self) -> None:
        if self.args.save_only_model:
            super()._load_best_model()
            return
        state, wrapped = self.state, self.prepared()
        folder, step = Path(str(state.best_model_checkpoint)), int(state.best_global_step or 0)
        read_model(folder, wrapped, step=step)


def _switched_on(arguments: SpeedArguments, *args: Any, **kwargs: Any) -> Speed:
    """Put switches on the model that a Trainer is about to be made of, and return them.

    Raises:
        UsageError: the model or the other arguments don't take one that was asked for by itself.
    """
    made_of = inspect.signature(Trainer).bind(*args, **kwargs).arguments
    model, training_args = made_of.get("model"), made_of.get("args")
    if model is None or training_args is None:
        raise UsageError("speed needs a model and TrainingArguments: pass model= and args=.")
    values, strategy = vars(training_args), _strategy_of(training_args)
    check_speed(arguments, values, strategy=strategy, on_gpu=training_args.device.type != "cpu")
    switches = Speed(arguments.under(strategy), training_args, strategy=strategy)
    switches.apply(model)
    for reason in switches.left_out.values() if training_args.process_index == 0 else ():
        say(f"left out of tuned: {reason}")
    return switches


def _recorder_for(args: TrainingArguments, model: Any, guards: Choice, folder: Path) -> Recorder:
    check_launch(os.environ)
    trained = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    moments = moments_of(model)
    deepspeed = args.deepspeed_plugin
    requested = Requested(
        strategy=_strategy_of(args),
        num_processes=int(os.environ.get("WORLD_SIZE", "1")),
        precision=args.mixed_precision,
        dtype="float32" if trained == {torch.float32} or moments is not None else "another",
        moments=moments,
        gradient_clipping=float(args.max_grad_norm or 0),
        accumulation_dtype=accumulation_dtype(deepspeed.deepspeed_config)
        if deepspeed is not None and args.deepspeed
        else requested_accumulation_dtype(os.environ),
        # The model's own methods may have switched checkpointing on for some layers.
        activation_checkpointing=bool(
            args.gradient_checkpointing
            or (args.fsdp_plugin_args or {}).get("activation_checkpointing")
            or requests_checkpointing(os.environ)
        )
        or None,
        # The Trainer itself shortens the last window of an epoch; only DeepSpeed counts its own.
        gradient_accumulation_steps=None if deepspeed is None else args.gradient_accumulation_steps,
        sync_each_batch=syncs_each_batch(args),
    )
    return Recorder(
        requested,
        rehearsal=args.device.type == "cpu",
        steps_file=folder / STEPS_FILE if args.should_save else None,
        heartbeat=heartbeat_for(guards, checkpoints=folder),
    )


def _strategy_of(args: TrainingArguments) -> Strategy:
    """Return the strategy of `TrainingArguments` themselves, or else of the launcher's config.

    Raises:
        UsageError: arguments and config ask for different strategies, or for one that the Trainer
            cannot train.
    """
    # A plugin in the arguments may also come from the launcher's config, which then names it.
    deepspeed = args.deepspeed_plugin if args.deepspeed else None
    fsdp = None
    if args.fsdp_plugin_args is not None:  # the Trainer passes it to its Accelerator
        fsdp = FullyShardedDataParallelPlugin(**cast("dict[str, Any]", args.fsdp_plugin_args))
    named = "--deepspeed" if deepspeed else "--fsdp" if fsdp else ""
    of_script = strategy_of_plugins(deepspeed, fsdp, args.parallelism_config)
    strategy = agreed_strategy(os.environ, of_script, named=named)
    if "trainer" not in strategy.engines:
        raise UsageError(
            f"{strategy.name} does not train under a Trainer. Start toolkit.train --strategy "
            f"{strategy.name} --engine {strategy.engines[0]}, or use another strategy's config."
        )
    return strategy
