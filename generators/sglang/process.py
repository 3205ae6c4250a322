"""Starts, watches and ends one SGLang server, with everything that it leaves behind."""

import asyncio
import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import psutil

from slipstream.generators.config import GeneratorSettings
from slipstream.generators.sglang.patches import GROUP_TIMEOUT_VARIABLE, SEEDS_VARIABLE
from slipstream.weightbus.net.interfaces import interface_variables
from slipstream.wire.errors import ChildDiedError, ConfigError
from slipstream.wire.process.environment import handed_on
from slipstream.wire.process.patience import Patience, signs_of
from slipstream.wire.process.processes import bound_to_me, last_lines

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 where SGLang puts it
_NOTES = "shared-memory.txt"
_RENDEZVOUS = "rendezvous"
_POLL_S = 0.25
_ANSWER_S = 4.0  # limit for one probe
_STOP_S = 3.0
_VARIABLES_OF_ENGINES = (
    *("SGLANG_", "SGL_", "NCCL_", "GLOO_", "TORCH", "PYTORCH_", "TRITON_", "FLASHINFER_", "DG_"),
    *("CUTE_", "CUTLASS_", "TRTLLM_", "NVSHMEM_", "UCX_", "MC_", "MLX5_", "IBV_", "RDMAV_", "FI_"),
    *("ROCM_", "HIP_", "HSA_", "ROCR_", "AITER_", "RCCL_", "GPU_", "CC", "CXX", "CPATH"),
    *("LIBRARY_PATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "MAX_JOBS"),
)
_INIT_METHOD = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"
_HOST = "127.0.0.1"
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_USUAL_FIRST_PORT = 32_768
_LOWEST_PORT = 20_000
_PORT_TRIES = 100


@dataclass(slots=True)
class SglangProcess:
    """A server in its own session; its API key is neither in argv nor in a file."""

    process: "subprocess.Popen[bytes]"
    url: str
    api_key: str = field(repr=False)
    log_file: Path
    scratch: Path  # private folder for its temporary files

    @classmethod
    def start(cls, settings: GeneratorSettings, name: str) -> "SglangProcess":
        """Start a server; it answers some seconds later (see ``until_ready``)."""
        port = free_port()
        api_key = random_api_key()
        scratch = Path(tempfile.mkdtemp(prefix=f"{name}-"))
        order = {
            "parent_pid": os.getpid(),
            "device": settings.device,
            "flags": server_flags(settings, port=port, api_key=api_key, seed_of=name),
        }
        log_file = settings.run.logs / f"{name}-sglang.log"
        log_file.parent.mkdir(parents=True, exist_ok=True)
        with log_file.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "slipstream.generators.sglang.server"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=_environment(settings, scratch),
                preexec_fn=bound_to_me(),
            )
        if process.stdin is not None:
            process.stdin.write(json.dumps(order).encode())
            process.stdin.close()
        url = f"http://{_HOST}:{port}"
        return cls(process, url, api_key, log_file, scratch)

    async def until_ready(self, timeout_s: float) -> None:
        """Return once the server answers.

        Args:
            timeout_s: without a sign of life.

        Raises:
            ConfigError: it ended.
            ChildDiedError: it shows no sign of life, or has been busy for far too long; with its
                last lines.
        """
        headers = {"Authorization": f"Bearer {self.api_key}"}
        patience = Patience(
            "SGLang to load the model and answer",
            timeout_s,
            signs_of(lambda: [self.process.pid], self.log_file),
        )
        async with aiohttp.ClientSession(headers=headers) as http:
            while not await _answers(http, self.url):
                code = self.process.poll()
                if code is not None:  # it was given no chance
                    reason = last_lines(self.log_file, 1).strip()
                    raise ConfigError(
                        f"SGLang ended with code {code} at its start: {reason} "
                        f"(run.model, [generators], {self.log_file})"
                    )
                self.note_shared_memory()
                if patience.is_over():
                    raise ChildDiedError(
                        f"SGLang does not answer: it {patience.why} "
                        f"(generators.start_timeout_s)\n{last_lines(self.log_file)}"
                    )
                await asyncio.sleep(_POLL_S)

    def note_shared_memory(self) -> None:
        """Record which shared memory the server holds: once it is killed, nothing else does."""
        held: set[str] = set()
        for pid in session_members(self.process.pid):
            with suppress(OSError):
                lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
                held.update(line.split()[-1] for line in lines if str(_SHARED_MEMORY) in line)
        if held:
            (self.scratch / _NOTES).write_text("\n".join(sorted(held)))

    def check_alive(self) -> None:
        """Raise ChildDiedError, with the last lines of the log, if the server ended."""
        code = self.process.poll()
        if code is not None:
            raise ChildDiedError(
                f"SGLang ended with code {code}; {self.log_file}:\n{last_lines(self.log_file)}"
            )

    def stop(self) -> None:
        """End the server. It drains without limit on SIGTERM, so it gets little time for it."""
        self.note_shared_memory()
        self.process.terminate()
        try:
            self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
        for pid in session_members(self.process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self.clean()

    def clean(self) -> None:
        """Remove what the server left: temporary files and shared memory."""
        remove_leftovers(self.scratch)


def remove_leftovers(scratch: Path) -> None:
    """Remove the shared memory noted in a scratch folder, and the folder."""
    notes = scratch / _NOTES
    if notes.is_file():
        for line in notes.read_text().splitlines():
            path = Path(line)
            if path.parent == _SHARED_MEMORY:
                path.unlink(missing_ok=True)
    shutil.rmtree(scratch, ignore_errors=True)


def session_members(session: int) -> Iterator[int]:
    """Yield the processes of a session (Linux; elsewhere none)."""
    for pid in psutil.pids():
        with suppress(ProcessLookupError):
            if os.getsid(pid) == session:
                yield pid


def server_flags(
    settings: GeneratorSettings, *, port: int, api_key: str, seed_of: str
) -> dict[str, str | int | float | bool]:
    """Return SGLang's settings: ours first, then the device's, then [generators.sglang]."""
    generators = settings.generators
    flags: dict[str, str | int | float | bool] = {
        "model_path": str(settings.model.resolve()),
        "host": _HOST,
        "port": port,
        "api_key": api_key,
        "device": settings.device,
        "dtype": settings.dtype,
        "max_running_requests": generators.max_sequences,
        "skip_server_warmup": True,
        "disable_overlap_schedule": True,  # version runs are exact to the token
        "random_seed": hash_seed(f"{settings.run.seed}/{seed_of}"),
        "log_level": "warning",
    }
    if settings.weightbus.in_flight == "in_place":
        flags["disable_radix_cache"] = True  # its prefixes cannot be forgotten amid responses
    if settings.sampling.seed_per_sibling:
        flags["sampling_backend"] = "pytorch"  # the one that takes seeds
    if settings.device == "cpu":
        flags |= {
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "grammar_backend": "none",
            "disable_cuda_graph": True,
            # The tokens bound the memory. SGLang counts what other programs take of this host's
            # while it loads as its own, and gives up where that is more than this share.
            "mem_fraction_static": 0.9,
            "max_total_tokens": generators.max_cached_tokens,
            "sleep_on_idle": True,
        }
    return flags | generators.sglang


def random_api_key() -> str:
    """Return a key for one server; hexadecimal, since one that starts with - is read as a flag."""
    return secrets.token_hex(24)


def hash_seed(text: str) -> int:
    """Return a stable 31-bit seed for a text."""
    return zlib.crc32(text.encode()) & 0x7FFFFFFF


def _environment(settings: GeneratorSettings, scratch: Path) -> dict[str, str]:
    environment = handed_on(
        os.environ,  # noqa: TID251 parts of it are handed on to a child
        named=settings.generators.environment,
        prefixes=_VARIABLES_OF_ENGINES,
        setting="generators.environment",
    )
    environment |= {"TMPDIR": str(scratch), "HF_HUB_OFFLINE": "1"}
    environment[GROUP_TIMEOUT_VARIABLE] = str(settings.weightbus.timeout_s)
    environment[SEEDS_VARIABLE] = str(int(settings.sampling.seed_per_sibling))
    # Its ranks find each other in a file of the private folder. By itself SGLang opens a store of
    # torch's, which listens on every interface and accepts writes from anyone.
    environment[_INIT_METHOD] = f"file://{scratch / _RENDEZVOUS}"
    if settings.device == "cpu":
        # More than one thread per server collapses as soon as anything else needs a core.
        environment |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
    return environment | interface_variables(settings.weightbus.host, environment)


async def _answers(http: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with http.get(
            f"{url}/model_info", timeout=aiohttp.ClientTimeout(_ANSWER_S)
        ) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


def free_port() -> int:
    """Return a free port outside the range from which the system assigns ports.

    The server binds it seconds later. A port of that range may be taken meanwhile, even by the
    probe for the server, which would connect to itself.
    """
    try:
        first = int(_PORT_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first = _USUAL_FIRST_PORT
    if first < _LOWEST_PORT + _PORT_TRIES:
        first = _USUAL_FIRST_PORT
    for port in random.sample(range(_LOWEST_PORT, first), _PORT_TRIES):
        with socket.socket() as probe:
            try:
                probe.bind((_HOST, port))
            except OSError:
                continue
            return port
    raise ConfigError(f"no port between {_LOWEST_PORT} and {first} is free for SGLang")
