"""The model card: `README.md` of a saved model, from facts that were known when it was saved.

Nothing in it is guessed. A license stands there where the base model's own card names one, a data
set where it is one of the Hub's; paths of this machine and secrets never do. A card that a user
has written, or made their own by removing the line that says it is ours, is left alone.
"""

from __future__ import annotations

import datetime
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from toolkit.escaping import code
from toolkit.files import write_text
from toolkit.records.results import Evaluated
from toolkit.training.card_command import command_of, hub_name_of, shown_name
from toolkit.training.model import BUILT_IN_MODEL

CARD_FILE: Final = "README.md"
TEMPLATE: Final = Path(__file__).with_name("model_card.md.jinja")

MARKER: Final = (
    "<!-- Written by the toolkit, and again with every save into this folder: remove this line to "
    "keep what you change. -->"
)

LOADING: Final = (
    "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
    'model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype="auto")\n'
    "tokenizer = AutoTokenizer.from_pretrained(FOLDER)"
)
"""The lines that load a whole model; `FOLDER` is this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What is known of a training at the moment of a save."""

    base: str
    """Name or folder of the model that training began with."""

    base_folder: str | None = None
    """Where its files lie; its own card may name a license."""

    datasets: tuple[str, ...] = ()
    """Those on the Hub."""

    training: tuple[tuple[str, str], ...] = ()
    evaluation: Sequence[Evaluated] = ()
    final_loss: float | None = None
    first_loss: float | None = None
    strategy: str | None = None
    command: str | None = None
    held_out: bool = False
    """Whether the rows of the evaluation were kept out of the training; else that isn't known."""

    packed_in: str | None = None
    """The dtype that weights in 4 bits are computed with; None where there are none."""

    versions: Mapping[str, str] = field(default_factory=dict[str, str])

    def write(self, draft: Path, folder: Path) -> None:
        """Write the card into `draft`, which takes the place of `folder`.

        The card of a user that lies in `folder` is taken along in its place; not through a link,
        which may lead to what is not to be shown.
        """
        own = folder / CARD_FILE
        linked = folder.is_symlink() or own.is_symlink()
        if (
            own.is_file()
            and not linked
            and MARKER not in own.read_text(encoding="utf-8", errors="replace")
        ):
            shutil.copy2(own, draft / CARD_FILE)
            return
        is_adapter = (draft / "adapter_config.json").exists()
        generates = (draft / "generation_config.json").exists()
        text = self.text(is_adapter=is_adapter, says_generation=generates)
        write_text(draft / CARD_FILE, text)

    def text(
        self, *, is_adapter: bool = False, says_generation: bool = False, date: str | None = None
    ) -> str:
        """Return the card; the same facts and date give the same text.

        Args:
            is_adapter: Adapters were saved, not a whole model.
            says_generation: Beside them lies how to generate, which peft doesn't read.
            date: Of the save; None: today, in UTC.
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
        base = shown_name(self.base)
        what = "Adapters (LoRA) for" if is_adapter else "Fine-tuned from"
        card = ModelCard.from_template(
            data,
            template_path=str(TEMPLATE),
            marker=MARKER,
            title=_cell(f"{base.rpartition('/')[2]}, fine-tuned"),
            summary=f"{what} {self._base_in_words()}.",
            loading=(
                _loading_adapters(hub_name, self.packed_in, says_generation=says_generation)
                if is_adapter
                else LOADING
            ),
            results=self._results(),
            evaluated=self._evaluated(),
            training=[(_cell(name), _cell(value)) for name, value in self.training],
            command=self.command,
            strategy=self.strategy,
            versions="\n".join(
                f"- {name} {value}" for name, value in sorted(self.versions.items())
            ),
            date=date or datetime.datetime.now(datetime.UTC).date().isoformat(),
        )
        return re.sub(r"\n{3,}", "\n\n", str(card)).rstrip() + "\n"

    def _base_in_words(self) -> str:
        if self.base == BUILT_IN_MODEL:
            return f"`{self.base}`, a small Llama with random weights that the toolkit builds"
        return code(shown_name(self.base))

    def _results(self) -> list[tuple[str, str, str]]:
        lines: list[tuple[str, str, str]] = []
        if self.final_loss is not None:
            first = (
                "not known" if self.first_loss is None else f"{self.first_loss:.4f} (first step)"
            )
            lines.append(("training loss", first, f"{self.final_loss:.4f} (last step)"))
        if self.evaluation:
            last = self.evaluation[-1]
            start = next((each for each in self.evaluation if each["step"] == 0), None)
            for name, part, form in (
                ("evaluation loss", "loss", "{:.4f}"),
                ("perplexity", "perplexity", "{:,.2f}"),
            ):
                before = "not measured" if start is None else form.format(start[part])
                lines.append((name, before, form.format(last[part])))
        return lines

    def _evaluated(self) -> str | None:
        if not self.evaluation:
            return None
        last = self.evaluation[-1]
        rows = (
            f"{last['rows']:,} rows that were held out of the training data"
            if self.held_out
            else f"the {last['rows']:,} rows given for evaluation"
        )
        return (
            f"Evaluated on {rows}: the loss is the mean "
            f"over their {last['tokens']:,} predicted tokens in nats, perplexity its exponential."
        )


def card_of_run(
    described: Mapping[str, Any],
    *,
    num_processes: int,
    evaluation: Sequence[Evaluated],
    losses: tuple[float, float] | None,
    resumed: bool,
    dataset_name: str | None,
) -> Card:
    """Return the card of a run of `toolkit.train`.

    Args:
        described: The part of its record that is known before the first step.
        num_processes: Ranks.
        evaluation: What was evaluated so far.
        losses: Of its first and its last step.
        resumed: Its first step was not the first of the training.
        dataset_name: As the flag named it.
    """
    model, data, training = described["model"], described["data"], described["training"]
    hub_data = None if dataset_name is None else hub_name_of(dataset_name)
    rows: dict[str, Any] = {
        "method": _method(training),
        "data": shown_name(data["name"]),
        "rows of data": f"{data['rows']:,}",
        "strategy": described["strategy"],
        "engine": described["engine"],
        "processes": num_processes,
        "precision": "fp32" if described["precision"] == "no" else described["precision"],
        "optimizer steps": training["max_steps"],
        "rows of a step": _effective_batch(training, num_processes),
        "longest row": f"{training['max_length']} tokens",
        "learning rate": f"{training['learning_rate']:g}, {training['lr_scheduler_type']}",
        "optimizer": training["optimizer"],
        "weight decay": f"{training['weight_decay']:g}",
        "largest gradient norm": f"{training['max_grad_norm']:g}",
        "seed": training["seed"],
    }
    return Card(
        base=model["name"],
        base_folder=model["path"],
        datasets=() if hub_data is None else (hub_data,),
        training=tuple((name, str(value)) for name, value in rows.items()),
        evaluation=tuple(evaluation),
        first_loss=losses[0] if losses and not resumed else None,
        final_loss=losses[1] if losses else None,
        strategy=described["strategy"],
        command=command_of(described, num_processes=num_processes, data=hub_data),
        held_out="validation_split_percentage" in data.get("asked", {}),
        packed_in=training.get("quant_storage"),
        versions=described["environment"]["versions"],
    )


def card_of_trainer(trainer: Any) -> Card:
    """Return the card of a model that a `ToolkitTrainer` saves; every rank calls it."""
    from toolkit.environment import versions

    args, model = trainer.args, trainer.accelerator.unwrap_model(trainer.model_wrapped)
    losses = trainer.recorder.outer_losses()
    resumed = trainer.recorder.steps_before > 0
    rows = {
        "strategy": trainer.recorder.asked.strategy.name,
        "processes": args.world_size,
        "precision": "fp32" if args.mixed_precision == "no" else args.mixed_precision,
        "optimizer steps": trainer.state.global_step,
        "rows of a step": args.train_batch_size
        * args.gradient_accumulation_steps
        * args.world_size,
        "learning rate": f"{args.learning_rate:g}, {args.lr_scheduler_type.value}",
        "optimizer": args.optim.value,
        "weight decay": f"{args.weight_decay:g}",
        "largest gradient norm": f"{args.max_grad_norm:g}",
        "seed": args.seed,
    }
    evaluated = [each for each in trainer.state.log_history if "eval_loss" in each]
    if evaluated:
        rows["evaluation loss"] = f"{evaluated[-1]['eval_loss']:.4f}"
    base = str(getattr(model, "name_or_path", "") or "a model of its own")
    return Card(
        base=base,
        base_folder=base,
        training=tuple((name, str(value)) for name, value in rows.items()),
        first_loss=losses[0] if losses and not resumed else None,
        final_loss=losses[1] if losses else None,
        versions=versions(),
    )


def _license_of(folder: str | None) -> str | None:
    """Return the license that a model's own card names."""
    import yaml
    from huggingface_hub import ModelCard

    card = None if folder is None else Path(folder) / CARD_FILE
    if card is None or not card.is_file():
        return None
    try:
        return ModelCard.load(card, ignore_metadata_errors=True).data.license
    except (
        ValueError,
        OSError,
        yaml.YAMLError,
    ):  # a card without a header, or with one that is broken
        return None


def _loading_adapters(hub_name: str | None, packed_in: str | None, *, says_generation: bool) -> str:
    """Return the lines that load adapters on their base; `FOLDER` is this one."""
    base = "BASE_MODEL" if hub_name is None else f'"{hub_name}"'
    ours = ["AutoModelForCausalLM", "AutoTokenizer"]
    options = 'dtype="auto"'
    lines: list[str] = []
    if packed_in is not None:
        ours.append("BitsAndBytesConfig")
        options += ", quantization_config=packed"
        lines += [
            "packed = BitsAndBytesConfig(",
            "    load_in_4bit=True,",
            '    bnb_4bit_quant_type="nf4",',
            "    bnb_4bit_use_double_quant=True,",
            f'    bnb_4bit_compute_dtype="{packed_in}",',
            ")",
        ]
    lines += [
        f"base = AutoModelForCausalLM.from_pretrained({base}, {options})",
        "model = PeftModel.from_pretrained(base, FOLDER)",
        "tokenizer = AutoTokenizer.from_pretrained(FOLDER)",
    ]
    if says_generation:
        ours.append("GenerationConfig")
        lines.append("model.generation_config = GenerationConfig.from_pretrained(FOLDER)")
    imports = f"from peft import PeftModel\nfrom transformers import {', '.join(sorted(ours))}\n"
    return "\n".join([imports, *lines])


def _method(training: Mapping[str, Any]) -> str:
    method = str(training.get("method") or "full")
    if method == "full":
        return "all weights"
    rank, alpha = training.get("lora_r"), training.get("lora_alpha")
    return f"{method}, rank {rank}, alpha {alpha}" if rank is not None else method


def _effective_batch(training: Mapping[str, Any], num_processes: int) -> str:
    return (
        f"{training['global_batch_size']} ({training['per_device_train_batch_size']} x "
        f"{num_processes} processes x {training['gradient_accumulation_steps']} micro-batches)"
    )


def _cell(text: str) -> str:
    """Return text as one cell of a table, whatever is in it."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
