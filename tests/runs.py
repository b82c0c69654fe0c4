"""A model and a cache fed by hand, forward by forward, and everything its attention saw."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from dense_simulation import LayerSimulation
from packaging.version import Version
from simulated_storage import SimPrecision
from tiny_models import VOCABULARY, ragged_prompts, tiny_model
from torch import Tensor
from transformers import PreTrainedModel

from hf_diffkv import DiffKVCache, DiffKVConfig
from hf_diffkv.cache.layer import DiffKVLayer
from hf_diffkv.compat import passing
from hf_diffkv.ops.softmax import Softmax

# Transformers 5.17's own sliding layers return more keys than their mask has if nothing is cropped between two forwards
SLIDING_LAYERS_RECORD = Version(transformers.__version__) >= Version("5.18")
CONFIG = DiffKVConfig.paper(alpha_high=1.0, alpha_low=0.5, window=16, sinks=4)
# with these, the models keep many tokens at every level
THRESHOLDS = {
    name: {"alpha_high": high, "alpha_low": low}
    for name, high, low in (("llama", 1.0, 0.5), ("gemma2", 1.2, 0.8), ("gpt_oss", 0.8, 0.2))
}


def model_of(name: str = "llama", attention: str = "diffkv", **options: Any) -> PreTrainedModel:
    """Returns a model in float64, so that results depend on neither batch size nor the split into forwards."""
    return tiny_model(name, attention, dtype=torch.float64, **options)


def tokens(batch: int, count: int, seed: int = 1) -> Tensor:
    """Returns random ids, int64 [batch, count]."""
    return torch.randint(3, VOCABULARY, (batch, count), generator=torch.Generator().manual_seed(seed))


class Run:
    """A cache and the ids and padding mask, int64 [batch, seen], of what it was fed."""

    def __init__(self, model: PreTrainedModel, cache: Any, batch: int = 1) -> None:
        self.model, self.cache = model, cache
        self.ids = self.mask = torch.zeros(batch, 0, dtype=torch.int64)

    @torch.no_grad()
    def feed(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Runs one forward of ids [batch, n]. Returns logits [batch, n, vocabulary]."""
        mask = torch.ones_like(ids) if mask is None else mask
        ids, mask = torch.cat([self.ids, ids], 1), torch.cat([self.mask, mask], 1)
        new = ids.shape[1] - self.ids.shape[1]
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -new:]
        logits = self.model(
            ids[:, -new:], attention_mask=mask, position_ids=positions, **passing(self.cache), use_cache=True
        ).logits
        self.ids, self.mask = ids, mask
        return logits

    def steps(self, ids: Tensor) -> Tensor:
        """Runs one forward per column. Returns logits [batch, n, vocabulary]."""
        return torch.cat([self.feed(step) for step in ids.split(1, dim=1)], 1)

    def crop(self, count: int) -> None:
        """Removes the last `count` columns."""
        self.cache.crop(-count)
        kept = self.ids.shape[1] - count
        self.ids, self.mask = self.ids[:, :kept], self.mask[:, :kept]

    def select(self, index: list[int]) -> None:
        """Selects the rows `index` of the batch."""
        self.cache.batch_select_indices(torch.tensor(index))
        self.ids, self.mask = self.ids[index], self.mask[index]

    def on(self, cache: Any) -> Run:
        """Returns a copy of the run that continues with another cache."""
        other = copy.copy(self)
        other.cache = cache
        return other


def started(
    model: PreTrainedModel, lengths: tuple[int, ...], config: DiffKVConfig = CONFIG, seed: int = 0, cache: Any = None
) -> Run:
    """Returns a run that was fed a left-padded prompt per length."""
    run = Run(model, DiffKVCache(model.config, config) if cache is None else cache, len(lengths))
    run.feed(*ragged_prompts(lengths, seed))
    return run


def contents(cache: DiffKVCache) -> list[Tensor]:
    """Returns copies of the levels, keys, values, stored masks and any sums of every compressed layer."""
    found = []
    for index, layer_idx in enumerate(cache.compressed_layers()):
        found += [cache.levels(layer_idx).clone(), *cache.dequantize(layer_idx)]
        found += [cache.significance(layer_idx)] if cache.config.of_layer(index).selects else []
    return found


def assert_equal_contents(actual: DiffKVCache, expected: DiffKVCache) -> None:
    """Compares tokens, levels, values and sums exactly."""
    assert_close_contents(actual, expected, 0)
    assert actual.memory().tokens == expected.memory().tokens


def assert_close_contents(actual: DiffKVCache, expected: DiffKVCache, tolerance: float = 1e-6) -> None:
    """Compares levels exactly, and values and sums up to the rounding of differently cut or batched forwards."""
    actual.check_integrity()
    assert actual.get_seq_length() == expected.get_seq_length()
    for mine, theirs in zip(contents(actual), contents(expected), strict=True):
        near = tolerance * mine.is_floating_point()
        torch.testing.assert_close(mine, theirs, rtol=near, atol=near)


class Captured:
    """Inputs and output of one layer's attention, with all forwards joined along the tokens."""

    # the dimension of the tokens
    TOKENS = {"query": 2, "key": 2, "value": 2, "valid": 1, "output": 2}

    def __init__(self) -> None:
        self.query = self.key = self.value = self.valid = self.output = None
        self.options: dict[str, Any] = {}

    def add(self, query: Tensor, key: Tensor, value: Tensor, valid: Tensor | None, output: Tensor) -> None:
        if valid is None:
            valid = torch.ones(key.shape[0], key.shape[2], dtype=torch.bool)
        for (name, dim), tensor in zip(self.TOKENS.items(), (query, key, value, valid, output)):
            held = getattr(self, name)
            setattr(self, name, tensor.clone() if held is None else torch.cat([held, tensor], dim))

    def crop(self, count: int) -> None:
        for name, tensor in zip(self.TOKENS, self.part(0, self.key.shape[2] - count)):
            setattr(self, name, tensor)

    def part(self, start: int, stop: int) -> tuple[Tensor, ...]:
        """Returns query, key, value, valid and output of the tokens [start, stop)."""
        return tuple(getattr(self, name).narrow(dim, start, stop - start) for name, dim in self.TOKENS.items())


@contextmanager
def captured() -> Iterator[dict[int, Captured]]:
    """Records every `DiffKVLayer.attend` inside the block, by index of the compressed layer."""
    seen: dict[int, Captured] = {}
    attend = DiffKVLayer.attend

    def spy(self: DiffKVLayer, query: Tensor, softmax: Softmax, valid: Tensor | None = None, *masks: Any) -> Tensor:
        key, value = self.pending
        output = attend(self, query, softmax, valid, *masks)
        layer = seen.setdefault(self.index, Captured())
        layer.add(query, key, value, valid, output)
        layer.options = dict(vars(softmax))
        return output

    DiffKVLayer.attend = spy
    try:
        yield seen
    finally:
        DiffKVLayer.attend = attend


def simulation_of(config: DiffKVConfig, layer: Captured) -> LayerSimulation:
    """Returns an empty simulation that fits a captured layer; thresholds are plain numbers."""
    return empty_simulation(config, layer.key, config.alpha_high, config.alpha_low)


def empty_simulation(
    config: DiffKVConfig, key: Tensor, alpha_high: float | list[float], alpha_low: float | list[float], **options: Any
) -> LayerSimulation:
    """Returns the simulation of a layer with keys like `key`, [batch, heads, tokens, dim]."""
    batch, heads, _, dim = key.shape
    return LayerSimulation(
        *(batch, heads, dim),
        high=SimPrecision.of(config.high),
        low=SimPrecision.of(config.low),
        alpha_high=alpha_high,
        alpha_low=alpha_low,
        window=config.window,
        sinks=config.sinks,
        observation_window=config.observation_window,
        dtype=key.dtype,
        **options,
    )


def assert_equals_simulation(cache: DiffKVCache, simulations: dict[int, LayerSimulation]) -> None:
    """Compares levels and stored values of every compressed layer exactly, and sums up to float32 rounding."""
    cache.check_integrity()
    for index, layer_idx in enumerate(cache.compressed_layers()):
        simulation = simulations[index]
        assert torch.equal(cache.levels(layer_idx), simulation.levels())
        keys, values, stored = cache.dequantize(layer_idx)
        expected_keys, expected_values, expected_stored = simulation.stored()
        assert torch.equal(stored, expected_stored)
        assert torch.equal(keys, expected_keys)
        assert torch.equal(values, expected_values)
        if cache.config.of_layer(index).selects:
            torch.testing.assert_close(cache.significance(layer_idx), simulation.sums(), rtol=1e-5, atol=1e-6)


class Followed:
    """A run with a simulation of each layer, which is fed one forward for each of the run's forwards or crops."""

    def __init__(self, run: Run, layers: dict[int, Captured], config: DiffKVConfig) -> None:
        self.run, self.layers = run, layers
        self.simulations = {index: simulation_of(config, layer) for index, layer in layers.items()}
        self.fed = 0
        self.follow()

    def feed(self, ids: Tensor, mask: Tensor | None = None) -> None:
        self.run.feed(ids, mask)
        self.follow()

    def crop(self, count: int) -> None:
        self.run.crop(count)
        for layer in self.layers.values():
            layer.crop(count)
        self.follow()

    def follow(self) -> None:
        """Hides what the mask now hides, and feeds what was accepted since the last time."""
        for index, layer in self.layers.items():
            simulation = self.simulations[index]
            simulation.hide(self.run.mask[:, : self.fed].bool())
            if layer.key.shape[2] == self.fed:
                continue
            query, key, value, valid, output = layer.part(self.fed, layer.key.shape[2])
            expected = simulation.forward(query, key, value, valid=valid, **layer.options)
            real = valid[:, None, :, None].expand_as(output)
            torch.testing.assert_close(output[real], expected[real], rtol=1e-6, atol=1e-6)
        self.fed = self.run.ids.shape[1]
        assert_equals_simulation(self.run.cache, self.simulations)
