"""Other ranks whose processes rank 0 has started."""

from llmbuild.errors import EngineError
from llmbuild.runtime.parallel.messages import Kind
from llmbuild.runtime.parallel.peers import Peers
from llmbuild.runtime.parallel.process import RankProcess, end_all


class ProcessPeers(Peers):
    """They end with this."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__({}, timeout_s)
        self._processes: dict[int, RankProcess] = {}

    def add(self, rank: int, process: RankProcess) -> None:
        self._processes[rank] = process
        self._channels[rank] = process.channel

    def set_up(self, rank: int, setup: bytes) -> None:
        """Tell a rank what it is to open. Raises EngineError where it is gone."""
        try:
            self._channels[rank].send(Kind.SETUP, setup)
        except OSError as error:
            raise EngineError(self.describe(rank, is_gone=True)) from error

    def describe(self, rank: int, is_gone: bool) -> str:
        if rank == 0:
            return f"rank 0, this process, kept the others waiting for {self.timeout_s:g} s"
        process = self._processes[rank]
        silent = f"didn't answer within {self.timeout_s:g} s (rank_timeout_s)"
        how = process.how_it_ended() if is_gone else silent
        return f"rank {rank} (process {process.id}) {how}"

    def _end(self, is_asked: bool) -> None:
        end_all([*self._processes.values()], is_asked=is_asked)
