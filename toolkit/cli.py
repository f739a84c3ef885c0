"""The `toolkit` command. Every body is an import and a call, so that `--help` is instant."""

from __future__ import annotations

import contextlib
import gc
import inspect
import shlex
import sys
from collections.abc import Callable
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_args, get_type_hints

import typer

from toolkit.certifying.options import CertifyOptions
from toolkit.comparing.run.options import CompareOptions, read_scale, usual_rows
from toolkit.configs import ConfigOptions, Flag
from toolkit.errors import UsageError, file_sentence, is_full_disk
from toolkit.jobs.options import PlanOptions, RecommendOptions
from toolkit.redaction import redact_output
from toolkit.strategies import STRATEGIES, get_strategy

if TYPE_CHECKING:
    from rich.console import Console


def _examples(*lines: str) -> str:
    """Return the end of a help text; its first line keeps Typer from wrapping it."""
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])


def _hyphened(word: str) -> str:
    return word.replace("_", "-")


app = typer.Typer(
    help="Fine-tune one causal LM under any backend, and see memory, speed and loss side by side.",
    epilog=_examples("toolkit compare", "toolkit --install-completion"),
    no_args_is_help=True,
    # Plain help has room for whole names of options, and takes half the time of rich's.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={
        "help_option_names": ["-h", "--help"],
        # Each option may be spelled with underscores too, as transformers and Accelerate do.
        "token_normalize_func": _hyphened,
    },
)
configs = typer.Typer(
    help="Accelerate YAML and DeepSpeed JSON for each strategy.",
    epilog=_examples("toolkit configs list", "toolkit configs show zero3"),
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(configs, name="configs")
checkpoint = typer.Typer(
    help="Checkpoints, the toolkit's and other libraries': show, verify, convert, merge.",
    epilog=_examples(
        "toolkit checkpoint show runs/a/checkpoint-15",
        "toolkit checkpoint convert runs/a/checkpoint-15 --output runs/b",
    ),
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(checkpoint, name="checkpoint")


def _complete_strategies(incomplete: str) -> list[str]:
    """Return the completions of names with commas between, of which the last is incomplete."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in STRATEGIES if name.startswith(last)]


def _console() -> Console:
    from rich.console import Console

    return Console()


def _strategies(help: str) -> Any:
    """Return the option of one strategy or several, whose names a shell completes."""
    return typer.Option(help=help, autocompletion=_complete_strategies)


StrategyName = Annotated[
    str,
    typer.Argument(help=f"One of: {', '.join(STRATEGIES)}.", autocompletion=_complete_strategies),
]
TrainFlags = Annotated[
    list[str] | None, typer.Argument(metavar="[-- FLAGS]", help="Flags of toolkit.train, after --.")
]
Files = Annotated[
    list[str] | None,
    typer.Argument(metavar="FILE... [-- FLAGS]", help="Configs; flags of the training behind --."),
]

ModelName = Annotated[
    str, typer.Argument(help="A Hub id, a folder with a config.json, or a count such as 7b.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print everything as JSON.")]


def _with_options_of(declared: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let a verb take the options that a dataclass declares with a `Flag`, as keyword arguments."""

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        # A shell passes a GPU by its name.
        types = get_type_hints(declared, localns={"Gpu": str}, include_extras=True)
        flags = [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                annotation=Annotated[
                    get_args(types[field.name])[0],
                    # Named, a boolean has no `--no-` form.
                    typer.Option(*(flag.names or [f"--{_hyphened(field.name)}"]), help=flag.help),
                ],
                default=inspect.Parameter.empty if field.default is MISSING else field.default,
            )
            for field in fields(declared)
            for flag in get_args(types[field.name])
            if isinstance(flag, Flag)
        ]
        signature = inspect.signature(verb, eval_str=True)
        first, *rest, _ = signature.parameters.values()
        rest = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in rest]
        combined = signature.replace(parameters=[first, *flags, *rest])
        verb.__signature__ = combined  # pyright: ignore[reportFunctionMemberAccess] - read by Typer
        return verb

    return decorate


def _print_version(wanted: bool) -> None:
    if not wanted:
        return
    from importlib.metadata import PackageNotFoundError, version

    try:
        typer.echo(f"toolkit {version('toolkit')}")
    except PackageNotFoundError:
        raise UsageError("This toolkit was never installed. Run: pip install .") from None
    raise typer.Exit()


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Take the options before a verb."""


@configs.command(
    "list", epilog=_examples("toolkit configs list", "toolkit configs list | grep offload")
)
def configs_list() -> None:
    """List the strategies, and what each one shards."""
    width = max(map(len, STRATEGIES))
    for strategy in STRATEGIES.values():
        typer.echo(f"{strategy.name:<{width}}  {strategy.num_processes}  {strategy.summary}")


@configs.command(
    "show", epilog=_examples("toolkit configs show fsdp", "toolkit configs show zero2_offload")
)
def configs_show(name: StrategyName) -> None:
    """Print a strategy's files."""
    from toolkit.configs.files import render_configs

    json_file = Path("deepspeed_configs") / f"{name}.json"
    launcher, deepspeed = render_configs(get_strategy(name), deepspeed_json=json_file)
    typer.echo(f"# accelerate_configs/{name}.yaml\n{launcher}")
    if deepspeed is not None:
        typer.echo(f"# {json_file}\n{deepspeed}")


@configs.command(
    "write",
    epilog=_examples(
        "toolkit configs write zero3 --to my_configs --num-processes 2",
        "toolkit configs write zero2 --to my_configs --precision bf16 --clipping 1.0",
    ),
)
@_with_options_of(ConfigOptions)
def configs_write(
    name: StrategyName,
    to: Annotated[Path, typer.Option("--to", help="Folder to write to.")],
    force: Annotated[bool, typer.Option("--force", help="Replace files already there.")] = False,
    **settings: Any,
) -> None:
    """Write a strategy's files, with absolute paths inside."""
    from toolkit.configs.files import commands_of_machines, write_configs

    options = ConfigOptions(**settings)
    files = write_configs(get_strategy(name), to, options=options, force=force)
    for path in (files.accelerate, files.deepspeed):
        if path is not None:
            typer.echo(path)
    for number, command in enumerate(commands_of_machines(files, options)):
        typer.echo(f"machine {number}: {command}")


@configs.command(
    "path",
    epilog=_examples(
        "toolkit configs path fsdp",
        'accelerate launch --config_file "$(toolkit configs path ddp)" my_script.py',
    ),
)
def configs_path(
    name: StrategyName,
    tensor_size: Annotated[
        int | None, typer.Option(help="tensor, tensor_ddp: ranks of a group.")
    ] = None,
) -> None:
    """Print the path of a strategy's YAML, for `accelerate launch --config_file`."""
    from toolkit.configs.files import cached_configs

    strategy = get_strategy(name).with_tensor_groups(tensor_size)
    typer.echo(cached_configs(strategy).accelerate)


@app.command(
    short_help="Train one causal LM under many strategies: a table.",
    epilog=_examples(
        "toolkit compare --strategies ddp,zero3 --max_steps 50 --output runs/first",
        "toolkit compare --bisect single zero2-loop --at 6 -- --train_file my.jsonl",
    ),
)
@_with_options_of(CompareOptions)
def compare(
    strategies: Annotated[
        str | None, _strategies("Names with commas between; the usual six if left out.")
    ] = None,
    bisect: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="A B", help="Name the first difference between two runs in one step."),
    ] = None,
    at: Annotated[
        int | None,
        typer.Option(
            metavar="STEP",
            help="The step that --bisect looks at; if left out, the first that broke a gate of the "
            "comparison in --output, or else the first of all.",
        ),
    ] = None,
    scale: Annotated[
        str | None,
        typer.Option(help="Numbers of ranks, 1,2,4: every strategy runs with each of them."),
    ] = None,
    global_batch_size: Annotated[
        int | None,
        typer.Option(help="Rows of an optimizer step; 8, or one a micro-batch, if left out."),
    ] = None,
    cold: Annotated[
        bool, typer.Option("--cold", help="Start each rank as a new Python, instead of forking it.")
    ] = False,
    train_flags: TrainFlags = None,
    **options: Any,
) -> None:
    """Train one causal LM under many strategies, and show them side by side."""
    if strategies is not None:
        options["strategies"] = tuple(_names(strategies))
    settings = CompareOptions(
        scale=() if scale is None else read_scale(scale),
        warm=not cold,
        train_flags=tuple(train_flags or ()),
        **options,
    )
    if global_batch_size is None:
        global_batch_size = usual_rows(settings.processes, settings.gradient_accumulation_steps)
    settings = replace(settings, global_batch_size=global_batch_size)
    if bisect is not None:
        from toolkit.comparing.bisect.running import bisect_runs

        if strategies is not None:
            raise UsageError("--bisect names its two runs itself. Leave --strategies out.")
        raise typer.Exit(bisect_runs(bisect, settings, console=_console(), at=at))
    if at is not None:
        raise UsageError("--at names a step to --bisect: pass --bisect A B too.")
    from toolkit.comparing.run.schedule import compare as run

    raise typer.Exit(run(settings, console=_console()))


@app.command(
    short_help="Fine-tune a model on your data, under one strategy.",
    # The flags of toolkit.train are passed on as they are.
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    epilog=_examples(
        "toolkit train --train_file rows.jsonl --model_name_or_path MODEL --bf16 True",
        "toolkit train --train_file rows.jsonl --strategy zero3 --method lora",
    ),
)
def train(
    context: typer.Context,
    strategy: Annotated[
        str | None, _strategies("Its name; left out, the first that fits the GPUs of this machine.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="An Accelerate YAML of your own, in place of a strategy.")
    ] = None,
    num_processes: Annotated[
        int | None, typer.Option(help="Ranks; the number of GPUs if left out.")
    ] = None,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Train also where the planner says it is too large.")
    ] = False,
) -> None:
    """Fine-tune a model on your data.

    All other flags are those of toolkit.train: python -m toolkit.train --help lists them.
    """
    from toolkit.train_command import TrainOptions
    from toolkit.train_command import train as run

    options = TrainOptions(
        strategy=strategy, config=config, num_processes=num_processes, anyway=anyway
    )
    raise typer.Exit(run(context.args, options, console=_console()))


@app.command(
    short_help="Prove a training script of your own.",
    epilog=_examples(
        "toolkit certify --strategy zero2 -- train.py --its --flags",
        "toolkit certify --config zero3.yaml --shrink -- train.py --model MODEL",
    ),
)
@_with_options_of(CertifyOptions)
def certify(
    script: Annotated[
        list[str], typer.Argument(metavar="-- SCRIPT [FLAGS]", help="The script, after --.")
    ],
    strategy: Annotated[str | None, _strategies("Its name, for the bundled config file.")] = None,
    only: Annotated[
        str,
        typer.Option(
            help="Groups of checks, by commas: rules, tokens, parameters, rows, one, log, saved, "
            "resumed, repeated; all if left out."
        ),
    ] = "",
    **options: Any,
) -> None:
    """Run a training script small and short, as ranks and as one process, and judge what it does.

    A certificate says what is trained, who is trained, which rows are read, whether the ranks do
    the work of one, whether what is saved loads and resumes, and whether an evaluation leaves no
    trace.
    """
    from toolkit.certifying.certify import certify as run

    settings = CertifyOptions(
        strategy=strategy, only=tuple(filter(None, only.split(","))), **options
    )
    raise typer.Exit(run(script, settings, console=_console()))


@app.command(
    short_help="Whether the installed releases compute what one process computes.",
    epilog=_examples("toolkit verify", "toolkit verify --against other/bin/python"),
)
def verify(
    python: Annotated[
        str | None, typer.Option(help="The Python of another environment, in place of this one.")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(help="The Python of an upgrade: what differs there from the first."),
    ] = None,
    only: Annotated[
        str, typer.Option(help="Cells, by commas: their names, or how these begin.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Train small cells as two ranks, and hold each against one process. Exit 1 for a red cell.

    Each known fault of a release is named with its thread, and with what to do.
    """
    from toolkit.verifying.verify import verify as run

    code = run(python=python, only=only, against=against, as_json=as_json, console=_console())
    raise typer.Exit(code)


@app.command(
    epilog=_examples(
        "toolkit prepare", "toolkit prepare -- --train_file my.jsonl --max_length 1024"
    )
)
def prepare(
    num_processes: Annotated[
        int | None, typer.Option(help="Ranks of the launch, for --streaming.")
    ] = None,
    as_json: AsJson = False,
    train_flags: TrainFlags = None,
) -> None:
    """Fetch the model and tokenise the data once, before a launch."""
    from toolkit.launching.preflight import described, prepare_once

    facts = prepare_once(train_flags or (), num_processes=num_processes)
    if as_json:
        _print_json(facts)
        return
    for line in described(facts):
        typer.echo(line)


@app.command(
    epilog=_examples(
        'toolkit generate runs/mine/final "What is a gradient?"',
        'toolkit generate runs/mine "A joke, please." --temperature 0.8 --seed 1',
    )
)
def generate(
    folder: Annotated[Path, typer.Argument(help="A saved model or adapter, or its run.")],
    prompt: Annotated[str, typer.Argument(help='In quotes; "-": one on each line of stdin.')],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 256,
    temperature: Annotated[float | None, typer.Option(min=0, help="0: no sampling.")] = None,
    top_p: Annotated[float | None, typer.Option(min=0, max=1, help="Of sampling.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of sampling; it repeats an answer.")] = 0,
    plain: Annotated[bool, typer.Option("--plain", help="Leave the chat template out.")] = False,
) -> None:
    """Answer a prompt with a trained model. Left out, settings are those of the model."""
    from toolkit.launching.generating import generate as answer

    sampling = {"temperature": temperature, "top_p": top_p, "seed": seed}
    answer(folder, prompt, most=max_new_tokens, plain=plain, **sampling)


CheckpointFolder = Annotated[
    Path, typer.Argument(metavar="FOLDER", help="A checkpoint, a model or an adapter.")
]
OutputFolder = Annotated[Path, typer.Option(help="Folder to write to.")]
BaseModel = Annotated[
    str | None,
    typer.Option(help="The model that was trained, where none is found beside the checkpoint."),
]


@checkpoint.command(
    "show",
    epilog=_examples(
        "toolkit checkpoint show runs/a/checkpoint-15", "toolkit checkpoint show MODEL --json"
    ),
)
def checkpoint_show(
    folder: CheckpointFolder, base: BaseModel = None, as_json: AsJson = False
) -> None:
    """Print what is in a folder, whether it is whole, and what goes on from it."""
    _read_checkpoint("show", folder, base=base, as_json=as_json)


@checkpoint.command(
    "verify",
    epilog=_examples(
        "toolkit checkpoint verify runs/a/checkpoint-15",
        "toolkit checkpoint verify runs/a/checkpoint-15 --against runs/a/final",
    ),
)
def checkpoint_verify(
    folder: CheckpointFolder,
    against: Annotated[
        Path | None, typer.Option(help="Another, of any kind, which should hold the same.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Read every tensor. Exit 1 where one is damaged, not finite, or another than the other's."""
    _read_checkpoint("verify", folder, against=against, as_json=as_json)


@checkpoint.command(
    "convert",
    epilog=_examples(
        "toolkit checkpoint convert runs/a/checkpoint-15 --output runs/b",
        "toolkit checkpoint convert TRAINER_OUTPUT/checkpoint-500 --output runs/b",
    ),
)
def checkpoint_convert(
    folder: CheckpointFolder, output: OutputFolder, base: BaseModel = None
) -> None:
    """Write OUTPUT/checkpoint-STEP in the portable form, which any strategy goes on from."""
    _read_checkpoint("convert", folder, output=output, base=base)


@checkpoint.command(
    "merge",
    epilog=_examples(
        "toolkit checkpoint merge runs/a/checkpoint-15 --output MODEL",
        "toolkit checkpoint merge runs/lora/final --output MODEL --merge_adapter",
    ),
)
def checkpoint_merge(
    folder: CheckpointFolder,
    output: OutputFolder,
    base: BaseModel = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Of the weights; as they were saved if left out."),
    ] = None,
    merge_adapter: Annotated[
        bool, typer.Option("--merge-adapter", help="Merge an adapter into its base model.")
    ] = False,
) -> None:
    """Write the weights as from_pretrained loads them, or an adapter as peft does."""
    settings = {"base": base, "dtype": dtype, "merge_adapter": merge_adapter}
    _read_checkpoint("merge", folder, output=output, **settings)


def _read_checkpoint(verb: str, folder: Path, **settings: Any) -> None:
    import json

    from toolkit.launching.python import become

    words = {"verb": verb, "folder": folder, **settings}
    become("toolkit.training.checkpoint_command", json.dumps(words, default=str))


@app.command(
    short_help="Reports of a comparison, a picture, or two side by side.",
    epilog=_examples("toolkit report runs/first --png", "toolkit report runs/first runs/second"),
)
def report(
    folder: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="Folder that toolkit compare wrote.")
    ],
    second: Annotated[
        Path | None,
        typer.Argument(metavar="OTHER_DIR", help="A second one, to show side by side with it."),
    ] = None,
    png: Annotated[
        bool, typer.Option("--png", help="Write only report.png there, a picture to share.")
    ] = False,
    to: Annotated[
        Path | None, typer.Option("--to", help="Folder for the files on two comparisons.")
    ] = None,
    show_speed: Annotated[
        bool, typer.Option("--show-speed", help="Show the speeds of a rehearsal, too.")
    ] = False,
) -> None:
    """Make a comparison's reports again, or set two comparisons side by side."""
    if second is None and to is not None:
        raise UsageError("--to is for two comparisons; the reports of one stand in its own folder.")
    if second is not None and png:
        raise UsageError("--png is for one comparison. Name one folder, or leave --png out.")
    from toolkit.comparing.report import write

    console = _console()
    if second is not None:
        from toolkit.comparing.report.diff.files import side_by_side

        side_by_side(folder, second, to=to, console=console, show_speed=show_speed)
    elif png:
        write.remake_picture(folder, console=console)
    else:
        write.remake(folder, console=console, show_speed=show_speed)


@app.command(
    epilog=_examples(
        "toolkit plan 7b --gpus 2 --gpu A100-80",
        "toolkit plan 1.5b --gpu L4 --strategy zero3,fsdp --method lora --explain",
    )
)
@_with_options_of(PlanOptions)
def plan(
    model: ModelName,
    strategy: Annotated[
        str | None, _strategies("One strategy, or several with commas between.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All strategies, not the usual ones.")] = (
        False
    ),
    as_json: AsJson = False,
    explain: Annotated[bool, typer.Option("--explain", help="Each formula and its inputs.")] = (
        False
    ),
    plot: Annotated[Path | None, typer.Option(help="Draw into this .svg or .png.")] = None,
    **options: Any,
) -> None:
    """Will it fit, how fast, at what cost: before a GPU is rented. Exit 1 where nothing fits."""
    from toolkit.planning.plan import plan as make_plan

    if every and strategy is not None:
        raise UsageError("--all and --strategy contradict each other. Leave one of them out.")
    if every or strategy is not None:
        options["strategies"] = "all" if strategy is None else _names(strategy)
    answer = make_plan(model, **options)
    if plot is not None:
        answer.plot(plot)
    if as_json:
        _print_json(answer.to_dict())
    else:
        from toolkit.planning.render import plans

        console = _console()
        plans.show_plan(answer, console)
        if explain:
            plans.explain(answer, console)
    if answer.nothing_fits:
        raise typer.Exit(1)


@app.command(
    epilog=_examples(
        "toolkit recommend 7b --gpu L4 --gpus 2",
        "toolkit recommend 1.5b --gpu A100-80 --goal memory --method lora",
    )
)
@_with_options_of(RecommendOptions)
def recommend(
    model: ModelName,
    write: Annotated[
        Path | None, typer.Option(help="Folder for the files to launch the choice with.")
    ] = None,
    as_json: AsJson = False,
    **options: Any,
) -> None:
    """Which strategy, with reasons, and the files to launch it. Exit 1 where nothing fits."""
    from toolkit.planning.recommend import recommend as make_recommendation
    from toolkit.planning.render import recommendations

    answer = make_recommendation(model, **options)
    command = None
    if write is not None and answer.choice is not None:
        command = shlex.join(recommendations.write_recommendation(answer, write))
    if as_json:
        _print_json(answer.to_dict() | {"command": command})
    else:
        typer.echo("\n".join(recommendations.recommendation_lines(answer)))
        if command is not None:
            typer.echo(command)
    if answer.choice is None and write is not None:
        typer.echo(f"Nothing fits, so nothing was written to {write}.", err=True)
    if answer.choice is None or not answer.keeps_bounds:
        raise typer.Exit(1)


@app.command(
    short_help="Check this machine, or name the cause of a failed run.",
    epilog=_examples("toolkit doctor", "toolkit doctor runs/mine"),
)
def doctor(
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RUN_DIR | LOGFILE]",
            help="A run that failed: its folder, or its log, of any script.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check this machine before a launch, or name the cause of a failed run. Exit 1 for a fault."""
    from toolkit.doctor.finding import count, to_json

    if path is None:
        from toolkit.doctor.machine import examine

        findings = examine()
    else:
        from toolkit.doctor.after import examine_run

        findings = examine_run(path)
    if as_json:
        _print_json(to_json(findings))
    else:
        from toolkit.doctor.finding import show_causes, show_findings

        show = show_findings if path is None else show_causes
        show(findings, _console())
    if count(findings, "fail"):
        raise typer.Exit(1)


@app.command(
    short_help="Check config files, flags and a script before a launch.",
    epilog=_examples(
        "toolkit check fsdp.yaml", "toolkit check zero3.yaml --fix -- --bf16 --learning_rate 1e-4"
    ),
)
def check(
    files: Files = None,
    script: Annotated[Path | None, typer.Option(help="The training script; it is not run.")] = None,
    fix: Annotated[bool, typer.Option("--fix", help="Make the repairs that are certain.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check Accelerate YAML, DeepSpeed JSON, flags behind -- and a script. Exit 1 for an error."""
    import os

    from toolkit.configs.check.command import check as run

    names, flags = _files_and_flags(files)
    report = run(names, flags, script=script, environ=os.environ, fix=fix)
    if as_json:
        _print_json(report.to_json())
    else:
        typer.echo("\n".join(report.lines()))
    if report.has_error:
        raise typer.Exit(1)


@app.command(
    short_help="The settings of a launch that count, and who set each.",
    epilog=_examples("toolkit explain zero2.yaml", "toolkit explain zero2.yaml -- --bf16 True"),
)
def explain(files: Files, as_json: AsJson = False) -> None:
    """Print the effective value of every setting, who set it, and what was left aside."""
    import os

    from toolkit.configs.check.documents import NOTHING
    from toolkit.configs.check.explain import effective, lines, to_json
    from toolkit.configs.check.flags import flags_document
    from toolkit.configs.check.setup import read_setups

    names, flags = _files_and_flags(files)
    setups = read_setups(names, flags_document(flags) if flags else NOTHING, os.environ)
    settings = [setting for setup in setups for setting in effective(setup)]
    if as_json:
        _print_json(to_json(settings))
    else:
        typer.echo("\n".join(lines(settings)))


@app.command(
    epilog=_examples(
        "toolkit translate old.yaml --to fsdp",
        "toolkit translate old.yaml --to fsdp | diff old.yaml -",
    )
)
def translate(
    file: Annotated[Path, typer.Argument(help="An Accelerate YAML for FSDP1.")],
    to: Annotated[str, typer.Option("--to", help="fsdp: that is FSDP2.")],
) -> None:
    """Print an Accelerate YAML for FSDP1 as one for FSDP2; what is lost goes to stderr."""
    from toolkit.configs.check.translate import translate as run

    if to != "fsdp":
        raise UsageError(f"--to {to}: there is fsdp only, which is FSDP2.")
    translation = run(file)
    typer.echo(translation.text, nl=False)
    for note in translation.notes:
        typer.echo(f"toolkit: {note}", err=True)


@app.command(
    epilog=_examples("toolkit schema accelerate", "toolkit schema deepspeed | tee deepspeed.json")
)
def schema(
    kind: Annotated[Literal["accelerate", "deepspeed"], typer.Argument(help="Whose files.")],
) -> None:
    """Print the JSON Schema of config files, for an editor."""
    from toolkit.configs.check import schemas

    _print_json(schemas.accelerate_schema() if kind == "accelerate" else schemas.deepspeed_schema())


def _files_and_flags(words: list[str] | None) -> tuple[list[Path], list[str]]:
    """Return the files of a call, and the words from the first flag behind -- on."""
    words = words or []
    end = next((index for index, word in enumerate(words) if word.startswith("--")), len(words))
    return [Path(word) for word in words[:end]], words[end:]


def _print_json(value: object) -> None:
    import json

    typer.echo(json.dumps(value, indent=2))


def _names(text: str) -> list[str]:
    names = [part.strip() for part in text.split(",")]
    if any(names) and not all(names):
        raise UsageError(f"{text!r} has a comma that stands beside no name. Leave it out.")
    return [name for name in names if name]


COMMAND_LINE_ERROR: Any = typer.BadParameter.__bases__[0]
"""Click's UsageError; typer 0.29 has a click of its own."""


def _sentence(error: Exception) -> str | None:
    """Return what a mistake of the user's is, None for another error."""
    if isinstance(error, OSError):
        return file_sentence(error)
    if not isinstance(error, COMMAND_LINE_ERROR):
        return str(error)
    problem = cast("typer.BadParameter", error)
    text, context = problem.format_message(), problem.ctx
    if context is None or "\n" in text:
        return text
    text = f"{text.rstrip('.?')}{'?' if text.endswith('?') else '.'}"
    option = getattr(problem, "option_name", None)  # of one that the verb does not have
    takes_flags = "FLAGS" in str(context.command.collect_usage_pieces(context))
    typed = [word for word in sys.argv if option and _hyphened(word).startswith(option)]
    if typed and str(option)[1:].isdigit():
        text += f" A count of parameters begins with no hyphen: {typed[0].lstrip('-')}."
    elif typed and takes_flags:
        text += f" Flags of toolkit.train stand behind --: {context.command_path} -- {typed[0]} ..."
    return f"{text} See {context.command_path} --help."


def main() -> None:
    """Run the command; a mistake of the user's is one sentence and exit code 2.

    The same holds for a file that may not be read or written; a full disk is exit code 1.
    """
    # A start makes many objects and frees few: looking for garbage too often takes time.
    gc.set_threshold(50_000)
    redact_output()
    try:
        raise SystemExit(app(prog_name="toolkit", standalone_mode=False))
    except typer.Abort:  # Ctrl-C, before typer 0.29
        raise SystemExit(130) from None
    except (UsageError, OSError, COMMAND_LINE_ERROR) as error:
        sentence = _sentence(error)
        if sentence is None:
            raise
        is_help = "\n" in sentence  # a verb without arguments shows it
        print(sentence if is_help else f"toolkit: {sentence}", file=sys.stderr)  # noqa: T201
        try:
            sys.stdout.flush()
        except OSError:
            # Python would try once more at its end, and leave with another status.
            with contextlib.suppress(OSError):
                sys.stdout.close()
        raise SystemExit(1 if is_full_disk(error) else 2) from None


if __name__ == "__main__":
    main()
