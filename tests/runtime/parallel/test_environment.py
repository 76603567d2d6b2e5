"""What launchers say is understood, and what they can't have meant is refused in a line."""

import pytest

from llmbuild.errors import UserError
from llmbuild.runtime.parallel.environment import Launch, read_launch

MASTER = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
TORCHRUN = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    "said",
    [
        TORCHRUN,
        {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"},
        {"PMI_RANK": "2", "PMI_SIZE": "4"},
        {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4"},
        # srun starts torchrun, which starts the ranks.
        {**TORCHRUN, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"},
        # One process of srun's on each of two nodes, with a launcher of another kind in each.
        {"RANK": "0", "WORLD_SIZE": "1", "PMI_RANK": "2", "PMI_SIZE": "4"},
    ],
)
def test_every_launcher_is_understood(said):
    assert read_launch({**said, **MASTER}, 4) == Launch(2, 4, "node1", 29500)


@pytest.mark.parametrize(
    "said",
    [
        {},
        MASTER,
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"WORLD_SIZE": "4"},
        {"RANK": "3"},
        # A batch script of Slurm runs alone, whatever srun is to start in it.
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"},
    ],
)
def test_process_that_no_launcher_has_started_runs_all_ranks(said):
    assert read_launch(said, 4) is None


def test_port_that_torchrun_listens_on_is_left_to_it():
    launch = read_launch({**TORCHRUN, **MASTER, "TORCHELASTIC_USE_AGENT_STORE": "True"}, 4)
    assert launch == Launch(2, 4, "node1", 29501)


def test_other_number_of_processes_than_the_engine_has_ranks_is_refused_with_both():
    with pytest.raises(UserError, match=r"WORLD_SIZE is 4, but the engine has 3 ranks"):
        read_launch({**TORCHRUN, **MASTER}, 3)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"RANK": "4"}, "RANK is '4'; it must be a whole number from 0 to 3"),
        ({"RANK": "-1"}, "RANK is '-1'"),
        ({"RANK": ""}, "RANK is ''"),
        ({"RANK": "\u0661"}, "RANK is"),
        ({"WORLD_SIZE": "four"}, "WORLD_SIZE is 'four'; it must be a whole number >= 1"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0'"),
        ({"WORLD_SIZE": "9" * 5000}, "WORLD_SIZE is"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT is '0'; it must be a whole number from 1 to 65535"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT is '65536'"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT is 'http'"),
        ({"MASTER_PORT": ""}, "MASTER_PORT isn't set"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR isn't set"),
    ],
)
def test_bad_value_is_named_in_one_line(said, told):
    with pytest.raises(UserError) as caught:
        read_launch({**TORCHRUN, **MASTER, **said}, 4)
    assert str(caught.value).startswith(told)
    assert "\n" not in str(caught.value)
