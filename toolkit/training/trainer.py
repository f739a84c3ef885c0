"""`ToolkitTrainer`: the HF Trainer, with a record of what engaged and a model at the end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
from transformers.training_args import ParallelMode

from toolkit.configs.requested import CUSTOM, requested_strategy
from toolkit.errors import UsageError
from toolkit.measuring.attestation import Asked
from toolkit.measuring.recorder import Recorder
from toolkit.results import SCHEMA, write_json
from toolkit.strategies import Strategy
from toolkit.training.saving import full_state_dict, save_model


class ToolkitTrainer(Trainer):
    """Takes what `transformers.Trainer` takes.

    It refuses to run as a silent `nn.DataParallel`, attests the backend before and after the
    first step, writes `record.json` into `output_dir`, and saves a model that `from_pretrained`
    loads under every backend. A `sample_id` column is recorded, and kept from the model.

    Args:
        recorder: Records the run; None makes one from the launcher's environment.
    """

    def __init__(self, *args: Any, recorder: Recorder | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.args.parallel_mode == ParallelMode.NOT_DISTRIBUTED:
            raise UsageError(
                f"One process sees {self.args.n_gpu} GPUs, and the Trainer would wrap the model in "
                "nn.DataParallel with a batch that many times larger. Start one process a GPU "
                "(accelerate launch --config_file accelerate_configs/ddp.yaml ...), or show it "
                "one GPU only (CUDA_VISIBLE_DEVICES=0)."
            )
        self.recorder = _recorder_for(self.args, self.model) if recorder is None else recorder
        self.record: dict[str, Any] | None = None
        self.add_callback(_Watch(self))

    def train(self, *args: Any, **kwargs: Any) -> Any:
        try:
            output = super().train(*args, **kwargs)
        finally:
            self.recorder.close()
        self.finish_record()
        return output

    def finish_record(self) -> None:
        """Gather what the ranks recorded, and write `record.json`; every rank calls it."""
        described = {"schema": SCHEMA, "engine": "trainer", "status": "ok", "reason": None}
        self.record = described | self.recorder.finish()
        if self.is_world_process_zero():
            write_json(Path(self.args.output_dir) / "record.json", self.record)

    def training_step(
        self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> torch.Tensor:
        ids = inputs.pop("sample_id", None)
        tokens = inputs["input_ids"].numel() if "input_ids" in inputs else 0
        supervised = (inputs["labels"][..., 1:] != -100).sum() if "labels" in inputs else None
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.recorder.micro_batch(loss, tokens=tokens, supervised=supervised, sample_ids=ids)
        return loss

    def get_batch_samples(self, epoch_iterator: Any, *args: Any, **kwargs: Any) -> Any:
        # It counts tokens over all ranks as well, which is no waiting for data.
        return super().get_batch_samples(self._timed(epoch_iterator), *args, **kwargs)

    def _timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            with self.recorder.waiting_for_data():
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def prediction_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        inputs.pop("sample_id", None)
        return super().prediction_step(model, inputs, *args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        super().log(logs, start_time)
        if "loss" in logs:
            kept = ("loss", "grad_norm", "learning_rate")
            self.recorder.logged(
                self.state.global_step, **{key: logs[key] for key in kept if key in logs}
            )

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the whole model, loadable with `from_pretrained`; every rank calls it.

        What has no `from_pretrained` of transformers' is left to the stock Trainer.

        Checkpoints on the way (`_internal_call`) stay the Trainer's own, but for ZeRO-3 without
        `stage3_gather_16bit_weights_on_model_save`: there the Trainer 5.23 has DeepSpeed save
        everything twice, and the second time fails with NVMe offload (`FileExistsError` on
        `offloaded_tensors`, deepspeed 0.19 engine.py `copytree(dirs_exist_ok=False)`).
        """
        if _internal_call:
            if self._is_zero3_without_gathering():
                weights = full_state_dict(self.accelerator, self.model_wrapped)
                self._save(output_dir, state_dict=weights)
                return
            super().save_model(output_dir, _internal_call)
            return
        folder = Path(output_dir or self.args.output_dir)
        if not isinstance(self.accelerator.unwrap_model(self.model_wrapped), PreTrainedModel):
            super().save_model(output_dir, _internal_call)
            return
        save_model(self.accelerator, self.model_wrapped, folder, tokenizer=self.processing_class)
        if self.args.push_to_hub:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _is_zero3_without_gathering(self) -> bool:
        engine = self.model_wrapped
        stage = getattr(engine, "zero_optimization_stage", lambda: 0)()
        return stage == 3 and not engine.zero_gather_16bit_weights_on_model_save()


class _Watch(TrainerCallback):
    """Tells the recorder where the Trainer is."""

    def __init__(self, trainer: ToolkitTrainer) -> None:
        self.trainer = trainer
        self.learning_rate = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        trainer = self.trainer
        trainer.recorder.prepared(trainer.accelerator, trainer.model_wrapped, trainer.optimizer)

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        # The scheduler moves on before the step ends.
        self.learning_rate = float(self.trainer.optimizer.param_groups[0]["lr"])

    def on_save(self, *_: Any, **__: Any) -> None:
        self.trainer.recorder.mark()

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        self.trainer.recorder.mark()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.trainer.recorder.step_done(
            learning_rate=self.learning_rate,
            skipped=bool(self.trainer.accelerator.optimizer_step_was_skipped),
        )


def _recorder_for(args: TrainingArguments, model: Any) -> Recorder:
    trained = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    asked = Asked(
        strategy=_strategy_of(args),
        num_processes=int(os.environ.get("WORLD_SIZE", "1")),
        precision=args.mixed_precision,
        dtype="float32" if trained == {torch.float32} else "another",
        gradient_clipping=float(args.max_grad_norm or 0),
        # The Trainer itself shortens the last window of an epoch; only DeepSpeed has its own say.
        gradient_accumulation_steps=args.gradient_accumulation_steps
        if args.deepspeed_plugin is not None
        else None,
    )
    return Recorder(
        asked,
        rehearsal=args.device.type == "cpu",
        steps_file=Path(args.output_dir) / "steps.jsonl" if args.should_save else None,
    )


def _strategy_of(args: TrainingArguments) -> Strategy:
    """What `TrainingArguments` ask for, which goes before what the launcher's config asks."""
    plugin = args.deepspeed_plugin
    if plugin is not None:
        zero = plugin.deepspeed_config["zero_optimization"]
        return Strategy(
            name=CUSTOM,
            backend="deepspeed",
            summary="DeepSpeed, as the arguments ask",
            zero_stage=zero["stage"],
            offload_optimizer=zero.get("offload_optimizer", {}).get("device") or "none",
            offload_parameters=zero.get("offload_param", {}).get("device") or "none",
        )
    if args.fsdp_plugin_args is not None and args.fsdp_plugin_args.get("fsdp_version") == 2:
        place = "cpu" if args.fsdp_plugin_args.get("cpu_offload") else "none"
        return Strategy(
            name=CUSTOM,
            backend="fsdp",
            summary="FSDP2, as the arguments ask",
            reshard_after_forward=args.fsdp_plugin_args.get("reshard_after_forward", True),
            offload_optimizer=place,
            offload_parameters=place,
        )
    return requested_strategy(os.environ)
