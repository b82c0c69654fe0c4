"""What all benchmarks of a device share: the environment, time limits, device time, and JSON lines."""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

import hf_diffkv

FOLDER = Path(__file__).parent / "results"
# bytes per second by the vendors' datasheets, first match in the device's name
PEAK_BANDWIDTH = {
    "H200": 4.8e12,
    "H100 PCIe": 2.0e12,
    "H100 NVL": 3.9e12,
    "H100": 3.35e12,
    "A100-SXM4-80GB": 2.039e12,
    "A100 80GB PCIe": 1.935e12,
    "A100": 1.555e12,
    "MI300X": 5.3e12,
}
# several times any L2 cache
FLUSH_BYTES = 1 << 28


def parser(description: str, name: str) -> argparse.ArgumentParser:
    """Arguments every benchmark takes."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--seconds", type=float, default=float("inf"), help="start nothing more after so many seconds")
    made.add_argument("--quick", action="store_true", help="the most telling part of the grid")
    made.add_argument("--tiny", action="store_true", help="sizes for a CPU: whether it runs, not how fast")
    made.add_argument("--repeats", type=int, default=30, help="timed runs of each case")
    made.add_argument("--commit", help="of this code, where it is run outside its repository")
    made.add_argument("--output", type=Path, default=FOLDER / f"{name}.jsonl", help="JSON lines are appended here")
    return made


class Session:
    """One run of a benchmark: its device, what is left of its time, and where its results go."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.device = torch.device(args.device)
        self.repeats = args.repeats
        self.output = args.output
        self.about = environment(self.device)
        self.about["commit"] = args.commit or self.about["commit"]
        self.rows: list[dict] = []
        self._end = time.perf_counter() + args.seconds
        self._flush: torch.Tensor | None = None
        print(" ".join(f"{key}={value}" for key, value in self.about.items()), flush=True)

    def has_time(self, what: str) -> bool:
        """Whether time is left; says what is left out where none is."""
        if time.perf_counter() < self._end:
            return True
        print(f"skipped, out of time: {what}", flush=True)
        return False

    def has_memory(self, num_bytes: float, what: str) -> bool:
        """Whether the device has so much free memory; says what is left out where it has not."""
        if self.device.type != "cuda":
            return True
        free_memory()
        free, _ = torch.cuda.mem_get_info(self.device)
        if num_bytes <= 0.95 * free:
            return True
        print(f"skipped, needs {num_bytes / 1e9:.1f} GB of {free / 1e9:.1f} GB free: {what}", flush=True)
        return False

    def failed(self, what: str, error: Exception) -> None:
        """Notes a case that could not be measured, in the results too."""
        message = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        print(f"failed: {what}: {message}", flush=True)
        self.add({"failed": what, "error": message[:300]})
        free_memory()

    def add(self, row: dict) -> None:
        """Writes one result at once, so that nothing is lost when the time is up."""
        self.rows.append(row)
        self.output.parent.mkdir(parents=True, exist_ok=True)
        with self.output.open("a") as file:
            file.write(json.dumps({**self.about, **row}) + "\n")

    def time(self, call: Callable[[], object]) -> Timing:
        """Device time of `call` with a cold L2 cache, launches left out (a captured graph is replayed)."""
        if self.device.type != "cuda":
            call()
            return Timing.of([_host_seconds(call) for _ in range(min(self.repeats, 3))], captured=False)
        if self._flush is None:
            self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=self.device)
        replay, captured = _captured(call)
        events = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(self.repeats)]
        for _ in range(3):
            replay()
        for start, end in events:
            self._flush.zero_()
            start.record()
            replay()
            end.record()
        torch.cuda.synchronize(self.device)
        return Timing.of([1e-3 * start.elapsed_time(end) for start, end in events], captured)

    def kernel_times(self, call: Callable[[], object], repeats: int = 5) -> dict[str, float]:
        """Microseconds per call of each GPU kernel by name; empty on a CPU."""
        if self.device.type != "cuda":
            return {}
        call()
        torch.cuda.synchronize(self.device)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(repeats):
                call()
            torch.cuda.synchronize(self.device)
        found: dict[str, float] = {}
        for event in profile.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                found[event.name] = found.get(event.name, 0.0) + event.device_time_total / repeats
        return found


@dataclass(frozen=True)
class Timing:
    """Median and quartiles of device seconds; `captured` says whether a graph was replayed."""

    median: float
    lower: float
    upper: float
    captured: bool

    @classmethod
    def of(cls, seconds: list[float], captured: bool) -> Timing:
        lower, median, upper = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else seconds * 3
        return cls(median, lower, upper, captured)

    def row(self) -> dict:
        """As result fields, in microseconds."""
        quartiles = [round(1e6 * self.lower, 3), round(1e6 * self.upper, 3)]
        return {"us": round(1e6 * self.median, 3), "us_quartiles": quartiles, "captured": self.captured}


def _captured(call: Callable[[], object]) -> tuple[Callable[[], object], bool]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except RuntimeError as error:
        print(f"not captured, timed with its launches: {str(error).splitlines()[0]}", flush=True)
        torch.cuda.synchronize()
        return call, False
    return graph.replay, True


def _host_seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def free_memory() -> None:
    """Gives cached device memory back."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def peak_bandwidth(device: torch.device) -> float | None:
    """Bytes per second of the device's memory by its datasheet; None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_BANDWIDTH.items() if part in name), None)


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of `expected`; infinite where anything is not finite."""
    error = float((got.double() - expected.double()).norm() / expected.double().norm())
    return error if error == error else float("inf")


def environment(device: torch.device) -> dict:
    """What a result depends on besides its own configuration."""
    commit = _output("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty")
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    about = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cuda": torch.version.cuda or torch.version.hip,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton_version,
        "transformers": transformers.__version__,
        "hf_diffkv": hf_diffkv.__version__,
        "commit": commit,
    }
    return about


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None
