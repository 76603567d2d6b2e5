"""`llmbuild verify`."""

import os
from pathlib import Path

import click

from llmbuild.errors import EngineError, SourceError, UserError


@click.command("verify")
@click.argument("engine_dir", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--emulate",
    is_flag=True,
    help="For an engine of tensorrt or tensorrt-rtx, without a GPU: run on the CPU the networks "
    "that its plans were built of. They are made again from the engine's recipe, whose model has "
    "to be there; a relative path is looked up from the current folder.",
)
def verify_command(engine_dir: Path, emulate: bool) -> None:
    """Check an engine's files and results on this machine.

    Every file of the engine DIR is checked, then its verification steps are replayed. Where an
    engine's GPU is missing, --emulate replays them in the network that its plans were built of.
    """
    from llmbuild.runtime.engine import check_files, check_plans, open_engine
    from llmbuild.runtime.manifest import read_manifest
    from llmbuild.runtime.replay import STEPS_FILE, load_steps, relative_difference, replay
    from llmbuild.runtime.target import CpuTarget

    if emulate:
        manifest = read_manifest(engine_dir)
        if isinstance(manifest.target, CpuTarget):
            raise UserError("--emulate is for engines that need a GPU, and this one is for cpu")
        check_files(engine_dir, manifest)
        check_plans(engine_dir, manifest)
        click.echo(f"{len(manifest.files)} files are as published; emulated, not run on a GPU")
        os.environ["TRITON_INTERPRET"] = "1"  # plugins; read when Triton is imported, with torch
        from llmbuild.builder.emulate_engine import emulate_engine
        from llmbuild.builder.sources.progress import stderr_progress

        steps = load_steps(engine_dir / STEPS_FILE)
        try:
            logits = emulate_engine(engine_dir, manifest, steps, Path.cwd(), stderr_progress())
        except SourceError as error:
            raise UserError(f"{error}; with --emulate it starts at the current folder") from error
    else:
        engine = open_engine(engine_dir)
        count = len(engine.manifest.files)
        click.echo(f"{count} files are as published; runs as {engine.variant}")
        steps = load_steps(engine_dir / STEPS_FILE)
        logits = replay(engine, steps)
    worst = 0.0
    for batch, got, want in zip(steps.batches, logits, steps.logits, strict=True):
        difference = relative_difference(got[:, steps.columns], want)
        worst = max(worst, difference)
        shape = f"{batch.num_tokens:4} tokens of {batch.num_sequences:2} sequences"
        click.echo(f"{shape}: logits differ by {difference:.1e} of the largest")
    if not worst <= steps.tolerance:
        raise EngineError(
            f"{engine_dir} computes other logits here than its reference: they differ by "
            f"{worst:.1e}, and {steps.tolerance:.1e} is allowed; don't serve with it"
        )
    click.echo(f"verified: at most {worst:.1e}, allowed {steps.tolerance:.1e}")
