"""Parts shared by all device benchmarks: the environment, time limits, device time, and JSON lines."""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

import hf_diffkv

FOLDER = Path(__file__).parent / "results"
# bytes per second from the vendors' data sheets; the first match in the device's name counts
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
    """Arguments that every benchmark takes."""
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
    """One run of a benchmark: its device, the time left, and where its results go.

    Attributes:
        gpu: whether `device` is a GPU; otherwise times are host times.
        rows: all results so far, as written.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.device = torch.device(args.device)
        self.gpu = self.device.type == "cuda"
        self.repeats = args.repeats
        self.output = args.output
        self.about = environment(self.device)
        self.about["commit"] = args.commit or self.about["commit"]
        self.rows: list[dict] = []
        self._end = time.perf_counter() + args.seconds
        self._flush: torch.Tensor | None = None
        print(" ".join(f"{key}={value}" for key, value in self.about.items()), flush=True)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the measured models."""
        return torch.bfloat16 if self.gpu else torch.float32

    def has_time(self, what: str) -> bool:
        """Returns whether time is left; if not, prints what is skipped."""
        if time.perf_counter() < self._end:
            return True
        print(f"skipped, out of time: {what}", flush=True)
        return False

    def has_memory(self, num_bytes: float) -> bool:
        """Returns whether the device has `num_bytes` of free memory."""
        if not self.gpu:
            return True
        free_memory()
        return num_bytes <= 0.95 * torch.cuda.mem_get_info(self.device)[0]

    def lacks_memory(self, num_bytes: float, case: dict) -> bool:
        """Returns whether `has_memory` is false; if so, records this in the results of the case."""
        if self.has_memory(num_bytes):
            return False
        free = torch.cuda.mem_get_info(self.device)[0]
        self.leave_out(case, f"needs {num_bytes / 1e9:.1f} GB, {free / 1e9:.1f} GB are free")
        return True

    def leave_out(self, case: dict, reason: str) -> None:
        """Reports a case that is not measured, with the reason, also in the results."""
        print(f"left out: {_words(case)}: {reason}", flush=True)
        self.add({**case, "left_out": reason})

    def failed(self, case: dict, error: BaseException) -> None:
        """Reports a failed case, also in the results."""
        message = str(error).strip().splitlines()[:1]
        reason = ": ".join([type(error).__name__, *message])[:300]
        print(f"failed: {_words(case)}: {reason}", flush=True)
        self.add({**case, "failed": reason})

    def add(self, row: dict) -> None:
        """Writes one result immediately, so that nothing is lost when time runs out."""
        self.rows.append(row)
        self.output.parent.mkdir(parents=True, exist_ok=True)
        with self.output.open("a") as file:
            file.write(json.dumps({**self.about, **row}) + "\n")

    def time(self, call: Callable[[], object]) -> Timing:
        """Device time of `call`; see `time_all`."""
        return self.time_all([call])[0]

    def time_all(self, calls: Sequence[Callable[[], object]]) -> list[Timing]:
        """Device time of each call with a cold L2 cache, in turns, so that all see the same clocks and temperatures.

        Launch overhead is excluded: a captured graph is replayed, and a message says if a call cannot be captured.
        """
        if not self.gpu:
            for call in calls:
                call()
            turns = [[_host_seconds(call) for call in calls] for _ in range(min(self.repeats, 3))]
            return [Timing.of(list(seconds), captured=False) for seconds in zip(*turns)]
        if self._flush is None:
            self._flush = torch.zeros(FLUSH_BYTES // 4, dtype=torch.float32, device=self.device)
        captures = [_captured(call) for call in calls]
        replays = [replay for replay, _ in captures]
        for replay in 3 * replays:
            replay()
        turns = []
        for _ in range(self.repeats):
            turn = []
            for replay in replays:
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                # flushed by reading: written lines would go back to memory while the call is timed
                self._flush.sum()
                start.record()
                replay()
                end.record()
                turn.append((start, end))
            turns.append(turn)
        torch.cuda.synchronize(self.device)
        seconds = [[1e-3 * start.elapsed_time(end) for start, end in turn] for turn in turns]
        return [Timing.of(list(mine), captured) for mine, (_, captured) in zip(zip(*seconds), captures)]

    def speed(self, num_bytes: int, seconds: float) -> dict:
        """Returns result fields: bytes read, GB/s, and the share of the device's peak bandwidth if it is known."""
        peak = peak_bandwidth(self.device)
        row = {"bytes": num_bytes, "gb_per_s": round(num_bytes / seconds / 1e9, 1)}
        return row if peak is None else row | {"share_of_peak": round(num_bytes / seconds / peak, 4)}

    def kernel_times(self, call: Callable[[], object], repeats: int = 5) -> dict[str, float]:
        """Microseconds per call of each GPU kernel, by name; empty on a CPU or without a profiler."""
        if not self.gpu:
            return {}
        call()
        profile = Profile(self.device)
        profile.start()
        for _ in range(repeats):
            call()
        return {name: us / repeats for name, us in profile.stop().items()}

    def kernel_count(self, call: Callable[[], object]) -> tuple[int, float]:
        """Returns the number of kernels that one call launches, including copies, and their microseconds.

        Both are 0 on a CPU and without a profiler.
        """
        if not self.gpu:
            return 0, 0.0
        profile = Profile(self.device)
        profile.start()
        call()
        found = profile.stop()
        return profile.count, sum(found.values())


class Profile:
    """Kernels that run on a GPU from `start` to `stop`, and afterwards their `count`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.count = 0
        self._profile: Any = None

    def start(self) -> None:
        torch.cuda.synchronize(self.device)
        try:
            self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self._profile.start()
        except RuntimeError as error:
            print(f"no profiler, shares are left out: {error}", flush=True)
            self._profile = None

    def stop(self) -> dict[str, float]:
        """Microseconds by kernel; empty if none was seen."""
        torch.cuda.synchronize(self.device)
        profile, self._profile = self._profile, None
        if profile is None:
            return {}
        profile.stop()
        found: dict[str, float] = {}
        for event in profile.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                found[event.name] = found.get(event.name, 0.0) + event.device_time_total
                self.count += 1
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
        """Returns the timing as result fields, in microseconds."""
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
    except torch.cuda.OutOfMemoryError:
        raise
    except RuntimeError as error:
        print(f"not captured, timed with its launches: {str(error).splitlines()[0]}", flush=True)
        torch.cuda.synchronize()
        return call, False
    return graph.replay, True


def _words(case: dict) -> str:
    return ", ".join(f"{key} {value}" for key, value in case.items() if key not in ("dtype", "window", "kv_heads"))


def _host_seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def free_memory() -> None:
    """Releases cached device memory."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def peak_bandwidth(device: torch.device) -> float | None:
    """Bytes per second of the device's memory, from its data sheet; None if unknown."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_BANDWIDTH.items() if part in name), None)


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of `expected`; infinite if anything is not finite."""
    error = float((got.double() - expected.double()).norm() / expected.double().norm())
    return error if error == error else float("inf")


def environment(device: torch.device) -> dict:
    """Describes the device, software and commit on which results depend."""
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
