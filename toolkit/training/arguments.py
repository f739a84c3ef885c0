"""The flags of `toolkit.train`: our own flags, and the flags of `transformers.TrainingArguments`.

Our flags are read without importing torch, so that a mistake is found before any process starts.
`TrainingArguments` is made last: making it may start the process group.

It checks few of its numbers itself: the others would end in a traceback of one rank, or in a model
of NaNs.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, cast, get_type_hints

import psutil
from transformers.hf_argparser import HfArgumentParser, string_to_bool

from toolkit.checkpoints.resume_request import LAST, folder_to_resume
from toolkit.data.arguments import DataArguments
from toolkit.data.flags import flag, typed_flags
from toolkit.errors import UsageError
from toolkit.launching.watchdog import DEFAULT_SECONDS, seconds_of
from toolkit.measuring.guards import GRAD_NORM_FACTOR
from toolkit.strategies import get_strategy
from toolkit.training.method_arguments import MethodArguments
from toolkit.training.speed_arguments import SpeedArguments

if TYPE_CHECKING:
    from transformers import TrainingArguments
    from transformers.trainer_pt_utils import AcceleratorConfig


@dataclass(frozen=True, slots=True)
class Bounds:
    """The range of a flag's number; a number that is not finite is never in range."""

    words: str
    hold: Callable[[float], bool]


_ONE_OR_MORE: Final = Bounds("1 or more", lambda value: value >= 1)
_ZERO_OR_MORE: Final = Bounds("0 or more", lambda value: value >= 0)
_ABOVE_ZERO: Final = Bounds("more than 0", lambda value: value > 0)
_BETA: Final = Bounds("0 or more, less than 1", lambda value: 0 <= value < 1)
_SHARE: Final = Bounds("0 to 1", lambda value: 0 <= value <= 1)
_SEED: Final = Bounds("0 to 4294967295, as NumPy does", lambda value: 0 <= value < 2**32)
_INTERVAL: Final = Bounds(
    "a number of steps, or a part of them between 0 and 1",
    lambda value: value > 0 and (value < 1 or value % 1 == 0),
)

BOUNDS: Final[dict[str, Bounds]] = {
    "per_device_train_batch_size": _ONE_OR_MORE,
    "per_device_eval_batch_size": _ONE_OR_MORE,
    "gradient_accumulation_steps": _ONE_OR_MORE,
    "num_train_epochs": _ABOVE_ZERO,
    "max_steps": Bounds(
        "1 or more, or -1 to count epochs", lambda value: value >= 1 or value == -1
    ),
    "learning_rate": _ZERO_OR_MORE,
    "warmup_steps": _ZERO_OR_MORE,
    "weight_decay": _ZERO_OR_MORE,
    "adam_beta1": _BETA,
    "adam_beta2": _BETA,
    "adam_epsilon": _ZERO_OR_MORE,
    "max_grad_norm": _ZERO_OR_MORE,
    "label_smoothing_factor": _SHARE,
    "neftune_noise_alpha": _ZERO_OR_MORE,
    "torch_empty_cache_steps": _ONE_OR_MORE,
    "logging_steps": _INTERVAL,
    "eval_steps": _INTERVAL,
    "eval_delay": _ZERO_OR_MORE,
    "eval_accumulation_steps": _ONE_OR_MORE,
    "save_steps": _INTERVAL,
    "save_total_limit": _ONE_OR_MORE,
    "seed": _SEED,
    "data_seed": _SEED,
    "dataloader_num_workers": _ZERO_OR_MORE,
    "dataloader_prefetch_factor": _ONE_OR_MORE,
    "ddp_bucket_cap_mb": _ONE_OR_MORE,
    "ddp_timeout": _ONE_OR_MORE,
    "local_rank": Bounds("-1 or more", lambda value: value >= -1),
}
"""Every flag of `TrainingArguments` that is a number."""

LAUNCHERS: Final = ("deepspeed", "fsdp", "fsdp_config", "parallelism_config")
"""Flags that could only contradict the launcher's config file."""


def check_values(values: Mapping[str, Any]) -> None:
    """Check the values of `TrainingArguments` from flags; None means "not passed".

    Raises:
        UsageError: numbers are out of range, or flags are not supported here. All are named.
    """
    problems = [
        f"--{name} {_shown(value)}: use {bounds.words}"
        for name, bounds in BOUNDS.items()
        if (value := values.get(name)) is not None
        and not (math.isfinite(value) and bounds.hold(value))
    ]
    if passed := [f"--{name}" for name in LAUNCHERS if values.get(name)]:
        problems.append(
            f"{', '.join(passed)}: the launcher's config file says it, accelerate launch "
            "--config_file accelerate_configs/<strategy>.yaml ..., so leave it out"
        )
    file = str(values.get("accelerator_config") or "{}")
    if not file.startswith("{") and not Path(file).is_file():
        problems.append(
            f"--accelerator_config {file}: there is no such file (this is {Path.cwd()})"
        )
    if values.get("push_to_hub"):
        problems.append(
            "--push_to_hub: toolkit.train uploads nothing. Leave it out, and when the run is done: "
            "hf upload NAME OUTPUT_DIR/final"
        )
    if problems:
        raise UsageError(f"{'; '.join(problems)}.")


def _shown(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelArguments:
    """The model to fine-tune, and how to load its weights."""

    model_name_or_path: str | None = flag(
        None, "Folder or Hub name of a causal LM; none: the built-in small Llama."
    )
    model_revision: str = flag("main", "Branch, tag or commit of a Hub model.")
    tokenizer_name: str | None = flag(
        None, "Folder or Hub name of the tokenizer; none: the model's own."
    )
    # transformers 5 loads weights in the checkpoint's dtype, often bf16. Optimizer states in bf16
    # make backends unequal, so the dtype is always given explicitly.
    dtype: Literal["float32", "bfloat16", "float16"] | None = flag(
        None,
        "The dtype that the weights are loaded in; none: float32, and with lora and "
        "qlora what is computed in, since nothing trains them.",
    )
    trust_remote_code: bool = flag(False, "Run Python code that comes with the model.")
    attn_implementation: str | None = flag(
        None, "eager, sdpa, flash_attention_2, ...; none: the best."
    )
    cudnn_attention: bool = flag(
        False, "Let sdpa take cuDNN's kernel, whose gradients are NaN at times on an H100 or H200."
    )

    flash_attention: Literal["FA2", "FA3", "FA4"] | None = flag(
        None,
        "Which FlashAttention sdpa takes on a GPU: FA2 is torch's own, the others are packages; "
        "none: FA2, and with --tuned FA4 where a release is installed that was measured.",
    )

    @property
    def is_built_in(self) -> bool:
        return self.model_name_or_path is None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunArguments:
    """Settings of the run."""

    engine: Literal["trainer", "loop"] = flag("trainer", "The HF Trainer, or the Accelerate loop.")
    strategy: str | None = flag(
        None, "What the launch is meant to be; the run stops when it is not."
    )
    throughput_steps: int = flag(0, "Steps on packed rows after the others, for tokens per second.")
    scale_lr: Literal["none", "linear", "sqrt"] = flag(
        "none", "Carry --learning_rate from --base_batch_size to the effective batch."
    )
    base_batch_size: int | None = flag(
        None, "Rows of an optimizer step that --learning_rate was chosen for."
    )
    dropout: Literal["model", "off"] = flag(
        "model",
        "model: as its config and --lora_dropout ask; off: none, for a run that is to "
        "be compared. What is saved keeps the model's own.",
    )
    reverse_rows: bool = flag(
        False,
        "Read the rows of each optimizer step in reverse: the same training, with its sums in "
        "another order. toolkit compare measures rounding by it.",
    )
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] | None = flag(
        None, "Order of the work of --strategy pipeline on a step's micro-batches; none: 1f1b."
    )
    pipeline_balance: Literal["flops", "parameters"] = flag(
        "flops", "What the stages of a pipeline have alike: operations, or parameters."
    )
    evidence: str | None = flag(None, "Folder for what one step did, for toolkit compare --bisect.")
    evidence_step: int | None = flag(
        None,
        "The step that --evidence keeps; the run ends after the next. None: the first "
        "that updates, and the run goes on to its end.",
    )
    evidence_weights: str | None = flag(
        None, "--evidence folder of another run, whose weights the step that is kept begins with."
    )
    checkpoint_form: Literal["native", "portable"] = flag(
        "native",
        "native: checkpoints that the same strategy and number of ranks goes on from bit for bit; "
        "portable: that any other goes on from too.",
    )
    hang_timeout: float = flag(
        DEFAULT_SECONDS,
        "Seconds without progress of any rank after which the run is ended, and the rank that "
        "the others wait for is named; 0: never.",
    )
    sample_prompts: int | None = flag(
        None,
        "Prompts to continue before and after training; none: 2 where rows are "
        "evaluated on, else 0.",
    )

    def __post_init__(self) -> None:
        if self.strategy is not None:
            get_strategy(self.strategy)
        if self.evidence is None and self.evidence_step is not None:
            raise UsageError("--evidence_step needs --evidence, the folder to keep it in.")
        if self.evidence_step is None and self.evidence_weights is not None:
            raise UsageError("--evidence_weights needs --evidence_step, the step that they are of.")
        if self.evidence_step is not None and self.evidence_step < 1:
            raise UsageError(f"--evidence_step {self.evidence_step}: use 1 or more.")
        if self.sample_prompts is not None and self.sample_prompts < 0:
            raise UsageError(f"--sample_prompts {self.sample_prompts}: use 0 or more.")
        seconds_of(self.hang_timeout)
        if self.throughput_steps < 0:
            raise UsageError(f"--throughput_steps {self.throughput_steps}: use 0 or more.")
        if (self.scale_lr == "none") is not (self.base_batch_size is None):
            raise UsageError("--scale_lr linear or sqrt and --base_batch_size need each other.")
        if self.base_batch_size is not None and self.base_batch_size < 1:
            raise UsageError(f"--base_batch_size {self.base_batch_size}: use 1 or more.")


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardArguments:
    """Checks that run in every step, and the reaction to a failed check."""

    guards: Literal["stop", "warn", "off"] = flag(
        "stop",
        "At a loss that is not finite, an exploding gradient norm, or ranks with other "
        "weights or another data order: stop all ranks, only warn, or don't look.",
    )
    guard_grad_norm: float = flag(
        GRAD_NORM_FACTOR,
        "A gradient norm explodes when it is this many times the running median, and "
        "above all before; 0 watches only for norms that are not finite.",
    )
    guard_slow_rank: Literal["warn", "stop"] = flag(
        "warn", "The same choice for a rank that falls behind."
    )

    def __post_init__(self) -> None:
        if self.guard_grad_norm and not 1 < self.guard_grad_norm < math.inf:
            raise UsageError(
                f"--guard_grad_norm {self.guard_grad_norm:g}: a norm explodes when it is that many "
                "times the median. Use more than 1, or 0 to watch only for norms that are not "
                "finite."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnArguments:
    """All our flags, and the remaining flags for `TrainingArguments`."""

    model: ModelArguments
    data: DataArguments
    run: RunArguments
    method: MethodArguments
    speed: SpeedArguments
    guards: GuardArguments
    rest: list[str]


OWN: dict[str, Any] = {
    name: kind for name, kind in get_type_hints(OwnArguments).items() if name != "rest"
}
"""The classes of our flags, by their fields in `OwnArguments`."""

OUR_DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "logging_steps": 1,
    "report_to": "none",
    # The Trainer's filter logs a loss that is not finite as 0.0.
    "logging_nan_inf_filter": False,
    # The Trainer's default is True, which searches the graph in every step.
    "ddp_find_unused_parameters": False,
    "remove_unused_columns": False,
    "optim": "adamw_torch",
    "seed": 42,
    "average_tokens_across_devices": True,
    # The rows come in the order they are trained in.
    "train_sampling_strategy": "sequential",
}
"""Our defaults for every run, where they differ from `TrainingArguments` or must stay fixed."""

DEFAULT_MAX_STEPS = 20

DEPENDENT_DEFAULTS: dict[str, str] = {
    "output_dir": "runs/<strategy>-<time>-<process>",
    "max_steps": f"{DEFAULT_MAX_STEPS} with the built-in rows and without --num_train_epochs",
    "num_train_epochs": "1 with rows of your own and without --max_steps",
    "learning_rate": "0.001 for the built-in model, else 5e-05, and 2e-04 for adapters",
    "save_strategy": "no without --save_steps",
    "eval_strategy": "no without --eval_steps",
    "per_device_eval_batch_size": "that of training",
    "dataloader_pin_memory": "with a GPU",
    "disable_tqdm": "without a terminal",
}
"""Flags whose defaults depend on other flags or the machine, and the `--help` text for each."""

ALIASES = {"max_train_steps": "max_steps", "num_warmup_steps": "warmup_steps"}
"""Names that HF's scripts without a Trainer use."""


def own_arguments(argv: Sequence[str]) -> OwnArguments:
    """Return all our arguments, and the flags left for `TrainingArguments`, unchecked.

    They come from flags, or from one JSON or YAML file.

    Raises:
        UsageError: one of our flags has a bad value, or the file of arguments can't be read.
    """
    flags = typed_flags(argv)
    if {"-h", "--help"} & set(flags):
        full_parser().print_help()
        raise SystemExit(0)
    parsed: Any = _Parser(tuple(OWN.values()), **_PARSER_OPTIONS).parse_args_into_dataclasses(
        flags, return_remaining_strings=True, look_for_args_file=False
    )
    return OwnArguments(**dict(zip((*OWN, "rest"), parsed, strict=True)))


def training_values(own: OwnArguments) -> dict[str, Any]:
    """Return the values that `TrainingArguments` is made from, without making it.

    The user's value wins over ours, and ours over that of `TrainingArguments`.

    Raises:
        UsageError: a flag is unknown, has a bad value or is not taken here.
    """
    import torch
    from transformers.training_args import TrainingArguments

    parser = _Parser(cast("Any", TrainingArguments), **_PARSER_OPTIONS)
    # --resume_from_checkpoint may be passed without a value.
    resume = next(a for a in parser._actions if a.dest == "resume_from_checkpoint")
    resume.nargs, resume.const = "?", LAST
    # None stands for "not passed".
    unset = dict.fromkeys((*DEPENDENT_DEFAULTS, "save_steps"))
    parser.set_defaults(**OUR_DEFAULTS | unset)
    namespace, unknown = parser.parse_known_args(canonical(own.rest))
    if unknown:
        raise UsageError(f"{unknown[0]!r} belongs to no flag. Write flags as --name value.")
    values = vars(namespace)
    values["report_to"] = [name for name in values["report_to"].split(",") if name]
    if not values["report_to"]:
        raise UsageError("--report_to needs a name, all or none.")
    check_values(values)
    counts_epochs = values["num_train_epochs"] is not None or not own.data.is_built_in
    defaults = {
        "output_dir": folder_to_resume(values["resume_from_checkpoint"], values["output_dir"])
        or _default_output_dir(own.run),
        "max_steps": TrainingArguments.max_steps if counts_epochs else DEFAULT_MAX_STEPS,
        "num_train_epochs": 1.0,
        "learning_rate": _usual_rate(own),
        "save_strategy": "no" if values["save_steps"] is None else "steps",
        "save_steps": TrainingArguments.save_steps,
        "eval_strategy": "no" if values["eval_steps"] is None else "steps",
        "per_device_eval_batch_size": values["per_device_train_batch_size"],
        "disable_tqdm": not sys.stderr.isatty(),
        "dataloader_pin_memory": torch.cuda.is_available(),
    }
    return values | {name: value for name, value in defaults.items() if values[name] is None}


def _usual_rate(own: OwnArguments) -> float:
    if own.model.is_built_in:
        return 1e-3
    return 5e-5 if own.method.is_full else 2e-4  # as QLoRA's (arXiv 2305.14314)


def training_arguments(values: Mapping[str, Any]) -> TrainingArguments:
    """Return the arguments of the HF Trainer, which both engines obey.

    Making them may start the process group: a rehearsal has to be set up before.

    Raises:
        UsageError: values contradict each other.
    """
    from transformers.training_args import TrainingArguments

    try:
        return TrainingArguments(**values)
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"The training arguments do not fit together: {reason}") from error


def sync_each_batch(args: TrainingArguments) -> None:
    """Have gradients reduced in every micro-batch; both engines read it from the arguments."""
    config = cast("AcceleratorConfig", args.accelerator_config)
    options: dict[str, Any] = config.gradient_accumulation_kwargs or {}
    config.gradient_accumulation_kwargs = options | {"sync_each_batch": True}


def syncs_each_batch(args: TrainingArguments) -> bool:
    """Whether gradients are to be reduced in every micro-batch, as the Trainer reads it."""
    config = cast("AcceleratorConfig", args.accelerator_config)
    options: dict[str, Any] = config.gradient_accumulation_kwargs or {}
    return bool(options.get("sync_each_batch"))


def output_dir_of(args: TrainingArguments) -> Path:
    """Return the folder of a run, which transformers 5.23 fills in where none was passed."""
    return Path(str(args.output_dir))


class _Parser(HfArgumentParser):
    """An `HfArgumentParser` whose errors are sentences, not a wall of usage and an exit."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # A switch without a value is on, also where its default depends on another flag.
        for action in self._actions:
            if action.type is string_to_bool and action.nargs is None:
                action.nargs, action.const = "?", True

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message[:1].upper()}{message[1:]}.")


# An abbreviation that one parser took could be the other one's flag.
_PARSER_OPTIONS: dict[str, Any] = {"allow_abbrev": False, "add_help": False}


def full_parser() -> HfArgumentParser:
    from transformers.training_args import TrainingArguments

    kinds: tuple[Any, ...] = (*OWN.values(), TrainingArguments)
    parser = _Parser(kinds, prog="toolkit.train", allow_abbrev=False)
    parser.set_defaults(**OUR_DEFAULTS | DEPENDENT_DEFAULTS)
    return parser


def canonical(rest: Sequence[str]) -> list[str]:
    """Return flags under their canonical names; join the values of `--report_to` with commas.

    `--report_to` takes a name or a list, and transformers' parser accepts only one name.
    """
    flags: list[str] = []
    for word in rest:
        name, equals, value = word.partition("=")
        if flags and flags[-1].startswith("--report_to=") and not word.startswith("--"):
            flags[-1] += f",{word}"
            continue
        if name.replace("-", "_") == "__report_to":
            flags.append(f"--report_to={value}")
            continue
        alias = ALIASES.get(name[2:].replace("-", "_")) if name.startswith("--") else None
        flags.append(f"--{alias}{equals}{value}" if alias else word)
    return flags


def _default_output_dir(run: RunArguments) -> str:
    """Return a new folder's name, the same on all ranks, before they can talk to each other.

    Ranks of one launch share their launcher, and differ in it from every other launch: its
    start time and process id make the name.
    """
    world_size = int(os.environ.get("WORLD_SIZE") or 1)
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE") or world_size)
    if local_world_size != world_size:
        raise UsageError(
            "A run on several machines needs --output_dir: they have no name in common by default."
        )
    owner = psutil.Process(os.getppid() if world_size > 1 else os.getpid())
    started = time.strftime("%Y%m%d-%H%M%S", time.localtime(owner.create_time()))
    return str(Path("runs") / f"{run.strategy or 'run'}-{started}-{owner.pid}")
