"""The command line: a group of commands, each of which lives beside its subject."""

import errno
import signal
import sys
from importlib import import_module
from types import FrameType

import click

from llmbuild.errors import InternalError, RankError, UserError
from llmbuild.version import __version__

_HOMES = {  # of each command, which is imported when it's asked for
    "compile": "llmbuild.builder.compile_cli:compile_command",
    "eval": "llmbuild.quant.evaluation.cli:eval_group",
    "fetch": "llmbuild.builder.fetch_cli:fetch_command",
    "generate": "llmbuild.runtime.generate_cli:generate_command",
    "inspect": "llmbuild.runtime.inspect_cli:inspect",
    "kernels": "llmbuild.builder.targets.gpu.kernels_cli:kernels_command",
    "models": "llmbuild.builder.models.models_cli:models_command",
    "plan": "llmbuild.builder.planning.cli:plan_command",
    "verify": "llmbuild.verify_cli:verify_command",
}


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_HOMES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _HOMES:
            return None
        module, _, name = _HOMES[cmd_name].partition(":")
        command = getattr(import_module(module), name)
        assert isinstance(command, click.Command)
        return command


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="llmbuild")
def cli() -> None:
    """Compile a decoder LLM ahead of time, and run the engine."""


# Space, quota, file size, descriptors, memory: nothing that llmbuild could have foreseen.
_SYSTEM_LACKS = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.ENOMEM),
    *(errno.EROFS, errno.EIO),
}


def main() -> None:
    """Exit codes: 0 done, 2 the user's to mend (one message), 1 a fault of llmbuild's or of a rank;
    128 and the signal's number where one ended the command."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as it is under nohup
            signal.signal(number, _leave)
    try:
        cli()
    except UserError as error:
        sys.exit(_fail(str(error), 2))
    except RankError as error:
        sys.exit(_fail(str(error), 1))
    except InternalError as error:
        sys.exit(_fail(f"{error}\nThis is a fault of llmbuild.", 1))
    except OSError as error:
        if error.errno not in _SYSTEM_LACKS:
            raise
        where = f"{error.filename}: " if error.filename else ""
        sys.exit(_fail(f"the system refused to go on: {where}{error.strerror}; free some first", 2))
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "llmbuild":
            raise
        message = (
            f"{error.name} isn't installed; `pip install '.[build]'` in llmbuild's checkout has it"
        )
        sys.exit(_fail(message, 2))


def _leave(number: int, frame: FrameType | None) -> None:
    """Unwinds, so that what was begun is removed: a compile's staging directory for one."""
    sys.exit(128 + number)


def _fail(message: str, code: int) -> int:
    click.echo(f"Error: {message}", err=True)
    return code
