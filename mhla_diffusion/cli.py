"""The command `mhla`. Each subcommand checks what was typed and calls the library, which does the work.

Exit status: 0 done; 1 some prompts failed, the others are drawn; 2 a mistake in what was typed, nothing was
done; 3 weights are missing; 4 a part of a protocol failed, the others are scored; 130 interrupted. Heavy modules
are imported only by the subcommand that needs them.
"""

import argparse
import difflib
import gc
import json
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from mhla_diffusion.evaluation.bench_commands import add_bench
from mhla_diffusion.evaluation.commands import add_eval
from mhla_diffusion.weights import DEFAULT_PIPELINE


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose complaints are one line and name the nearest option."""

    def __init__(self, **kwargs):
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (see {self.prog} --help)")

    def parse_args(self, args=None, namespace=None):
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            chosen = getattr(parsed, "parser", self)
            if not unknown[0].startswith("-"):
                chosen.error(f"unexpected {unknown[0]!r}: put what has no option before the first option")
            near = difflib.get_close_matches(unknown[0].split("=")[0], chosen._option_string_actions, n=1)
            hint = f", did you mean {near[0]}?" if near else ""
            chosen.error(f"unknown option {unknown[0]}{hint}")
        return parsed


def number_list(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number or numbers joined by commas") from None


def layer_choice(text: str) -> str | list[int]:
    """Layers as typed: "all", "none", a share such as "2/3", or numbers joined by commas."""
    if text in ("all", "none") or "/" in text:
        return text
    return number_list(text)


def build_parser() -> OneLineParser:
    parser = OneLineParser(
        prog="mhla", description="Diffusion transformers with multi-head linear attention."
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=OneLineParser)
    add_generate(commands)
    add_env(commands)
    add_train(commands)
    add_convert(commands)
    add_eval(commands, add_command, OneLineParser)
    add_bench(commands, add_command, OneLineParser)
    return parser


def add_command(commands, name: str, run, summary: str, epilog: str | None = None) -> OneLineParser:
    parser = commands.add_parser(name, help=summary, description=summary, epilog=epilog)
    parser.add_argument("--traceback", action="store_true", help="on an error show where it arose")
    parser.set_defaults(run=run, parser=parser)
    return parser


def add_generate(commands) -> None:
    parser = add_command(
        commands,
        "generate",
        run_generate,
        "Draw a picture, or with a text-to-video pipeline make a video, for each prompt.",
        "Every PNG or mp4 carries its settings, and a JSON with the same lies beside it. Files that are there "
        "already with the same settings are skipped. Exit status 1 if some prompts failed, the others drawn.",
    )
    add = parser.add_argument
    add("prompts", nargs="*", metavar="PROMPT", help="what to draw; of a DiT, names or numbers of classes")
    add("--prompts", dest="prompt_file", metavar="FILE", help="text file with one prompt a line")
    add("--vbench-plan", metavar="PLAN.json",
        help="what `mhla eval vbench plan` wrote: its prompts, seeds and file names")  # fmt: skip
    add("--pipeline", default=DEFAULT_PIPELINE, help="folder or name of a pipeline (default: %(default)s)")
    add("--seed", "--seeds", dest="seeds", type=number_list, metavar="N[,N...]",
        help="one seed for all prompts or one per prompt, joined by commas (default: 0)")  # fmt: skip
    add("--steps", type=int, help="denoising steps (default: the pipeline's)")
    add("--guidance", type=float, help="classifier-free guidance scale (default: the pipeline's)")
    add("--height", type=int, help="pixels (default: the pipeline's)")
    add("--width", type=int, help="pixels (default: the pipeline's)")
    add("--frames", type=int, help="of a video, such as 17 or 81 (default: the pipeline's)")
    add("--fps", type=float, help="frames a second of a video (default: the pipeline's)")
    add("--gif", action="store_true", help="also each video as a GIF")
    add("--out", default="outputs", metavar="FOLDER", help="where the files go (default: %(default)s)")
    add("--batch-size", type=int, help="how many are drawn at a time (default: 4 pictures or 1 video)")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: %(default)s)")
    add("--dtype", default="auto", help="auto, float32, bfloat16 or float16 (default: %(default)s)")
    add("--offload", metavar="model|sequential",
        help="keep weights that do not compute off the GPU: whole models or single layers (slowest)")  # fmt: skip
    add("--overwrite", action="store_true", help="draw again what is there already")
    add("--sheet", metavar="FILE", help="also write a contact sheet of all pictures (.png or .webp)")
    add("--columns", type=int, default=4, help="columns of the contact sheet (default: %(default)s)")


def wait_asleep() -> None:
    """Let OpenMP's threads sleep soon while they wait for each other; before torch is loaded, and if nothing is set.

    By default (GNU's library) they spin for milliseconds, in which other programs on the same cores cannot run.
    """
    if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def run_generate(args: argparse.Namespace) -> int:
    wait_asleep()
    from mhla_diffusion.pipelines.generation import generate
    from mhla_diffusion.pipelines.requests import read_prompts

    if sum(map(bool, (args.prompts, args.prompt_file, args.vbench_plan))) != 1:
        raise ValueError(
            'give either prompts or a file of them or a plan: mhla generate "a 3D emoji of a red apple"'
        )
    names = None
    if args.vbench_plan:
        from mhla_diffusion.evaluation.vbench.plan import read_plan
        from mhla_diffusion.pipelines.requests import makes_videos
        from mhla_diffusion.weights import find_pipeline

        if args.seeds is not None:
            raise ValueError(
                "the plan has a seed for each video: leave --seed out, or make a plan with another"
            )
        videos = read_plan(args.vbench_plan)["videos"]
        if not makes_videos(find_pipeline(args.pipeline)):
            raise ValueError(
                f"{args.vbench_plan} is a plan of videos, and {args.pipeline} makes none of texts: give a "
                "text-to-video pipeline with --pipeline"
            )
        prompts, args.seeds, names = ([row[key] for row in videos] for key in ("prompt", "seed", "file"))
    else:
        prompts = read_prompts(args.prompt_file) if args.prompt_file else args.prompts
    report = generate(
        prompts,
        pipeline=args.pipeline,
        seeds=args.seeds if args.seeds is not None else [0],
        names=names,
        steps=args.steps,
        guidance=args.guidance,
        height=args.height,
        width=args.width,
        frames=args.frames,
        fps=args.fps,
        gif=args.gif,
        out=args.out,
        batch_size=args.batch_size,
        device=args.device,
        dtype=args.dtype,
        offload=args.offload,
        overwrite=args.overwrite,
        sheet=args.sheet,
        columns=args.columns,
    )
    print(f"{report.summary()} in {args.out}" + (f", contact sheet in {args.sheet}" if args.sheet else ""))
    for index, reason in report.failed.items():
        print(f"mhla: prompt {index} failed: {reason}", file=sys.stderr)
    return 1 if report.failed else 0


def add_env(commands) -> None:
    parser = add_command(
        commands, "env", run_env, "Print versions, device, attention backend and weights found."
    )
    parser.add_argument("--json", action="store_true", help="as JSON")


def run_env(args: argparse.Namespace) -> int:
    from mhla_diffusion.environment import as_text, describe_environment

    facts = describe_environment()
    print(json.dumps(facts, indent=2) if args.json else as_text(facts))
    return 0


def add_train(commands) -> None:
    parser = add_command(commands, "train", run_train, "Train by a recipe (TOML), or go on with a run.")
    parser.add_argument("recipe", metavar="RECIPE", help="for example train/recipes/<name>.toml")
    parser.add_argument(
        "--set",
        dest="overrides",
        nargs="+",
        action="extend",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="values that take the place of the recipe's, for example run.steps=10",
    )
    parser.add_argument(
        "--resume",
        default="auto",
        metavar="auto|none|PATH",
        help="go on from the newest checkpoint, from none, or from this one (default: %(default)s)",
    )


def run_train(args: argparse.Namespace) -> int:
    wait_asleep()
    from mhla_diffusion.training.recipe import load_recipe

    load_recipe(args.recipe, args.overrides)  # names mistakes before torch is imported, which takes seconds

    collects = gc.isenabled() and "torch" not in sys.modules
    if collects:
        gc.disable()  # what modules leave behind stays: to look through it for garbage takes a quarter of their time
    from mhla_diffusion.training.loop import run

    if collects:
        gc.freeze()  # nor is it looked through later
        gc.enable()
    run(args.recipe, args.overrides, args.resume)
    return 0


def add_convert(commands) -> None:
    parser = add_command(
        commands,
        "convert",
        run_convert,
        "Turn a DiT, SANA, SANA-Video or Wan model into an MHLA one, or give an MHLA model another grid of blocks.",
        "A converted stock model computes MHLA with untrained mixing coefficients: fine-tune it before use. An "
        "MHLA model's matrices are interpolated. Nothing is written before all is checked: every key that is "
        "unexpected or missing, sizes, shards, and the sha256 beside a file. A pickled checkpoint is read without "
        "running what is in it.",
    )
    add = parser.add_argument
    add("source", metavar="SOURCE", help="pipeline or transformer folder in Diffusers' layout, or a checkpoint file "
        "or folder of the original DiT, SANA, SANA-Video, Wan or MHLA code")  # fmt: skip
    add(
        "out",
        metavar="OUT",
        help="new folder: a pipeline if SOURCE is one or --pipeline is given, else a model",
    )
    add("--block-grid", type=number_list, metavar="[FRAMES,]ROWS,COLUMNS",
        help="blocks of tokens per axis (default: 4,4; video: 3,5,10; an MHLA checkpoint's own)")  # fmt: skip
    add("--layers", type=layer_choice, metavar="all|none|2/3|N[,N...]",
        help="layers that become MHLA (default: all; 2/3: not 0, 3, 6, ...); an MHLA model keeps its own")  # fmt: skip
    add("--from", dest="layout", default="auto", metavar="LAYOUT",
        help="auto, diffusers, dit, sana, sana-sprint, sana-video, wan, or the released MHLA code's: official (DiT), "
        "wan-mhla "
        "(default: %(default)s)")  # fmt: skip
    add("--config", metavar="FILE",
        help="JSON with arguments of the model that an original checkpoint does not tell")  # fmt: skip
    add("--gate", action="store_true", help="add an output gate, which starts neutral")
    add("--local-conv", type=int, metavar="SIZE", help="add a local convolution of this size, 3 in the paper")
    add("--variant", metavar="NAME", help="which weights of a folder to take, for example fp16")
    add("--weights", metavar="ENTRY",
        help="which entry of a checkpoint to take, for example model (default: ema if there is one)")  # fmt: skip
    add("--pipeline", metavar="FOLDER",
        help="with a checkpoint file: a pipeline folder whose other components OUT gets")  # fmt: skip
    add("--dry-run", action="store_true", help="check everything, print what each key becomes, write nothing")


def run_convert(args: argparse.Namespace) -> int:
    from mhla_diffusion.pipelines.conversion import convert_folder

    # A process that is told to stop would leave gigabytes of a half-written folder behind.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        done = convert_folder(
            args.source,
            args.out,
            block_grid=args.block_grid,
            layers=args.layers,
            layout=args.layout,
            config=args.config,
            gate=args.gate,
            local_conv=args.local_conv,
            variant=args.variant,
            weights=args.weights,
            pipeline=args.pipeline,
            dry_run=args.dry_run,
        )
    finally:
        signal.signal(signal.SIGTERM, before)
    for line in done.key_map() if args.dry_run else ():
        print(line)
    for line in done.report():
        print(line)
    print("nothing written (--dry-run)" if args.dry_run else f"{args.out} written")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        args = build_parser().parse_args(arguments)
        if not hasattr(args, "run"):
            build_parser().print_help()
            return 0
        status = args.run(args)
        if sys.stdout is not None:
            sys.stdout.flush()  # at exit it would be too late to say nothing of a reader that is gone
        return status
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains at exit
        return 1
    except (ValueError, OSError) as error:
        if "--traceback" in arguments:
            raise
        print(f"mhla: {' '.join(str(error).split())}", file=sys.stderr)
        return getattr(error, "exit_status", 2)
    except KeyboardInterrupt:
        print("mhla: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
