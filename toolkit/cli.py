"""The `toolkit` command. Every body is an import and a call, so that `--help` is instant."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from toolkit.errors import UsageError, file_sentence, is_full_disk
from toolkit.planning.choices import Attention, Dtype, Goal, Method, Optimizer
from toolkit.redaction import redact_output
from toolkit.strategies import STRATEGIES


def _examples(*lines: str) -> str:
    """Return the end of a help text; the first line keeps it from being wrapped."""
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])


app = typer.Typer(
    help="Fine-tune one causal LM under any backend, and see memory, speed and loss side by side.",
    epilog=_examples("toolkit compare", "toolkit --install-completion"),
    no_args_is_help=True,
    # Plain help has room for whole names of options, and is there in half the time.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
configs = typer.Typer(
    help="Accelerate YAML and DeepSpeed JSON for each strategy.",
    epilog=_examples("toolkit configs list", "toolkit configs show zero3"),
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(configs, name="configs")


class Engine(StrEnum):
    trainer = "trainer"
    loop = "loop"
    both = "both"


class Precision(StrEnum):
    no = "no"
    bf16 = "bf16"
    fp16 = "fp16"


class OffloadDevice(StrEnum):
    none = "none"
    cpu = "cpu"
    nvme = "nvme"


def _complete_strategies(incomplete: str) -> list[str]:
    """Return what a shell may put in the place of names with commas between, the last begun."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in STRATEGIES if name.startswith(last)]


StrategyName = Annotated[
    str,
    typer.Argument(help=f"One of: {', '.join(STRATEGIES)}.", autocompletion=_complete_strategies),
]
NumProcesses = Annotated[
    int | None, typer.Option("--num-processes", "--num_processes", help="Ranks in all.")
]

ModelName = Annotated[
    str, typer.Argument(help="A Hub id, a folder with a config.json, or a count such as 7b.")
]
Gpus = Annotated[int, typer.Option(help="GPUs in all, one rank each.")]
GpuName = Annotated[str | None, typer.Option(help="L4, A100-80, H100, ...; or one of --gpu-file.")]
GpuFile = Annotated[Path | None, typer.Option("--gpu-file", help="JSON or YAML with further GPUs.")]
Nodes = Annotated[int, typer.Option(help="Machines that the GPUs are spread over.")]
Sequence = Annotated[
    int | None, typer.Option("--seq", "--sequence", help="Tokens of a row; 2,048 if left out.")
]
HostGib = Annotated[float | None, typer.Option("--host-gib", help="RAM of a node, for offloads.")]
Network = Annotated[
    float | None, typer.Option("--internode-gbps", help="Network of a node, in Gbit/s.")
]
ShowSpeed = Annotated[
    bool,
    typer.Option("--show-speed", "--show_speed", help="Of a rehearsal, show the speeds too."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print everything as JSON.")]


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
    """Take the options that stand before a verb."""


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
    from toolkit.configs import render_configs
    from toolkit.strategies import get_strategy

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
def configs_write(
    name: StrategyName,
    to: Annotated[Path, typer.Option("--to", help="Folder to write to.")],
    num_processes: NumProcesses = None,
    precision: Annotated[
        Precision | None, typer.Option(help="Written into the files; else the run says.")
    ] = None,
    accumulation: Annotated[
        int | None, typer.Option(help="DeepSpeed: micro-batches per optimizer step.")
    ] = None,
    clipping: Annotated[
        float | None, typer.Option(help="DeepSpeed: largest gradient norm, 0 for none.")
    ] = None,
    offload_device: Annotated[
        OffloadDevice | None,
        typer.Option("--offload-device", help="DeepSpeed: where to offload to instead."),
    ] = None,
    nvme_path: Annotated[
        Path | None, typer.Option("--nvme-path", help="Folder on a fast local disk.")
    ] = None,
    layer: Annotated[
        str | None, typer.Option(help="FSDP2: class to wrap; else the model decides.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files already there.")] = False,
) -> None:
    """Write a strategy's files, with absolute paths inside."""
    from toolkit.configs import ConfigOptions, write_configs
    from toolkit.strategies import get_strategy

    options = ConfigOptions(
        num_processes=num_processes,
        precision=None if precision is None else precision.value,
        gradient_accumulation_steps=accumulation,
        gradient_clipping=clipping,
        offload_device=None if offload_device is None else offload_device.value,
        nvme_path=nvme_path,
        decoder_layer=layer,
    )
    files = write_configs(get_strategy(name), to, options=options, force=force)
    for path in (files.accelerate, files.deepspeed):
        if path is not None:
            typer.echo(path)


@configs.command(
    "path",
    epilog=_examples(
        "toolkit configs path fsdp",
        'accelerate launch --config_file "$(toolkit configs path ddp)" my_script.py',
    ),
)
def configs_path(name: StrategyName) -> None:
    """Print the path of a strategy's YAML, for `accelerate launch --config_file`."""
    from toolkit.configs import cached_configs
    from toolkit.strategies import get_strategy

    typer.echo(cached_configs(get_strategy(name)).accelerate)


@app.command(
    short_help="Train one causal LM under many strategies: a table.",
    epilog=_examples(
        "toolkit compare --strategies ddp,zero3,fsdp --output runs/first",
        "toolkit compare --bisect single zero2-loop --at 6 -- --train_file my.jsonl",
    ),
)
def compare(
    strategies: Annotated[
        str | None,
        typer.Option(
            help="Names with commas between; the usual six if left out.",
            autocompletion=_complete_strategies,
        ),
    ] = None,
    bisect: Annotated[
        tuple[str, str] | None,
        typer.Option(
            metavar="A B", help="Name the first thing that differs in one step of two runs."
        ),
    ] = None,
    at: Annotated[
        int | None,
        typer.Option(
            metavar="STEP",
            help="The step that --bisect looks at; if left out, the first that broke a gate of the "
            "comparison in --output, or else the first of all.",
        ),
    ] = None,
    engine: Annotated[Engine, typer.Option(help="The HF Trainer, the loop, or both.")] = (
        Engine.trainer
    ),
    max_steps: Annotated[
        int, typer.Option("--max_steps", "--max-steps", help="Optimizer steps compared.")
    ] = 20,
    num_processes: Annotated[
        int | None,
        typer.Option(
            "--num_processes", "--num-processes", help="Ranks of every run; 2 if left out."
        ),
    ] = None,
    scale: Annotated[
        str | None,
        typer.Option(help="Numbers of ranks, 1,2,4: every strategy runs with each of them."),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Starts of every run.")] = 1,
    precision: Annotated[Precision, typer.Option(help="Of every run.")] = Precision.no,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder of the comparison. Given again, finished runs are kept."),
    ] = None,
    global_batch_size: Annotated[
        int | None,
        typer.Option(
            "--global_batch_size",
            "--global-batch-size",
            help="Rows per optimizer step; 8, or one for every micro-batch, if left out.",
        ),
    ] = None,
    accumulation: Annotated[
        int,
        typer.Option(
            "--gradient_accumulation_steps",
            "--gradient-accumulation-steps",
            help="Micro-batches per optimizer step.",
        ),
    ] = 2,
    throughput_steps: Annotated[
        int,
        typer.Option(
            "--throughput_steps",
            "--throughput-steps",
            help="Steps on packed rows that tokens/s is read from.",
        ),
    ] = 10,
    timeout: Annotated[float, typer.Option(help="Seconds until a run is given up.")] = 3600.0,
    nvme_path: Annotated[
        Path | None, typer.Option("--nvme_path", "--nvme-path", help="Folder on a fast disk.")
    ] = None,
    dollars_per_hour: Annotated[
        float | None,
        typer.Option("--dollars-per-hour", "--dollars_per_hour", help="Price of one GPU."),
    ] = None,
    show_speed: ShowSpeed = False,
    cold: Annotated[
        bool,
        typer.Option(
            "--cold", help="Let every rank import everything anew, instead of forking it."
        ),
    ] = False,
    train_flags: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- FLAGS]", help="Flags of toolkit.train, after --."),
    ] = None,
) -> None:
    """Train one causal LM under many strategies, and show them side by side."""
    from rich.console import Console

    from toolkit.comparing.run.options import (
        DEFAULT_STRATEGIES,
        CompareOptions,
        read_scale,
        usual_rows,
    )
    from toolkit.comparing.run.schedule import compare as run

    names = DEFAULT_STRATEGIES if strategies is None else tuple(_names(strategies))
    options = CompareOptions(
        strategies=names,
        engine=engine.value,
        max_steps=max_steps,
        num_processes=num_processes,
        scale=() if scale is None else read_scale(scale),
        repeats=repeats,
        precision=precision.value,
        gradient_accumulation_steps=accumulation,
        throughput_steps=throughput_steps,
        timeout=timeout,
        nvme_path=nvme_path,
        dollars_per_hour=dollars_per_hour,
        show_speed=show_speed,
        warm=not cold,
        output=output,
        train_flags=tuple(train_flags or ()),
    )
    if global_batch_size is None:
        global_batch_size = usual_rows(options.processes, accumulation)
    options = replace(options, global_batch_size=global_batch_size)
    if bisect is not None:
        from toolkit.comparing.bisect.running import bisect_runs

        if strategies is not None:
            raise UsageError("--bisect names its two runs itself. Leave --strategies out.")
        raise typer.Exit(bisect_runs(bisect, options, console=Console(), at=at))
    if at is not None:
        raise UsageError("--at names a step to --bisect: pass --bisect A B too.")
    raise typer.Exit(run(options, console=Console()))


@app.command(
    epilog=_examples(
        "toolkit prepare",
        "toolkit prepare -- --train_file my.jsonl --max_length 1024",
    ),
)
def prepare(
    num_processes: Annotated[
        int | None,
        typer.Option(
            "--num_processes", "--num-processes", help="Ranks of the launch, for --streaming."
        ),
    ] = None,
    as_json: AsJson = False,
    train_flags: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- FLAGS]", help="Flags of toolkit.train, after --."),
    ] = None,
) -> None:
    """Fetch the model and tokenise the data once, before a launch."""
    from toolkit.launching.preparing import described, prepare_once

    facts = prepare_once(train_flags or (), num_processes=num_processes)
    if as_json:
        _print_json(facts)
        return
    for line in described(facts):
        typer.echo(line)


@app.command(
    short_help="Reports of a comparison, a picture, or two side by side.",
    epilog=_examples("toolkit report runs/first --png", "toolkit report runs/first runs/second"),
)
def report(
    folder: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="Folder that toolkit compare wrote.")
    ],
    other: Annotated[
        Path | None,
        typer.Argument(metavar="OTHER_DIR", help="Another: shows the two side by side."),
    ] = None,
    png: Annotated[
        bool,
        typer.Option("--png", help="Of one: write report.png there instead, a picture to share."),
    ] = False,
    to: Annotated[
        Path | None, typer.Option("--to", help="Of two: folder for their side-by-side files.")
    ] = None,
    show_speed: ShowSpeed = False,
) -> None:
    """Make a comparison's reports again, or set two comparisons side by side."""
    from rich.console import Console

    from toolkit.comparing.run.rebuilding import restore

    if other is None and to is not None:
        raise UsageError("--to is for two comparisons; the reports of one stand in its own folder.")
    if other is not None and png:
        raise UsageError("--png is for one comparison. Name one folder, or leave --png out.")
    console = Console()
    for each in (folder, other):
        if each is not None:
            restore(each, console=console)
    if png:
        from toolkit.comparing.report.remake import remake_picture

        remake_picture(folder, console=console)
        return
    if other is not None:
        from toolkit.comparing.report.side_by_side import side_by_side

        side_by_side(folder, other, to=to, console=console)
        return
    from toolkit.comparing.report.remake import remake

    remake(folder, console=console, show_speed=show_speed)


@app.command(
    epilog=_examples(
        "toolkit plan 7b --gpus 2 --gpu A100-80",
        "toolkit plan 1.5b --gpu L4 --strategy ddp,zero3 --seq 4096 --explain",
    ),
)
def plan(
    model: ModelName,
    gpus: Gpus = 2,
    gpu: GpuName = None,
    nodes: Nodes = 1,
    strategy: Annotated[
        str | None,
        typer.Option(
            help="One strategy, or several with commas between.",
            autocompletion=_complete_strategies,
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All strategies, not the usual six.")] = (
        False
    ),
    method: Annotated[Method, typer.Option(help="What is trained.")] = "full",
    lora_rank: Annotated[int, typer.Option("--lora-rank", help="Rank of the adapters.")] = 16,
    batch: Annotated[int, typer.Option(help="Rows of a micro-batch on one GPU.")] = 1,
    sequence: Sequence = None,
    accumulate: Annotated[int, typer.Option(help="Micro-batches of an optimizer step.")] = 1,
    precision: Annotated[
        Precision | None, typer.Option(help="bf16 if left out, fp16 on GPUs without it.")
    ] = None,
    optimizer: Annotated[Optimizer, typer.Option(help="Whose states are kept.")] = "adamw",
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Compute activations again in backward.")
    ] = False,
    attention: Annotated[Attention, typer.Option(help="Whether scores are held.")] = ("flash"),
    chunked_loss: Annotated[
        bool, typer.Option("--chunked-loss", help="Head and loss fused, as Liger does.")
    ] = False,
    dtype: Annotated[Dtype, typer.Option(help="What trained weights are loaded in.")] = ("float32"),
    host_gib: HostGib = None,
    internode_gbps: Network = None,
    gpu_file: GpuFile = None,
    tokens: Annotated[float | None, typer.Option(help="To be trained: gives hours and cost.")] = (
        None
    ),
    dollars_per_hour: Annotated[
        float | None, typer.Option("--dollars-per-hour", help="Price of one GPU.")
    ] = None,
    as_json: AsJson = False,
    explain: Annotated[bool, typer.Option("--explain", help="Each formula and its inputs.")] = (
        False
    ),
    plot: Annotated[Path | None, typer.Option(help="Draw into this .svg or .png.")] = None,
) -> None:
    """Will it fit, how fast, at what cost: before a GPU is rented."""
    from toolkit.planning.plan import USUAL
    from toolkit.planning.plan import plan as make_plan

    if every and strategy is not None:
        raise UsageError("--all and --strategy contradict each other. Leave one of them out.")
    names = "all" if every else USUAL if strategy is None else tuple(_names(strategy))
    found = make_plan(
        model,
        gpus=gpus,
        gpu=gpu,
        nodes=nodes,
        strategies=names,
        method=method,
        lora_rank=lora_rank,
        batch=batch,
        sequence=sequence,
        accumulation=accumulate,
        precision=None if precision is None else precision.value,
        optimizer=optimizer,
        checkpointing=checkpointing,
        attention=attention,
        chunked_loss=chunked_loss,
        dtype=dtype,
        host_gib=host_gib,
        internode_gbps=internode_gbps,
        gpu_file=gpu_file,
        tokens=tokens,
        dollars_per_hour=dollars_per_hour,
    )
    if plot is not None:
        found.plot(plot)
    if as_json:
        _print_json(found.to_dict())
        return
    from rich.console import Console

    from toolkit.planning.render import table

    console = Console()
    table.show_plan(found, console)
    if explain:
        table.explain(found, console)


@app.command(
    epilog=_examples(
        "toolkit recommend 7b --gpu L4 --gpus 2",
        "toolkit recommend 1.5b --gpu A100-80 --goal memory --method lora",
    ),
)
def recommend(
    model: ModelName,
    gpu: Annotated[str, typer.Option(help="L4, A100-80, H100, ...; or one of --gpu-file.")],
    gpus: Gpus = 2,
    nodes: Nodes = 1,
    goal: Annotated[Goal, typer.Option(help="Fastest, or with the least memory.")] = "speed",
    method: Annotated[
        Method | None, typer.Option(help="Else the first of these that fits.")
    ] = None,
    global_batch: Annotated[
        int, typer.Option("--global-batch", help="Rows of an optimizer step; kept.")
    ] = 32,
    sequence: Sequence = None,
    precision: Annotated[
        Precision | None, typer.Option(help="bf16 if left out, fp16 on GPUs without it.")
    ] = None,
    optimizer: Annotated[Optimizer, typer.Option(help="Whose states are kept.")] = "adamw",
    learning_rate: Annotated[
        float, typer.Option("--learning-rate", help="Chosen for --base-batch.")
    ] = 2e-5,
    base_batch: Annotated[
        int | None, typer.Option("--base-batch", help="Global batch the rate was chosen for.")
    ] = None,
    host_gib: HostGib = None,
    internode_gbps: Network = None,
    gpu_file: GpuFile = None,
    write: Annotated[
        Path | None, typer.Option(help="Folder for the files to launch the choice with.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Which strategy, with reasons, and the files to launch it."""
    from toolkit.planning.recommend import recommend as make

    found = make(
        model,
        gpu=gpu,
        gpus=gpus,
        nodes=nodes,
        goal=goal,
        method=method,
        global_batch=global_batch,
        sequence=sequence,
        precision=None if precision is None else precision.value,
        optimizer=optimizer,
        learning_rate=learning_rate,
        base_batch=base_batch,
        host_gib=host_gib,
        internode_gbps=internode_gbps,
        gpu_file=gpu_file,
    )
    from toolkit.planning.render import recommended

    line = None
    if write is not None:
        line = recommended.shown_command(recommended.write_recommendation(found, write))
    if as_json:
        _print_json(found.to_dict() | {"command": line})
        return
    from rich.console import Console

    recommended.show_recommendation(found, Console())
    if line is not None:
        typer.echo(line)


def _print_json(value: object) -> None:
    import json

    typer.echo(json.dumps(value, indent=2))


def _names(text: str) -> list[str]:
    return [name for part in text.split(",") if (name := part.strip())]


def main() -> None:
    """Run the command; a mistake of the user's is one sentence and exit code 2.

    So is a file that may not be read or written; a full disk is exit code 1.
    """
    redact_output()
    try:
        app(prog_name="toolkit")
    except (UsageError, OSError) as error:
        sentence = str(error) if isinstance(error, UsageError) else file_sentence(error)
        if sentence is None:
            raise
        print(f"toolkit: {sentence}", file=sys.stderr)  # noqa: T201
        _print_the_rest()
        raise SystemExit(1 if is_full_disk(error) else 2) from None


def _print_the_rest() -> None:
    try:
        sys.stdout.flush()
    except OSError:
        # Python would try once more at its end, and leave with another status.
        with contextlib.suppress(OSError):
            sys.stdout.close()


if __name__ == "__main__":
    main()
