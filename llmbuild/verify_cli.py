"""`llmbuild verify`."""

from pathlib import Path

import click

from llmbuild.errors import EngineError


@click.command("verify")
@click.argument("engine_dir", metavar="DIR", type=click.Path(path_type=Path))
def verify_command(engine_dir: Path) -> None:
    """Check an engine's files and results on this machine.

    Every file of the engine DIR is checked, then its verification steps are replayed.
    """
    from llmbuild.runtime.engine import open_engine
    from llmbuild.runtime.replay import STEPS_FILE, load_steps, relative_difference, replay

    engine = open_engine(engine_dir)
    click.echo(f"{len(engine.manifest.files)} files are as published; runs as {engine.variant}")
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
