"""Drives llama-server over HTTP: a server for each number of requests that come together."""

import http.client
import json
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.peers.drivers.line_protocol import (
    FIRST_TOKEN,
    Generation,
    Setup,
    die_with_parent,
    serve,
)

SERVER = Path(sys.prefix) / "build" / "bin" / "llama-server"
SLOT_TOKENS = 64  # a slot's context is a multiple of it
START_LIMIT_S = 60


class Server:
    """llama-server with `slots` places of `slot_tokens` tokens each, which has given a token."""

    def __init__(self, model: str, setup: Setup, slots: int, slot_tokens: int) -> None:
        self.port = _free_port()
        threads = str(setup.threads)
        command = [
            *(str(SERVER), "-m", model, "-t", threads, "-tb", threads),
            *("-np", str(slots), "-c", str(slots * slot_tokens), "-b", "2048", "-ub", "512"),
            *("--port", str(self.port), "--no-webui", "--no-warmup"),
            *("--no-cache-prompt", "--cache-ram", "0"),
        ]
        places = ",".join(f"{{{processor}}}" for processor in setup.processors)
        start = time.perf_counter()
        self.process = subprocess.Popen(
            command,
            env=os.environ | {"OMP_PROC_BIND": "true", "OMP_PLACES": places},
            preexec_fn=die_with_parent,
        )
        while not self._is_healthy():
            if self.process.poll() is not None or time.perf_counter() - start > START_LIMIT_S:
                raise RuntimeError("llama-server did not start")
            time.sleep(0.002)
        self.complete([FIRST_TOKEN], 1)
        self.load_s = time.perf_counter() - start

    def complete(self, prompt: list[int], new_tokens: int) -> tuple[int, float]:
        """The number of output tokens, and the server's seconds from the first to the last."""
        request = {
            "prompt": prompt,
            "n_predict": new_tokens,
            "temperature": 0,
            "top_k": 1,
            "samplers": ["top_k"],
            "ignore_eos": True,
            "cache_prompt": False,
        }
        body = json.dumps(request)
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        connection.request("POST", "/completion", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
        if response.status != 200:
            raise RuntimeError(text)
        reply = json.loads(text)
        return reply["tokens_predicted"], reply["timings"]["predicted_ms"] / 1e3

    def _is_healthy(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()


class LlamaCpp:
    load_s: float | None
    pid: int

    def __init__(self, model: str, setup: Setup) -> None:
        self.model, self.setup = model, setup
        self.servers: dict[int, Server] = {}
        server = self._server(1, setup.max_sequence)
        self.load_s = server.load_s
        self.versions = self._version()

    def generate(self, prompts: list[list[int]], new_tokens: list[int]) -> Generation:
        longest = max(len(p) + n for p, n in zip(prompts, new_tokens, strict=True))
        server = self._server(len(prompts), longest)
        with ThreadPoolExecutor(len(prompts)) as pool:
            start = time.perf_counter()
            replies = list(pool.map(server.complete, prompts, new_tokens))
            total_s = time.perf_counter() - start
        decode_s = max(seconds for _, seconds in replies)
        return Generation(total_s - decode_s, total_s, [count for count, _ in replies])

    def _server(self, slots: int, longest: int) -> Server:
        if slots not in self.servers:
            slot_tokens = -(-longest // SLOT_TOKENS) * SLOT_TOKENS
            self.servers[slots] = Server(self.model, self.setup, slots, slot_tokens)
        self.pid = self.servers[slots].process.pid
        return self.servers[slots]

    def _version(self) -> str:
        done = subprocess.run([SERVER, "--version"], capture_output=True, text=True, check=True)
        line = next(line for line in (done.stdout + done.stderr).splitlines() if "version" in line)
        return "llama.cpp " + line.partition(":")[2].strip()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    serve(LlamaCpp)
