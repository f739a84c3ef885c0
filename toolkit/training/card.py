"""The model card: `README.md` of a saved model, from facts that were known when it was saved.

No fact in it is guessed. It names a license if the base model's own card does, and a data set if it
is on the Hub. It never holds paths of this machine or secrets. A card that a user wrote, or took
over by removing the toolkit's marker, is left alone.
"""

from __future__ import annotations

import datetime
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from toolkit.configs.requested import CUSTOM
from toolkit.data.chat import brought
from toolkit.data.flags import plain_value
from toolkit.escaping import code, one_line, shell_line
from toolkit.files import write_text
from toolkit.records.fields import Evaluated
from toolkit.records.summary import Summary, summary_lines
from toolkit.strategies import COMPUTE_DTYPES
from toolkit.training.method_arguments import MethodArguments
from toolkit.training.model import BUILT_IN_MODEL
from toolkit.training.speed.layers import CHECKPOINTING
from toolkit.training.speed_arguments import SpeedArguments

CARD_FILE: Final = "README.md"
TEMPLATE: Final = Path(__file__).with_name("model_card.md.jinja")

MARKER: Final = (
    "<!-- Written by the toolkit, and again with every save into this folder: remove this line to "
    "keep what you change. -->"
)

HUB_NAME: Final = re.compile(r"[\w-][\w.-]*(?:/[\w-][\w.-]*)?")
"""The form of a name on the Hub; a folder here can have the same."""

SNAPSHOT: Final = re.compile(r"/snapshots/([0-9a-f]{40})/?$")
"""The end of a Hub model's folder path, which holds its commit."""

PATHS: Final = ("dataset_name", "train_file", "validation_file", "chat_template")
"""Flags for data whose values may be paths of this machine."""

ALWAYS: Final = (
    "max_steps",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "learning_rate",
    "max_length",
    "seed",
)
"""Fields of a record's `training` whose flags are in every command."""

USUAL: Final = {
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "lr_scheduler_type": "linear",
    "optimizer": "adamw_torch",
    "tf32": False,
    "cudnn_attention": False,
    "activation_checkpointing": False,
}
"""Fields of a record's `training` whose flags a command omits at this value."""

FLAG_OF: Final = {"optimizer": "optim", "activation_checkpointing": CHECKPOINTING}
"""Flags whose field in a record has another name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """Facts of a training at the moment of a save."""

    base: str
    """Name or folder of the model that training began with."""

    base_folder: str | None = None
    """Local folder of the base model; the card in it may name a license."""

    datasets: tuple[str, ...] = ()
    """Names of data sets on the Hub."""

    training: Mapping[str, object] = field(default_factory=dict[str, object])
    """Rows of the table of settings."""

    evaluation: Sequence[Evaluated] = ()
    final_loss: float | None = None
    first_loss: float | None = None
    summary: Sequence[str] = ()
    """Lines of the run's summary."""

    strategy: str | None = None
    command: str | None = None
    held_out: bool = False
    """Whether the toolkit split the rows of the evaluation off the training data."""

    packed_in: str | None = None
    """The dtype that weights in 4 bits are computed with; None where there are none."""

    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    verified: str | None = None
    """What `toolkit verify` found for these releases, in words."""

    def write(self, draft: Path, folder: Path) -> None:
        """Write the card into `draft`, which takes the place of `folder`.

        A user's card that lies in `folder` is copied instead.
        """
        existing = folder / CARD_FILE
        # Not through a link, which may lead to a file that is not to be published.
        linked = folder.is_symlink() or existing.is_symlink()
        if (
            existing.is_file()
            and not linked
            and MARKER not in existing.read_text(encoding="utf-8", errors="replace")
        ):
            shutil.copy2(existing, draft / CARD_FILE)
            return
        text = self.text(
            is_adapter=(draft / "adapter_config.json").exists(),
            has_generation_config=(draft / "generation_config.json").exists(),
        )
        write_text(draft / CARD_FILE, text)

    def text(
        self,
        *,
        is_adapter: bool = False,
        has_generation_config: bool = False,
        date: str | None = None,
    ) -> str:
        """Return the card; the same facts and date give the same text.

        Args:
            is_adapter: Adapters were saved, not a whole model.
            has_generation_config: A `generation_config.json` lies beside them; peft reads none.
            date: Date of the save; None: today, in UTC.
        """
        from huggingface_hub import ModelCard, ModelCardData

        hub_name = None if self.base == BUILT_IN_MODEL else hub_name_of(self.base)
        data = ModelCardData(
            base_model=hub_name,
            library_name="peft" if is_adapter else "transformers",
            pipeline_tag="text-generation",
            license=_license_of(self.base_folder),
            datasets=list(self.datasets) or None,
            tags=["generated-by-toolkit", *(["lora"] if is_adapter else [])],
        )
        card = ModelCard.from_template(
            data,
            template_path=str(TEMPLATE),
            card=self,
            marker=MARKER,
            title=_cell(f"{shown_name(self.base).rpartition('/')[2]}, fine-tuned"),
            base=code(shown_name(self.base)),
            is_built_in=self.base == BUILT_IN_MODEL,
            is_adapter=is_adapter,
            has_generation_config=has_generation_config,
            hub_name=hub_name,
            start=next((result for result in self.evaluation if result["step"] == 0), None),
            last=self.evaluation[-1] if self.evaluation else None,
            training=[(_cell(name), _cell(str(value))) for name, value in self.training.items()],
            date=date or datetime.datetime.now(datetime.UTC).date().isoformat(),
        )
        # Omitted parts leave blank lines behind.
        return re.sub(r"\n{3,}", "\n\n", str(card)).rstrip() + "\n"


def card_of_run(
    described: Mapping[str, Any],
    *,
    num_processes: int,
    evaluation: Sequence[Evaluated],
    summary: Summary | None,
    dataset_name: str | None,
) -> Card:
    """Return the card of a run of `toolkit.train`.

    Args:
        described: The part of the run's record that is known before the first step.
        evaluation: Results of its evaluations so far.
        summary: Of the training so far; None where no step was taken.
        dataset_name: The value of `--dataset_name`.
    """
    model, data, training = described["model"], described["data"], described["training"]
    hub_data = None if dataset_name is None else hub_name_of(dataset_name)
    adapters = "{method}, rank {lora_r}, alpha {lora_alpha}".format(**training)
    rows_of_a_step = (
        f"{training['global_batch_size']} ({training['per_device_train_batch_size']} x "
        f"{num_processes} processes x {training['gradient_accumulation_steps']} micro-batches)"
    )
    return Card(
        base=model["name"],
        base_folder=model["path"],
        datasets=() if hub_data is None else (hub_data,),
        training={
            "method": "all weights" if training["method"] == "full" else adapters,
            "data": shown_name(data["name"]),
            "rows of data": f"{data['rows']:,}",
        }
        | _template_row(data)
        | _settings(
            training,
            strategy=described["strategy"],
            engine=described["engine"],
            precision=described["precision"],
            processes=num_processes,
            rows_of_a_step=rows_of_a_step,
            longest_row=f"{training['max_length']} tokens",
        ),
        evaluation=tuple(evaluation),
        first_loss=None if summary is None else summary["first_loss"],
        final_loss=None if summary is None else summary["last_loss"],
        summary=() if summary is None else summary_lines(summary),
        strategy=described["strategy"],
        command=_command(described, num_processes),
        held_out="validation_split_percentage" in data["asked"],
        packed_in=training["quant_storage"],
        versions=described["environment"]["versions"],
        verified=described["environment"].get("verified"),
    )


def card_of_trainer(trainer: Any) -> Card:
    """Return the card of a model that a `ToolkitTrainer` saves; every rank calls it."""
    from toolkit.environment import verified, versions

    args, model = trainer.args, trainer.accelerator.unwrap_model(trainer.model_wrapped)
    first, last = trainer.recorder.outer_losses() or (None, None)
    resumed = trainer.recorder.steps_before > 0
    rows = _settings(
        vars(args) | {"max_steps": trainer.state.global_step, "optimizer": args.optim},
        strategy=trainer.recorder.requested.strategy.name,
        precision=args.mixed_precision,
        processes=args.world_size,
        rows_of_a_step=args.train_batch_size * args.gradient_accumulation_steps * args.world_size,
    )
    evaluated = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    if evaluated:
        rows["evaluation loss"] = f"{evaluated[-1]['eval_loss']:.4f}"
    base = str(getattr(model, "name_or_path", "") or "a model of its own")
    return Card(
        base=base,
        base_folder=base,
        training=rows,
        # A resumed run lacks the first step of the training.
        first_loss=None if resumed else first,
        final_loss=last,
        versions=versions(),
        verified=verified().get("words"),
    )


def _template_row(data: Mapping[str, Any]) -> dict[str, str]:
    """Return the row of the chat template, of data that have chats."""
    template = data.get("template")
    if template is None:
        return {}
    name = shown_name(template["name"])
    unasked = brought(template, data["asked"]) is not None
    reason = ", brought by the toolkit, for the base model has none" if unasked else ""
    return {"chat template": name + reason}


def _license_of(folder: str | None) -> str | None:
    """Return the license that a model's own card names."""
    import yaml
    from huggingface_hub import ModelCard

    card = None if folder is None else Path(folder) / CARD_FILE
    if card is None or not card.is_file():
        return None
    try:
        # `to_dict`, for a card without a header has data without any field.
        return ModelCard.load(card, ignore_metadata_errors=True).data.to_dict().get("license")
    except (ValueError, OSError, yaml.YAMLError):  # no header, or a broken one
        return None


def _settings(
    training: Mapping[str, Any],
    *,
    strategy: str,
    precision: str,
    processes: int,
    rows_of_a_step: object,
    engine: str | None = None,
    longest_row: str | None = None,
) -> dict[str, object]:
    """Return the rows of the table of settings; a row with the value None is omitted."""
    rows = {
        "strategy": strategy,
        "engine": engine,
        "processes": processes,
        "precision": "fp32" if precision == "no" else precision,
        "optimizer steps": training["max_steps"],
        "rows of a step": rows_of_a_step,
        "longest row": longest_row,
        "learning rate": f"{training['learning_rate']:g}, "
        f"{plain_value(training['lr_scheduler_type'])}",
        "optimizer": plain_value(training["optimizer"]),
        "weight decay": f"{training['weight_decay']:g}",
        "largest gradient norm": f"{training['max_grad_norm']:g}",
        "seed": training["seed"],
    }
    return {name: value for name, value in rows.items() if value is not None}


def _cell(text: str) -> str:
    """Return text as one cell of a table, escaped."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def hub_name_of(name: str) -> str | None:
    """Return the name if it is a Hub name; None for a folder, a file or anything else."""
    is_name = HUB_NAME.fullmatch(name) is not None and not Path(name).exists()
    return name if is_name else None


def shown_name(name: str) -> str:
    """Return a name for publication, on one line: a path is cut to its last part."""
    if hub_name_of(name) is not None or "/" not in name:
        return one_line(name)
    return one_line(Path(name).name) or "a folder"


def _command(described: Mapping[str, Any], num_processes: int) -> str | None:
    """Return the training as a command; None for a config file that is not the toolkit's.

    The command comes from the record, not from the typed command. The typed one names folders of
    this machine and omits the switches of `--tuned`, which may differ in another version.
    """
    if described["strategy"] == CUSTOM:
        return None
    training, precision = described["training"], described["precision"]
    data_flags: Mapping[str, Any] = described["data"]["asked"]
    speed = _speed_flags(training["speed"]["on"])
    usual_dtype = "float32" if training["method"] == "full" else COMPUTE_DTYPES[precision]
    usual: dict[str, Any] = {"dtype": usual_dtype} | USUAL
    if "checkpoint_layers" in speed:
        # If that is all layers, the record also has `activation_checkpointing`.
        del usual["activation_checkpointing"]
    flags = {
        **_model_flags(described["model"]),
        **{
            name: shown_name(value) if name in PATHS else value
            for name, value in data_flags.items()
        },
        "engine": described["engine"],
        **{name: training[name] for name in ALWAYS},
        # Without adapters their fields are null.
        **{
            name: training[name]
            for name, default in asdict(MethodArguments()).items()
            if training[name] not in (None, default)
        },
        **{
            FLAG_OF.get(name, name): training[name]
            for name, value in usual.items()
            if training[name] != value
        },
        **speed,
        **({} if precision == "no" else {precision: True}),
    }
    lines = [
        f"accelerate launch --config_file accelerate_configs/{described['strategy']}.yaml",
        f"--num_processes {num_processes} -m toolkit.train",
    ]
    for name, value in flags.items():
        words = value if isinstance(value, list) else [value]
        lines.append(f"--{name} {shell_line(map(str, words))}")
    return " \\\n  ".join(lines)


def _model_flags(model: Mapping[str, Any]) -> dict[str, Any]:
    name = model["name"]
    if name == BUILT_IN_MODEL:
        return {}
    flags = {"model_name_or_path": shown_name(name)}
    commit = SNAPSHOT.search(model["path"])
    if commit is not None and hub_name_of(name) is not None:
        flags["model_revision"] = commit[1]
    return flags


def _speed_flags(on: Mapping[str, Any]) -> dict[str, Any]:
    """Return each active switch as its own flag; `--tuned` may change in later versions."""
    flags = dict(on)
    if "lean_masks" in on:
        flags["lean_masks"] = True
    if "checkpoint_layers" in on:
        flags["checkpoint_layers"] = on["checkpoint_layers"]["asked"]
    if "bf16_weights" in on:
        flags |= {"bf16_weights": True, "optimizer_state_dtype": on["bf16_weights"]["moments"]}
    if "compile_blocks" in on:
        flags |= {"compile_blocks": True, "compile_backend": on["compile_blocks"]["backend"]}
    usual = asdict(SpeedArguments())
    return {name: value for name, value in flags.items() if value != usual.get(name)}
