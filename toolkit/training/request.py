"""The request for a run: flags, launcher's environment, model and data, checked in one order.

A rank, `toolkit prepare` and a comparison before its first run make these checks, so a mistake gets
the same message wherever it is found first. Except for the caches of model and data, no file is
written before all checks pass.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from toolkit.backends import backend_of
from toolkit.checkpoints.resume_request import ResumeRequest, requested_checkpoint
from toolkit.configs.accelerate import check_num_processes
from toolkit.configs.optimizers import NOT_BY_ELEMENT, missing_package, optimizer_problem
from toolkit.configs.requested import (
    asks_for_deepspeed,
    requested_processes,
    requested_strategy,
    requests_checkpointing,
    same_features,
    shown,
)
from toolkit.data.dataset import TokenDataset, prepare_data, prepare_validation
from toolkit.data.flags import changed_flags, is_on, plain_value
from toolkit.data.packing import check_borders, check_no_cache
from toolkit.data.sampling_order import rows_needed
from toolkit.engines.deepspeed_config import checked_deepspeed_config
from toolkit.environment import check_installed
from toolkit.errors import UnfitModelError, UsageError
from toolkit.escaping import one_line
from toolkit.files import check_takes_files
from toolkit.launching.ranks import rank, say
from toolkit.launching.status import STATUS_DIR
from toolkit.records.evidence import BEFORE_FILE, EVIDENCE_FILES
from toolkit.records.record import RECORD_FILE, STARTING_ADAPTER, STEPS_FILE, read_record
from toolkit.rehearse import rehearse_if_needed
from toolkit.strategies import STRATEGIES, Engine, Strategy, get_strategy
from toolkit.training.arguments import OwnArguments, RunArguments, training_values
from toolkit.training.dropout import dropout_facts
from toolkit.training.evaluation_plan import check_evaluation
from toolkit.training.flags import refuse_all
from toolkit.training.method_arguments import MethodArguments
from toolkit.training.methods import Method, check_strategy, checked_method
from toolkit.training.model import (
    BUILT_IN_MODEL,
    ModelFacts,
    check_length,
    check_vocabulary,
    model_facts,
    resolve_model,
    resolve_tokenizer,
)
from toolkit.training.model_checks import check_loadable, check_split, has_weights
from toolkit.training.precision import requested_precision, with_precision
from toolkit.training.run_folder import check_names
from toolkit.training.speed_arguments import check_model, check_speed
from toolkit.training.split_requests import bubble_note, check_pipeline, check_rows, with_schedule
from toolkit.training.tracking import names_of_trackers, requested_trackers


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The launch of a request: the launch that started this rank, or a future one."""

    strategies: tuple[Strategy, ...]
    """One in a rank; in a comparison, all strategies with the same flags. `toolkit prepare` may
    have none, because its launcher is not chosen yet."""

    num_processes: int | None
    """Number of ranks; None: not known."""

    ranks: Mapping[str, Sequence[int]] = field(default_factory=dict[str, Sequence[int]])
    """Numbers of ranks under a strategy of a comparison, where they are not `num_processes`."""

    rehearsal: bool
    """Whether its ranks are hidden from the GPUs."""

    environ: Mapping[str, str] | None = None
    """The variables that the launcher set for this rank; None for a launch to come."""

    needs_weights: bool = True
    """Whether a model without weights is refused; to look at data, its tokenizer is enough."""

    knows_precision: bool = True
    """Whether the launcher's config can't choose another precision than the flags do."""

    def ranks_under(self, strategy: Strategy) -> Sequence[int | None]:
        """Return the numbers of ranks under a strategy, ascending; None: not known."""
        return self.ranks.get(strategy.name) or [self.num_processes]

    @property
    def data_parallel_size(self) -> int | None:
        """The number of ranks that read their own rows, under the strategy with the most."""
        if self.num_processes is None:
            return None
        sizes = [strategy.data_parallel_size(self.num_processes) for strategy in self.strategies]
        return max(sizes, default=self.num_processes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The requested settings and the model and data found for them, all checked."""

    own: OwnArguments
    launch: Launch
    values: dict[str, dict[str, Any]]
    """The values of `TrainingArguments` by strategy, including the values set by `--tuned`."""

    trackers: list[str]
    resume: ResumeRequest | None
    """The checkpoint that a rank is to go on from, before it is looked for."""

    model: ModelFacts
    data: TokenDataset
    validation: TokenDataset | None
    """The rows to evaluate on; None if none were requested, or the run keeps evidence."""

    unfit: dict[tuple[str, int | None], str]
    """Why a strategy of a comparison cannot take the model, by its name and its ranks."""

    method: Method
    notes: list[str]
    """Sentences for the user: settings taken from the launcher's config or left out, and why."""

    @property
    def model_name(self) -> str:
        return one_line(self.own.model.model_name_or_path or BUILT_IN_MODEL)

    def training_facts(self) -> dict[str, Any]:
        """Return the fields of a record's `training` about the method and dropout."""
        return self.method.facts() | dropout_facts(
            self.model.path,
            off=self.own.run.dropout == "off",
            lora_dropout=self.own.method.lora_dropout,
            trust_remote_code=self.own.model.trust_remote_code,
        )


def this_launch(run: RunArguments) -> Launch:
    """Return the launch that started this rank; begin its rehearsal if it has too few GPUs.

    Raises:
        UsageError: the launcher's config asks for something unsupported, or not `--strategy`.
    """
    # This comes first: reading the defaults of `TrainingArguments` already wakes CUDA.
    rehearsal = rehearse_if_needed()
    if asks_for_deepspeed(os.environ):
        checked_deepspeed_config()  # names all its mistakes; later checks stop at the first
    strategy, ranks = _launched_strategy(run.strategy), requested_processes(os.environ)
    strategy = with_schedule(strategy, run)
    if not rehearsal and rank() == 0:
        on_gpus = "1 rank on a GPU" if ranks == 1 else f"{ranks} ranks on a GPU each"
        say(f"training under {shown(strategy)}: {on_gpus}")
    return Launch(
        strategies=(strategy,), num_processes=ranks, rehearsal=rehearsal, environ=os.environ
    )


def check_request(own: OwnArguments, launch: Launch) -> Request:
    """Check the request of the flags for a launch: quick checks first, then model and data.

    Args:
        own: As `checked_flags` returned them.
        launch: In a rank the folders that the run writes to are checked as well.

    Raises:
        UsageError: it would fail under at least one of the strategies; nothing was written.
    """
    environ: Mapping[str, str] = {} if launch.environ is None else launch.environ
    passed, notes = with_precision(own.rest, environ)
    # Without a strategy, the flags are read as for the control, `single`.
    strategies = launch.strategies or (STRATEGIES["single"],)
    values = {
        strategy.name: training_values(
            replace(
                own,
                rest=own.speed.with_flags(passed, strategy),
                run=replace(own.run, strategy=_named(strategy) if launch.strategies else None),
            )
        )
        for strategy in strategies
    }
    common = next(iter(values.values()))
    _refuse_ignored_flags(common, own)
    form = own.run.checkpoint_form
    _refuse_under(launch, lambda strategy: _check_optimizer(values[strategy.name], strategy, form))
    trackers = requested_trackers(common["report_to"], engine=own.run.engine)
    resume = None
    if launch.environ is not None:  # in a rank; a comparison chooses the engine by strategy
        _refuse_under(launch, lambda strategy: _check_engine(own.run.engine, strategy))
        if check_output_folder(Path(common["output_dir"]), own.method, trackers) is None:
            resume = requested_checkpoint(common)
            _check_evidence_folders(own.run)
    _refuse_under(
        launch,
        lambda strategy: check_speed(
            own.speed,
            values[strategy.name],
            strategy=strategy,
            evidence=own.run.evidence is not None,
            on_gpu=not launch.rehearsal,
            config_checkpoints=requests_checkpointing(environ),
        ),
    )
    model = _checked_model(own, launch, notes)
    tokenizer, trust = resolve_tokenizer(own.model), own.model.trust_remote_code
    ranks = launch.data_parallel_size
    fetched = None if ranks is None else rows_needed(common, num_processes=ranks)
    asked = own.data
    if asked.max_length is None:
        length = min(asked.length, model.max_positions or asked.length)
        own = replace(own, data=replace(asked, max_length=length))
    data = prepare_data(
        own.data,
        tokenizer,
        trust_remote_code=trust,
        rows_needed=fetched,
        vocab_size=model.vocab_size,
    )
    validation = None
    if own.run.evidence is None:  # a run that keeps evidence is not evaluated
        validation = prepare_validation(own.data, tokenizer, trust_remote_code=trust)
    for rows in (data, validation):
        if rows is not None:
            check_vocabulary(model, rows)
            notes += rows.notes()
    if asked.max_length is None and own.data.packing == "none":
        longest = [rows.longest for rows in (data, validation) if rows and rows.longest]
        own = replace(own, data=replace(own.data, max_length=max(2, *longest)))
    data = replace(data, asked=changed_flags(asked))
    unfit = _unfit_under(
        launch,
        lambda strategy, ranks: check_split(
            model.path, strategy, ranks or strategy.num_processes, trust_remote_code=trust
        ),
    )
    for check in (check_pipeline, _check_server, check_rows):
        unfit |= _unfit_under(
            launch,
            lambda strategy, ranks, check=check: check(
                strategy, own, values[strategy.name], folder=model.path, num_processes=ranks
            ),
        )
    precision = requested_precision(common)
    check_model(own.speed, model.path)
    method = checked_method(own.method, own.model, model, precision=precision)
    if launch.knows_precision:
        _refuse_under(
            launch, lambda strategy: check_strategy(method, strategy, precision=precision)
        )
    notes += method.notes()
    for strategy in launch.strategies:
        ranks = launch.ranks_under(strategy)[-1]
        note = bubble_note(strategy, own, values[strategy.name], ranks)
        notes += [] if note is None or (strategy.name, ranks) in unfit else [note]
    return Request(
        own=own,
        launch=launch,
        values=values,
        trackers=trackers,
        resume=resume,
        model=model,
        data=data,
        validation=validation,
        unfit=unfit,
        method=method,
        notes=notes,
    )


def _named(strategy: Strategy) -> str | None:
    """Return the name for the folder of a run; None for a config that is none of the table's."""
    return strategy.name if strategy.name in STRATEGIES else None


def check_output_folder(
    folder: Path, method: MethodArguments, trackers: Sequence[str], more: Sequence[str] = ()
) -> dict[str, Any] | None:
    """Check that a run can write its files to a folder without replacing other files.

    `more` are names that its launcher writes there.

    Returns the facts of the run that ended well there, if one did.

    Raises:
        UsageError: it can't be written, or holds files that are not the run's own.
    """
    names = ["final/", STEPS_FILE, RECORD_FILE, *names_of_trackers(trackers), *more]
    if not os.environ.get(STATUS_DIR):
        names.append("status/")
    if method.merge:
        names.append("merged/")
    if not method.is_full:
        names.append(STARTING_ADAPTER)
    check_takes_files(folder, flag="--output_dir")
    check_names(folder, names, flag="--output_dir", checkpoints=True)
    return finished_facts(folder)


def finished_facts(folder: Path) -> dict[str, Any] | None:
    """Return the facts of the run that ended well in a folder; None where it holds no record.

    Raises:
        UsageError: its record has none, or cannot be read, or is of a run that did not end well; or
            its final model is gone.
    """
    if not (folder / RECORD_FILE).exists():
        return None
    with contextlib.suppress(UsageError):
        record = read_record(folder)
        model = folder / (record["final"] or "final")
        if record["status"] == "ok" and record["facts"] is not None and model.is_dir():
            return record["facts"]
    raise UsageError(f"{folder} holds the record of another run. Choose another --output_dir.")


def _launched_strategy(name: str | None) -> Strategy:
    """Return the strategy of the launcher's config, after comparing it with `--strategy`."""
    strategy = None if name is None else get_strategy(name)
    launched = requested_strategy(os.environ, strategy)
    if strategy is None or strategy.name == launched.name:
        return launched  # with the groups of the config, of which a strategy may have any number
    if not same_features(strategy, launched):
        raise UsageError(
            f"--strategy {name} was asked, but the launcher's config file is for "
            f"{launched.name} ({launched.summary}). Pass the file of {name}: "
            f"accelerate launch --config_file accelerate_configs/{name}.yaml ..."
        )
    return strategy


def _refuse_under(launch: Launch, check: Callable[[Strategy], object]) -> None:
    """Make a check under every strategy, and raise one UsageError for all that fail it."""
    several = len(launch.strategies) > 1
    same_flags = " All strategies of a comparison get the same flags." if several else ""
    refuse_all([partial(check, strategy) for strategy in launch.strategies], same_flags)


def _unfit_under(
    launch: Launch, check: Callable[[Strategy, int | None], object]
) -> dict[tuple[str, int | None], str]:
    """Return why strategies cannot take the model, by their name and number of ranks.

    Raises:
        UsageError: flags don't go with a strategy; or the first strategy cannot take the model,
            which alone is to train, or is the one that the others are compared with.
    """
    unfit: dict[tuple[str, int | None], str] = {}

    def note(strategy: Strategy, ranks: int | None) -> None:
        try:
            check(strategy, ranks)
        except UnfitModelError as error:
            if strategy is launch.strategies[0]:
                raise
            unfit[strategy.name, ranks] = str(error)

    def note_all(strategy: Strategy) -> None:
        for ranks in launch.ranks_under(strategy):
            note(strategy, ranks)

    _refuse_under(launch, note_all)
    return unfit


def _refuse_ignored_flags(values: Mapping[str, Any], own: OwnArguments) -> None:
    """Raise UsageError naming all flags that are accepted but would be ignored."""
    check_evaluation(values, own.data)
    check_no_cache(values, packing=own.data.packing)
    ignored = ["save_only_model", "ignore_data_skip", "enable_jit_checkpoint"]
    if own.run.engine == "loop":
        ignored += [
            "torch_compile",
            "label_smoothing_factor",
            "neftune_noise_alpha",
            "accelerator_config",
        ]
    flags = [f"--{name}" for name in ignored if is_on(values.get(name))]
    if flags:
        raise UsageError(
            f"{', '.join(flags)}: toolkit.train with --engine {own.run.engine} does not do that. "
            "Leave it out, or use --engine trainer where the Trainer can."
        )
    if own.run.evidence is not None and is_on(values.get("torch_compile")):
        raise UsageError(
            "--evidence looks into the model's forward, which --torch_compile would compile away. "
            "Leave one of them out."
        )


def _check_engine(engine: Engine, strategy: Strategy) -> None:
    if engine not in strategy.engines:
        raise UsageError(
            f"{strategy.name} does not train under --engine {engine}. Pass --engine "
            f"{strategy.engines[0]}."
        )


def _check_server(
    strategy: Strategy,
    _: OwnArguments,
    values: Mapping[str, Any],
    *,
    folder: str,
    num_processes: int | None,
) -> None:
    if not backend_of(strategy).has_server:
        return
    if num_processes is not None:
        check_num_processes(strategy, num_processes)
    if values.get("fp16"):
        raise UsageError(
            f"{strategy.name} does not work with --fp16: only rank 0 would know that a step was "
            "skipped. Pass --bf16, or use --strategy ddp."
        )


def _check_optimizer(values: Mapping[str, Any], strategy: Strategy, form: str) -> None:
    name = plain_value(values["optim"])
    if problem := optimizer_problem(name, strategy) or missing_package(name):
        raise UsageError(problem)
    if form == "portable" and name in NOT_BY_ELEMENT:
        raise UsageError(
            f"--checkpoint_form portable does not go with --optim {name}, whose states depend on "
            "how the weights are cut. Use --optim adamw_torch, or --checkpoint_form native."
        )


def _check_evidence_folders(run: RunArguments) -> None:
    if run.evidence is None:
        return
    folder = Path(run.evidence)
    check_takes_files(folder, flag="--evidence")
    if any(os.path.lexists(folder / name) for name in EVIDENCE_FILES):
        raise UsageError(f"{folder} holds the evidence of another run. Name another folder.")
    weights = run.evidence_weights
    if weights is not None and not (Path(weights) / BEFORE_FILE).is_file():
        raise UsageError(
            f"--evidence_weights {weights} holds no {BEFORE_FILE}. Name the --evidence folder of a "
            "run that kept the same step."
        )


def _checked_model(own: OwnArguments, launch: Launch, notes: list[str]) -> ModelFacts:
    """Find or make the model, and check that it can be trained with these flags."""
    check_installed("datasets")
    trust = own.model.trust_remote_code
    model = model_facts(resolve_model(own.model))
    if own.data.max_length is not None:
        check_length(model, own.data.max_length)
    if own.data.packing == "best_fit":
        check_borders(model.path, attention=own.model.attn_implementation, trust_remote_code=trust)
    if not (launch.needs_weights or has_weights(Path(model.path))):
        notes.append(f"{one_line(model.path)} holds no weights, which a training needs")
    elif not own.model.is_built_in:  # the cache has checked the built-in model
        check_loadable(model.path, trust_remote_code=trust)
    return model
