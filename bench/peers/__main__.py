"""Compares ours with other engines on this machine: python -m bench.peers."""

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from bench import report as output
from bench.peers import report
from bench.peers.convert import convert
from bench.peers.install import install, missing
from bench.peers.run import compare
from bench.peers.variants import OURS, PEERS, VARIANTS, Variant
from bench.peers.work_folder import Unavailable, WorkFolder
from bench.peers.workload import make_cases

CASES = {case.name: case for case in make_cases()}


@click.command()
@click.option(
    "--only",
    "peers",
    type=click.Choice(list(PEERS)),
    multiple=True,
    help="These peers alone; may be repeated.",
)
@click.option("--cases", "names", type=click.Choice(list(CASES)), multiple=True)
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--threads", type=int, default=2, show_default=True)
@click.option(
    "--patience",
    "patience_s",
    type=click.FloatRange(min=0),
    default=30,
    show_default=True,
    metavar="SECONDS",
    help="For how long a run is put off, or repeated, while other processes work.",
)
@click.option("--prepare-only", is_flag=True, help="Install and convert, and measure nothing.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), metavar="FILE")
@click.option("--out", "out_path", type=click.Path(path_type=Path), metavar="FILE.md")
def main(
    peers: tuple[str, ...],
    names: tuple[str, ...],
    repeats: int,
    threads: int,
    patience_s: float,
    prepare_only: bool,
    json_path: Path | None,
    out_path: Path | None,
) -> None:
    """Rates, load time and memory of ours and of other engines, on the same requests.

    What isn't there yet is installed and converted before, below llmbuild's cache. Exit code 1 if
    ours or every peer is missing.
    """
    output.check_output(json_path)
    output.check_output(out_path)
    work = WorkFolder.default()
    models, absent = prepare(peers or tuple(PEERS), work)
    if prepare_only:
        for name, reason in absent.items():
            say(f"{name}: {reason}")
        return
    cases = [CASES[name] for name in names or CASES]
    comparison = compare(models, cases, repeats, threads, patience_s, work, say)
    comparison.absent.update(absent)
    text = report.write(comparison, cases)
    click.echo(text)
    if out_path is not None:
        out_path.write_text(text)
    if json_path is not None:
        output.write_json(json_path, comparison)
    present = {result.variant.peer for result in comparison.results}
    if OURS not in present or present == {OURS}:
        sys.exit(1)


def prepare(peers: Sequence[str], work: WorkFolder) -> tuple[dict[Variant, Path], dict[str, str]]:
    """Each variant's model, once its peer is installed; and why others are absent."""
    work.root.mkdir(parents=True, exist_ok=True)
    absent = {}
    to_install = missing(peers, work)
    if to_install:
        size = sum(peer.download_mb for peer in to_install)
        names = ", ".join(peer.name for peer in to_install)
        say(f"installing {names} into {work.root}: about {size} MB to download")
    for peer in to_install:
        say(f"installing {peer.name}")
        try:
            install(peer, work)
        except Unavailable as error:
            absent[peer.name] = str(error)
    models = {}
    for variant in VARIANTS:
        if variant.peer in (OURS, *peers) and variant.peer not in absent:
            say(f"preparing {variant.name}")
            try:
                models[variant] = convert(variant, work)
            except Unavailable as error:
                absent[variant.name] = str(error)
    return models, absent


def say(line: str) -> None:
    click.echo(line, err=True)


if __name__ == "__main__":
    output.run(main)
