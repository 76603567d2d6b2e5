"""What a launcher (torchrun, mpirun, srun) says to the processes that it starts."""

from collections.abc import Mapping
from dataclasses import dataclass

from llmbuild.errors import UserError

# Of this process and of all. A batch script of Slurm has SLURM_NTASKS too, though it runs alone;
# srun alone sets the number of a step's tasks.
_CONVENTIONS = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)
_MAX_PORT = 65535


@dataclass(frozen=True)
class Launch:
    """This process is one rank; rank 0 is met at address and port."""

    rank: int
    num_ranks: int
    address: str
    port: int


def read_launch(environment: Mapping[str, str], num_ranks: int) -> Launch | None:
    """This process's part in running an engine of so many ranks; None where no launcher has
    started several processes. Raises UserError for what doesn't fit or can't be read."""
    for rank_name, size_name in _CONVENTIONS:
        if rank_name not in environment or size_name not in environment:
            continue
        size = _whole_number(environment, size_name, 1, None)
        if size == 1:
            continue
        if size != num_ranks:
            raise UserError(
                f"{size_name} is {size}, but the engine has {num_ranks} ranks; start {num_ranks} "
                f"processes, or unset {size_name} to run all ranks from one"
            )
        rank = _whole_number(environment, rank_name, 0, size - 1)
        return Launch(rank, size, _address(environment, size_name), _port(environment))
    return None


def _address(environment: Mapping[str, str], size_name: str) -> str:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not environment.get(name):
            raise UserError(
                f"{name} isn't set, though {size_name} says that a launcher has started several "
                "processes; set MASTER_ADDR and MASTER_PORT to where rank 0 can be reached, or "
                f"unset {size_name} to run all ranks from one process"
            )
    return environment["MASTER_ADDR"]


def _port(environment: Mapping[str, str]) -> int:
    """MASTER_PORT, or the next where torchrun's agent listens on that itself."""
    is_taken = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return _whole_number(environment, "MASTER_PORT", 1, _MAX_PORT - is_taken) + is_taken


def _whole_number(environment: Mapping[str, str], name: str, least: int, most: int | None) -> int:
    text = environment[name]
    is_number = text.isascii() and text.isdecimal() and len(text) < 10
    if not is_number or int(text) < least or (most is not None and int(text) > most):
        range_text = f">= {least}" if most is None else f"from {least} to {most}"
        raise UserError(f"{name} is {text!r}; it must be a whole number {range_text}")
    return int(text)
