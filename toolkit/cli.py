"""The `toolkit` command. Every body is an import and a call, so that `--help` is instant."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from toolkit.errors import UsageError
from toolkit.strategies import STRATEGIES

app = typer.Typer(
    help="Fine-tune one causal LM under any backend, and see memory, speed and loss side by side.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
configs = typer.Typer(
    help="Accelerate YAML and DeepSpeed JSON for each strategy.", no_args_is_help=True
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


StrategyName = Annotated[str, typer.Argument(help=f"One of: {', '.join(STRATEGIES)}.")]
NumProcesses = Annotated[
    int | None, typer.Option("--num-processes", "--num_processes", help="Ranks in all.")
]


@configs.command("list")
def configs_list() -> None:
    """List the strategies, and what each one shards."""
    width = max(map(len, STRATEGIES))
    for strategy in STRATEGIES.values():
        typer.echo(f"{strategy.name:<{width}}  {strategy.num_processes}  {strategy.summary}")


@configs.command("show")
def configs_show(name: StrategyName) -> None:
    """Print a strategy's files."""
    from toolkit.configs import render_configs
    from toolkit.strategies import get_strategy

    json_file = Path("deepspeed_configs") / f"{name}.json"
    launcher, deepspeed = render_configs(get_strategy(name), deepspeed_json=json_file)
    typer.echo(f"# accelerate_configs/{name}.yaml\n{launcher}")
    if deepspeed is not None:
        typer.echo(f"# {json_file}\n{deepspeed}")


@configs.command("write")
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


@configs.command("path")
def configs_path(name: StrategyName) -> None:
    """Print the path of a strategy's YAML, for `accelerate launch --config_file`."""
    from toolkit.configs import cached_configs
    from toolkit.strategies import get_strategy

    typer.echo(cached_configs(get_strategy(name)).accelerate)


@app.command()
def compare(
    strategies: Annotated[
        str | None, typer.Option(help="Names with commas between; the usual six if left out.")
    ] = None,
    engine: Annotated[Engine, typer.Option(help="The HF Trainer, the loop, or both.")] = (
        Engine.trainer
    ),
    max_steps: Annotated[
        int, typer.Option("--max_steps", "--max-steps", help="Optimizer steps compared.")
    ] = 20,
    num_processes: Annotated[
        int, typer.Option("--num_processes", "--num-processes", help="Ranks of every run.")
    ] = 2,
    precision: Annotated[Precision, typer.Option(help="Of every run.")] = Precision.no,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder of the comparison. Given again, finished runs are kept."),
    ] = None,
    global_batch_size: Annotated[
        int,
        typer.Option("--global_batch_size", "--global-batch-size", help="Rows per optimizer step."),
    ] = 16,
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
    train_flags: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- FLAGS]", help="Flags of toolkit.train, after --."),
    ] = None,
) -> None:
    """Train one causal LM under many strategies, and show them side by side."""
    from rich.console import Console

    from toolkit.comparing.plan import DEFAULT_STRATEGIES, CompareOptions
    from toolkit.comparing.schedule import compare as run

    names = DEFAULT_STRATEGIES if strategies is None else tuple(_names(strategies))
    options = CompareOptions(
        strategies=names,
        engine=engine.value,
        max_steps=max_steps,
        num_processes=num_processes,
        precision=precision.value,
        global_batch_size=global_batch_size,
        gradient_accumulation_steps=accumulation,
        throughput_steps=throughput_steps,
        timeout=timeout,
        nvme_path=nvme_path,
        output=output,
        train_flags=tuple(train_flags or ()),
    )
    raise typer.Exit(run(options, console=Console()))


def _names(text: str) -> list[str]:
    return [name for part in text.split(",") if (name := part.strip())]


def main() -> None:
    """Run the command; a mistake of the user's is one sentence and exit code 2."""
    try:
        app()
    except UsageError as error:
        print(f"toolkit: {error}", file=sys.stderr)  # noqa: T201
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
